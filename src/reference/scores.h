// The score of one (query, key) pair: what the forward and the backward pass of the reference share.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "contract/sequences.h"
#include "core/dropout.h"
#include "core/dtype.h"
#include "core/memory_size.h"
#include "core/philox.h"
#include "polyhead/attention.h"
#include "reference/program.h"

namespace polyhead::reference {

// A [batch, row, head, dim] operand, or a packed [row, head, dim] one (every sequence has the same rows, by number).
struct Operand {
  Tensor tensor;
  int64_t batch = 0, row = 0, head = 0, dim = 0;  // strides

  explicit Operand(const Tensor& t) : tensor(t) {
    if (!t.given()) return;
    const int last = t.ndim - 1;
    dim = t.strides[last], head = t.strides[last - 1], row = t.strides[last - 2];
    if (t.ndim == 4) batch = t.strides[0];
  }

  int64_t at(int64_t b, int64_t i, int64_t h) const { return b * batch + i * row + h * head; }
};

// Sum over `dim` elements of a[..] * c[..], in index order.
template <class T, class A, class C>
T dot(const A* a, int64_t a_stride, const C* c, int64_t c_stride, int64_t dim) {
  T sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += widen<T>(a[d * a_stride]) * widen<T>(c[d * c_stride]);
  return sum;
}

// A [B, H, Sq] statistic (logsumexp), or a packed [H, rows] one.
inline int64_t statistic_at(const Tensor& t, int64_t b, int64_t h, int64_t i) {
  return t.ndim == 3 ? b * t.strides[0] + h * t.strides[1] + i * t.strides[2] : h * t.strides[0] + i * t.strides[1];
}

// Element (b, h, i, j) of a mask or bias, whose dims of size 1 broadcast.
inline int64_t broadcast_at(const Tensor& t, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t index[4] = {b, h, i, j};
  int64_t at = 0;
  for (int n = 0; n < 4; ++n) at += t.dims[n] == 1 ? 0 : index[n] * t.strides[n];
  return at;
}

// Keys or values that are stored with scales: number d of a row is what is stored there times the scale of its group.
struct ScaledRows {
  Operand rows, scales;
  int64_t group;  // 0: all of a row

  template <class T>
  T at(int64_t row, int64_t scale_row, int64_t d) const {
    const Tensor &stored = rows.tensor, &factors = scales.tensor;
    const char* const first = static_cast<const char*>(stored.data) + row;  // of one byte each
    const int64_t scale = scale_row + (group == 0 ? 0 : d / group) * scales.dim;
    return static_cast<T>(load_stored(first, stored.dtype, d, rows.dim)) *
           static_cast<T>(load_element(factors.data, factors.dtype, scale));
  }
};

// What the steps of a program need.
template <class T>
MemorySize program_bytes(const AttentionDesc& desc) {
  if (desc.program == nullptr) return 0;
  return (MemorySize(sizeof(Value<T>) + sizeof(T)) * desc.program->steps().size()).rounded_up(64);
}

// Scores of one problem whose query, key and value have elements In, in arithmetic of T.
template <class T, class In>
struct Scores {
  const AttentionDesc& desc;
  const ForwardArgs& args;
  Operand Q, K, V;
  ScaledRows scaled_K, scaled_V;  // where they have scales
  T scale, softcap, kept_factor;  // kept_factor: 1 / (1 - p) of dropout
  uint32_t threshold;
  std::optional<ProgramAt<T>> program;

  // `memory` has program_bytes<T>(d).
  Scores(const AttentionDesc& d, const ForwardArgs& a, void* memory)
      : desc(d),
        args(a),
        Q(a.query),
        K(a.key),
        V(a.value),
        scaled_K{K, Operand(a.key_scales), d.key_group},
        scaled_V{V, Operand(a.value_scales), d.value_group} {
    if (d.program != nullptr) {
      Value<T>* const values = static_cast<Value<T>*>(memory);
      program.emplace(*d.program, a.captures, values, reinterpret_cast<T*>(values + d.program->steps().size()));
    }
    const double dim = static_cast<double>(d.head_dim);
    scale = d.head_dim == 0 ? T(0) : static_cast<T>(d.scale.value_or(1 / std::sqrt(dim)));
    softcap = static_cast<T>(d.softcap);
    threshold = dropout_threshold(d.dropout_p);
    kept_factor = d.dropout_p < 1 ? static_cast<T>(1 / (1 - d.dropout_p)) : T(0);
  }

