#include "attention/checks_operands.h"

#include "core/sentence.h"

namespace polyhead {
namespace {

Status wrong_ndim(const char* name, const Tensor& t, Dims dims) {
  std::string layout;
  for (const Dim& dim : dims) layout += sentence(layout.empty() ? "" : ", ", dim.name);
  return invalid(sentence(name, " has ", t.ndim, " dims, expected ", dims.size(), ": [", layout, "]"));
}

Status wrong_dtype(const char* name, const Tensor& t, const char* expected) {
  return invalid(sentence(name, " is ", dtype_name(t.dtype), ", expected ", expected));
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

}  // namespace

Status check_writable(Role role, const char* name, const Tensor& t) {
  for (int i = 0; i < t.ndim && role == Role::kOutput; ++i) {
    if (t.dims[i] > 1 && t.strides[i] < 0) {
      return invalid(sentence(name, " has stride ", t.strides[i], " in dim ", i, ", an output's must not be negative"));
    }
  }
  if (!overlaps_itself(t)) return {};
  return invalid(sentence(name, " overlaps itself: two indices name one element"));
}

Status check_tensor(const char* name, const Tensor& t, DType dtype, Dims dims, MemoryRange* range) {
  if (!t.given()) return invalid(sentence(name, " is missing"));
  if (t.dtype != dtype) return wrong_dtype(name, t, dtype_name(dtype));
  if (t.device != Device::kCpu) return invalid(sentence(name, " is not on the CPU, where this call computes"));
  if (t.ndim != static_cast<int32_t>(dims.size())) return wrong_ndim(name, t, dims);
  int i = 0;
  for (const Dim& dim : dims) {
    if (t.dims[i] != dim.size) {
      return invalid(sentence(name, " dim ", i, " is ", t.dims[i], ", expected ", dim.name, " ", dim.size));
    }
    ++i;
  }
  return check_memory(name, t, range);
}

Status Operands::add(Role role, const char* name, const Tensor& t, DType dtype, Dims dims) {
  if (count_ == kMaxOperands)
    return {StatusCode::kInternal, sentence("a call has more than ", kMaxOperands, " tensors")};
  Operand& added = operands_[count_];
  added.name = name;
  added.tensor = &t;
  if (Status status = check_tensor(name, t, dtype, dims, &added.range); !status.ok()) return status;
  ++count_;
  if (role == Role::kInput || added.range.begin == added.range.end) return {};
  if (Status status = check_writable(role, name, t); !status.ok()) return status;
  for (int i = 0; i < count_ - 1; ++i) {
    const Operand& other = operands_[i];
    if (added.range.intersects(other.range) && may_share_memory(t, *other.tensor)) {
      return invalid(sentence(name, " overlaps ", other.name));
    }
  }
  return {};
}

Status Operands::add_rows(Role role, const char* name, const Tensor& t, Dim rows, Dim heads, Dim dim) {
  if (desc_.packed) return add(role, name, t, desc_.dtype, {rows, heads, dim});
  return add(role, name, t, desc_.dtype, {{"batch", desc_.batch}, rows, heads, dim});
}

Status Operands::add_query_like(Role role, const char* name, const Tensor& t) {
  return add_rows(role, name, t, rows_q(), {"num_heads", desc_.num_heads}, {"head_dim", desc_.head_dim});
}

Status Operands::add_key_like(Role role, const char* name, const Tensor& t) {
  return add_rows(role, name, t, rows_k(), {"num_heads_kv", desc_.num_heads_kv}, {"head_dim", desc_.head_dim});
}

Status Operands::add_value_like(Role role, const char* name, const Tensor& t) {
  return add_rows(role, name, t, rows_k(), {"num_heads_kv", desc_.num_heads_kv}, {"head_dim_v", desc_.head_dim_v});
}

Status Operands::add_out_like(Role role, const char* name, const Tensor& t) {
  return add_rows(role, name, t, rows_q(), {"num_heads", desc_.num_heads}, {"head_dim_v", desc_.head_dim_v});
}

Status Operands::add_logsumexp_like(Role role, const char* name, const Tensor& t) {
  const Dim num_heads{"num_heads", desc_.num_heads};
  if (desc_.packed) return add(role, name, t, sums_dtype(desc_), {num_heads, rows_q()});
  return add(role, name, t, sums_dtype(desc_), {{"batch", desc_.batch}, num_heads, rows_q()});
}

Status Operands::add_broadcast(Role role, const char* name, const Tensor& t, const BroadcastOperand& planned) {
  static constexpr const char* kNames[] = {"batch", "num_heads", "seqlen_q", "seqlen_k"};
  for (int i = 0; i < 4 && t.ndim == 4; ++i) {
    if (t.dims[i] == planned.dims[i]) continue;
    return invalid(
        sentence(name, " dim ", i, " (", kNames[i], ") is ", t.dims[i], ", the plan's is ", planned.dims[i]));
  }
  return add(role, name, t, planned.dtype,
             {{kNames[0], planned.dims[0]},
              {kNames[1], planned.dims[1]},
              {kNames[2], planned.dims[2]},
              {kNames[3], planned.dims[3]}});
}

Status Operands::add_slopes_like(Role role, const char* name, const Tensor& t) {
  const Dim num_heads{"num_heads", desc_.num_heads};
  if (desc_.alibi_slopes_ndim == 1) return add(role, name, t, DType::kFloat32, {num_heads});
  return add(role, name, t, DType::kFloat32, {{"batch", desc_.batch}, num_heads});
}

Status Operands::add_inputs(const ForwardArgs& args) {
  Status status = add_query_like(Role::kInput, "query", args.query);
  if (status.ok()) status = add_key_like(Role::kInput, "key", args.key);
  if (status.ok()) status = add_value_like(Role::kInput, "value", args.value);
  if (status.ok()) status = add_options(args);
  return status;
}

Status Operands::add_options(const ForwardArgs& args) {
  constexpr Role kInput = Role::kInput;
  Status status = desc_.attn_mask.given ? add_broadcast(kInput, "attn_mask", args.attn_mask, desc_.attn_mask)
                                        : unasked("attn_mask", args.attn_mask);
  if (!status.ok()) return status;
  status = desc_.attn_bias.given ? add_broadcast(kInput, "attn_bias", args.attn_bias, desc_.attn_bias)
                                 : unasked("attn_bias", args.attn_bias);
  if (!status.ok()) return status;
  status = desc_.alibi_slopes_ndim > 0 ? add_slopes_like(kInput, "alibi_slopes", args.alibi_slopes)
                                       : unasked("alibi_slopes", args.alibi_slopes);
  const struct {
    const char* name;
    const Tensor& tensor;
    bool asked;
    Dim dim;
  } integers[] = {{"seqlens_q", args.seqlens_q, desc_.has_seqlens_q, {"batch", desc_.batch}},
                  {"seqlens_k", args.seqlens_k, desc_.has_seqlens_k, {"batch", desc_.batch}},
                  {"cu_seqlens_q", args.cu_seqlens_q, desc_.packed, {"batch + 1 =", desc_.batch + 1}},
                  {"cu_seqlens_k", args.cu_seqlens_k, desc_.packed, {"batch + 1 =", desc_.batch + 1}},
                  {"query_offsets", args.query_offsets, desc_.has_query_offsets, {"batch", desc_.batch}},
                  {"window_lo", args.window_lo, desc_.has_windows, {"seqlen_q", desc_.seqlen_q}},
                  {"window_hi", args.window_hi, desc_.has_windows, {"seqlen_q", desc_.seqlen_q}}};
  for (const auto& t : integers) {
    if (!status.ok()) return status;
    if (!t.asked) {
      status = unasked(t.name, t.tensor);
    } else if (t.tensor.given() && t.tensor.dtype != DType::kInt32 && t.tensor.dtype != DType::kInt64) {
      status = wrong_dtype(t.name, t.tensor, "int32 or int64");
    } else {
      status = add(kInput, t.name, t.tensor, t.tensor.dtype, {t.dim});
    }
  }
  return status;
}

Status Operands::check_workspace(const void* data, size_t given_bytes, size_t needed_bytes) const {
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

Status unasked(const char* name, const Tensor& t) {
  if (!t.given()) return {};
  return invalid(sentence(name, " is given, but the plan was made without"));
}

}  // namespace polyhead
