#include "testing/layer_truth.h"

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "core/dtype.h"
#include "core/philox.h"
#include "testing/elements.h"
#include "testing/layer_program.h"

namespace polyhead::testing::truth {
namespace {

int64_t head_dim_of(const LayerDesc& d) { return d.query_proj_size > 0 ? d.query_proj_size : d.query_size; }
int64_t head_dim_v_of(const LayerDesc& d) { return d.value_proj_size > 0 ? d.value_proj_size : d.value_size; }
int64_t out_size_of(const LayerDesc& d) {
  return d.out_proj_size > 0 ? d.out_proj_size : d.num_heads * head_dim_v_of(d);
}

// `value` as an element of `dtype` holds it.
double as_held(DType dtype, double value) {
  alignas(double) std::byte element[sizeof(double)] = {};
  set_element(dtype, element, value);
  return element_value(dtype, element);
}

template <class T>
class Loops {
 public:
  Loops(const LayerDesc& desc, const LayerNumbers& inputs, bool rounded)
      : d_(desc),
        a_(desc.attention),
        in_(inputs),
        rounded_(rounded),
        H_(d_.num_heads),
        G_(d_.num_heads_kv),
        D_(head_dim_of(d_)),
        Dv_(head_dim_v_of(d_)),
        program_(a_, inputs) {}

  // values, and magnitudes if asked for.
  void run(LayerResults* results, LayerResults* magnitude) {
    q_ = project(in_.query, 0, d_.beam, d_.seqlen_q, H_, D_);
    k_ = project(in_.key, 1, d_.beam_kv, d_.seqlen_k, G_, D_);
    v_ = project(in_.value, 2, d_.beam_kv, d_.seqlen_k, G_, Dv_);
    attend();
    round(O_);
    output();
    if (in_.grad_out.given()) backward();
    store(*results, false);
    if (magnitude != nullptr) store(*magnitude, true);
  }

 private:
  using Wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;

  void backward() {
    output_backward();
    attend_backward();
    round(dq_), round(dk_), round(dv_);
    project_backward(in_.query, 0, dq_, d_.beam, d_.seqlen_q, H_, D_);
    project_backward(in_.key, 1, dk_, d_.beam_kv, d_.seqlen_k, G_, D_);
    project_backward(in_.value, 2, dv_, d_.beam_kv, d_.seqlen_k, G_, Dv_);
  }

  static T number(const Numbers& a, int64_t n) { return static_cast<T>(a.at(n)); }
  const Numbers& weight(WeightKind kind) const { return in_.weights[static_cast<size_t>(kind)]; }
  static WeightKind kind(int i) { return static_cast<WeightKind>(i); }

  T rounded(T x) const {
    if (rounded_) {
      with_element_type(d_.dtype, [&](auto type) {
        x = static_cast<T>(widen<double>(narrow<decltype(type)>(static_cast<double>(x))));
      });
    }
    return x;
  }
  void round(Sums<T>& sums) const {
    for (T& x : sums.value) x = rounded(x);
  }

  // [B, N, S, heads, dim]
  Sums<T> project(const Numbers& x, int i, int64_t beams, int64_t steps, int64_t heads, int64_t dim) const {
    const Numbers &w = weight(kind(i)), &bias = weight(kind(i + 4));
    const int64_t tokens = d_.batch * beams * steps, size = x.dims[3], columns = heads * dim;
    Sums<T> y(tokens * columns);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t c = 0; c < columns; ++c) {
        if (!w.given()) {
          y.add(token * columns + c, number(x, token * size + c % dim));
          continue;
        }
        for (int64_t e = 0; e < size; ++e) {
          y.add(token * columns + c, number(x, token * size + e) * number(w, e * columns + c));
        }
        if (bias.given()) y.add(token * columns + c, number(bias, c));
      }
    }
    round(y);
    return y;
  }

  int64_t length(const Numbers& lengths, int64_t b, int64_t n, int64_t beams, int64_t all) const {
    return lengths.given() ? static_cast<int64_t>(lengths.at(b * beams + n % beams)) : all;
  }
  int64_t len_q(int64_t b, int64_t n) const { return length(in_.seqlens_q, b, n, d_.beam, d_.seqlen_q); }
  int64_t len_k(int64_t b, int64_t n) const { return length(in_.seqlens_k, b, n, d_.beam_kv, d_.seqlen_k); }

