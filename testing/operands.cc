#include "testing/operands.h"

#include <cmath>

#include "testing/pair_program.h"

namespace polyhead::testing {
namespace {

int64_t integer(const Array& a, int64_t n) { return static_cast<int64_t>(a.at(n)); }

Array cu_seqlens_from_zero(const Array& a, int64_t first, int64_t last) {
  Array part = rows(a, first, last + 1);
  const double start = part.at(0);
  for (int64_t n = 0; n < part.size(); ++n) part.set(n, part.at(n) - start);
  return part;
}

// Columns [first, last) of a [rows, columns] array.
Array columns(const Array& a, int64_t first, int64_t last) {
  Array part(a.dtype, {a.dims[0], last - first});
  for (int64_t n = 0; n < part.size(); ++n) {
    part.set(n, a.at(n / (last - first) * a.dims[1] + first + n % (last - first)));
  }
  return part;
}

}  // namespace

const GradientName kGradients[kNumGradients] = {
    {"query", "grad_query", &Gradients::query, &Inputs::query, &ForwardArgs::query, &BackwardArgs::grad_query},
    {"key", "grad_key", &Gradients::key, &Inputs::key, &ForwardArgs::key, &BackwardArgs::grad_key},
    {"value", "grad_value", &Gradients::value, &Inputs::value, &ForwardArgs::value, &BackwardArgs::grad_value},
    {"attn_bias", "grad_attn_bias", &Gradients::attn_bias, &Inputs::attn_bias, &ForwardArgs::attn_bias,
     &BackwardArgs::grad_attn_bias},
    {"alibi_slopes", "grad_alibi_slopes", &Gradients::alibi_slopes, &Inputs::alibi_slopes, &ForwardArgs::alibi_slopes,
     &BackwardArgs::grad_alibi_slopes},
    {"sink_logits", "grad_sink_logits", &Gradients::sink_logits, &Inputs::sink_logits, &ForwardArgs::sink_logits,
     &BackwardArgs::grad_sink_logits}};

Span span_of(const AttentionDesc& desc, const Inputs& in, int64_t b) {
  Span s;
  s.len_q = desc.seqlen_q;
  s.len_k = desc.seqlen_k;
  if (in.cu_seqlens_q.given()) {
    s.first_q = integer(in.cu_seqlens_q, b);
    s.len_q = integer(in.cu_seqlens_q, b + 1) - s.first_q;
  }
  if (in.cu_seqlens_k.given()) {
    s.first_k = integer(in.cu_seqlens_k, b);
    s.len_k = integer(in.cu_seqlens_k, b + 1) - s.first_k;
  }
  if (in.seqlens_q.given()) s.len_q = integer(in.seqlens_q, b);
  if (in.seqlens_k.given()) s.len_k = integer(in.seqlens_k, b);
  if (desc.align == Align::kBottomRight) s.offset = s.len_k - s.len_q;
  if (desc.query_offset) s.offset = *desc.query_offset;
  if (in.query_offsets.given()) s.offset = integer(in.query_offsets, b);
  return s;
}

bool visible(const AttentionDesc& desc, const Inputs& in, const Span& s, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (i >= s.len_q || j >= s.len_k) return false;
  const __int128 distance = static_cast<__int128>(i) + s.offset - j;  // how far the key lies behind
  if (desc.causal && distance < 0) return false;
  const bool sink = j < desc.sink_keys;
  if (desc.window_left >= 0 && distance > desc.window_left && !sink) return false;
  if (desc.window_right >= 0 && -distance > desc.window_right) return false;
  if (in.window_lo.given() && ((j < integer(in.window_lo, i) && !sink) || j >= integer(in.window_hi, i))) return false;
  auto element = [&](const Array& a) { return a.at(broadcast_index(a, b, h, i, j)); };
  const int64_t column = desc.mask_at_end ? j - s.len_k + desc.attn_mask.dims[3] : j;
  if (in.attn_mask.given() && column >= 0 && in.attn_mask.at(broadcast_index(in.attn_mask, b, h, i, column)) == 0) {
    return false;
  }
  return !in.attn_bias.given() || element(in.attn_bias) != -HUGE_VAL;
}

Visibility::Visibility(const AttentionDesc& desc, const Inputs& in)
    : batch_(desc.batch), heads_(desc.num_heads), queries_(desc.seqlen_q), keys_(desc.seqlen_k) {
  seen_.resize(static_cast<size_t>(batch_ * heads_ * queries_ * keys_));
  const PairProgram<double> program(desc, in);
  size_t n = 0;
  for (int64_t b = 0; b < batch_; ++b) {
    const Span s = span_of(desc, in, b);
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t i = 0; i < queries_; ++i) {
        for (int64_t j = 0; j < keys_; ++j) {
          seen_[n++] = visible(desc, in, s, b, h, i, j) && program.visible({b, h, i, j, s.offset});
        }
      }
    }
  }
}

bool Visibility::any_key(int64_t b, int64_t h, int64_t i) const {
  for (int64_t j = 0; j < keys_; ++j) {
    if (at(b, h, i, j)) return true;
  }
  return false;
}

