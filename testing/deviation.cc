#include "testing/deviation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "testing/score_errors.h"

namespace polyhead::testing {
namespace {

// Rounding to bfloat16, which has 8 digits.
const double kPairs = rounding(0x1p-8);

bool has_pairs(const AttentionDesc& desc) { return desc.dtype == DType::kBFloat16; }

// Of sums over keys, or over queries, whose factors are rounded to bfloat16, or are two numbers of float16, multiplied one
// after the other. What each addition cuts off; 0: no tensor cores multiply in this dtype.
double cut_of_sum(const AttentionDesc& desc) {
  return desc.dtype == DType::kBFloat16 ? kCut : desc.dtype == DType::kFloat16 ? 2 * kCut : 0;
}

Array like(const Array& a) { return a.given() ? Array(DType::kFloat64, a.dims) : Array(); }

double* data(Array& a) { return reinterpret_cast<double*>(a.bytes.data()); }

class ForwardErrors {
 public:
  ForwardErrors(const AttentionDesc& desc, const Inputs& in, const Visibility& seen, const Outputs& exact)
      : d_(desc),
        errors_(desc, in, seen),
        e_(errors_.operation()),
        cut_(cut_of_sum(desc)),
        V_(stored_numbers<double>(in.value, in.value_scales)) {
    v_.out = like(exact.out);
    v_.logsumexp = like(exact.logsumexp);
    v_.attn_weights = like(exact.attn_weights);
    v_.column_sums = like(exact.column_sums);
    if (has_pairs(desc)) v_.pairs_out = like(exact.out);
    if (cut_ > 0) v_.cut_out = like(exact.out), v_.cut_logsumexp = like(exact.logsumexp);
    column_.resize(static_cast<size_t>(exact.column_sums.size()));
  }

  ForwardVariance run() {
    errors_.scores().for_each_row([](int64_t, int64_t) {}, [&](int64_t b, int64_t h, int64_t i) { row(b, h, i); });
    return std::move(v_);
  }

 private:
  struct Key {
    int64_t j;
    double P, S, of_S, factor, cut;
  };

  void row(int64_t b, int64_t h, int64_t i) {
    const Scores<double>& scores = errors_.scores();
    errors_.row(b, h, i);
    keys_.clear();
    double m = scores.sink(h, i), of_l = 0;
    for (int64_t j = 0; j < scores.num_keys(); ++j) {
      if (!scores.visible(b, h, i, j)) continue;
      const auto score = scores.score(b, h, i, j);
      if (scores.hides(score.S)) continue;
      const Through through = errors_.through(b, h, i, j, score);
      const double of_S = ScoreErrors::of_S(errors_.of_given(j, score), through);
      keys_.push_back(
          {j, 0, score.S, of_S, scores.dropout_factor(b, h, i, j), cut_ > 0 ? errors_.cut(j, score, through) : 0});
      m = std::max(m, score.S);
    }
    if (keys_.empty()) return;
    if (!scores.softmax()) return scores_as_weights(b, h, i);
    double l = std::exp(scores.sink(h, i) - m);
    for (Key& key : keys_) {
      key.P = std::exp(key.S - m);
      key.of_S = errors_.of_exponent(key.of_S, key.S - m);
      l += key.P;
      of_l += e_ * squared(l);
    }
    of_l = of_l / squared(l) + 2 * e_;  // relative; and of a division
    double of_L = 0;
    for (Key& key : keys_) {
      key.P /= l;
      of_L += squared(key.P) * key.of_S;
      if (cut_ > 0) data(v_.cut_logsumexp)[scores.statistic(b, h, i)] += key.P * key.cut;
    }
    data(v_.logsumexp)[scores.statistic(b, h, i)] = of_L + of_l + 3 * e_ * (squared(m) + squared(std::log(l)) + 1);
    out(b, h, i, of_l);
    statistics(b, h, i, of_L + of_l);
  }