  int64_t offset(int64_t b, int64_t n) const {
    if (in_.query_offsets.given()) return static_cast<int64_t>(in_.query_offsets.at(b * d_.beam + n));
    if (a_.query_offset) return *a_.query_offset;
    return a_.align == Align::kBottomRight ? len_k(b, n) - len_q(b, n) : 0;
  }

  static int64_t broadcast(const Numbers& x, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t at[4] = {b, h, i, j};
    int64_t n = 0;
    for (size_t dim = 0; dim < 4; ++dim) n = n * x.dims[dim] + (x.dims[dim] == 1 ? 0 : at[dim]);
    return n;
  }

  bool visible(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j) const {
    if (i >= len_q(b, n) || j >= len_k(b, n)) return false;
    const int64_t stand = i + offset(b, n);
    if (a_.causal && j > stand) return false;
    const bool sink = j < a_.sink_keys;
    if (a_.window_left >= 0 && j < stand - a_.window_left && !sink) return false;
    if (a_.window_right >= 0 && j > stand + a_.window_right) return false;
    if (d_.has_windows) {
      const double at = static_cast<double>(j);
      if ((at < in_.window_lo.at(i) && !sink) || at >= in_.window_hi.at(i)) return false;
    }
    if (in_.attn_mask.given() && in_.attn_mask.at(broadcast(in_.attn_mask, b, h, i, j)) == 0) return false;
    if (in_.attn_bias.given() && in_.attn_bias.at(broadcast(in_.attn_bias, b, h, i, j)) == -HUGE_VAL) return false;
    if (!program_.visible(place(b, n, h, i, j))) return false;
    return !program_.has_score() || score(b, n, h, i, j) != -HUGE_VALF;
  }
  reference::PairPlace place(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j) const {
    return {b, h, i, j, offset(b, n)};
  }

  static T kept(double p, uint64_t seed, uint32_t offset, int64_t head, int64_t i, int64_t j) {
    if (p <= 0) return 1;
    const auto threshold = static_cast<uint32_t>(std::floor(p * 65536 + 0.5));
    if (dropout_bits(seed, offset, static_cast<uint32_t>(head), static_cast<uint32_t>(i), j) < threshold) return 0;
    return static_cast<T>(1 / (1 - p));
  }
  T kept_weight(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j) const {
    return kept(a_.dropout_p, in_.dropout_seed, in_.dropout_offset + static_cast<uint32_t>(n), b * H_ + h, i, j);
  }
  T kept_output(int64_t b, int64_t n, int64_t t, int64_t c) const {
    return kept(d_.output_dropout_p, in_.output_dropout_seed, in_.output_dropout_offset, b * d_.beam + n, t, c);
  }

  int64_t row_q(int64_t b, int64_t n, int64_t i) const { return (b * d_.beam + n) * d_.seqlen_q + i; }
  int64_t row_k(int64_t b, int64_t n, int64_t j) const { return (b * d_.beam_kv + n % d_.beam_kv) * d_.seqlen_k + j; }

  // visit(b, n, h, i) for each row of scores.
  template <class Visit>
  void for_each_row(Visit visit) const {
    for (int64_t b = 0; b < d_.batch; ++b) {
      for (int64_t n = 0; n < d_.beam; ++n) {
        for (int64_t h = 0; h < H_; ++h) {
          for (int64_t i = 0; i < d_.seqlen_q; ++i) visit(b, n, h, i);
        }
      }
    }
  }

  size_t row(int64_t b, int64_t n, int64_t h, int64_t i) const {
    return static_cast<size_t>(((b * d_.beam + n) * H_ + h) * d_.seqlen_q + i);
  }
  int64_t pair(int64_t b, int64_t n, int64_t h, int64_t i) const {
    return static_cast<int64_t>(row(b, n, h, i)) * d_.seqlen_k;
  }
  int64_t at_q(int64_t b, int64_t n, int64_t i, int64_t h) const { return (row_q(b, n, i) * H_ + h) * D_; }
  int64_t at_k(int64_t b, int64_t n, int64_t j, int64_t h) const { return (row_k(b, n, j) * G_ + h / (H_ / G_)) * D_; }
  int64_t at_v(int64_t b, int64_t n, int64_t j, int64_t h) const { return (row_k(b, n, j) * G_ + h / (H_ / G_)) * Dv_; }
  int64_t at_O(int64_t b, int64_t n, int64_t i, int64_t h) const { return (row_q(b, n, i) * H_ + h) * Dv_; }

