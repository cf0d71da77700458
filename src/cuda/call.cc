#include "cuda/call.h"

#include <algorithm>
#include <cmath>

#include "core/dropout.h"
#include "core/philox.h"
#include "core/threads.h"

namespace polyhead::cuda {
namespace {

// Blocks of threads that own the rows of a head in all sequences, so many each; none where there is no row. Packed: one
// and a part for each sequence, see OwnRows.
MemorySize row_blocks(const AttentionDesc& desc, int64_t rows, int64_t of_block) {
  if (desc.packed && rows > 0) return MemorySize(rows / of_block) + MemorySize(desc.batch) + 1;
  return MemorySize(desc.batch) * MemorySize(pieces(rows, of_block));
}

Pages pages_of(const AttentionDesc& desc, const Tensor& table) {
  if (desc.page_size == 0) return {};
  return {table.data, table.strides[0], table.strides[1], table.dtype == DType::kInt64, desc.page_size, desc.num_pages};
}

Dropout dropout_of(const AttentionDesc& desc, const ForwardArgs& args) {
  Dropout dropout;
  if (desc.dropout_p == 0) return dropout;
  const DropoutOrigin& origin = desc.dropout_origin;
  dropout.on = true;
  dropout.threshold = dropout_threshold(desc.dropout_p);
  dropout.offset = args.dropout_offset;
  dropout.first_head = static_cast<uint32_t>(origin.first_head);
  dropout.heads = static_cast<uint32_t>(counted_heads(origin, desc.num_heads));
  dropout.first_query = static_cast<uint32_t>(origin.first_query);
  dropout.first_key_group = static_cast<uint32_t>(origin.first_key / 8);
  dropout.seed = args.dropout_seed.value_or(0);
  dropout.factor = desc.dropout_p < 1 ? static_cast<float>(1 / (1 - desc.dropout_p)) : 0;
  return dropout;
}

void set_options(const AttentionDesc& desc, const ForwardArgs& args, Problem* p) {
  p->softcap = static_cast<float>(desc.softcap);
  p->softmax = desc.normalizer == Normalizer::kSoftmax;
  p->mask = broadcast_of(args.attn_mask);
  if (desc.mask_at_end) p->mask_keys = desc.attn_mask.dims[3];
  p->bias = broadcast_of(args.attn_bias);
  p->slopes = slopes_of(args.alibi_slopes);
  p->sinks = static_cast<const float*>(args.sink_logits.data);
  p->sinks_stride = args.sink_logits.strides[0];
  p->dropout = dropout_of(desc, args);
  for (size_t i = 0; i < args.captures.size(); ++i) p->captures[i] = captured(args.captures[i]);
  const bool sinks_before_window = p->sink_keys > 0 && p->left >= 0;
  p->hides_pairs = p->mask.data != nullptr || p->bias.data != nullptr || p->window_lo.data != nullptr ||
                   sinks_before_window || desc.program != nullptr;
  p->has_options = p->hides_pairs || p->softcap > 0 || p->slopes.data != nullptr || p->sinks != nullptr ||
                   p->dropout.on || !p->softmax;
}

}  // namespace

MemorySize query_blocks(const AttentionDesc& desc, int64_t rows) {
  return MemorySize(desc.num_heads) * row_blocks(desc, desc.seqlen_q, rows);
}
MemorySize key_blocks(const AttentionDesc& desc, int64_t rows) {
  return MemorySize(desc.num_heads_kv) * row_blocks(desc, desc.seqlen_k, rows);
}

Number number_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return Number::kBFloat16;
    case DType::kFloat16: return Number::kFloat16;
    case DType::kFloat64: return Number::kFloat64;
    case DType::kInt8: return Number::kInt8;
    case DType::kFloat8E4M3: return Number::kFloat8E4M3;
    case DType::kFloat8E5M2: return Number::kFloat8E5M2;
    case DType::kInt4x2: return Number::kInt4x2;
    default: return Number::kFloat32;
  }
}

Integers integers(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.dtype == DType::kInt64};
}

Diagonal diagonal_of(const AttentionDesc& desc) {
  if (desc.has_query_offsets) return Diagonal::kPerSequence;
  return !desc.query_offset && desc.align == Align::kBottomRight ? Diagonal::kBottomRight : Diagonal::kFixed;
}

