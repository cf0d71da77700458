#include "testing/definition.h"

#include <algorithm>
#include <cmath>

#include "testing/deviation.h"
#include "testing/scores.h"

namespace polyhead::testing {
namespace {

// A weight below float32's normal numbers may be taken for 0: 4 ulp of this one are 2^-126.
template <class T>
constexpr T kLeast = static_cast<T>(0x1p-104);

// The elements of one gradient: sums in T, stored in `result`.
template <class T>
struct Sums {
  Numbers<T> sums;
  explicit Sums(const Array& input) : sums(static_cast<size_t>(input.size())) {}

  T* at(int64_t n) { return sums.data() + n; }

  Array result(const Array& input, DType dtype, const Array& before, T factor, bool absolute) const {
    if (!input.given()) return {};
    Array a(dtype, input.dims);
    for (size_t n = 0; n < sums.size(); ++n) {
      const int64_t at = static_cast<int64_t>(n);
      T value = factor * sums[n] + T(0);  // -0 + 0 is +0
      if (before.given()) value += static_cast<T>(absolute ? std::fabs(before.at(at)) : before.at(at));
      a.set(at, static_cast<double>(value));
    }
    return a;
  }
};

template <class T>
class ForwardDefinition {
 public:
  // magnitude: null, or where sum_k P_k |V_k| goes.
  ForwardDefinition(const AttentionDesc& desc, const Inputs& in, const Visibility& seen, bool wide, Array* magnitude)
      : d_(desc), scores_(desc, in, seen), V_(stored_numbers<T>(in.value, in.value_scales)), magnitude_(magnitude) {
    const OutputDims dims = output_dims(desc, true);
    const DType weights = wide ? DType::kFloat64 : desc.dtype;
    const DType statistics = wide ? DType::kFloat64 : statistics_dtype(desc);
    o_.out = Array(wide ? DType::kFloat64 : out_dtype(desc), dims.out);
    o_.logsumexp = Array(statistics, dims.logsumexp);
    for (int64_t n = 0; n < o_.logsumexp.size(); ++n) o_.logsumexp.set(n, -HUGE_VAL);
    if (!dims.attn_weights.empty()) o_.attn_weights = Array(weights, dims.attn_weights);
    if (!dims.column_sums.empty()) o_.column_sums = Array(statistics, dims.column_sums);
    mean_.resize(desc.return_weights == ReturnWeights::kMean ? static_cast<size_t>(o_.attn_weights.size()) : 0);
    column_.resize(static_cast<size_t>(o_.column_sums.size()));
    if (magnitude_) *magnitude_ = Array(DType::kFloat64, dims.out);
  }

  Outputs run() {
    scores_.for_each_row([](int64_t, int64_t) {}, [&](int64_t b, int64_t h, int64_t i) { row(b, h, i); });
    const auto heads = static_cast<T>(std::max<int64_t>(d_.num_heads, 1));
    for (size_t n = 0; n < mean_.size(); ++n) {
      o_.attn_weights.set(static_cast<int64_t>(n), static_cast<double>(mean_[n] / heads));
    }
    for (size_t n = 0; n < column_.size(); ++n) {
      o_.column_sums.set(static_cast<int64_t>(n), static_cast<double>(column_[n]));
    }
    return std::move(o_);
  }

 private:
  void row(int64_t b, int64_t h, int64_t i) {
    scores_.dots(b, h, i);
    keys_.clear();
    P_.clear();
    const T sink = scores_.sink(h, i), none = static_cast<T>(-HUGE_VAL);
    T m = sink;
    for (int64_t j = 0; j < scores_.num_keys(); ++j) {
      if (!scores_.visible(b, h, i, j)) continue;
      const T S = scores_.score(b, h, i, j).S;
      if (scores_.hides(S)) continue;
      keys_.push_back(j);
      P_.push_back(S);
      if (P_.back() > m) m = P_.back();
    }
    if (keys_.empty()) {  // O is +0
      return o_.logsumexp.set(scores_.statistic(b, h, i), static_cast<double>(sink));
    }
    T l = sink == none ? T(0) : std::exp(sink - m);
    for (size_t k = 0; k < P_.size() && scores_.softmax(); ++k) {
      P_[k] = std::exp(P_[k] - m);  // NaN where S is NaN or inf
      l += P_[k];
    }
    O_.assign(static_cast<size_t>(d_.head_dim_v), T(0));
    sums_.assign(O_.size(), T(0));
    for (size_t k = 0; k < keys_.size(); ++k) weigh(b, h, i, keys_[k], scores_.softmax() ? P_[k] / l : P_[k]);
    const int64_t first = scores_.q_row(b, h, i) * d_.head_dim_v;
    for (int64_t c = 0; c < d_.head_dim_v; ++c) {
      o_.out.set(first + c, static_cast<double>(O_[c]));
      if (magnitude_) magnitude_->set(first + c, static_cast<double>(sums_[c]));
    }
    o_.logsumexp.set(scores_.statistic(b, h, i), scores_.softmax() ? static_cast<double>(m + std::log(l)) : 0);
  }

