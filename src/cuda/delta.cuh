// What backward begins with: delta = sum_c dO O - dL of each row of queries.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/numbers.cuh"

namespace polyhead::cuda {

// sum_c dO O of a row, by a warp.
__device__ inline float product_of_elements(const BackwardProblem& p, int64_t grad_out, int64_t out, int lane) {
  float sum = 0;
  for (int c = lane; c < p.head_dim_v; c += 32) {
    sum += load_number(p.grad_out.data, p.grad_out.number, grad_out + c * p.grad_out.column) *
           load_number(p.out.data, p.out.number, out + c * p.out.column);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

// The same of two rows, by half a warp each, where 16 bytes of both matrices hold eight of T each and nothing else.
template <class T>
__device__ inline float product_of_pieces(const BackwardProblem& p, int64_t grad_out, int64_t out, int lane) {
  constexpr int kPiece = 8, kLanes = 16;
  float sum = 0;
  for (int c = lane % kLanes * kPiece; c < p.head_dim_v; c += kLanes * kPiece) {
    const auto piece = [&](const Rows& rows, int64_t row) {
      return *reinterpret_cast<const uint4*>(static_cast<const T*>(rows.data) + row + c);
    };
    const uint4 x = piece(p.grad_out, grad_out), y = piece(p.out, out);
    const unsigned of_x[4] = {x.x, x.y, x.z, x.w}, of_y[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      sum = fmaf(low_half<T>(of_x[n]), low_half<T>(of_y[n]), sum);
      sum = fmaf(high_half<T>(of_x[n]), high_half<T>(of_y[n]), sum);
    }
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

// Of kBlockRows rows of a head. T: of O and dO in pieces; Float32: of any.
template <class T>
__device__ void deltas(const BackwardProblem& p) {
  constexpr int kOfWarp = T::kOnTensorCores ? 2 : 1, kLanes = 32 / kOfWarp, kStep = kBlockThreads / kLanes;
  const auto heads = static_cast<unsigned>((p.packed ? 1 : p.batch) * p.heads), tile = blockIdx.x / heads,
             index = blockIdx.x - tile * heads;
  const unsigned b = index / static_cast<unsigned>(p.heads), h = index - b * static_cast<unsigned>(p.heads);
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / kLanes;
#pragma unroll 4
  for (int n = row; n < kBlockRows; n += kStep) {
    const int64_t i = int64_t{tile} * kBlockRows + n, last = p.seqlen_q - 1;
    float sum = 0;
    if (p.given_delta.data == nullptr) {
      const auto first_of = [&](const Rows& x) { return b * x.batch + h * x.head + (i < last ? i : last) * x.row; };
      const int64_t grad_out = first_of(p.grad_out), out = first_of(p.out);
      if constexpr (T::kOnTensorCores) {
        sum = product_of_pieces<T>(p, grad_out, out, lane);
      } else {
        sum = product_of_elements(p, grad_out, out, lane);
      }
    }
    if (i > last || lane % kLanes != 0) continue;
    if (p.given_delta.data != nullptr) sum = statistic(p.given_delta, b, h, i);
    if (p.grad_logsumexp.data != nullptr) sum -= statistic(p.grad_logsumexp, b, h, i);
    statistic(p.delta, b, h, i) = sum;
  }
}

// Whether deltas<T>() of the elements' type will do.
inline bool has_deltas_in_pieces(const BackwardProblem& p) {
  const auto in_pieces = [&](const Rows& x) { return x.in_pieces && x.number == p.elements; };
  return p.elements != Number::kFloat32 &&
         (p.given_delta.data != nullptr || (in_pieces(p.out) && in_pieces(p.grad_out)));
}

}  // namespace polyhead::cuda