  template <class U = T>
  U scale() const {
    return static_cast<U>(a_.scale ? *a_.scale : D_ > 0 ? 1 / std::sqrt(static_cast<U>(D_)) : U(1));
  }

  template <class U = T>
  U distance(int64_t b, int64_t n, int64_t i, int64_t j) const {
    return std::fabs(static_cast<U>(i + offset(b, n) - j));
  }
  int64_t slope_index(int64_t b, int64_t h) const { return a_.alibi_slopes_ndim == 2 ? b * H_ + h : h; }

  // tanh(scale q.k / softcap), or the product itself; in the arithmetic of U.
  template <class U = T>
  U raw(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j) const {
    U sum = 0;
    for (int64_t e = 0; e < D_; ++e) sum += static_cast<U>(q_[at_q(b, n, i, h) + e]) * k_[at_k(b, n, j, h) + e];
    sum *= scale<U>();
    return a_.softcap > 0 ? std::tanh(sum / static_cast<U>(a_.softcap)) : sum;
  }

  template <class U = T>
  U score(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j) const {
    U S = raw<U>(b, n, h, i, j);
    if (a_.softcap > 0) S *= static_cast<U>(a_.softcap);
    if (in_.attn_bias.given()) S += static_cast<U>(in_.attn_bias.at(broadcast(in_.attn_bias, b, h, i, j)));
    if (in_.alibi_slopes.given()) {
      S -= static_cast<U>(in_.alibi_slopes.at(slope_index(b, h))) * distance<U>(b, n, i, j);
    }
    return program_.score(place(b, n, h, i, j), S);
  }

  bool softmax() const { return a_.normalizer == Normalizer::kSoftmax; }

  // -inf: none, as of padding.
  template <class U = T>
  U sink(int64_t b, int64_t n, int64_t h, int64_t i) const {
    return in_.sink_logits.given() && i < len_q(b, n) ? static_cast<U>(in_.sink_logits.at(h))
                                                      : static_cast<U>(-HUGE_VAL);
  }

  // L as it is saved: exact, then rounded.
  T logsumexp(int64_t b, int64_t n, int64_t h, int64_t i) const {
    Wide largest = sink<Wide>(b, n, h, i), sum = largest > -HUGE_VAL ? 1 : 0;
    for (int64_t j = 0; j < d_.seqlen_k; ++j) {
      if (!visible(b, n, h, i, j)) continue;
      const Wide S = score<Wide>(b, n, h, i, j);
      sum = S > largest ? sum * std::exp(largest - S) + 1 : sum + std::exp(S - largest);
      largest = std::fmax(largest, S);
    }
    return static_cast<T>(largest + std::log(sum));
  }

  void attend() {
    P_.assign(static_cast<size_t>(d_.batch * d_.beam * H_ * d_.seqlen_q * d_.seqlen_k), 0);
    sink_P_.assign(static_cast<size_t>(d_.batch * d_.beam * H_ * d_.seqlen_q), 0);
    O_ = Sums<T>(d_.batch * d_.beam * d_.seqlen_q * H_ * Dv_);
    for_each_row([&](int64_t b, int64_t n, int64_t h, int64_t i) {
      T* P = P_.data() + pair(b, n, h, i);
      T largest = sink(b, n, h, i), sum = 0;
      for (int64_t j = 0; j < d_.seqlen_k; ++j) {
        if (!visible(b, n, h, i, j)) continue;
        P[j] = score(b, n, h, i, j);
        largest = std::fmax(largest, P[j]);
      }
      T& of_sink = sink_P_[row(b, n, h, i)];
      of_sink = largest > -HUGE_VALF ? std::exp(sink(b, n, h, i) - largest) : T(0);
      sum = of_sink;
      for (int64_t j = 0; j < d_.seqlen_k && softmax(); ++j) {
        if (!visible(b, n, h, i, j)) continue;
        P[j] = std::exp(P[j] - largest);
        sum += P[j];
      }
      if (of_sink > 0) of_sink /= sum;
      for (int64_t j = 0; j < d_.seqlen_k; ++j) {
        if (!visible(b, n, h, i, j)) continue;
        if (softmax()) P[j] /= sum;
        const T weight = P[j] * kept_weight(b, n, h, i, j);
        for (int64_t e = 0; e < Dv_; ++e) {
          O_.add(at_O(b, n, i, h) + e, weight * v_[at_v(b, n, j, h) + e]);
        }
      }
    });
  }