  // What the weight P of key j adds to the results of its row.
  void weigh(int64_t b, int64_t h, int64_t i, int64_t j, T P) {
    if (!column_.empty()) column_[(b * d_.num_heads + h) * d_.seqlen_k + j] += P;
    P *= scores_.dropout_factor(b, h, i, j);
    const T* V = V_.data() + scores_.k_row(b, h, j) * d_.head_dim_v;
    add(O_.data(), P, V, d_.head_dim_v);
    // A row of a softmax without a sink has weights near 1, too.
    const bool small = d_.has_sink_logits || !scores_.softmax();
    const T weight = small ? std::max(std::abs(P), kLeast<T>) : P;
    for (int64_t c = 0; magnitude_ && c < d_.head_dim_v; ++c) sums_[c] += weight * std::abs(V[c]);
    if (!mean_.empty()) mean_[(b * d_.seqlen_q + i) * d_.seqlen_k + j] += P;
    if (d_.return_weights == ReturnWeights::kPerHead) {
      o_.attn_weights.set(((b * d_.num_heads + h) * d_.seqlen_q + i) * d_.seqlen_k + j, static_cast<double>(P));
    }
  }

  const AttentionDesc& d_;
  Scores<T> scores_;
  const Numbers<T> V_;
  Array* magnitude_;
  Outputs o_;
  std::vector<int64_t> keys_;  // that the row sees
  Numbers<T> P_, O_, sums_, column_, mean_;
};

// absolute: of every factor behind the scores the absolute value.
template <class T>
class BackwardDefinition {
 public:
  BackwardDefinition(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen, bool absolute)
      : d_(desc),
        in_(in),
        absolute_(absolute),
        scores_(desc, in.forward, seen),
        abs_Q_(absolute ? numbers<T>(in.forward.query, true) : Numbers<T>()),
        abs_K_(absolute ? numbers<T>(in.forward.key, true) : Numbers<T>()),
        V_(numbers<T>(in.forward.value, absolute)),
        dO_(numbers<T>(in.grad_out, absolute)),
        O_(numbers<T>(in.out, absolute)),
        L_(numbers<T>(in.logsumexp, false)),
        dL_(numbers<T>(in.grad_logsumexp, absolute)),
        delta_(numbers<T>(in.delta, absolute)),
        dQ_(in.forward.query),
        dK_(in.forward.key),
        dV_(in.forward.value),
        dbias_(in.forward.attn_bias),
        dslopes_(in.forward.alibi_slopes),
        dsinks_(in.forward.sink_logits) {
    for (const Array& a : in.forward.captures) dcaptures_.emplace_back(has_gradient(a.dtype) ? a : Array());
  }

