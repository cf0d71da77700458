#include "judge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tools/bounds.h"

namespace polyhead::testing {
namespace {

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

std::vector<double> numbers(const Array& a) {
  std::vector<double> x(static_cast<size_t>(a.size()));
  for (size_t n = 0; n < x.size(); ++n) x[n] = a.at(static_cast<int64_t>(n));
  return x;
}

// Rows of `out` whose logsumexp is -inf must be +0, bit for bit.
void judge_hidden_rows(const AttentionDesc& desc, const Outputs& got, const Array& exact_logsumexp,
                       std::vector<std::string>* faults) {
  const size_t row_bytes = static_cast<size_t>(desc.head_dim_v) * dtype_size_bytes(desc.dtype);
  const int64_t batch = desc.packed ? 1 : desc.batch;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < desc.seqlen_q; ++i) {
      for (int64_t h = 0; h < desc.num_heads; ++h) {
        if (exact_logsumexp.at((b * desc.num_heads + h) * desc.seqlen_q + i) != -HUGE_VAL) continue;
        const auto* row =
            got.out.bytes.data() + static_cast<size_t>((b * desc.seqlen_q + i) * desc.num_heads + h) * row_bytes;
        if (std::any_of(row, row + row_bytes, [](uint8_t byte) { return byte != 0; })) {
          return faults->push_back(format("out: the row of batch %lld, query %lld, head %lld sees no key and is not 0",
                                          static_cast<long long>(b), static_cast<long long>(i),
                                          static_cast<long long>(h)));
        }
      }
    }
  }
}

}  // namespace

void Errors::add(const Array& got, const Array& exact, const Array& naive, const Magnitude& magnitude) {
  if (!got.given() && !exact.given()) return;
  if (got.dims != exact.dims) return errors_.add_fault(errors_.name() + ": wrong dims");
  const std::vector<double> g = numbers(got), e = numbers(exact), w = numbers(naive);
  std::vector<double> m(e.size());
  for (size_t n = 0; n < m.size(); ++n) m[n] = magnitude(static_cast<int64_t>(n));
  errors_.add({got.dtype, got.dims, g, e, w, m});
}

std::string Errors::verdict() const {
  std::string text;
  for (const std::string& complaint : errors_.complaints()) text += complaint + "\n";
  return text;
}

Judge::Judge(const Problem& problem) : problem_(problem) {
  const bool shifted = problem.fill == Fill::kShiftUp || problem.fill == Fill::kShiftDown;
  const tools::ForwardBounds bounds = tools::forward_bounds(problem.desc, shifted);
  out_ = Errors("out", bounds.out);
  logsumexp_ = Errors("logsumexp", bounds.logsumexp);
  weights_ = Errors("weights", bounds.weights);
  column_sums_ = Errors("column_sums", bounds.column_sums);
}

void Judge::add(const Outputs& got, const Expected& want) {
  const Outputs &exact = want.exact, &naive = want.naive;
  faults_.insert(faults_.end(), got.faults.begin(), got.faults.end());
  out_.add(got.out, exact.out, naive.out, [&](int64_t n) { return want.magnitude.at(n); });
  if (got.logsumexp.given()) {
    // |L| <= largest |S| + log(keys)
    const double log_keys = std::log(static_cast<double>(problem_.desc.seqlen_k) + 1);
    const Array& L = exact.logsumexp;
    logsumexp_.add(got.logsumexp, L, naive.logsumexp, [&](int64_t n) { return std::fabs(L.at(n)) + log_keys; });
  }
  weights_.add(got.weights, exact.weights, naive.weights, [&](int64_t n) { return exact.weights.at(n); });
  column_sums_.add(got.column_sums, exact.column_sums, naive.column_sums,
                   [&](int64_t n) { return exact.column_sums.at(n); });
  judge_hidden_rows(problem_.desc, got, exact.logsumexp, &faults_);
}

std::string Judge::verdict() const {
  std::string text;
  for (const std::string& fault : faults_) text += fault + "\n";
  for (const Errors* errors : {&out_, &logsumexp_, &weights_, &column_sums_}) text += errors->verdict();
  return text;
}

bool Judge::could_be_chance() const {
  for (const Errors* errors : {&out_, &logsumexp_, &weights_, &column_sums_}) {
    if (!errors->could_be_chance()) return false;
  }
  return faults_.empty();
}

int64_t num_redraws(const AttentionDesc& d) {
  return tools::num_redraws((d.packed ? 1 : d.batch) * d.num_heads * d.seqlen_q);
}

std::string mismatch(const Outputs& got, const Expected& want, const Problem& problem) {
  Judge judge(problem);
  judge.add(got, want);
  return judge.verdict();
}

std::string mismatch(const Kernel& kernel, const Problem& problem, const Inputs& in, const Expected& want,
                     const RunOptions& options) {
  Judge judge(problem);
  judge.add(run(kernel, problem.desc, in, options), want);
  const AttentionDesc& d = problem.desc;
  Problem again = problem;
  for (int64_t n = 0; n < num_redraws(d) && !judge.verdict().empty() && judge.could_be_chance(); ++n) {
    again.seed = tools::redraw_seed(problem.seed, n);
    const Inputs more = random_inputs(again);
    judge.add(run(kernel, d, more, options), expected(d, more));
  }
  return judge.verdict();
}

}  // namespace polyhead::testing