  void output() {
    const int64_t size = out_size_of(d_), inner = H_ * Dv_;
    const Numbers &w = weight(WeightKind::kOut), &bias = weight(WeightKind::kOutBias);
    out_ = Sums<T>(d_.batch * d_.beam * d_.seqlen_q * size);
    for (int64_t token = 0; token < d_.batch * d_.beam * d_.seqlen_q; ++token) {
      const int64_t t = token % d_.seqlen_q, n = token / d_.seqlen_q % d_.beam, b = token / d_.seqlen_q / d_.beam;
      for (int64_t c = 0; c < size; ++c) {
        const int64_t at = token * size + c;
        const T factor = kept_output(b, n, t, c);
        for (int64_t e = 0; w.given() && e < inner; ++e) {
          const T by = factor * number(w, e * size + c);
          out_.add(at, by * O_[token * inner + e], std::fabs(by) * O_.size_of(token * inner + e));
        }
        if (!w.given()) out_.add(at, factor * O_[at], factor * O_.size_of(at));
        if (bias.given()) out_.add(at, factor * number(bias, c));
        if (d_.residual) out_.add(at, number(in_.residual, at));
      }
    }
  }

  void output_backward() {
    const int64_t size = out_size_of(d_), inner = H_ * Dv_;
    const Numbers& w = weight(WeightKind::kOut);
    dO_ = Sums<T>(d_.batch * d_.beam * d_.seqlen_q * inner);
    grads_[3] = Sums<T>(inner * size);
    grads_[7] = Sums<T>(size);
    for (int64_t token = 0; token < d_.batch * d_.beam * d_.seqlen_q; ++token) {
      const int64_t t = token % d_.seqlen_q, n = token / d_.seqlen_q % d_.beam, b = token / d_.seqlen_q / d_.beam;
      if (t >= len_q(b, n)) continue;
      for (int64_t c = 0; c < size; ++c) {
        const T dY = rounded(number(in_.grad_out, token * size + c) * kept_output(b, n, t, c));
        grads_[7].add(c, dY);
        if (!w.given()) dO_.add(token * inner + c, dY);
        for (int64_t e = 0; w.given() && e < inner; ++e) {
          dO_.add(token * inner + e, dY * number(w, e * size + c));
          grads_[3].add(e * size + c, O_[token * inner + e] * dY, std::fabs(dY) * O_.size_of(token * inner + e));
        }
      }
    }
    round(dO_);
  }

  void attend_backward() {
    dq_ = Sums<T>(static_cast<int64_t>(q_.value.size()));
    dk_ = Sums<T>(static_cast<int64_t>(k_.value.size()));
    dv_ = Sums<T>(static_cast<int64_t>(v_.value.size()));
    dbias_ = Sums<T>(in_.attn_bias.size());
    dslopes_ = Sums<T>(in_.alibi_slopes.size());
    dsinks_ = Sums<T>(in_.sink_logits.size());
    for_each_row([&](int64_t b, int64_t n, int64_t h, int64_t i) {
      T D = 0, size_D = 0;
      for (int64_t e = 0; e < Dv_; ++e) {
        D += dO_[at_O(b, n, i, h) + e] * O_[at_O(b, n, i, h) + e];
        size_D += std::fabs(dO_[at_O(b, n, i, h) + e]) * O_.size_of(at_O(b, n, i, h) + e);
      }
      const T L = rounded_ && softmax() ? logsumexp(b, n, h, i) : 0;
      if (sink(b, n, h, i) > -HUGE_VALF) sink_backward(b, n, h, i, L, D, size_D);
      for (int64_t j = 0; j < d_.seqlen_k; ++j) {
        if (visible(b, n, h, i, j)) pair_backward(b, n, h, i, j, weight_backward(b, n, h, i, j, L), D, size_D);
      }
    });
  }

  void sink_backward(int64_t b, int64_t n, int64_t h, int64_t i, T L, T D, T size_D) {
    const T P = rounded_ ? std::exp(sink(b, n, h, i) - L) : sink_P_[row(b, n, h, i)];
    dsinks_.add(h, -P * D, P * size_D);
  }