  // Without a softmax P_j = S_j, so that dO / dS_j = f_j V_j.
  void scores_as_weights(int64_t b, int64_t h, int64_t i) {
    for (Key& key : keys_) key.P = key.S;
    out(b, h, i, 0);
    statistics(b, h, i, 0);
  }

  // dO / dS_j = P_j (f_j V_j - O)
  void out(int64_t b, int64_t h, int64_t i, double of_l) {
    const Scores<double>& scores = errors_.scores();
    const int64_t Dv = d_.head_dim_v;
    const int64_t first = scores.q_row(b, h, i) * Dv;
    double* const cut = cut_ > 0 ? data(v_.cut_out) + first : nullptr;
    O_.assign(static_cast<size_t>(Dv), 0);
    sums_.assign(O_.size(), 0);
    for (const Key& key : keys_) {
      const double* V = V_.data() + scores.k_row(b, h, key.j) * Dv;
      for (int64_t c = 0; c < Dv; ++c) {
        const double term = key.P * key.factor * V[c];
        O_[c] += term;
        sums_[c] += e_ * (squared(O_[c]) + squared(term));
        if (cut) cut[c] -= cut_ / kAddedAtATime * O_[c];
      }
    }
    double* variance = data(v_.out) + first;
    for (int64_t c = 0; c < Dv; ++c) {
      variance[c] = sums_[c] + squared(O_[c]) * (of_l + e_);
      if (cut) cut[c] -= cut_ * O_[c];  // of the last addition, of fewer
    }
    for (const Key& key : keys_) {
      const double* V = V_.data() + scores.k_row(b, h, key.j) * Dv;
      const bool softmax = scores.softmax();
      for (int64_t c = 0; c < Dv; ++c) {
        const double slope = softmax ? key.P * (key.factor * V[c] - O_[c]) : key.factor * V[c];
        variance[c] += squared(slope) * key.of_S;
        if (cut) cut[c] += slope * key.cut;
      }
      if (!v_.pairs_out.given()) continue;
      double* pairs = data(v_.pairs_out) + first;
      for (int64_t c = 0; c < Dv; ++c) pairs[c] += kPairs * squared(key.P * key.factor * V[c]);
    }
  }

  // dP_j / dS_k = P_j ([j = k] - P_k)
  void statistics(int64_t b, int64_t h, int64_t i, double of_L) {
    for (const Key& key : keys_) {
      const double of_P = errors_.scores().softmax()
                              ? squared(key.P) * (std::max((1 - 2 * key.P) * key.of_S, 0.0) + of_L + 2 * e_)
                              : key.of_S;
      if (v_.column_sums.given()) {
        const int64_t at = (b * d_.num_heads + h) * d_.seqlen_k + key.j;
        column_[at] += key.P;
        data(v_.column_sums)[at] += of_P + e_ * squared(column_[at]);
      }
      if (!v_.attn_weights.given()) continue;
      const bool mean = d_.return_weights == ReturnWeights::kMean;
      const int64_t rows = mean ? b : b * d_.num_heads + h;
      const double part = squared(key.factor / (mean ? static_cast<double>(d_.num_heads) : 1));
      data(v_.attn_weights)[(rows * d_.seqlen_q + i) * d_.seqlen_k + key.j] += part * (of_P + 3 * e_ * squared(key.P));
    }
  }

