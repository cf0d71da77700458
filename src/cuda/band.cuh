// The keys that a query sees, as contract/band.h says it, from lengths and offsets that lie on the device: what nobody
// has checked is cut off at the sizes, so that no access leaves a tensor.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

__device__ inline int64_t element(const Integers& x, int64_t n) {
  return x.wide ? static_cast<const int64_t*>(x.data)[n * x.stride] : static_cast<const int32_t*>(x.data)[n * x.stride];
}

__device__ inline int64_t length(const Integers& lengths, int64_t b, int64_t most) {
  if (lengths.data == nullptr) return most;
  const int64_t n = element(lengths, b);
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
__device__ inline int64_t first_row(const Integers& cu_seqlens, int64_t batch, int64_t b, int64_t total) {
  if (b > batch) return total;
  const int64_t first = element(cu_seqlens, b);
  return first < 0 ? 0 : first < total ? first : total;
}

// Packed: the last sequence whose first(b), a place among all, is not behind `place`; 0 where none is.
template <class Place, class First>
__device__ inline int sequence_at(const Problem& p, Place place, const First& first) {
  int b = 0;
  for (int above = static_cast<int>(p.batch) + 1; b + 1 < above;) {
    const int middle = b + (above - b) / 2;
    (first(middle) <= place ? b : above) = middle;
  }
  return b;
}

// Of how many rows that sequence of queries is that row i belongs to.
__device__ inline int64_t rows_of_sequence(const Problem& p, int64_t i) {
  const auto first = [&](int64_t b) { return first_row(p.cu_seqlens_q, p.batch, b, p.seqlen_q); };
  const int b = sequence_at(p, i, first);
  return first(b + 1) - first(b);
}

// Whose rows the blocks of a kernel of forward own, of packed sequences: Problem::group_blocks.
enum class Sequences { kAll, kLong, kShort };

// The sequence and head of a block, and the first of `rows` rows that it owns. What is longest under a causal mask begins first: the
// last queries, the first keys.
struct OwnRows {
  int b, h;
  int64_t first;

  __device__ OwnRows(const Problem& p, bool keys, int rows = kBlockRows, Sequences sequences = Sequences::kAll) {
    // A grid has fewer than 2^31 blocks, some for each head and sequence: divisions of 32 bits, which are short.
    const bool are_long = sequences == Sequences::kLong;
    const auto tile_heads = static_cast<unsigned>(keys || are_long ? 1 : p.tile_heads);
    const unsigned heads = static_cast<unsigned>(keys ? p.heads_kv : p.heads) / tile_heads,
                   blocks = (keys       ? p.key_blocks
                             : are_long ? p.group_blocks
                                        : p.query_blocks) /
                            heads,
                   of_head = blockIdx.x / heads;
    const unsigned n = keys ? of_head : blocks - 1 - of_head;
    h = static_cast<int>((blockIdx.x - of_head * heads) * tile_heads);
    if (!p.packed) {
      const auto batch = static_cast<unsigned>(p.batch), tile = n / batch;
      b = static_cast<int>(n - tile * batch);
      first = int64_t{tile} * rows;
      return;
    }
    if (sequences == Sequences::kShort && tile_heads == 1) {  // each has one
      b = static_cast<int>(n);
      first = 0;
      return;
    }
    // Sequence b takes the blocks from first_row / rows + b on: it never has more than there are to the next one's. Likewise
    // long ones, if that many of them are in front of it at most.
    const auto first_block = [&](int64_t sequence) {
      const int64_t row = keys ? first_row(p.cu_seqlens_k, p.batch, sequence, p.seqlen_k)
                               : first_row(p.cu_seqlens_q, p.batch, sequence, p.seqlen_q);
      const int64_t most_long = row / (kBlockRows + 1);
      return row / rows + (are_long && most_long < sequence ? most_long : sequence);
    };
    b = sequence_at(p, n, first_block);
    first = (b == 0 ? n : n - first_block(b)) * rows;
  }
};

// A range of others, as far as they are in a tile.
struct TileRange {
  int first = 0, last = 0;

  TileRange() = default;
  __device__ TileRange(const Range& range, int64_t tile)
      : first(bounded(range.first - tile)), last(bounded(range.last - tile)) {}
  // Whether x is in the range, or in front of it among so many others of the tile.
  __device__ bool holds(int x, int sinks = 0) const { return (first <= x || x < sinks) && x < last; }

  __device__ static int bounded(int64_t x) { return x < 0 ? 0 : x < kTileRows ? static_cast<int>(x) : kTileRows; }
};

// Query i sees keys from max(0, i + begin) to min(keys, i + end), and below these the first `sinks`; where each query has
// a window, of these keys those that are in it.
struct Band {
  int64_t first_q = 0, first_k = 0;  // of the sequence, where it is packed with others
  int64_t rows_q, rows_k;            // that the sequence has
  int64_t queries, keys;             // of these; the rows behind are padding
  int64_t begin, end;
  int64_t sinks = 0;
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
    if (p.diagonal == Diagonal::kPerSequence && there) offset = element(p.query_offsets, b);
    begin = p.left < 0 ? -kFar : bounded_sum(offset, -p.left);
    if (p.left >= 0) sinks = p.sink_keys < keys ? p.sink_keys : keys;
    end = p.right < 0 ? kFar : bounded_sum(bounded_sum(offset, p.right), 1);
  }

  // Both grow with their argument; of padding the last is 0. With sinks a range goes from the first to the last that is seen.
  __device__ Range keys_of(int64_t i) const {
    return {sinks == 0 && i + begin > 0 ? i + begin : 0, i >= queries ? 0 : i + end < keys ? i + end : keys};
  }
  __device__ Range queries_of(int64_t j) const {
    const bool to_the_last = j < sinks || j - begin + 1 > queries;
    return {j - end + 1 > 0 ? j - end + 1 : 0, j >= keys ? 0 : to_the_last ? queries : j - begin + 1};
  }

  // The keys that query i sees, beside sinks.
  __device__ Range seen_by(const Problem& p, int64_t i) const {
    Range range = {i + begin > 0 ? i + begin : 0, keys_of(i).last};
    if (p.window_lo.data == nullptr || i >= queries) return range;
    const int64_t lo = element(p.window_lo, i), hi = element(p.window_hi, i);
    if (lo > range.first) range.first = lo;
    if (hi < range.last) range.last = hi > 0 ? hi : 0;
    return range;
  }

  // Behind the sinks, query i and those that follow see nothing in front of this tile.
  __device__ int64_t behind_sinks(int64_t i) const {
    return sinks > 0 && i + begin > 0 ? (i + begin) / kTileRows * kTileRows : 0;
  }
};

}  // namespace polyhead::cuda