  // Backward has L and takes P from it; exactly, that is the P of forward.
  T weight_backward(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j, T L) const {
    if (rounded_ && !softmax()) return score(b, n, h, i, j);
    return rounded_ ? std::exp(score(b, n, h, i, j) - L) : P_[static_cast<size_t>(pair(b, n, h, i) + j)];
  }

  void pair_backward(int64_t b, int64_t n, int64_t h, int64_t i, int64_t j, T P, T D, T size_D) {
    const T factor = kept_weight(b, n, h, i, j);
    T dP = 0, size_dP = 0;
    for (int64_t e = 0; e < Dv_; ++e) {
      const T dO = dO_[at_O(b, n, i, h) + e];
      dP += factor * dO * v_[at_v(b, n, j, h) + e];
      size_dP += std::fabs(factor * dO * v_[at_v(b, n, j, h) + e]);
      dv_.add(at_v(b, n, j, h) + e, P * factor * dO);
    }
    T dS = softmax() ? P * (dP - D) : dP, size_dS = softmax() ? P * (size_dP + size_D) : size_dP;
    if (program_.has_score()) {
      score(b, n, h, i, j);
      program_.differentiate(dS, size_dS);
    }
    if (in_.attn_bias.given()) dbias_.add(broadcast(in_.attn_bias, b, h, i, j), dS, size_dS);
    if (in_.alibi_slopes.given()) {
      dslopes_.add(slope_index(b, h), -dS * distance(b, n, i, j), size_dS * distance(b, n, i, j));
    }
    T slope = scale();
    if (a_.softcap > 0) {
      const T x = raw(b, n, h, i, j);
      slope *= 1 - x * x;
    }
    for (int64_t e = 0; e < D_; ++e) {
      const T q = q_[at_q(b, n, i, h) + e], k = k_[at_k(b, n, j, h) + e];
      dq_.add(at_q(b, n, i, h) + e, slope * dS * k, std::fabs(slope * k) * size_dS);
      dk_.add(at_k(b, n, j, h) + e, slope * dS * q, std::fabs(slope * q) * size_dS);
    }
  }

  // Inputs that are one tensor have one gradient: the first's.
  Sums<T>& grad_input(int i) {
    if (i == 2 && in_.value_is_key) i = 1;
    if (i == 1 && in_.key_is_query) i = 0;
    return inputs_[i];
  }

