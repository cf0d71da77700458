#include "gradient_definition.h"

#include <algorithm>
#include <cmath>

#include "core/philox.h"

namespace polyhead::testing {
namespace {

template <class T>
using Numbers = std::vector<T>;

template <class T>
Numbers<T> numbers(const Array& a, bool absolute) {
  Numbers<T> x(static_cast<size_t>(a.size()));
  for (size_t n = 0; n < x.size(); ++n) {
    x[n] = static_cast<T>(a.at(static_cast<int64_t>(n)));
    if (absolute) x[n] = std::abs(x[n]);
  }
  return x;
}

// to[n] += factor * x[n]
template <class T>
void add(T* to, T factor, const T* x, int64_t count) {
  for (int64_t n = 0; n < count; ++n) to[n] += factor * x[n];
}

// The elements of one gradient: sums in T, stored in `result`.
template <class T>
struct Sums {
  Numbers<T> sums;
  explicit Sums(const Array& input) : sums(static_cast<size_t>(input.size())) {}

  T* at(int64_t n) { return sums.data() + n; }

  Array result(const Array& input, const Array& before, T factor, bool wide, bool absolute) const {
    if (!input.given()) return {};
    Array a(wide ? DType::kFloat64 : input.dtype, input.dims);
    for (size_t n = 0; n < sums.size(); ++n) {
      const int64_t at = static_cast<int64_t>(n);
      T value = factor * sums[n] + T(0);  // -0 + 0 is +0
      if (before.given()) value += static_cast<T>(absolute ? std::fabs(before.at(at)) : before.at(at));
      a.set(at, static_cast<double>(value));
    }
    return a;
  }
};

// Names as in reference_backward.cc. absolute: of every factor behind the scores the absolute value.
template <class T>
class Definition {
 public:
  Definition(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen, bool absolute)
      : d_(desc),
        in_(in),
        seen_(seen),
        absolute_(absolute),
        Q_(numbers<T>(in.forward.query, false)),
        K_(numbers<T>(in.forward.key, false)),
        abs_Q_(absolute ? numbers<T>(in.forward.query, true) : Numbers<T>()),
        abs_K_(absolute ? numbers<T>(in.forward.key, true) : Numbers<T>()),
        V_(numbers<T>(in.forward.value, absolute)),
        dO_(numbers<T>(in.grad_out, absolute)),
        O_(numbers<T>(in.out, absolute)),
        L_(numbers<T>(in.logsumexp, false)),
        dL_(numbers<T>(in.grad_logsumexp, absolute)),
        delta_(numbers<T>(in.delta, absolute)),
        bias_(numbers<T>(in.forward.attn_bias, false)),
        slopes_(numbers<T>(in.forward.alibi_slopes, false)),
        dQ_(in.forward.query),
        dK_(in.forward.key),
        dV_(in.forward.value),
        dbias_(in.forward.attn_bias),
        dslopes_(in.forward.alibi_slopes) {
    scale_ = desc.head_dim == 0 ? T(0) : static_cast<T>(desc.scale.value_or(1 / std::sqrt(double(desc.head_dim))));
    softcap_ = static_cast<T>(desc.softcap);
  }

  Gradients run(bool wide) {
    if (d_.seqlen_q > 0 && d_.seqlen_k > 0) {
      for (int64_t b = 0; b < d_.batch; ++b) {
        span_ = span_of(d_, in_.forward, b);
        keys_ = d_.packed ? span_.len_k : d_.seqlen_k;
        const int64_t queries = d_.packed ? span_.len_q : d_.seqlen_q;
        for (int64_t h = 0; h < d_.num_heads; ++h) {
          start_head(b, h);
          for (int64_t i = 0; i < queries; ++i) row(b, h, i);
        }
      }
    }
    const Inputs& x = in_.forward;
    const Gradients& before = in_.before;
    const T scale = absolute_ ? std::abs(scale_) : scale_;
    Gradients g;
    g.query = dQ_.result(x.query, before.query, scale, wide, absolute_);
    g.key = dK_.result(x.key, before.key, scale, wide, absolute_);
    g.value = dV_.result(x.value, before.value, T(1), wide, absolute_);
    g.attn_bias = dbias_.result(x.attn_bias, before.attn_bias, T(1), wide, absolute_);
    g.alibi_slopes = dslopes_.result(x.alibi_slopes, before.alibi_slopes, T(absolute_ ? 1 : -1), wide, absolute_);
    return g;
  }

 private:
  int64_t query_row(int64_t b, int64_t h, int64_t i) const {
    return ((d_.packed ? span_.first_q : b * d_.seqlen_q) + i) * d_.num_heads + h;
  }
  int64_t key_row(int64_t b, int64_t h, int64_t j) const {
    const int64_t g = h / (d_.num_heads / d_.num_heads_kv);
    return ((d_.packed ? span_.first_k : b * d_.seqlen_k) + j) * d_.num_heads_kv + g;
  }
  size_t statistic(int64_t b, int64_t h, int64_t i) const {
    const int64_t head = (d_.packed ? 0 : b) * d_.num_heads + h;
    return static_cast<size_t>(head * d_.seqlen_q + span_.first_q + i);
  }

