// Passes over the rows of matrices, eight columns a thread: epilogues without a product, sums over rows, copies.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

constexpr int kGroupsOfBlock = 16, kRowsAtOnce = kThreads / kGroupsOfBlock;  // of eight columns, and of rows
constexpr int kColumnsOfBlock = kGroupsOfBlock * kEight;

// What a thread of such a block does: rows first_row, first_row + kRowsAtOnce and so on of a block's.
struct RowsOfThread {
  int block_of_rows, first_row, end_row, column, count;

  __device__ RowsOfThread(int m, int n, int rows_of_block) {
    const int column_blocks = (n + kColumnsOfBlock - 1) / kColumnsOfBlock, thread = static_cast<int>(threadIdx.x);
    const int block = static_cast<int>(blockIdx.x);
    block_of_rows = block / column_blocks;
    const int64_t begin = int64_t{block_of_rows} * rows_of_block, end = begin + rows_of_block;
    first_row = static_cast<int>(begin) + thread / kGroupsOfBlock;
    end_row = static_cast<int>(end < m ? end : m);
    column = block % column_blocks * kColumnsOfBlock + thread % kGroupsOfBlock * kEight;
    count = column < n ? count_from(column, n) : 0;
    if (count == 0) end_row = first_row;
  }
};

// Adds what the threads of a block hold of each column, in order of their rows, and leaves it in to[n].
__device__ inline void add_threads(const Eight& x, float (&shared)[kRowsAtOnce][kColumnsOfBlock],
                                   const RowsOfThread& rows, float* to, int n) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kEight; ++i) shared[thread / kGroupsOfBlock][i * kGroupsOfBlock + thread % kGroupsOfBlock] = x[i];
  __syncthreads();
  const int column = rows.column - thread % kGroupsOfBlock * kEight + thread;
  if (column < n) {
    float sum = 0;
    for (int r = 0; r < kRowsAtOnce; ++r) sum += shared[r][thread % kEight * kGroupsOfBlock + thread / kEight];
    to[column] = sum;
  }
  __syncthreads();
}

// The sum of num_terms matrices, in order.
__device__ inline void load_terms(Eight& x, const PointwiseProblem& p, int row, int column, int count) {
  RowOf term(p.x, row);
  term.load(x, column, count);
  for (int n = 1; n < p.num_terms; ++n) {
    term.first += p.term;
    Eight more;
    term.load(more, column, count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] += more[i];
  }
}

__device__ inline void pointwise(const PointwiseProblem& p) {
  __shared__ float shared[kRowsAtOnce][kColumnsOfBlock];
  const RowsOfThread rows(p.m, p.n, p.rows_of_block);
  Eight sums = {};
  for (int row = rows.first_row; row < rows.end_row; row += kRowsAtOnce) {
    Eight x;
    load_terms(x, p, row, rows.column, rows.count);
    finish(x, p.finish, row, rows.column, rows.count);
#pragma unroll
    for (int i = 0; i < kEight; ++i) sums[i] += x[i];
  }
  if (p.partial != nullptr) add_threads(sums, shared, rows, p.partial + rows.block_of_rows * p.stride, p.n);
}

// A column a thread.
__device__ inline void merge(const MergeProblem& p) {
  const int column = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (column >= p.n) return;
  float sum = 0;
  for (int n = 0; n < p.count; ++n) sum += p.partial[n * p.stride + column];
  const int64_t at = offset_of(p.out.columns, column);
  store_one(p.out, at, p.accumulate ? load_one(p.out, at) + sum : sum);
}

// An element a thread.
__device__ inline void sum_heads(const HeadsProblem& p) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= int64_t{p.m} * p.n) return;
  const int row = static_cast<int>(n / p.n), column = static_cast<int>(n % p.n);
  const int64_t to = offset_of(p.y.rows, row) + offset_of(p.y.columns, column);
  const int64_t from = offset_of(p.x.rows, row) + offset_of(p.x.columns, column);
  double sum = p.accumulate ? load_one(p.y, to) : 0;
  for (int h = 0; h < p.heads; ++h) sum += load_one(p.x, from + h * p.head);
  store_one(p.y, to, p.y.number == Number::kFloat32 ? static_cast<float>(sum) : rounded_to_odd(sum));
}

__device__ inline int64_t length_of(const CopyProblem::Lengths& x, unsigned b, unsigned beam) {
  if (x.data == nullptr) return 0;
  const int64_t at = b * x.batch + beam * x.beam;
  return x.wide ? static_cast<const int64_t*>(x.data)[at] : static_cast<const int32_t*>(x.data)[at];
}

__device__ inline void copy(const CopyProblem& p) {
  const RowsOfThread rows(p.m, p.n, kRowsAtOnce);
  const int row = rows.first_row;
  if (row >= rows.end_row) return;
  const unsigned r = static_cast<unsigned>(row), step = r % p.steps, beam = r / p.steps % p.beams,
                 b = r / p.steps / p.beams;
  const int64_t first = length_of(p.lengths[0], b, beam), second = length_of(p.lengths[1], b, beam);
  Eight x = {};
  if (step < first || step < second) RowOf(p.x, row).load(x, rows.column, rows.count);
  RowOf(p.y, row).store(x, rows.column, rows.count);
}

}  // namespace polyhead::cuda