  const AttentionDesc& d_;
  ScoreErrors errors_;
  const double e_, cut_;
  const Numbers<double> V_;
  ForwardVariance v_;
  std::vector<Key> keys_;  // that the row sees
  Numbers<double> O_, sums_, column_;
};

class BackwardErrors {
 public:
  BackwardErrors(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen)
      : d_(desc),
        in_(in),
        errors_(desc, in.forward, seen),
        e_(errors_.operation()),
        cut_(cut_of_sum(desc)),
        V_(numbers<double>(in.forward.value, false)),
        dO_(numbers<double>(in.grad_out, false)),
        O_(numbers<double>(in.out, false)),
        L_(numbers<double>(in.logsumexp, false)),
        dL_(numbers<double>(in.grad_logsumexp, false)),
        delta_(numbers<double>(in.delta, false)) {
    for (const GradientName& name : kGradients) {
      v_.arithmetic.*name.gradient = like(in.forward.*name.input);
      sums_.*name.gradient = like(in.forward.*name.input);
      lost_.*name.gradient = like(in.forward.*name.input);
      if (cut_ > 0) v_.cut.*name.gradient = like(in.forward.*name.input);
    }
    for (const Array& a : in.forward.captures) {
      const bool counts = has_gradient(a.dtype) && errors_.scores().program().has_score();
      for (Gradients* g : {&v_.arithmetic, &sums_}) g->captures.push_back(counts ? like(a) : Array());
    }
    if (!has_pairs(desc)) return;
    for (int n = 0; n < 3; ++n) v_.pairs.*kGradients[n].gradient = like(in.forward.*kGradients[n].input);
  }

  GradientVariance run() {
    if (d_.seqlen_q > 0 && (d_.seqlen_k > 0 || d_.has_sink_logits)) {
      Scores<double>& scores = errors_.scores();
      scores.for_each_row([&](int64_t b, int64_t h) { scores.by_dim(b, h, V_, d_.head_dim_v, V_by_dim_); },
                          [&](int64_t b, int64_t h, int64_t i) { row(b, h, i); });
    }
    finish();
    return std::move(v_);
  }

 private:
  // A pair's dS, and what of it goes through softcap.
  struct Pair {
    int64_t j;
    double P, factor, slope;  // slope = 1 - tanh^2
    double through;           // the program's slope
    double dS, of_dS;         // behind the program, without what the row shares
    double of_dX;             // likewise
    double of_weight;         // variance of P
    double cut_P, cut_dS;     // what tensor cores shift P and dS by
    bool lost;                // P may be taken for 0
  };

  void row(int64_t b, int64_t h, int64_t i) {
    const Scores<double>& scores = errors_.scores();
    const int64_t Dv = d_.head_dim_v, q = scores.q_row(b, h, i), row = scores.statistic(b, h, i);
    errors_.row(b, h, i);
    dP_.compute(dO_.data() + q * Dv, V_by_dim_.data(), Dv, scores.num_keys());
    delta_of_row_.compute(dO_.data() + q * Dv, O_.size() > 0 ? O_.data() + q * Dv : nullptr, O_.size() > 0 ? Dv : 0, 1);
    const double rowsum = delta_.size() > 0 ? delta_[row] : delta_of_row_.sums[0];
    const bool softmax = scores.softmax();
    of_rowsum_ = delta_.size() > 0 || !softmax ? 0 : e_ * delta_of_row_.squares[0];
    of_L_ = softmax ? 2 * e_ * squared(L_[row]) : 0;
    const double dL = dL_.size() > 0 ? dL_[row] : 0;
    if (scores.sink(h, i) != -HUGE_VAL) sink(h, scores.sink(h, i) - L_[row], dL - rowsum);
    pairs_.clear();
    for (int64_t j = 0; j < scores.num_keys(); ++j) {
      if (!scores.visible(b, h, i, j)) continue;
      const auto score = scores.score(b, h, i, j);
      if (!scores.hides(score.S)) pairs_.push_back(pair(b, h, i, j, score, softmax ? L_[row] : 0, rowsum, dL));
    }
    if (pairs_.empty()) return;  // L is -inf
    query(b, h, i);
    key_and_value(b, h, i);
    if (v_.arithmetic.attn_bias.given()) bias(b, h, i);
    if (v_.arithmetic.alibi_slopes.given()) slopes(b, h, i);
    for (size_t n = 0; n < shares_.size(); ++n) share_of_row(n);
  }