  Gradients run(bool wide) {
    if (d_.seqlen_q > 0 && (d_.seqlen_k > 0 || d_.has_sink_logits)) {
      scores_.for_each_row(
          [&](int64_t b, int64_t h) {
            scores_.by_dim(b, h, V_, d_.head_dim_v, V_by_dim_);
            dP_.resize(static_cast<size_t>(scores_.num_keys()));
          },
          [&](int64_t b, int64_t h, int64_t i) { row(b, h, i); });
    }
    const Inputs& x = in_.forward;
    const Gradients& before = in_.before;
    const T scale = absolute_ ? std::abs(scores_.scale()) : scores_.scale();
    Gradients g;
    const auto stored = [&](DType dtype) { return wide ? DType::kFloat64 : dtype; };
    const DType dtype = stored(grad_dtype(d_)), of_bias = stored(x.attn_bias.dtype);
    g.query = dQ_.result(x.query, dtype, before.query, scale, absolute_);
    g.key = dK_.result(x.key, dtype, before.key, scale, absolute_);
    g.value = dV_.result(x.value, dtype, before.value, T(1), absolute_);
    g.attn_bias = dbias_.result(x.attn_bias, of_bias, before.attn_bias, T(1), absolute_);
    g.alibi_slopes =
        dslopes_.result(x.alibi_slopes, stored(DType::kFloat32), before.alibi_slopes, T(absolute_ ? 1 : -1), absolute_);
    g.sink_logits = dsinks_.result(x.sink_logits, stored(x.sink_logits.dtype), before.sink_logits, T(1), absolute_);
    for (size_t n = 0; n < dcaptures_.size(); ++n) {
      const Array input = has_gradient(x.captures[n].dtype) ? x.captures[n] : Array();
      const Array none, &there = before.captures.empty() ? none : before.captures[n];
      g.captures.push_back(dcaptures_[n].result(input, stored(input.dtype), there, T(1), absolute_));
    }
    return g;
  }

 private:
  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t Dv = d_.head_dim_v, keys = scores_.num_keys(), q = scores_.q_row(b, h, i);
    scores_.dots(b, h, i);
    std::fill(dP_.begin(), dP_.end(), T(0));
    for (int64_t c = 0; c < Dv; ++c) add(dP_.data(), dO_[q * Dv + c], V_by_dim_.data() + c * keys, keys);
    T rowsum = 0;
    for (int64_t c = 0; c < Dv && O_.size() > 0 && scores_.softmax(); ++c) rowsum += dO_[q * Dv + c] * O_[q * Dv + c];
    if (delta_.size() > 0) rowsum = delta_[scores_.statistic(b, h, i)];
    if (scores_.sink(h, i) != static_cast<T>(-HUGE_VAL)) this->sink(b, h, i, rowsum);
    for (int64_t j = 0; j < keys; ++j) {
      if (scores_.visible(b, h, i, j)) pair(b, h, i, j, rowsum);
    }
  }

  // Where all of O is 0, nothing of grad_out reaches the sink.
  void sink(int64_t b, int64_t h, int64_t i, T rowsum) {
    const int64_t Dv = d_.head_dim_v, q = scores_.q_row(b, h, i), row = scores_.statistic(b, h, i);
    const auto O = O_.begin() + q * Dv;
    if (O_.size() > 0 && delta_.size() == 0 && std::all_of(O, O + Dv, [](T x) { return x == 0; })) rowsum = 0;
    const T weight = std::exp(scores_.sink(h, i) - L_[row]), dL = dL_.size() > 0 ? dL_[row] : T(0);
    const T P = absolute_ ? std::max(weight, kLeast<T>) : weight;
    *dsinks_.at(h) += P * (absolute_ ? rowsum + dL : dL - rowsum);
  }

  void pair(int64_t b, int64_t h, int64_t i, int64_t j, T rowsum) {
    const int64_t D = d_.head_dim, Dv = d_.head_dim_v, q = scores_.q_row(b, h, i), k = scores_.k_row(b, h, j);
    const int64_t row = scores_.statistic(b, h, i);
    const auto [S, t, given] = scores_.score(b, h, i, j);
    if (scores_.hides(S)) return;
    const T weight = scores_.softmax() ? std::exp(S - L_[row]) : S, f = scores_.dropout_factor(b, h, i, j);
    const T P = absolute_ ? std::max(std::abs(weight), kLeast<T>) : weight;
    const T dL = dL_.size() > 0 ? dL_[row] : T(0), dP = f * dP_[j];
    T dS = scores_.softmax() ? P * (absolute_ ? dP + rowsum + dL : dP - rowsum + dL) : dP;
    if (scores_.program().has_score()) dS = through_program(dS);
    T dX = dS;
    if (d_.softcap > 0) dX *= 1 - t * t;
    add(dQ_.at(q * D), dX, (absolute_ ? abs_K_ : scores_.K()).data() + k * D, D);
    add(dK_.at(k * D), dX, (absolute_ ? abs_Q_ : scores_.Q()).data() + q * D, D);
    add(dV_.at(k * Dv), P * f, dO_.data() + q * Dv, Dv);
    if (in_.forward.attn_bias.size() > 0) *dbias_.at(scores_.bias_at(b, h, i, j)) += dS;
    if (in_.forward.alibi_slopes.size() > 0) *dslopes_.at(scores_.slope_at(b, h)) += dS * scores_.distance(i, j);
  }

