// The scores of one row of queries after another, and what dropout makes of their weights, as the contract defines them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/philox.h"
#include "testing/formats.h"
#include "testing/operands.h"
#include "testing/pair_program.h"

namespace polyhead::testing {

template <class T>
using Numbers = std::vector<T>;

template <class T>
Numbers<T> numbers(const Array& a, bool absolute) {
  Numbers<T> x = numbers<T>(a);
  for (size_t n = 0; n < x.size() && absolute; ++n) x[n] = std::abs(x[n]);
  return x;
}

// to[n] += factor * x[n]
template <class T>
void add(T* to, T factor, const T* x, int64_t count) {
  for (int64_t n = 0; n < count; ++n) to[n] += factor * x[n];
}

// Names as in src/reference.
template <class T>
class Scores {
 public:
  Scores(const AttentionDesc& desc, const Inputs& in, const Visibility& seen)
      : d_(desc),
        in_(in),
        seen_(seen),
        Q_(numbers<T>(in.query, false)),
        K_(stored_numbers<T>(in.key, in.key_scales)),
        bias_(numbers<T>(in.attn_bias, false)),
        slopes_(numbers<T>(in.alibi_slopes, false)),
        sinks_(numbers<T>(in.sink_logits, false)),
        program_(desc, in) {
    scale_ = desc.head_dim == 0 ? T(0) : static_cast<T>(desc.scale.value_or(1 / std::sqrt(double(desc.head_dim))));
    softcap_ = static_cast<T>(desc.softcap);
  }

  // Calls row(b, h, i) for every query of every sequence and head, after head(b, h).
  template <class Head, class Row>
  void for_each_row(Head head, Row row) {
    for (int64_t b = 0; b < d_.batch; ++b) {
      span_ = span_of(d_, in_, b);
      keys_ = packs_keys(d_) ? span_.len_k : d_.seqlen_k;
      const int64_t queries = d_.packed ? span_.len_q : d_.seqlen_q;
      for (int64_t h = 0; h < d_.num_heads; ++h) {
        by_dim(b, h, K_, d_.head_dim, K_by_dim_);
        X_.resize(static_cast<size_t>(keys_));
        head(b, h);
        for (int64_t i = 0; i < queries; ++i) row(b, h, i);
      }
    }
  }

  // Keys or values of one head, dim by dim, so that the dots of a row run over keys.
  void by_dim(int64_t b, int64_t h, const Numbers<T>& of, int64_t dim, Numbers<T>& to) const {
    to.resize(static_cast<size_t>(dim * keys_));
    for (int64_t j = 0; j < keys_; ++j) {
      const int64_t row = k_row(b, h, j);
      for (int64_t c = 0; c < dim; ++c) to[c * keys_ + j] = of[row * dim + c];
    }
  }

  // Q_i K_j^T of all keys, for score().
  void dots(int64_t b, int64_t h, int64_t i) {
    const int64_t q = q_row(b, h, i);
    std::fill(X_.begin(), X_.end(), T(0));
    for (int64_t c = 0; c < d_.head_dim; ++c) {
      add(X_.data(), Q_[q * d_.head_dim + c], K_by_dim_.data() + c * keys_, keys_);
    }
  }

  T dot(int64_t j) const { return X_[j]; }
  const T* keys_by_dim() const { return K_by_dim_.data(); }  // [D, keys] of the head

  struct Score {
    T S, t;   // t = tanh(X / softcap); S: -inf where the program hides its key
    T given;  // what the program got
  };
  Score score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const T X = scale_ * X_[j], t = softcap_ > 0 ? std::tanh(X / softcap_) : T(0);
    T S = softcap_ > 0 ? softcap_ * t : X;
    if (bias_.size() > 0) S += bias_[bias_at(b, h, i, j)];
    if (slopes_.size() > 0) S -= slopes_[slope_at(b, h)] * distance(i, j);
    return {program_.score(place(b, h, i, j), S), t, S};
  }

  // Whether weights are made of scores by a softmax, or are the scores.
  bool softmax() const { return d_.normalizer == Normalizer::kSoftmax; }

  // -inf: none, as of padding.
  T sink(int64_t h, int64_t i) const {
    return sinks_.empty() || i >= span_.len_q ? static_cast<T>(-HUGE_VAL) : sinks_[static_cast<size_t>(h)];
  }

  reference::PairPlace place(int64_t b, int64_t h, int64_t i, int64_t j) const { return {b, h, i, j, span_.offset}; }
  const PairProgram<T>& program() const { return program_; }
  bool hides(T S) const { return program_.has_score() && S == static_cast<T>(-HUGE_VAL); }

  T dropout_factor(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (d_.dropout_p == 0) return 1;
    const DropoutOrigin& first = d_.dropout_origin;
    const int64_t heads = first.num_heads > 0 ? first.num_heads : d_.num_heads;
    const uint32_t head = static_cast<uint32_t>(first.first_head + b * heads + h);
    const uint32_t query = static_cast<uint32_t>(first.first_query + i);
    const uint32_t bits = dropout_bits(in_.dropout_seed, in_.dropout_offset, head, query, first.first_key + j);
    return bits >= dropout_threshold(d_.dropout_p) ? static_cast<T>(1 / (1 - d_.dropout_p)) : T(0);
  }

  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const { return seen_.at(b, h, i, j); }
  int64_t q_row(int64_t b, int64_t h, int64_t i) const { return query_row(d_, span_, b, h, i); }
  int64_t k_row(int64_t b, int64_t h, int64_t j) const { return key_row(d_, span_, b, h, j); }
  int64_t statistic(int64_t b, int64_t h, int64_t i) const {
    return ((d_.packed ? 0 : b) * d_.num_heads + h) * d_.seqlen_q + span_.first_q + i;
  }
  int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return broadcast_index(in_.attn_bias, b, h, i, j);
  }
  int64_t slope_at(int64_t b, int64_t h) const { return d_.alibi_slopes_ndim == 2 ? b * d_.num_heads + h : h; }
  T distance(int64_t i, int64_t j) const {
    return std::abs(static_cast<T>(static_cast<__int128>(i) + span_.offset - j));
  }
  int64_t num_keys() const { return keys_; }
  T scale() const { return scale_; }
  const Numbers<T>& Q() const { return Q_; }
  const Numbers<T>& K() const { return K_; }

 private:
  const AttentionDesc& d_;
  const Inputs& in_;
  const Visibility& seen_;
  const Numbers<T> Q_, K_, bias_, slopes_, sinks_;
  const PairProgram<T> program_;
  Numbers<T> K_by_dim_, X_;  // [D, keys], [keys]
  T scale_, softcap_;
  Span span_;
  int64_t keys_ = 0;
};

}  // namespace polyhead::testing
