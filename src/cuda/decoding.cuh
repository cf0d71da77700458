// New tokens on their way into a cache, bit for bit what src/cache/append.cc makes of them, and the place of one step of
// decoding. No number that lies on the device is trusted: what it says beyond a tensor is cut off, or stored nowhere.
//   x [D] one head of one token, in shared memory: a warp's
#pragma once

#include "core/dtype.h"
#include "cuda/band.cuh"
#include "cuda/decoding_problem.h"
#include "cuda/eight.cuh"

namespace polyhead::cuda {

constexpr int kWarps = kThreads / 32;

__device__ inline int64_t number_of(const TokenNumbers& x, int64_t b, int64_t t) {
  const int64_t at = b * x.batch + t * x.time;
  return x.wide ? static_cast<const int64_t*>(x.data)[at] : static_cast<const int32_t*>(x.data)[at];
}

// One warp and its x. Lane l has numbers l, l + 32 and so on; nothing is contracted to fma, as it is not on the host.
class Append {
 public:
  __device__ Append(const AppendProblem& problem, float* row)
      : p(problem), x(row), lane(static_cast<int>(threadIdx.x) % 32) {}

  // Head `head` of a token: of its query, or of these its key, or of these its value.
  __device__ void run(int64_t token, int head) const {
    const int64_t b = token / p.time, t = token % p.time;
    const bool there = p.lengths.data == nullptr || t < length(p.lengths, b, p.time);
    if (head < p.heads) {
      load(p.query, b, t, head, p.to_key.dim);
      turn(b, t, there);
      store(p.query_out, b * p.query_out.batch + t * p.query_out.row + head * p.query_out.head, p.to_key.dim);
      return;
    }
    const int64_t slot = there ? number_of(p.slots, b, t) : -1;
    if (slot < 0 || slot >= p.num_slots) return;
    const int h = (head - p.heads) % p.heads_kv;
    const bool is_key = head - p.heads < p.heads_kv;
    const CacheRows& to = is_key ? p.to_key : p.to_value;
    load(is_key ? p.key : p.value, b, t, h, to.dim);
    if (is_key) turn(b, t, there);
    store(to, slot, h);
  }

 private:
  __device__ void load(const Rows& rows, int64_t b, int64_t t, int h, int dim) const {
    const int64_t first = b * rows.batch + t * rows.row + h * rows.head;
    for (int d = lane; d < dim; d += 32) x[d] = load_number(rows.data, rows.number, first + d * rows.column);
    __syncwarp();
  }

  __device__ void turn(int64_t b, int64_t t, bool there) const {
    if (there && p.num_positions > 0) rotate(number_of(p.positions, b, t));
    if (p.hadamard) hadamard(p.to_key.dim);
  }

  __device__ void rotate(int64_t given) const {
    const int64_t last = p.num_positions - 1, position = given < 0 ? 0 : given < last ? given : last;
    const int step = p.interleaved ? 2 : 1, apart = p.interleaved ? 1 : p.pairs;
    for (int n = lane; n < p.pairs; n += 32) {
      const float c = p.cos.data[position * p.cos.row + n * p.cos.column];
      const float s = p.sin.data[position * p.sin.row + n * p.sin.column];
      const float first = x[n * step], second = x[n * step + apart];
      x[n * step] = __fsub_rn(__fmul_rn(first, c), __fmul_rn(second, s));
      x[n * step + apart] = __fadd_rn(__fmul_rn(first, s), __fmul_rn(second, c));
    }
    __syncwarp();
  }

  // The fast Walsh-Hadamard transform.
  __device__ void hadamard(int dim) const {
    for (int half = 1; half < dim; half *= 2) {
      for (int n = lane; n < dim / 2; n += 32) {
        const int d = n / half * 2 * half + n % half;
        const float a = x[d], b = x[d + half];
        x[d] = a + b;
        x[d + half] = a - b;
      }
      __syncwarp();
    }
    for (int d = lane; d < dim; d += 32) x[d] = __fmul_rn(x[d], p.hadamard_factor);
    __syncwarp();
  }

  // To elements from number `first` on.
  __device__ void store(const Rows& rows, int64_t first, int dim) const {
    for (int d = lane; d < dim; d += 32) store_number(rows.data, rows.number, first + d * rows.column, x[d]);
  }

