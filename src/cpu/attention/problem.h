// One forward call as the CPU kernels see it: plain pointers and strides, no library types. call.cc fills it.
#pragma once

#include <cstdint>

#include "contract/band.h"
#include "cpu/isa/operand.h"
#include "program/call.h"

namespace polyhead::cpu {

// Mask or bias: element (b, h, i, j) at the given strides, 0 where it broadcasts. No data: not given.
struct Broadcast {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
};

// [batch, heads, seqlen_q] by strides; packed: batch stride 0.
struct Statistic {
  float* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;
};

static inline float* at(const Statistic& x, int64_t b, int64_t h, int64_t i) {
  return x.data + b * x.stride_b + h * x.stride_h + i * x.stride_s;
}

struct Problem {
  int64_t batch = 0, num_heads = 0, group = 1;  // group: query heads of a key/value head
  int64_t head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kFloat32;  // of query, key, value

  Operand query, key, value, out;
  Statistic logsumexp;

  // Returned weights [batch, heads or 1, seqlen_q, seqlen_k], in `dtype`; keys of the operand, those behind len_k too.
  void* attn_weights = nullptr;
  int64_t weights_stride_b = 0, weights_stride_h = 0, weights_stride_q = 0, weights_stride_k = 0;
  int64_t seqlen_k = 0;

  Broadcast mask, bias;
  int64_t mask_keys = -1;         // the mask tells of the last so many keys of each sequence; -1: of all
  const float* slopes = nullptr;  // ALiBi
  int64_t slopes_stride_b = 0, slopes_stride_h = 0;
  const float* sinks = nullptr;  // one more logit of each row of a head
  int64_t sinks_stride_h = 0;
  bool softmax = true;  // else weights are scores, and there is no logsumexp
  Band band;
  float scale = 1, softcap = 0;
  Dropout dropout;
  program::Call program;
};

// The sink of head h; -inf: none. +inf is NaN already, as it would be in a softmax.
static inline float sink_of(const Problem& p, int64_t h) {
  if (p.sinks == nullptr) return -__builtin_inff();
  const float sink = p.sinks[h * p.sinks_stride_h];
  return sink < __builtin_inff() ? sink : __builtin_nanf("");
}

// One backward call. `forward` has out and logsumexp as inputs. Gradients without data are not asked for.
struct BackwardProblem {
  Problem forward;
  Operand grad_out;
  Statistic delta, grad_logsumexp;  // delta: sum over head_dim_v of grad_out * out, where it is known
  Operand grad_query, grad_key, grad_value;
  Broadcast grad_bias;
  float* grad_slopes = nullptr;
  int64_t grad_slopes_stride_b = 0, grad_slopes_stride_h = 0;
  bool accumulate = false;
};

}  // namespace polyhead::cpu