  void sink(int64_t h, double exponent, double terms) {
    const double P = std::exp(exponent), one = 1, of_weight = errors_.of_exponent(0, exponent) + of_L_ + 2 * e_;
    add(&Gradients::sink_logits, h, &one, 1, P * terms, 0,
        squared(P * terms) * of_weight + squared(P) * (of_rowsum_ + e_ * squared(terms)),
        ScoreErrors::may_be_lost(exponent));
  }

  Pair pair(int64_t b, int64_t h, int64_t i, int64_t j, const Scores<double>::Score& score, double L, double rowsum,
            double dL) {
    const Scores<double>& scores = errors_.scores();
    const Through through = errors_.through(b, h, i, j, score);
    Pair p;
    p.through = through.slope;
    p.j = j;
    const bool softmax = scores.softmax();
    p.P = softmax ? std::exp(score.S - L) : score.S;
    p.factor = scores.dropout_factor(b, h, i, j);
    p.slope = 1 - squared(score.t);
    const double of_S = ScoreErrors::of_S(errors_.of_given(j, score), through);
    p.of_weight = softmax ? squared(p.P) * errors_.of_exponent(of_S, score.S - L) : of_S;
    p.lost = softmax && ScoreErrors::may_be_lost(score.S - L);
    const double dP = p.factor * dP_.sums[j], of_dP = e_ * (squared(p.factor) * dP_.squares[j] + squared(dP));
    const double terms = dP - rowsum + dL, of_terms = of_dP + e_ * (squared(dP - rowsum) + squared(terms));
    const double dS = softmax ? p.P * terms : dP;
    const double of_dS =
        softmax ? squared(terms) * p.of_weight + 2 * e_ * squared(dS) + squared(p.P) * of_terms : of_dP;
    const double cut = errors_.cut(j, score, through), cut_dP = p.factor * dP_.cuts[j];
    p.cut_P = softmax ? p.P * cut : cut;
    p.cut_dS = through.slope * (softmax ? terms * p.cut_P + p.P * cut_dP : cut_dP);
    for (size_t n = 0; n < v_.arithmetic.captures.size(); ++n) captured(n, p.P, dS, of_dS);
    p.dS = through.slope * dS;
    p.of_dS = squared(through.slope) * of_dS + squared(dS) * through.of_slope;
    p.of_dX = squared(p.slope) * p.of_dS;
    if (d_.softcap > 0) {
      const double of_t = 4 * e_ * squared(score.t) + squared(p.slope / d_.softcap) * errors_.of_X(j);
      p.of_dX += squared(p.dS) * (4 * squared(score.t) * of_t + 2 * e_);
    }
    return p;
  }

  // What a row's rowsum and L err by is the same for all its keys, and does not average out.
  void query(int64_t b, int64_t h, int64_t i) {
    const Scores<double>& scores = errors_.scores();
    const int64_t D = d_.head_dim, first = scores.q_row(b, h, i) * D;
    double *sums = data(sums_.query) + first, *variance = data(v_.arithmetic.query) + first;
    double* lost = data(lost_.query) + first;
    double* rounded = v_.pairs.query.given() ? data(v_.pairs.query) + first : nullptr;
    double* cut = cut_ > 0 ? data(v_.cut.query) + first : nullptr;
    of_rowsum_terms_.assign(static_cast<size_t>(D), 0);
    for (const Pair& p : pairs_) {
      const double* K = scores.K().data() + scores.k_row(b, h, p.j) * D;
      const double dX = p.dS * p.slope;
      for (int64_t c = 0; c < D; ++c) {
        sums[c] += dX * K[c];
        of_rowsum_terms_[c] += p.P * p.through * p.slope * K[c];
        variance[c] += p.of_dX * squared(K[c]) + e_ * squared(sums[c]);
        if (rounded) rounded[c] += kPairs * squared(dX * K[c]);
        if (cut) cut[c] += p.slope * p.cut_dS * K[c] - cut_ / kAddedAtATime * sums[c];
        if (p.lost) lost[c] += std::fabs(dX * K[c]);
      }
    }
    for (int64_t c = 0; c < D; ++c) {
      variance[c] += of_rowsum_ * squared(of_rowsum_terms_[c]) + of_L_ * squared(sums[c]);
    }
  }