VisibleParts::VisibleParts(const AttentionDesc& d, const Inputs& in, const Visibility& seen)
    : query(static_cast<size_t>((d.packed ? 1 : d.batch) * d.seqlen_q * d.num_heads)),
      key(static_cast<size_t>((packs_keys(d) ? 1 : d.batch) * d.seqlen_k * d.num_heads_kv)),
      bias(static_cast<size_t>(in.attn_bias.size())),
      heads(static_cast<size_t>(d.batch * d.num_heads)) {
  std::vector<Span> spans;
  for (int64_t b = 0; b < d.batch; ++b) spans.push_back(span_of(d, in, b));
  seen.for_each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const Span& s = spans[static_cast<size_t>(b)];
    query[static_cast<size_t>(query_row(d, s, b, h, i))] = 1;
    key[static_cast<size_t>(key_row(d, s, b, h, j))] = 1;
    if (!bias.empty()) bias[static_cast<size_t>(broadcast_index(in.attn_bias, b, h, i, j))] = 1;
    heads[static_cast<size_t>(b * d.num_heads + h)] = 1;
  });
}

Slice slice_batch(const AttentionDesc& desc, const Inputs& in, int64_t first, int64_t last) {
  Slice s{desc, in};
  s.desc.batch = last - first;
  const DropoutOrigin& origin = desc.dropout_origin;
  s.desc.dropout_origin.first_head += first * (origin.num_heads > 0 ? origin.num_heads : desc.num_heads);
  auto cut = [&](Array& a) { a = rows(a, first, last); };
  auto cut_operand = [&](Array& a, BroadcastOperand& told) {
    if (!a.given() || a.dims[0] == 1) return;
    cut(a);
    told.dims[0] = a.dims[0];
  };
  cut_operand(s.inputs.attn_mask, s.desc.attn_mask);
  cut_operand(s.inputs.attn_bias, s.desc.attn_bias);
  if (desc.alibi_slopes_ndim == 2) cut(s.inputs.alibi_slopes);
  cut(s.inputs.seqlens_q);
  cut(s.inputs.seqlens_k);
  cut(s.inputs.query_offsets);
  if (!desc.packed) {
    cut(s.inputs.query);
    for (Array* a : {&s.inputs.key, &s.inputs.value, &s.inputs.key_scales, &s.inputs.value_scales}) cut(*a);
    return s;
  }
  const Span begin = span_of(desc, in, first), back = span_of(desc, in, last - 1);
  s.inputs.query = rows(in.query, begin.first_q, back.first_q + back.len_q);
  s.desc.seqlen_q = s.inputs.query.dims[0];
  s.inputs.cu_seqlens_q = cu_seqlens_from_zero(in.cu_seqlens_q, first, last);
  if (!packs_keys(desc)) {
    for (Array* a : {&s.inputs.key, &s.inputs.value, &s.inputs.key_scales, &s.inputs.value_scales}) cut(*a);
    return s;
  }
  for (Array* a : {&s.inputs.key, &s.inputs.value, &s.inputs.key_scales, &s.inputs.value_scales}) {
    *a = rows(*a, begin.first_k, back.first_k + back.len_k);
  }
  s.desc.seqlen_k = s.inputs.key.dims[0];
  s.inputs.cu_seqlens_k = cu_seqlens_from_zero(in.cu_seqlens_k, first, last);
  return s;
}

BackwardSlice slice_batch(const AttentionDesc& desc, const BackwardInputs& in, int64_t first, int64_t last) {
  const Slice forward = slice_batch(desc, in.forward, first, last);
  BackwardSlice s{forward.desc, in};
  s.inputs.forward = forward.inputs;
  const Span begin = span_of(desc, in.forward, first);
  auto cut_rows = [&](Array& a, int64_t first_row, int64_t count) {
    if (a.given()) a = rows(a, first_row, first_row + count);
  };
  const int64_t batch = last - first, first_q = desc.packed ? begin.first_q : first;
  const int64_t first_k = desc.packed ? begin.first_k : first;
  const int64_t count_q = desc.packed ? s.desc.seqlen_q : batch, count_k = desc.packed ? s.desc.seqlen_k : batch;
  Gradients& before = s.inputs.before;
  for (Array* a : {&s.inputs.out, &s.inputs.grad_out, &before.query}) cut_rows(*a, first_q, count_q);
  for (Array* a : {&before.key, &before.value}) cut_rows(*a, first_k, count_k);
  if (before.attn_bias.given() && before.attn_bias.dims[0] > 1) cut_rows(before.attn_bias, first, batch);
  if (desc.alibi_slopes_ndim == 2) cut_rows(before.alibi_slopes, first, batch);
  for (Array* a : {&s.inputs.logsumexp, &s.inputs.grad_logsumexp, &s.inputs.delta}) {
    if (a->given()) *a = desc.packed ? columns(*a, first_q, first_q + count_q) : rows(*a, first, last);
  }
  return s;
}

}  // namespace polyhead::testing