  // What the program passes on of dS, and gives to what it captures.
  T through_program(T dS) {
    const T passed = scores_.program().differentiate(dS);
    for (size_t n = 0; n < dcaptures_.size(); ++n) {
      scores_.program().for_each_gradient(static_cast<int>(n), [&](int64_t at, T gradient) {
        *dcaptures_[n].at(at) += absolute_ ? std::abs(gradient) : gradient;
      });
    }
    return absolute_ ? std::abs(passed) : passed;
  }

  const AttentionDesc& d_;
  const BackwardInputs& in_;
  const bool absolute_;
  Scores<T> scores_;
  const Numbers<T> abs_Q_, abs_K_, V_, dO_, O_, L_, dL_, delta_;
  Sums<T> dQ_, dK_, dV_, dbias_, dslopes_, dsinks_;
  std::vector<Sums<T>> dcaptures_;
  Numbers<T> V_by_dim_, dP_;  // [Dv, keys], [keys]
};

}  // namespace

DType statistics_dtype(const AttentionDesc& desc) {
  return desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

OutputDims output_dims(const AttentionDesc& d, bool logsumexp) {
  OutputDims dims;
  if (d.packed) {
    dims.out = {d.seqlen_q, d.num_heads, d.head_dim_v};
    if (logsumexp) dims.logsumexp = {d.num_heads, d.seqlen_q};
    return dims;
  }
  dims.out = {d.batch, d.seqlen_q, d.num_heads, d.head_dim_v};
  if (logsumexp) dims.logsumexp = {d.batch, d.num_heads, d.seqlen_q};
  if (d.return_weights == ReturnWeights::kPerHead) dims.attn_weights = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  if (d.return_weights == ReturnWeights::kMean) dims.attn_weights = {d.batch, d.seqlen_q, d.seqlen_k};
  if (d.return_column_sums) dims.column_sums = {d.batch, d.num_heads, d.seqlen_k};
  return dims;
}

template <class T>
Outputs defined_outputs(const AttentionDesc& desc, const Inputs& in, const Visibility& seen, bool wide,
                        Array* magnitude) {
  return ForwardDefinition<T>(desc, in, seen, wide, magnitude).run();
}

template Outputs defined_outputs<double>(const AttentionDesc&, const Inputs&, const Visibility&, bool, Array*);
template Outputs defined_outputs<float>(const AttentionDesc&, const Inputs&, const Visibility&, bool, Array*);

template <class T>
Gradients defined_gradients(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen, bool wide) {
  return BackwardDefinition<T>(desc, in, seen, false).run(wide);
}

template Gradients defined_gradients<double>(const AttentionDesc&, const BackwardInputs&, const Visibility&, bool);
template Gradients defined_gradients<float>(const AttentionDesc&, const BackwardInputs&, const Visibility&, bool);

Gradients gradient_magnitudes(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen) {
  return BackwardDefinition<double>(desc, in, seen, true).run(true);
}

Expected expected(const AttentionDesc& desc, const Inputs& in) {
  const Visibility seen(desc, in);
  Expected e;
  e.exact = defined_outputs<double>(desc, in, seen, true, &e.magnitude);
  e.naive = desc.dtype == DType::kFloat64 ? defined_outputs<double>(desc, in, seen, false)
                                          : defined_outputs<float>(desc, in, seen, false);
  e.variance = forward_variance(desc, in, seen, e.exact);
  return e;
}

ExpectedGradients expected(const AttentionDesc& desc, const BackwardInputs& in) {
  const Visibility seen(desc, in.forward);
  ExpectedGradients e;
  e.exact = defined_gradients<double>(desc, in, seen, true);
  e.naive = desc.dtype == DType::kFloat64 ? defined_gradients<double>(desc, in, seen, false)
                                          : defined_gradients<float>(desc, in, seen, false);
  e.magnitude = gradient_magnitudes(desc, in, seen);
  e.variance = backward_variance(desc, in, seen);
  e.seen = VisibleParts(desc, in.forward, seen);
  return e;
}

}  // namespace polyhead::testing
