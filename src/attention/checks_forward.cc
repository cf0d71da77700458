#include <initializer_list>
#include <utility>

#include "attention/checks.h"
#include "attention/sequences.h"
#include "core/layout.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

struct Dim {
  const char* name;
  int64_t size;
};
using Dims = std::initializer_list<Dim>;

Status wrong_ndim(const char* name, const Tensor& t, Dims dims) {
  std::string layout;
  for (const Dim& dim : dims) layout += sentence(layout.empty() ? "" : ", ", dim.name);
  return invalid(sentence(name, " has ", t.ndim, " dims, expected ", dims.size(), ": [", layout, "]"));
}

// Pointer and strides of a view whose dims are as expected.
Status check_memory(const char* name, const Tensor& t, MemoryRange* range) {
  const int64_t num_elements = t.num_elements();
  *range = {};
  if (num_elements == 0) return {};
  if (t.data == nullptr) return invalid(sentence(name, " is null, has ", num_elements, " elements"));
  if (!memory_range(t, range)) return invalid(sentence(name, " reaches beyond the address space, by its strides"));
  const size_t element_bytes = dtype_size_bytes(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % element_bytes != 0) {
    return invalid(sentence(name, " is not aligned to its elements of ", element_bytes, " bytes"));
  }
  return {};
}

Status check_writable(const char* name, const Tensor& t) {
  for (int i = 0; i < t.ndim; ++i) {
    if (t.dims[i] > 1 && t.strides[i] < 0) {
      return invalid(sentence(name, " has stride ", t.strides[i], " in dim ", i, ", an output's must not be negative"));
    }
  }
  if (overlaps_itself(t)) return invalid(sentence(name, " overlaps itself: two indices name one element"));
  return {};
}

// Collects the operands of a call, each checked by itself, so that outputs can be compared with all.
class Operands {
 public:
  Status input(const char* name, const Tensor& t, DType dtype, Dims dims) {
    if (t.dtype != dtype) return wrong_dtype(name, t, dtype_name(dtype));
    return add(name, t, dims);
  }

  // An input of int32 or int64.
  Status integers(const char* name, const Tensor& t, Dim dim) {
    if (t.given() && t.dtype != DType::kInt32 && t.dtype != DType::kInt64)
      return wrong_dtype(name, t, "int32 or int64");
    return add(name, t, {dim});
  }

  // Outputs come after all inputs.
  Status output(const char* name, const Tensor& t, DType dtype, Dims dims) {
    if (t.dtype != dtype) return wrong_dtype(name, t, dtype_name(dtype));
    if (Status status = add(name, t, dims); !status.ok()) return status;
    const Operand& out = operands_[count_ - 1];
    if (out.range.begin == out.range.end) return {};
    if (Status status = check_writable(name, t); !status.ok()) return status;
    for (int i = 0; i < count_ - 1; ++i) {
      const Operand& other = operands_[i];
      if (out.range.intersects(other.range) && may_share_memory(t, *other.tensor)) {
        return invalid(sentence(name, " overlaps ", other.name));
      }
    }
    return {};
  }

  Status workspace(const void* data, size_t given_bytes, size_t needed_bytes) const {
    if (needed_bytes == 0) return {};
    if (data == nullptr) return invalid(sentence("workspace is null, needs ", needed_bytes, " bytes"));
    if (given_bytes < needed_bytes) {
      return invalid(sentence("workspace_bytes is ", given_bytes, ", needs ", needed_bytes));
    }
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (begin % 64 != 0) return invalid("workspace is not aligned to 64 bytes");
    const MemoryRange range{begin, begin + needed_bytes};
    if (range.end < begin) return invalid("workspace reaches beyond the address space");
    for (int i = 0; i < count_; ++i) {
      if (range.intersects(operands_[i].range)) return invalid(sentence("workspace overlaps ", operands_[i].name));
    }
    return {};
  }

 private:
  struct Operand {
    const char* name;
    const Tensor* tensor;
    MemoryRange range;
  };

  static Status wrong_dtype(const char* name, const Tensor& t, const char* expected) {
    if (!t.given()) return invalid(sentence(name, " is missing"));
    return invalid(sentence(name, " is ", dtype_name(t.dtype), ", expected ", expected));
  }

  Status add(const char* name, const Tensor& t, Dims dims) {
    if (!t.given()) return invalid(sentence(name, " is missing"));
    if (t.device != Device::kCpu) return invalid(sentence(name, " is not on the CPU, where this plan computes"));
    if (t.ndim != static_cast<int32_t>(dims.size())) return wrong_ndim(name, t, dims);
    int i = 0;
    for (const Dim& dim : dims) {
      if (t.dims[i] != dim.size) {
        return invalid(sentence(name, " dim ", i, " is ", t.dims[i], ", expected ", dim.name, " ", dim.size));
      }
      ++i;
    }
    Operand& operand = operands_[count_++];
    operand.name = name;
    operand.tensor = &t;
    return check_memory(name, t, &operand.range);
  }

