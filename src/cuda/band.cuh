// The keys that a query sees, as contract/band.h says it, from lengths and offsets that lie on the device: what nobody
// has checked is cut off at the sizes, so that no access leaves a tensor.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

__device__ inline int64_t of_sequence(const PerSequence& x, int64_t b) {
  return x.wide ? static_cast<const int64_t*>(x.data)[b * x.stride] : static_cast<const int32_t*>(x.data)[b * x.stride];
}

__device__ inline int64_t length(const PerSequence& lengths, int64_t b, int64_t most) {
  if (lengths.data == nullptr) return most;
  const int64_t n = of_sequence(lengths, b);
  return n < 0 ? 0 : n < most ? n : most;
}

constexpr int64_t kFar = int64_t{1} << 61;  // beyond every key, and i + kFar cannot wrap

// a + b, at most kFar from 0
__device__ inline int64_t bounded_sum(int64_t a, int64_t b) {
  if (b > 0 && a > kFar - b) return kFar;
  if (b < 0 && a < -kFar - b) return -kFar;
  const int64_t sum = a + b;
  return sum > kFar ? kFar : sum < -kFar ? -kFar : sum;
}

// Packed: where rows of sequence b begin, of `total`. Those behind the last one count as a sequence of padding.
__device__ inline int64_t first_row(const PerSequence& cu_seqlens, int64_t batch, int64_t b, int64_t total) {
  if (b > batch) return total;
  const int64_t first = of_sequence(cu_seqlens, b);
  return first < 0 ? 0 : first < total ? first : total;
}

// The sequence and head of a block, and the first row that it owns. What is longest under a causal mask begins first: the
// last queries, the first keys.
struct OwnRows {
  int b, h;
  int64_t first;

  __device__ OwnRows(const Problem& p, bool keys) {
    const int64_t heads = keys ? p.heads_kv : p.heads, blocks = (keys ? p.key_blocks : p.query_blocks) / heads;
    const int64_t n = keys ? blockIdx.x / heads : blocks - 1 - blockIdx.x / heads;
    h = static_cast<int>(blockIdx.x % heads);
    if (!p.packed) {
      b = static_cast<int>(n % p.batch);
      first = n / p.batch * kBlockRows;
      return;
    }
    // Sequence b takes the blocks from first_row / kBlockRows + b on: it never has more than there are to the next one's.
    const auto first_block = [&](int64_t sequence) {
      const int64_t row = keys ? first_row(p.cu_seqlens_k, p.batch, sequence, p.seqlen_k)
                               : first_row(p.cu_seqlens_q, p.batch, sequence, p.seqlen_q);
      return row / kBlockRows + sequence;
    };
    b = 0;
    for (int above = static_cast<int>(p.batch) + 1; b + 1 < above;) {
      const int middle = b + (above - b) / 2;
      (first_block(middle) <= n ? b : above) = middle;
    }
    first = (b == 0 ? n : n - first_block(b)) * kBlockRows;
  }
};

// A range of others, as far as they are in a tile.
struct TileRange {
  int first = 0, last = 0;

  TileRange() = default;
  __device__ TileRange(const Range& range, int64_t tile)
      : first(bounded(range.first - tile)), last(bounded(range.last - tile)) {}
  __device__ bool holds(int x) const { return first <= x && x < last; }

 private:
  __device__ static int bounded(int64_t x) { return x < 0 ? 0 : x < kTileRows ? static_cast<int>(x) : kTileRows; }
};

// Query i sees keys from max(0, i + begin) to min(keys, i + end).
struct Band {
  int64_t first_q = 0, first_k = 0;  // of the sequence, where it is packed with others
  int64_t rows_q, rows_k;            // that the sequence has
  int64_t queries, keys;             // of these; the rows behind are padding
  int64_t begin, end;
  int64_t offset;

  __device__ Band(const Problem& p, int64_t b) : rows_q(p.seqlen_q), rows_k(p.seqlen_k), offset(p.offset) {
    const bool there = b < p.batch;
    if (p.packed) {
      first_q = first_row(p.cu_seqlens_q, p.batch, b, p.seqlen_q);
      const int64_t next_q = first_row(p.cu_seqlens_q, p.batch, b + 1, p.seqlen_q);
      rows_q = next_q > first_q ? next_q - first_q : 0;
    }
    if (p.packed && p.pages.table == nullptr) {
      first_k = first_row(p.cu_seqlens_k, p.batch, b, p.seqlen_k);
      const int64_t next_k = first_row(p.cu_seqlens_k, p.batch, b + 1, p.seqlen_k);
      rows_k = next_k > first_k ? next_k - first_k : 0;
    }
    queries = there ? length(p.seqlens_q, b, rows_q) : 0;
    keys = there ? length(p.seqlens_k, b, rows_k) : 0;
    if (p.diagonal == Diagonal::kBottomRight) offset = keys - queries;
    if (p.diagonal == Diagonal::kPerSequence && there) offset = of_sequence(p.query_offsets, b);
    begin = p.left < 0 ? -kFar : bounded_sum(offset, -p.left);
    end = p.right < 0 ? kFar : bounded_sum(bounded_sum(offset, p.right), 1);
  }

  // Both grow with their argument; of padding the last is 0.
  __device__ Range keys_of(int64_t i) const {
    return {i + begin > 0 ? i + begin : 0, i >= queries ? 0 : i + end < keys ? i + end : keys};
  }
  __device__ Range queries_of(int64_t j) const {
    return {j - end + 1 > 0 ? j - end + 1 : 0, j >= keys ? 0 : j - begin + 1 < queries ? j - begin + 1 : queries};
  }
};

}  // namespace polyhead::cuda
