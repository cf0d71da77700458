// One small, correct problem and the tensors of a call, for tests that then break a single thing.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "polyhead/attention.h"

namespace polyhead {

inline constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr unsigned char kUntouched = 0x5a;

inline AttentionDesc good_desc() {
  AttentionDesc desc;
  desc.batch = 2;
  desc.seqlen_q = 3;
  desc.seqlen_k = 5;
  desc.num_heads = 4;
  desc.num_heads_kv = 2;
  desc.head_dim = 8;
  desc.head_dim_v = 6;
  return desc;
}

// Every tensor that a desc asks for, and all optional outputs: inputs hold zeros, outputs kUntouched, masks True.
class Call {
 public:
  explicit Call(const AttentionDesc& desc) {
    const int64_t B = desc.batch, Sq = desc.seqlen_q, Sk = desc.seqlen_k, H = desc.num_heads, G = desc.num_heads_kv;
    const int64_t D = desc.head_dim, Dv = desc.head_dim_v;
    const DType sums = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const bool softmax = desc.normalizer == Normalizer::kSoftmax;  // which alone has a logsumexp
    if (desc.packed) {
      args.query = input(desc.dtype, {Sq, H, D});
      args.key = input(desc.dtype, {Sk, G, D});
      args.value = input(desc.dtype, {Sk, G, Dv});
      args.cu_seqlens_q = integers(DType::kInt32, B + 1);
      args.cu_seqlens_k = integers(DType::kInt64, B + 1);
      args.out = output(desc.dtype, {Sq, H, Dv});
      if (softmax) args.logsumexp = output(sums, {H, Sq});
    } else {
      args.query = input(desc.dtype, {B, Sq, H, D});
      args.key = input(desc.dtype, {B, Sk, G, D});
      args.value = input(desc.dtype, {B, Sk, G, Dv});
      args.out = output(desc.dtype, {B, Sq, H, Dv});
      if (softmax) args.logsumexp = output(sums, {B, H, Sq});
    }
    if (desc.attn_mask.given) args.attn_mask = broadcast(desc.attn_mask, 1);
    if (desc.attn_bias.given) args.attn_bias = broadcast(desc.attn_bias, 0);
    if (desc.alibi_slopes_ndim == 1) args.alibi_slopes = input(DType::kFloat32, {H});
    if (desc.alibi_slopes_ndim == 2) args.alibi_slopes = input(DType::kFloat32, {B, H});
    if (desc.has_sink_logits) args.sink_logits = input(sums, {H});
    if (desc.has_seqlens_q) args.seqlens_q = integers(DType::kInt32, B);
    if (desc.has_seqlens_k) args.seqlens_k = integers(DType::kInt64, B);
    if (desc.has_windows) {
      args.window_lo = integers(DType::kInt32, Sq);
      args.window_hi = integers(DType::kInt64, Sq);
    }
    if (desc.has_query_offsets) args.query_offsets = integers(DType::kInt64, B);
    if (desc.return_weights == ReturnWeights::kPerHead) args.attn_weights = output(desc.dtype, {B, H, Sq, Sk});
    if (desc.return_weights == ReturnWeights::kMean) args.attn_weights = output(desc.dtype, {B, Sq, Sk});
    if (desc.return_column_sums) args.column_sums = output(sums, {B, H, Sk});
    if (desc.dropout_p > 0) args.dropout_seed = 1;
  }

  // A workspace of its own, as the plan wants it.
  void reserve(const Plan& plan) { reserve(plan.workspace_bytes()); }
  void reserve(size_t bytes) {
    workspace_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)));
    args.workspace = workspace_.get();
    args.workspace_bytes = bytes;
  }

  bool outputs_untouched() const {
    for (const size_t i : outputs_) {
      for (const unsigned char byte : buffers_[i]) {
        if (byte != kUntouched) return false;
      }
    }
    return true;
  }

  ForwardArgs args;

 protected:
  // `t` with memory of its own, not null and aligned to 16 even if empty.
  Tensor place(Tensor t, unsigned char fill) {
    if (fill == kUntouched) outputs_.push_back(buffers_.size());
    buffers_.emplace_back(static_cast<size_t>(t.num_elements()) * dtype_size_bytes(t.dtype) + 1, fill);
    t.data = buffers_.back().data();
    return t;
  }

 private:
  Tensor tensor(DType dtype, std::initializer_list<int64_t> dims, unsigned char fill) {
    return place(Tensor(nullptr, dtype, dims), fill);
  }
  Tensor input(DType dtype, std::initializer_list<int64_t> dims) { return tensor(dtype, dims, 0); }
  Tensor integers(DType dtype, int64_t count) { return tensor(dtype, {count}, 0); }
  Tensor broadcast(const BroadcastOperand& o, unsigned char fill) {
    return tensor(o.dtype, {o.dims[0], o.dims[1], o.dims[2], o.dims[3]}, fill);
  }
  Tensor output(DType dtype, std::initializer_list<int64_t> dims) { return tensor(dtype, dims, kUntouched); }

  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };

  std::vector<std::vector<unsigned char>> buffers_;
  std::vector<size_t> outputs_;
  std::unique_ptr<unsigned char, Free> workspace_;
};

// A backward call with every optional tensor. Until a forward call has filled them, out and logsumexp hold kUntouched
// too, so that outputs_untouched() speaks for what backward may only read.
class BackwardCall : public Call {
 public:
  explicit BackwardCall(const AttentionDesc& desc) : Call(desc) {
    backward.forward = args;
    backward.forward.attn_weights = backward.forward.column_sums = {};
    backward.grad_out = place(args.out, 0);
    if (args.logsumexp.given()) {
      backward.grad_logsumexp = place(args.logsumexp, 0);
      backward.delta = place(args.logsumexp, 0);
    }
    backward.grad_query = place(args.query, kUntouched);
    backward.grad_key = place(args.key, kUntouched);
    backward.grad_value = place(args.value, kUntouched);
    if (desc.attn_bias.given) backward.grad_attn_bias = place(args.attn_bias, kUntouched);
    if (desc.has_sink_logits) backward.grad_sink_logits = place(args.sink_logits, kUntouched);
    if (desc.alibi_slopes_ndim > 0) backward.grad_alibi_slopes = place(args.alibi_slopes, kUntouched);
  }

  // A workspace of its own for either direction.
  void reserve(const Plan& plan) {
    const size_t bytes = std::max(plan.workspace_bytes(), plan.backward_workspace_bytes());
    Call::reserve(bytes);
    backward.forward.workspace = args.workspace;
    backward.forward.workspace_bytes = bytes;
  }

  BackwardArgs backward;
};

inline void set(const Tensor& t, std::initializer_list<int64_t> values) {
  int64_t i = 0;
  for (const int64_t value : values) {
    if (t.dtype == DType::kInt32) {
      static_cast<int32_t*>(t.data)[i++] = static_cast<int32_t>(value);
    } else {
      static_cast<int64_t*>(t.data)[i++] = value;
    }
  }
}

inline BroadcastOperand operand(DType dtype, int64_t b, int64_t h, int64_t i, int64_t j) {
  return {true, dtype, {b, h, i, j}};
}

inline constexpr char kAlignChoices[] =
    ". Set align to top_left (query 0 stands at key 0) or bottom_right (the last query at the last key), or give "
    "query_offset";

}  // namespace polyhead