  __device__ void store(const CacheRows& to, int64_t slot, int h) const {
    const int64_t page = slot / to.page_size, within = slot % to.page_size;
    const auto first = [&](const Rows& rows) { return page * rows.batch + within * rows.row + h * rows.head; };
    if (to.scales.data == nullptr) {
      store(to.rows, first(to.rows), to.dim);
      return;
    }
    auto* const row = static_cast<unsigned char*>(to.rows.data) + first(to.rows);
    const int64_t scales = first(to.scales);
    int g = 0;
    do {  // a head of no numbers has a scale too
      const float scale = scale_of(to, g * to.group);
      if (lane == 0) store_number(to.scales.data, to.scales.number, scales + g * to.scales.column, scale);
      store_group(to, row, g * to.group, scale);
    } while (++g * to.group < to.dim);
  }

  // A group's scale, as it is stored: its largest magnitude over the format's; NaN, if one of its numbers is NaN or inf.
  __device__ float scale_of(const CacheRows& to, int begin) const {
    float largest = 0;
    bool finite = true;
    for (int d = begin + lane; d < begin + to.group; d += 32) {
      largest = fmaxf(largest, fabsf(x[d]));
      finite = finite && fabsf(x[d]) < INFINITY;
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, other));
    if (__ballot_sync(kAllLanes, finite) != kAllLanes) largest = NAN;
    const double exact = static_cast<double>(largest) / static_cast<double>(to.largest);
    if (to.scales.number == Number::kFloat32) return static_cast<float>(exact);
    return to_float(rounded<Float16>(rounded_to_odd(exact)));
  }

  __device__ void store_group(const CacheRows& to, unsigned char* row, int begin, float scale) const {
    const bool divides = scale > 0 && scale < INFINITY;
    // Of a subnormal scale, which is rounded by much, numbers would be larger than the largest.
    const auto number = [&](int d) { return divides ? fmaxf(-to.largest, fminf(x[d] / scale, to.largest)) : 0; };
    if (to.rows.number == Number::kInt4x2) {
      for (int pair = begin / 2 + lane; pair < (begin + to.group) / 2; pair += 32) {
        const int low = __float2int_rn(number(2 * pair)), high = __float2int_rn(number(2 * pair + 1));
        row[pair * to.rows.column] = static_cast<unsigned char>((low & 15) | high * 16);
      }
      return;
    }
    for (int d = begin + lane; d < begin + to.group; d += 32) {
      unsigned char& stored = row[d * to.rows.column];
      if (to.rows.number == Number::kInt8) stored = static_cast<unsigned char>(__float2int_rn(number(d)));
      if (to.rows.number == Number::kFloat8E4M3) stored = to_float8_e4m3(number(d)).bits;
      if (to.rows.number == Number::kFloat8E5M2) stored = to_float8_e5m2(number(d)).bits;
    }
  }

  const AppendProblem& p;
  float* x;
  int lane;
};

// A head of a token a warp.
__device__ inline void append(const AppendProblem& p) {
  __shared__ float rows[kWarps][kMostHeadDim];
  const int warp = static_cast<int>(threadIdx.x) / 32, heads = p.heads + 2 * p.heads_kv;
  const int64_t n = int64_t{blockIdx.x} * kWarps + warp;
  if (n < p.batch * p.time * heads) Append(p, rows[warp]).run(n / heads, static_cast<int>(n % heads));
}

// A sequence a thread.
__device__ inline void stand_at_step(const StepProblem& p) {
  const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (b >= p.batch) return;
  const int64_t queries = length(p.seqlens_q, b, p.seqlen_q), keys = length(p.seqlens_k, b, p.seqlen_k);
  int64_t offset = p.offset;
  if (p.diagonal == Diagonal::kBottomRight) offset = keys - queries;
  if (p.diagonal == Diagonal::kPerSequence) offset = element(p.query_offsets, b);
  const int64_t cached = p.joins && p.step + 1 < keys ? p.step + 1 : keys;
  p.to[b] = p.step < queries ? cached : 0;
  p.to[p.batch + b] = offset > INT64_MAX - p.step ? INT64_MAX : offset + p.step;
  if (b == 0) p.to[2 * p.batch] = p.step;
}

}  // namespace polyhead::cuda