  void project_backward(const Numbers& x, int i, const Sums<T>& dy, int64_t beams, int64_t steps, int64_t heads,
                        int64_t dim) {
    const Numbers& w = weight(kind(i));
    const int64_t tokens = d_.batch * beams * steps, size = x.dims[3], columns = heads * dim;
    Sums<T>& dx = grad_input(i);
    if (dx.value.empty()) dx = Sums<T>(tokens * size);
    grads_[i] = Sums<T>(size * columns);
    grads_[i + 4] = Sums<T>(columns);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t c = 0; c < columns; ++c) {
        const T gradient = dy[token * columns + c], magnitude = dy.size_of(token * columns + c);
        if (!w.given()) {
          dx.add(token * size + c % dim, gradient, magnitude);
          continue;
        }
        grads_[i + 4].add(c, gradient, magnitude);
        for (int64_t e = 0; e < size; ++e) {
          const T weight = number(w, e * columns + c), input = number(x, token * size + e);
          dx.add(token * size + e, gradient * weight, magnitude * std::fabs(weight));
          grads_[i].add(e * columns + c, gradient * input, magnitude * std::fabs(input));
        }
      }
    }
  }

  Numbers array(const Sums<T>& sums, const std::vector<int64_t>& dims, DType dtype, bool magnitude) const {
    Numbers a(rounded_ ? dtype : DType::kFloat64, dims);
    for (size_t n = 0; n < a.values.size(); ++n) {
      const T x = magnitude ? sums.magnitude[n] : sums.value[n];
      a.values[n] = as_held(a.dtype, static_cast<double>(x));
    }
    return a;
  }

  void store(LayerResults& to, bool magnitude) {
    to[kLayerOut] = array(out_, {d_.batch, d_.beam, d_.seqlen_q, out_size_of(d_)}, d_.dtype, magnitude);
    if (a_.return_weights != ReturnWeights::kNone) to[kLayerAttnWeights] = attn_weights();
    if (!in_.grad_out.given()) return;
    const Numbers* const inputs[] = {&in_.query, &in_.key, &in_.value};
    for (size_t i = 0; i < 3; ++i) {
      if (&grad_input(static_cast<int>(i)) != &inputs_[i]) continue;
      to[kLayerGradQuery + i] = array(inputs_[i], inputs[i]->dims, d_.dtype, magnitude);
    }
    if (in_.attn_bias.given()) {
      to[kLayerGradAttnBias] = array(dbias_, in_.attn_bias.dims, in_.attn_bias.dtype, magnitude);
    }
    if (in_.alibi_slopes.given()) {
      to[kLayerGradAlibiSlopes] = array(dslopes_, in_.alibi_slopes.dims, DType::kFloat32, magnitude);
    }
    for (size_t n = 0; n < in_.captures.size(); ++n) {
      const Sums<T>& sums = program_.gradients()[n];
      const Numbers& like = in_.captures[n];
      if (has_gradient(like.dtype)) to[kLayerGradCaptures + n] = array(sums, like.dims, like.dtype, magnitude);
    }
    if (in_.sink_logits.given()) {
      to[kLayerGradSinkLogits] = array(dsinks_, in_.sink_logits.dims, in_.sink_logits.dtype, magnitude);
    }
    for (size_t n = 0; n < kNumWeightKinds; ++n) {
      if (!in_.weights[n].given()) continue;
      const Numbers& before = in_.grad_weights[n];
      for (int64_t at = 0; at < before.size() && !magnitude; ++at) grads_[n].add(at, number(before, at));
      to[kLayerGradWeights + n] = array(grads_[n], in_.weights[n].dims, d_.dtype, magnitude);
    }
  }

  Numbers attn_weights() const {
    const bool per_head = a_.return_weights == ReturnWeights::kPerHead;
    Sums<T> sums(d_.batch * d_.beam * (per_head ? H_ : 1) * d_.seqlen_q * d_.seqlen_k);
    for_each_row([&](int64_t b, int64_t n, int64_t h, int64_t i) {
      for (int64_t j = 0; j < d_.seqlen_k; ++j) {
        const T weight = P_[static_cast<size_t>(pair(b, n, h, i) + j)] * kept_weight(b, n, h, i, j);
        const int64_t mean = ((b * d_.beam + n) * d_.seqlen_q + i) * d_.seqlen_k + j;
        sums.add(per_head ? pair(b, n, h, i) + j : mean, weight / static_cast<T>(per_head ? 1 : H_));
      }
    });
    if (per_head) return array(sums, {d_.batch, d_.beam, H_, d_.seqlen_q, d_.seqlen_k}, d_.dtype, false);
    return array(sums, {d_.batch, d_.beam, d_.seqlen_q, d_.seqlen_k}, d_.dtype, false);
  }

  const LayerDesc& d_;
  const AttentionDesc& a_;
  const LayerNumbers& in_;
  bool rounded_;
  int64_t H_, G_, D_, Dv_;
  LayerProgram<T, Wide> program_;
  Sums<T> q_, k_, v_, O_, out_, dO_, dq_, dk_, dv_, dbias_, dslopes_, dsinks_;
  Sums<T> inputs_[3], grads_[kNumWeightKinds];
  std::vector<T> P_, sink_P_;
};

}  // namespace

Numbers::Numbers(DType type, std::vector<int64_t> sizes) : dtype(type), dims(std::move(sizes)) {
  int64_t count = dims.empty() ? 0 : 1;
  for (const int64_t dim : dims) count *= dim;
  values.resize(static_cast<size_t>(count));
}

LayerTruth layer_truth(const LayerDesc& desc, const LayerNumbers& in) {
  LayerTruth truth;
  if (desc.dtype == DType::kFloat64) {
    Loops<long double>(desc, in, false).run(&truth.exact, &truth.magnitude);
    Loops<double>(desc, in, true).run(&truth.yardstick, nullptr);
  } else {
    Loops<double>(desc, in, false).run(&truth.exact, &truth.magnitude);
    Loops<float>(desc, in, true).run(&truth.yardstick, nullptr);
  }
  return truth;
}

}  // namespace polyhead::testing::truth