  void key_and_value(int64_t b, int64_t h, int64_t i) {
    const Scores<double>& scores = errors_.scores();
    const int64_t D = d_.head_dim, Dv = d_.head_dim_v, q = scores.q_row(b, h, i);
    const double *Q = scores.Q().data() + q * D, *dO = dO_.data() + q * Dv;
    for (const Pair& p : pairs_) {
      const int64_t k = scores.k_row(b, h, p.j);
      const double dX = p.dS * p.slope, weight = p.P * p.factor;
      const double of_dX = p.of_dX + squared(p.slope) * shared(p.P * p.through, p.dS);
      const double of_weight = squared(p.factor) * p.of_weight + squared(weight) * (of_L_ + 2 * e_);
      add(&Gradients::key, k * D, Q, D, dX, p.slope * p.cut_dS, of_dX, p.lost);
      add(&Gradients::value, k * Dv, dO, Dv, weight, p.factor * p.cut_P, of_weight, p.lost);
    }
  }

  // gradient[first + c] += factor * x[c]
  void add(Array Gradients::*gradient, int64_t first, const double* x, int64_t count, double factor, double cut_factor,
           double of_factor, bool may_be_lost) {
    double *sums = data(sums_.*gradient) + first, *variance = data(v_.arithmetic.*gradient) + first;
    double* lost = may_be_lost ? data(lost_.*gradient) + first : nullptr;
    double* rounded = (v_.pairs.*gradient).given() ? data(v_.pairs.*gradient) + first : nullptr;
    double* cut = (v_.cut.*gradient).given() ? data(v_.cut.*gradient) + first : nullptr;
    const double of_sum = is_product(gradient) ? cut_ / kAddedAtATime : 0;
    for (int64_t c = 0; c < count; ++c) {
      sums[c] += factor * x[c];
      variance[c] += of_factor * squared(x[c]) + e_ * squared(sums[c]);
      if (rounded) rounded[c] += kPairs * squared(factor * x[c]);
      if (cut) cut[c] += cut_factor * x[c] - of_sum * sums[c];
      if (lost) lost[c] += std::fabs(factor * x[c]);
    }
  }

  // Which tensor cores sum.
  static bool is_product(Array Gradients::*gradient) {
    return gradient == &Gradients::query || gradient == &Gradients::key || gradient == &Gradients::value;
  }

  double shared(double P, double dS) const { return of_rowsum_ * squared(P) + of_L_ * squared(dS); }

  void bias(int64_t b, int64_t h, int64_t i) {
    const bool one_for_all_keys = in_.forward.attn_bias.dims[3] == 1;
    double P = 0, dS = 0;
    for (const Pair& p : pairs_) {
      const int64_t at = errors_.scores().bias_at(b, h, i, p.j);
      const double one = 1;
      add(&Gradients::attn_bias, at, &one, 1, p.dS, p.cut_dS,
          p.of_dS + (one_for_all_keys ? 0 : shared(p.P * p.through, p.dS)), p.lost);
      P += p.P * p.through;
      dS += p.dS;
      if (one_for_all_keys && &p == &pairs_.back()) data(v_.arithmetic.attn_bias)[at] += shared(P, dS);
    }
  }

  void slopes(int64_t b, int64_t h, int64_t i) {
    const int64_t at = errors_.scores().slope_at(b, h);
    double P = 0, dS = 0;
    for (const Pair& p : pairs_) {
      const double distance = errors_.scores().distance(i, p.j);
      add(&Gradients::alibi_slopes, at, &distance, 1, p.dS, p.cut_dS, p.of_dS + e_ * squared(p.dS), p.lost);
      P += p.P * p.through * distance;
      dS += p.dS * distance;
    }
    data(v_.arithmetic.alibi_slopes)[at] += shared(P, dS);
  }