  static constexpr int kMaxOperands = 15;  // the tensors of ForwardArgs
  Operand operands_[kMaxOperands];
  int count_ = 0;
};

Status unasked(const char* name, const Tensor& t) {
  if (!t.given()) return {};
  return invalid(sentence(name, " is given, but the plan was made without"));
}

Status check_inputs(const AttentionDesc& desc, const ForwardArgs& args, Operands& operands) {
  const Dim batch{"batch", desc.batch};
  const Dim seqlen_q{desc.packed ? "total_q" : "seqlen_q", desc.seqlen_q};
  const Dim seqlen_k{desc.packed ? "total_k" : "seqlen_k", desc.seqlen_k};
  const Dim num_heads{"num_heads", desc.num_heads}, num_heads_kv{"num_heads_kv", desc.num_heads_kv};
  const Dim head_dim{"head_dim", desc.head_dim}, head_dim_v{"head_dim_v", desc.head_dim_v};
  Status status;
  if (desc.packed) {
    status = operands.input("query", args.query, desc.dtype, {seqlen_q, num_heads, head_dim});
    if (status.ok()) status = operands.input("key", args.key, desc.dtype, {seqlen_k, num_heads_kv, head_dim});
    if (status.ok()) status = operands.input("value", args.value, desc.dtype, {seqlen_k, num_heads_kv, head_dim_v});
  } else {
    status = operands.input("query", args.query, desc.dtype, {batch, seqlen_q, num_heads, head_dim});
    if (status.ok()) status = operands.input("key", args.key, desc.dtype, {batch, seqlen_k, num_heads_kv, head_dim});
    if (status.ok()) {
      status = operands.input("value", args.value, desc.dtype, {batch, seqlen_k, num_heads_kv, head_dim_v});
    }
  }
  return status;
}

Status check_broadcast(const char* name, const BroadcastOperand& planned, const Tensor& t, Operands& operands) {
  if (!planned.given) return unasked(name, t);
  static constexpr const char* kNames[] = {"batch", "num_heads", "seqlen_q", "seqlen_k"};
  for (int i = 0; i < 4 && t.ndim == 4; ++i) {
    if (t.dims[i] == planned.dims[i]) continue;
    return invalid(
        sentence(name, " dim ", i, " (", kNames[i], ") is ", t.dims[i], ", the plan's is ", planned.dims[i]));
  }
  return operands.input(name, t, planned.dtype,
                        {{kNames[0], planned.dims[0]},
                         {kNames[1], planned.dims[1]},
                         {kNames[2], planned.dims[2]},
                         {kNames[3], planned.dims[3]}});
}

Status check_options(const AttentionDesc& desc, const ForwardArgs& args, Operands& operands) {
  const Dim batch{"batch", desc.batch}, num_heads{"num_heads", desc.num_heads};
  Status status = check_broadcast("attn_mask", desc.attn_mask, args.attn_mask, operands);
  if (status.ok()) status = check_broadcast("attn_bias", desc.attn_bias, args.attn_bias, operands);
  if (!status.ok()) return status;
  if (desc.alibi_slopes_ndim == 0) {
    status = unasked("alibi_slopes", args.alibi_slopes);
  } else if (desc.alibi_slopes_ndim == 1) {
    status = operands.input("alibi_slopes", args.alibi_slopes, DType::kFloat32, {num_heads});
  } else {
    status = operands.input("alibi_slopes", args.alibi_slopes, DType::kFloat32, {batch, num_heads});
  }
  const struct {
    const char* name;
    const Tensor& tensor;
    bool asked;
    int64_t size;
  } integers[] = {{"seqlens_q", args.seqlens_q, desc.has_seqlens_q, desc.batch},
                  {"seqlens_k", args.seqlens_k, desc.has_seqlens_k, desc.batch},
                  {"cu_seqlens_q", args.cu_seqlens_q, desc.packed, desc.batch + 1},
                  {"cu_seqlens_k", args.cu_seqlens_k, desc.packed, desc.batch + 1},
                  {"query_offsets", args.query_offsets, desc.has_query_offsets, desc.batch}};
  for (const auto& t : integers) {
    if (!status.ok()) return status;
    const char* dim = t.size == desc.batch ? "batch" : "batch + 1 =";
    status = t.asked ? operands.integers(t.name, t.tensor, {dim, t.size}) : unasked(t.name, t.tensor);
  }
  return status;
}