  const In* query(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    return static_cast<const In*>(args.query.data) + Q.at(b, s.first_q + i, h);
  }
  int64_t group(int64_t h) const { return h / (desc.num_heads / desc.num_heads_kv); }
  const In* key(const Sequence& s, int64_t b, int64_t h, int64_t j) const {
    return static_cast<const In*>(args.key.data) + key_at(K, s, b, group(h), j);
  }
  const In* value(const Sequence& s, int64_t b, int64_t h, int64_t j) const {
    return static_cast<const In*>(args.value.data) + key_at(V, s, b, group(h), j);
  }
  // O += P V_j
  void add_value(T P, const Sequence& s, int64_t b, int64_t h, int64_t j, T* O) const {
    if (!args.value_scales.given()) {
      const In* const V_j = value(s, b, h, j);
      for (int64_t d = 0; d < desc.head_dim_v; ++d) O[d] += P * widen<T>(V_j[d * V.dim]);
      return;
    }
    const int64_t row = key_at(V, s, b, group(h), j), scale_row = key_at(scaled_V.scales, s, b, group(h), j);
    for (int64_t d = 0; d < desc.head_dim_v; ++d) O[d] += P * scaled_V.template at<T>(row, scale_row, d);
  }
  int64_t key_at(const Operand& x, const Sequence& s, int64_t b, int64_t g, int64_t j) const {
    if (desc.page_size == 0) return x.at(b, s.first_k + j, g);
    const Tensor& table = args.page_table;  // contiguous, int64
    const int64_t page = static_cast<const int64_t*>(table.data)[b * table.dims[1] + j / desc.page_size];
    return x.at(page, j % desc.page_size, g);
  }

  // Whether mask, bias and the program's mask let (i, j) be seen; causal, window and lengths are key_range()'s.
  bool visible(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (desc.attn_mask.given && !shown_by_mask(s, b, h, i, j)) return false;
    if (desc.attn_bias.given && bias(b, h, i, j) == -HUGE_VAL) return false;
    return !program || program->visible({b, h, i, j, s.offset});
  }

  bool shown_by_mask(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Tensor& mask = args.attn_mask;
    const int64_t column = desc.mask_at_end ? j - (s.len_k - mask.dims[3]) : j;
    return column < 0 || static_cast<const uint8_t*>(mask.data)[broadcast_at(mask, b, h, i, column)] != 0;
  }

  // Whether weights are made of scores by a softmax, or are the scores.
  bool softmax() const { return desc.normalizer == Normalizer::kSoftmax; }

  // Whether the program's score hides its key.
  bool hides(T score) const { return program && program->has_score() && score == static_cast<T>(-HUGE_VAL); }

  double bias(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return load_element(args.attn_bias.data, args.attn_bias.dtype, broadcast_at(args.attn_bias, b, h, i, j));
  }

  // |i + offset - j|
  T distance(const Sequence& s, int64_t i, int64_t j) const {
    __extension__ using Wide = __int128;  // the offset may be any int64
    return std::abs(static_cast<T>(static_cast<Wide>(i) + s.offset - j));
  }

  T slope(int64_t b, int64_t h) const {
    const Tensor& t = args.alibi_slopes;
    const int64_t at = desc.alibi_slopes_ndim == 2 ? b * t.strides[0] + h * t.strides[1] : h * t.strides[0];
    return static_cast<T>(static_cast<const float*>(t.data)[at]);
  }

  // The sink of head h; -inf: none. +inf is NaN already, as it would be in a softmax.
  T sink(int64_t h) const {
    const Tensor& t = args.sink_logits;
    if (!desc.has_sink_logits) return static_cast<T>(-HUGE_VAL);
    const T sink = static_cast<T>(load_element(t.data, t.dtype, h * t.strides[0]));
    return sink < static_cast<T>(HUGE_VAL) ? sink : static_cast<T>(NAN);
  }

  // scale * q.k
  T raw(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const In* const Q_i = query(s, b, h, i);
    if (!args.key_scales.given()) return scale * dot<T>(Q_i, Q.dim, key(s, b, h, j), K.dim, desc.head_dim);
    const int64_t row = key_at(K, s, b, group(h), j), scale_row = key_at(scaled_K.scales, s, b, group(h), j);
    T sum = 0;
    for (int64_t d = 0; d < desc.head_dim; ++d) {
      sum += widen<T>(Q_i[d * Q.dim]) * scaled_K.template at<T>(row, scale_row, d);
    }
    return scale * sum;
  }

  // S of a visible key, from its raw score.
  T score(T raw, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    T S = raw;
    if (softcap > 0) S = softcap * std::tanh(S / softcap);
    if (desc.attn_bias.given) S += static_cast<T>(bias(b, h, i, j));
    if (desc.alibi_slopes_ndim > 0) S -= slope(b, h) * distance(s, i, j);
    if (!program || !program->has_score()) return S;
    program->evaluate({b, h, i, j, s.offset}, S);
    return program->score();
  }

  // What dropout multiplies P by.
  T dropout_factor(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (desc.dropout_p == 0) return 1;
    const DropoutOrigin& first = desc.dropout_origin;
    const int64_t head_index = first.first_head + b * counted_heads(first, desc.num_heads) + h;
    const uint32_t bits =
        dropout_bits(args.dropout_seed.value_or(0), args.dropout_offset, static_cast<uint32_t>(head_index),
                     static_cast<uint32_t>(first.first_query + i), first.first_key + j);
    return bits >= threshold ? kept_factor : T(0);
  }
};

}  // namespace polyhead::reference