  // What a pair gives to the elements of capture n, whose adjoints are the program's now. An element gets the row's shared
  // errors once, of all its pairs together.
  void captured(size_t n, double P, double dS, double of_dS) {
    Array &variance = v_.arithmetic.captures[n], &sums = sums_.captures[n];
    if (!variance.given()) return;
    shares_.resize(v_.arithmetic.captures.size());
    const PairProgram<double>& program = errors_.scores().program();
    const double steps = program.roundings(*d_.program).steps;
    program.for_each_gradient(static_cast<int>(n), [&](int64_t at, double adjoint) {
      data(sums)[at] += dS * adjoint;
      data(variance)[at] += squared(adjoint) * (of_dS + e_ * (steps + 1) * squared(dS)) + e_ * squared(data(sums)[at]);
      auto& [of_rowsum, of_L] = shares_[n][at];
      of_rowsum += P * adjoint;
      of_L += dS * adjoint;
    });
  }

  void share_of_row(size_t n) {
    for (const auto& [at, share] : shares_[n]) {
      data(v_.arithmetic.captures[n])[at] += shared(share.first, share.second);
    }
    shares_[n].clear();
  }

  // What is lost of all terms is lost together. Then the scale of query's and key's, and what was there before.
  void finish() {
    for (const GradientName& name : kGradients) {
      Array &variance = v_.arithmetic.*name.gradient, &rounded = v_.pairs.*name.gradient;
      Array& cut = v_.cut.*name.gradient;
      const bool scaled = name.gradient == &Gradients::query || name.gradient == &Gradients::key;
      const double factor = scaled ? errors_.scores().scale() : 1;
      const Array& before = in_.before.*name.gradient;
      for (int64_t n = 0; n < variance.size(); ++n) {
        const double sum = factor * data(sums_.*name.gradient)[n];
        double& v = data(variance)[n];
        v = squared(factor) * (v + squared(data(lost_.*name.gradient)[n])) + 2 * e_ * squared(sum);
        if (before.given()) v += e_ * squared(sum + before.at(n));
        if (rounded.given()) data(rounded)[n] *= squared(factor);
        if (!cut.given()) continue;
        if (is_product(name.gradient)) data(cut)[n] -= cut_ * data(sums_.*name.gradient)[n];  // the last addition
        data(cut)[n] *= factor;
      }
    }
    for (size_t i = 0; i < v_.arithmetic.captures.size() && !in_.before.captures.empty(); ++i) {
      const Array &before = in_.before.captures[i], &sums = sums_.captures[i];
      for (int64_t n = 0; before.given() && n < sums.size(); ++n) {
        data(v_.arithmetic.captures[i])[n] += e_ * squared(data(sums_.captures[i])[n] + before.at(n));
      }
    }
  }

  const AttentionDesc& d_;
  const BackwardInputs& in_;
  ScoreErrors errors_;
  const double e_, cut_;
  const Numbers<double> V_, dO_, O_, L_, dL_, delta_;
  GradientVariance v_;
  Gradients sums_;  // so far
  Gradients lost_;  // |terms| whose weight may be taken for 0
  Numbers<double> V_by_dim_, of_rowsum_terms_;
  Dots dP_, delta_of_row_;
  double of_rowsum_ = 0, of_L_ = 0;
  std::vector<Pair> pairs_;                                           // of the row
  std::vector<std::map<int64_t, std::pair<double, double>>> shares_;  // of each capture's elements, of the row
};

}  // namespace

ForwardVariance forward_variance(const AttentionDesc& desc, const Inputs& in, const Visibility& seen,
                                 const Outputs& exact) {
  return ForwardErrors(desc, in, seen, exact).run();
}

GradientVariance backward_variance(const AttentionDesc& desc, const BackwardInputs& in, const Visibility& seen) {
  return BackwardErrors(desc, in, seen).run();
}

}  // namespace polyhead::testing