Status check_lengths(const char* name, const Tensor& lengths, const char* limit_name, int64_t limit) {
  for (int64_t b = 0; b < lengths.dims[0]; ++b) {
    const int64_t length = integer_at(lengths, b);
    if (length < 0 || length > limit) {
      return invalid(sentence(name, "[", b, "] is ", length, ", must be 0 to ", limit_name, " ", limit));
    }
  }
  return {};
}

Status check_cumulative(const char* name, const Tensor& starts, const char* limit_name, int64_t limit) {
  int64_t last = integer_at(starts, 0);
  if (last != 0) return invalid(sentence(name, "[0] is ", last, ", must be 0"));
  for (int64_t b = 1; b < starts.dims[0]; ++b) {
    const int64_t start = integer_at(starts, b);
    if (start < last) {
      return invalid(sentence(name, "[", b, "] is ", start, ", must not be less than the ", last, " before it"));
    }
    last = start;
  }
  if (last <= limit) return {};
  return invalid(sentence(name, " ends at ", last, ", must be at most ", limit_name, " ", limit));
}

// Lengths are data: they are checked in every call.
Status check_sequences(const AttentionDesc& desc, const ForwardArgs& args) {
  Status status;
  if (desc.has_seqlens_q) status = check_lengths("seqlens_q", args.seqlens_q, "seqlen_q", desc.seqlen_q);
  if (status.ok() && desc.has_seqlens_k) {
    status = check_lengths("seqlens_k", args.seqlens_k, "seqlen_k", desc.seqlen_k);
  }
  if (status.ok() && desc.packed) {
    status = check_cumulative("cu_seqlens_q", args.cu_seqlens_q, "total_q", desc.seqlen_q);
    if (status.ok()) status = check_cumulative("cu_seqlens_k", args.cu_seqlens_k, "total_k", desc.seqlen_k);
  }
  if (!status.ok() || !(desc.packed || desc.has_seqlens_q || desc.has_seqlens_k)) return status;
  const char* option = unaligned_option(desc);
  if (option == nullptr) return status;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const Sequence s = sequence(desc, args, b);
    if (s.len_q != s.len_k) return alignment_missing(option, b, s.len_q, s.len_k);
  }
  return status;
}

Status check_outputs(const AttentionDesc& desc, const ForwardArgs& args, Operands& operands) {
  const Dim batch{"batch", desc.batch}, num_heads{"num_heads", desc.num_heads};
  const Dim seqlen_q{desc.packed ? "total_q" : "seqlen_q", desc.seqlen_q}, seqlen_k{"seqlen_k", desc.seqlen_k};
  const Dim head_dim_v{"head_dim_v", desc.head_dim_v};
  const DType sums = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Status status = desc.packed ? operands.output("out", args.out, desc.dtype, {seqlen_q, num_heads, head_dim_v})
                              : operands.output("out", args.out, desc.dtype, {batch, seqlen_q, num_heads, head_dim_v});
  if (status.ok() && args.logsumexp.given()) {
    status = desc.packed ? operands.output("logsumexp", args.logsumexp, sums, {num_heads, seqlen_q})
                         : operands.output("logsumexp", args.logsumexp, sums, {batch, num_heads, seqlen_q});
  }
  if (!status.ok()) return status;
  switch (desc.return_weights) {
    case ReturnWeights::kNone: status = unasked("weights", args.weights); break;
    case ReturnWeights::kPerHead:
      status = operands.output("weights", args.weights, desc.dtype, {batch, num_heads, seqlen_q, seqlen_k});
      break;
    case ReturnWeights::kMean:
      status = operands.output("weights", args.weights, desc.dtype, {batch, seqlen_q, seqlen_k});
      break;
  }
  if (!status.ok()) return status;
  if (!desc.return_column_sums) return unasked("column_sums", args.column_sums);
  return operands.output("column_sums", args.column_sums, sums, {batch, num_heads, seqlen_k});
}

}  // namespace

Status check_forward_args(const AttentionDesc& desc, const ForwardArgs& args, size_t workspace_bytes) {
  Operands operands;
  Status status = check_inputs(desc, args, operands);
  if (status.ok()) status = check_options(desc, args, operands);
  if (status.ok()) status = check_outputs(desc, args, operands);
  if (status.ok()) status = operands.workspace(args.workspace, args.workspace_bytes, workspace_bytes);
  if (status.ok()) status = check_sequences(desc, args);
  return status;
}

Status check_backward_args(const AttentionDesc& desc, const BackwardArgs& args, size_t) {
  (void)desc, (void)args;
  return {};
}

}  // namespace polyhead