  // Keys and values of one head, dim by dim, so that the dots of a row run over keys.
  void start_head(int64_t b, int64_t h) {
    K_by_dim_.resize(static_cast<size_t>(d_.head_dim * keys_));
    V_by_dim_.resize(static_cast<size_t>(d_.head_dim_v * keys_));
    for (Numbers<T>* x : {&X_, &dP_}) x->resize(static_cast<size_t>(keys_));
    for (int64_t j = 0; j < keys_; ++j) {
      const int64_t row = key_row(b, h, j);
      for (int64_t c = 0; c < d_.head_dim; ++c) K_by_dim_[c * keys_ + j] = K_[row * d_.head_dim + c];
      for (int64_t c = 0; c < d_.head_dim_v; ++c) V_by_dim_[c * keys_ + j] = V_[row * d_.head_dim_v + c];
    }
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t D = d_.head_dim, Dv = d_.head_dim_v, q = query_row(b, h, i);
    std::fill(X_.begin(), X_.end(), T(0));
    std::fill(dP_.begin(), dP_.end(), T(0));
    for (int64_t c = 0; c < D; ++c) add(X_.data(), Q_[q * D + c], K_by_dim_.data() + c * keys_, keys_);
    for (int64_t c = 0; c < Dv; ++c) add(dP_.data(), dO_[q * Dv + c], V_by_dim_.data() + c * keys_, keys_);
    T rowsum = 0;
    for (int64_t c = 0; c < Dv && O_.size() > 0; ++c) rowsum += dO_[q * Dv + c] * O_[q * Dv + c];
    if (delta_.size() > 0) rowsum = delta_[statistic(b, h, i)];
    for (int64_t j = 0; j < keys_; ++j) {
      if (seen_.at(b, h, i, j)) pair(b, h, i, j, rowsum);
    }
  }

  void pair(int64_t b, int64_t h, int64_t i, int64_t j, T rowsum) {
    const int64_t D = d_.head_dim, Dv = d_.head_dim_v, q = query_row(b, h, i), k = key_row(b, h, j);
    const size_t row = statistic(b, h, i);
    const T X = scale_ * X_[j], t = softcap_ > 0 ? std::tanh(X / softcap_) : T(0);
    T S = softcap_ > 0 ? softcap_ * t : X;
    int64_t bias_at = 0;
    if (bias_.size() > 0) {
      const std::vector<int64_t>& dims = in_.forward.attn_bias.dims;
      const int64_t index[4] = {b, h, i, j};
      for (size_t n = 0; n < 4; ++n) bias_at = bias_at * dims[n] + (dims[n] == 1 ? 0 : index[n]);
      S += bias_[bias_at];
    }
    const int64_t slope_at = d_.alibi_slopes_ndim == 2 ? b * d_.num_heads + h : h;
    const T distance = std::abs(static_cast<T>(static_cast<__int128>(i) + span_.offset - j));
    if (slopes_.size() > 0) S -= slopes_[slope_at] * distance;
    const T weight = std::exp(S - L_[row]), f = dropout_factor(b, h, i, j);
    const T P = absolute_ ? std::max(weight, kLeastWeight) : weight;
    const T dL = dL_.size() > 0 ? dL_[row] : T(0), dP = f * dP_[j];
    const T dS = P * (absolute_ ? dP + rowsum + dL : dP - rowsum + dL);
    T dX = dS;
    if (softcap_ > 0) dX *= 1 - t * t;
    add(dQ_.at(q * D), dX, (absolute_ ? abs_K_ : K_).data() + k * D, D);
    add(dK_.at(k * D), dX, (absolute_ ? abs_Q_ : Q_).data() + q * D, D);
    add(dV_.at(k * Dv), P * f, dO_.data() + q * Dv, Dv);
    if (bias_.size() > 0) *dbias_.at(bias_at) += dS;
    if (slopes_.size() > 0) *dslopes_.at(slope_at) += dS * distance;
  }

  T dropout_factor(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (d_.dropout_p == 0) return 1;
    const uint32_t head = static_cast<uint32_t>(b * d_.num_heads + h);
    const Inputs& x = in_.forward;
    const uint32_t bits = dropout_bits(x.dropout_seed, x.dropout_offset, head, static_cast<uint32_t>(i), j);
    return bits >= dropout_threshold(d_.dropout_p) ? static_cast<T>(1 / (1 - d_.dropout_p)) : T(0);
  }

  static constexpr T kLeastWeight = static_cast<T>(0x1p-104);

  const AttentionDesc& d_;
  const BackwardInputs& in_;
  const Visibility& seen_;
  const bool absolute_;
  Numbers<T> Q_, K_, abs_Q_, abs_K_, V_, dO_, O_, L_, dL_, delta_, bias_, slopes_;
  Sums<T> dQ_, dK_, dV_, dbias_, dslopes_;
  Numbers<T> K_by_dim_, V_by_dim_, X_, dP_;  // [D, keys], [Dv, keys], [keys]
  T scale_, softcap_;
  Span span_;
  int64_t keys_ = 0;
};

}  // namespace

template <class T>
Gradients defined_gradients(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen, bool wide) {
  return Definition<T>(desc, in, seen, false).run(wide);
}

template Gradients defined_gradients<double>(const AttentionDesc&, const BackwardInputs&, const Visibility&, bool);
template Gradients defined_gradients<float>(const AttentionDesc&, const BackwardInputs&, const Visibility&, bool);

Gradients gradient_magnitudes(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen) {
  return Definition<double>(desc, in, seen, true).run(true);
}

}  // namespace polyhead::testing
