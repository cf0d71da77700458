// The keys that a query sees, as contract/band.h says it, from lengths and offsets that lie on the device: what nobody
// has checked is cut off at the sizes, so that no access leaves a tensor.
#pragma once

#include "cuda/lane_rows.cuh"

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

// Query i sees keys from max(0, i + begin) to min(keys, i + end).
struct Band {
  int64_t queries, keys;  // of the sequence; the rows behind are padding
  int64_t begin, end;
  int64_t offset;

  __device__ Band(const Problem& p, int64_t b)
      : queries(length(p.seqlens_q, b, p.seqlen_q)), keys(length(p.seqlens_k, b, p.seqlen_k)), offset(p.offset) {
    if (p.diagonal == Diagonal::kBottomRight) offset = keys - queries;
    if (p.diagonal == Diagonal::kPerSequence) offset = of_sequence(p.query_offsets, b);
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