Rows rows_of(const Tensor& t, Number elements) {
  if (!t.given()) return {};
  const int last = t.ndim - 1;
  // Strides of what is there once may be anything: places behind it are computed, though not read.
  const auto stride = [&](int dim) { return t.dims[dim] <= 1 ? 0 : t.strides[dim]; };
  Rows rows{t.data, t.ndim == 4 ? stride(0) : 0, stride(last - 2), stride(last - 1), stride(last), number_of(t.dtype)};
  if (rows.number != elements) return rows;
  const int64_t piece = 16 / static_cast<int64_t>(dtype_size_bytes(t.dtype));
  const auto whole = [&](int64_t in_elements) { return in_elements % piece == 0; };
  rows.in_pieces = rows.column == 1 && whole(t.dims[last]) && whole(rows.batch) && whole(rows.row) &&
                   whole(rows.head) && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  return rows;
}

StoredRows stored_rows(const Tensor& t, const Tensor& scales, int64_t group) {
  StoredRows stored;
  stored.rows = rows_of(t, number_of(t.dtype));
  stored.scales = rows_of(scales, number_of(scales.dtype));
  stored.group = static_cast<int>(group);
  return stored;
}

Statistic statistic_of(const Tensor& t) {
  if (!t.given()) return {};
  return {static_cast<float*>(t.data), t.ndim == 3 ? t.strides[0] : 0, t.strides[t.ndim - 2], t.strides[t.ndim - 1]};
}

Broadcast broadcast_of(const Tensor& t) {
  if (!t.given()) return {};
  const auto stride = [&](int n) { return t.dims[n] == 1 ? 0 : t.strides[n]; };
  return {t.data, stride(0), stride(1), stride(2), stride(3), number_of(t.dtype)};
}

Broadcast slopes_of(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.ndim == 2 ? t.strides[0] : 0, t.strides[t.ndim - 1]};
}

Captured captured(const Tensor& t) {
  if (t.data == nullptr) return {};
  Captured x;
  x.data = t.data;
  std::fill_n(x.dims, std::size(x.dims), 1);
  std::copy_n(t.dims, t.ndim, x.dims);
  std::copy_n(t.strides, t.ndim, x.strides);
  return x;
}

void set_problem(const AttentionDesc& desc, const ForwardArgs& args, DType dtype, Problem* p) {
  p->elements = number_of(dtype);
  p->query = rows_of(args.query, p->elements);
  p->key = rows_of(args.key, p->elements);
  p->value = rows_of(args.value, p->elements);
  p->out = rows_of(args.out, p->elements);
  p->logsumexp = statistic_of(args.logsumexp);
  p->seqlens_q = integers(args.seqlens_q);
  p->seqlens_k = integers(args.seqlens_k);
  p->query_offsets = integers(args.query_offsets);
  p->packed = desc.packed;
  p->cu_seqlens_q = integers(args.cu_seqlens_q);
  p->cu_seqlens_k = integers(args.cu_seqlens_k);
  p->pages = pages_of(desc, args.page_table);
  p->batch = desc.batch;
  p->heads = desc.num_heads;
  p->heads_kv = desc.num_heads_kv;
  p->seqlen_q = desc.seqlen_q;
  p->seqlen_k = desc.seqlen_k;
  p->query_blocks = static_cast<unsigned>(query_blocks(desc).value());
  p->key_blocks = static_cast<unsigned>(key_blocks(desc).value());
  p->head_dim = static_cast<int>(desc.head_dim);
  p->head_dim_v = static_cast<int>(desc.head_dim_v);
  p->scale = static_cast<float>(
      desc.head_dim == 0 ? 0 : desc.scale.value_or(1 / std::sqrt(static_cast<double>(desc.head_dim))));
  p->diagonal = diagonal_of(desc);
  if (p->diagonal == Diagonal::kFixed) p->offset = desc.query_offset.value_or(0);
  p->left = desc.window_left;
  p->right = desc.causal ? 0 : desc.window_right;
  p->window_lo = integers(args.window_lo);
  p->window_hi = integers(args.window_hi);
  p->sink_keys = desc.sink_keys;
  set_options(desc, args, p);
}

bool is_stored(const AttentionDesc& desc) { return key_dtype(desc) != desc.dtype || value_dtype(desc) != desc.dtype; }

void set_stored(const AttentionDesc& desc, const ForwardArgs& args, StoredProblem* p) {
  const auto stored = [&](const Tensor& t, const Tensor& scales, int64_t group, int64_t dim) {
    return stored_rows(t, scales, std::max<int64_t>(group == 0 ? dim : group, 1));
  };
  p->stored_key = stored(args.key, args.key_scales, desc.key_group, desc.head_dim);
  p->stored_value = stored(args.value, args.value_scales, desc.value_group, desc.head_dim_v);
}

}  // namespace polyhead::cuda
