#include "contract/attention_operands.h"

#include "core/dtype.h"

namespace polyhead {
namespace {

using Desc = AttentionDesc;

// Sums and statistics are kept in float32, of float64 operands in float64.
DType sums_dtype(const Desc& d) { return d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

OperandShape rows(const Desc& d, DType dtype, Dim tokens, Dim heads, Dim dim) {
  if (d.packed) return {dtype, {tokens, heads, dim}};
  return {dtype, {{"batch", d.batch}, tokens, heads, dim}};
}
Dim rows_q(const Desc& d) { return {d.packed ? "total_q" : "seqlen_q", d.seqlen_q}; }
Dim rows_k(const Desc& d) { return {d.packed ? "total_k" : "seqlen_k", d.seqlen_k}; }

OperandShape query_in(const Desc& d, DType dtype) {
  return rows(d, dtype, rows_q(d), {"num_heads", d.num_heads}, {"head_dim", d.head_dim});
}
OperandShape keys_in(const Desc& d, DType dtype, Dim dim) {
  const Dim heads{"num_heads_kv", d.num_heads_kv};
  if (d.page_size == 0) return rows(d, dtype, rows_k(d), heads, dim);
  return {dtype, {{"num_pages", d.num_pages}, {"page_size", d.page_size}, heads, dim}};
}
OperandShape key_in(const Desc& d, DType dtype) {
  if (dtype == DType::kInt4x2) return keys_in(d, dtype, {"head_dim / 2", d.head_dim / 2});
  return keys_in(d, dtype, {"head_dim", d.head_dim});
}
OperandShape value_in(const Desc& d, DType dtype) {
  if (dtype == DType::kInt4x2) return keys_in(d, dtype, {"head_dim_v / 2", d.head_dim_v / 2});
  return keys_in(d, dtype, {"head_dim_v", d.head_dim_v});
}
OperandShape scales_in(const Desc& d, DType dtype, int64_t group, Dim dim) {
  if (!has_scales(dtype)) return {};
  return keys_in(d, scale_dtype(dtype), {dim.name, group == 0 ? 1 : dim.size / group});
}
OperandShape key_scales(const Desc& d) {
  return scales_in(d, key_dtype(d), d.key_group, {"head_dim / key_group", d.head_dim});
}
OperandShape value_scales(const Desc& d) {
  return scales_in(d, value_dtype(d), d.value_group, {"head_dim_v / value_group", d.head_dim_v});
}
OperandShape query(const Desc& d) { return query_in(d, d.dtype); }
OperandShape key(const Desc& d) { return key_in(d, key_dtype(d)); }
OperandShape value(const Desc& d) { return value_in(d, value_dtype(d)); }
OperandShape grad_query(const Desc& d) { return query_in(d, grad_dtype(d)); }
OperandShape grad_key(const Desc& d) { return key_in(d, grad_dtype(d)); }
OperandShape grad_value(const Desc& d) { return value_in(d, grad_dtype(d)); }
OperandShape out(const Desc& d) {
  return rows(d, out_dtype(d), rows_q(d), {"num_heads", d.num_heads}, {"head_dim_v", d.head_dim_v});
}

OperandShape logsumexp(const Desc& d) {
  if (d.normalizer == Normalizer::kNone) return {};
  if (d.packed) return {sums_dtype(d), {{"num_heads", d.num_heads}, rows_q(d)}};
  return {sums_dtype(d), {{"batch", d.batch}, {"num_heads", d.num_heads}, rows_q(d)}};
}

OperandShape broadcast(const BroadcastOperand& operand) {
  if (!operand.given) return {};
  const int64_t* const dims = operand.dims;
  OperandShape shape(operand.dtype,
                     {{"batch", dims[0]}, {"num_heads", dims[1]}, {"seqlen_q", dims[2]}, {"seqlen_k", dims[3]}});
  shape.planned = true;
  return shape;
}
OperandShape attn_mask(const Desc& d) { return broadcast(d.attn_mask); }
OperandShape attn_bias(const Desc& d) { return broadcast(d.attn_bias); }

OperandShape alibi_slopes(const Desc& d) {
  if (d.alibi_slopes_ndim == 0) return {};
  const Dim heads{"num_heads", d.num_heads};
  if (d.alibi_slopes_ndim == 1) return {DType::kFloat32, {heads}};
  return {DType::kFloat32, {{"batch", d.batch}, heads}};
}

OperandShape sink_logits(const Desc& d) {
  if (!d.has_sink_logits) return {};
  return {sums_dtype(d), {{"num_heads", d.num_heads}}};
}

OperandShape integers(bool asked, Dim dim) {
  if (!asked) return {};
  OperandShape shape(DType::kInt64, {dim});
  shape.takes = OperandShape::Takes::kInt32OrInt64;
  return shape;
}
OperandShape seqlens_q(const Desc& d) { return integers(d.has_seqlens_q, {"batch", d.batch}); }
OperandShape seqlens_k(const Desc& d) { return integers(d.has_seqlens_k, {"batch", d.batch}); }
OperandShape cu_seqlens_q(const Desc& d) { return integers(d.packed, {"batch + 1 =", d.batch + 1}); }
OperandShape cu_seqlens_k(const Desc& d) {
  return integers(d.packed && d.page_size == 0, {"batch + 1 =", d.batch + 1});
}
OperandShape page_table(const Desc& d) {
  if (d.page_size == 0) return {};
  OperandShape shape(DType::kInt64, {{"batch", d.batch}, {"seqlen_k / page_size", d.seqlen_k / d.page_size}});
  shape.takes = OperandShape::Takes::kInt32OrInt64;
  return shape;
}
OperandShape query_offsets(const Desc& d) { return integers(d.has_query_offsets, {"batch", d.batch}); }
OperandShape window(const Desc& d) { return integers(d.has_windows, {"seqlen_q", d.seqlen_q}); }

OperandShape weights(const Desc& d) {
  const Dim batch{"batch", d.batch}, queries{"seqlen_q", d.seqlen_q}, keys{"seqlen_k", d.seqlen_k};
  switch (d.return_weights) {
    case ReturnWeights::kPerHead: return {d.dtype, {batch, {"num_heads", d.num_heads}, queries, keys}};
    case ReturnWeights::kMean: return {d.dtype, {batch, queries, keys}};
    case ReturnWeights::kNone: break;
  }
  return {};
}
OperandShape column_sums(const Desc& d) {
  if (!d.return_column_sums) return {};
  return {sums_dtype(d), {{"batch", d.batch}, {"num_heads", d.num_heads}, {"seqlen_k", d.seqlen_k}}};
}

using F = ForwardArgs;
using B = BackwardArgs;
constexpr Use kNone = Use::kNone, kInput = Use::kInput, kMayCome = Use::kOptionalInput, kOutput = Use::kOutput,
              kMayGo = Use::kOptionalOutput, kGradient = Use::kGradient;

constexpr AttentionOperand kOperands[] = {
    {"query", &F::query, nullptr, kInput, kInput, query},
    {"key", &F::key, nullptr, kInput, kInput, key},
    {"value", &F::value, nullptr, kInput, kInput, value},
    {"key_scales", &F::key_scales, nullptr, kInput, kInput, key_scales},
    {"value_scales", &F::value_scales, nullptr, kInput, kInput, value_scales},
    {"attn_mask", &F::attn_mask, nullptr, kInput, kInput, attn_mask},
    {"attn_bias", &F::attn_bias, nullptr, kInput, kInput, attn_bias},
    {"alibi_slopes", &F::alibi_slopes, nullptr, kInput, kInput, alibi_slopes},
    {"sink_logits", &F::sink_logits, nullptr, kInput, kInput, sink_logits},
    {"seqlens_q", &F::seqlens_q, nullptr, kInput, kInput, seqlens_q},
    {"seqlens_k", &F::seqlens_k, nullptr, kInput, kInput, seqlens_k},
    {"cu_seqlens_q", &F::cu_seqlens_q, nullptr, kInput, kInput, cu_seqlens_q},
    {"cu_seqlens_k", &F::cu_seqlens_k, nullptr, kInput, kInput, cu_seqlens_k},
    {"page_table", &F::page_table, nullptr, kInput, kInput, page_table},
    {"query_offsets", &F::query_offsets, nullptr, kInput, kInput, query_offsets},
    {"window_lo", &F::window_lo, nullptr, kInput, kInput, window},
    {"window_hi", &F::window_hi, nullptr, kInput, kInput, window},
    {"out", &F::out, nullptr, kOutput, kMayCome, out},  // backward: or delta in its place
    {"logsumexp", &F::logsumexp, nullptr, kMayGo, kInput, logsumexp},
    {"attn_weights", &F::attn_weights, nullptr, kOutput, kNone, weights},
    {"column_sums", &F::column_sums, nullptr, kOutput, kNone, column_sums},
    {"grad_out", nullptr, &B::grad_out, kNone, kInput, out},
    {"grad_logsumexp", nullptr, &B::grad_logsumexp, kNone, kMayCome, logsumexp},
    {"delta", nullptr, &B::delta, kNone, kMayCome, logsumexp},
    {"grad_query", nullptr, &B::grad_query, kNone, kGradient, grad_query},
    {"grad_key", nullptr, &B::grad_key, kNone, kGradient, grad_key},
    {"grad_value", nullptr, &B::grad_value, kNone, kGradient, grad_value},
    {"grad_attn_bias", nullptr, &B::grad_attn_bias, kNone, kGradient, attn_bias},
    {"grad_alibi_slopes", nullptr, &B::grad_alibi_slopes, kNone, kGradient, alibi_slopes},
    {"grad_sink_logits", nullptr, &B::grad_sink_logits, kNone, kGradient, sink_logits},
};

}  // namespace

std::span<const AttentionOperand> attention_operands() { return kOperands; }

const AttentionOperand& attention_operand(Tensor ForwardArgs::*tensor) {
  const AttentionOperand* row = kOperands;
  while (row->in_forward != tensor) ++row;
  return *row;
}

const Tensor& AttentionOperand::element(std::span<const Tensor> captures) const {
  static const Tensor kNotGiven;
  return capture < captures.size() ? captures[capture] : kNotGiven;
}

namespace {

OperandShape shape_of(const CaptureShape& capture) {
  OperandShape shape;
  shape.dtype = capture.dtype;
  shape.ndim = capture.ndim;
  for (int i = 0; i < capture.ndim; ++i) shape.dims[i] = {"dim", capture.dims[i]};
  shape.planned = true;
  return shape;
}

// The capture itself, or its gradient.
PlannedOperand planned_capture(const AttentionDesc& desc, size_t i, bool gradient) {
  static constexpr const char* kGradients[Program::kMostCaptures] = {
      "grad_captures[0]", "grad_captures[1]", "grad_captures[2]", "grad_captures[3]",
      "grad_captures[4]", "grad_captures[5]", "grad_captures[6]", "grad_captures[7]"};
  const bool has_gradient = desc.program->captures()[i].type == ValueType::kFloat;
  AttentionOperand row{};
  row.name = gradient ? kGradients[i] : desc.program->captures()[i].name.c_str();
  row.forward = gradient ? kNone : kInput;
  row.backward = gradient ? kGradient : kInput;
  row.capture = i;
  row.grad_capture = gradient;
  return {row, gradient && !has_gradient ? OperandShape() : shape_of(desc.captures[i])};
}

}  // namespace

MemorySize num_elements(const CaptureShape& shape) {
  MemorySize count = 1;
  for (int i = 0; i < shape.ndim; ++i) count = count * shape.dims[i];
  return count;
}

std::vector<PlannedOperand> planned_operands(const AttentionDesc& desc) {
  const size_t num_captures = desc.program != nullptr ? desc.captures.size() : 0;
  std::vector<PlannedOperand> operands;
  operands.reserve(std::size(kOperands) + 2 * num_captures);
  for (const AttentionOperand& row : kOperands) {
    if (row.in_forward == &F::out) {
      for (size_t i = 0; i < num_captures; ++i) operands.push_back(planned_capture(desc, i, false));
    }
    operands.emplace_back(row, row.shape(desc));
  }
  for (size_t i = 0; i < num_captures; ++i) operands.push_back(planned_capture(desc, i, true));
  return operands;
}

Tensor expected_tensor(const AttentionDesc& desc, Tensor ForwardArgs::*tensor) {
  const OperandShape shape = attention_operand(tensor).shape(desc);
  Tensor t;
  t.dtype = shape.dtype;
  t.ndim = shape.ndim;
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.dims[i] = shape.dims[i].size;
    t.strides[i] = stride;
    if (__builtin_mul_overflow(stride, t.dims[i] > 0 ? t.dims[i] : 1, &stride)) stride = INT64_MAX;
  }
  return t;
}

}  // namespace polyhead
