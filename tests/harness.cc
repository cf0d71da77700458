#include "harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "attention/reference.h"

namespace polyhead::testing {
namespace {

// Runs what it is given on the calling thread, last piece first.
class ReversedExecutor : public Executor {
 public:
  int num_threads() const override { return 3; }
  void parallel_for(int count, void (*body)(void* context, int index), void* context) override {
    for (int i = count - 1; i >= 0; --i) body(context, i);
  }
};

DType statistics_dtype(const AttentionDesc& desc) {
  return desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

struct OutputDims {
  std::vector<int64_t> out, logsumexp, weights, column_sums;  // empty: not asked for
};

OutputDims output_dims(const AttentionDesc& d, bool logsumexp) {
  OutputDims dims;
  if (d.packed) {
    dims.out = {d.seqlen_q, d.num_heads, d.head_dim_v};
    if (logsumexp) dims.logsumexp = {d.num_heads, d.seqlen_q};
    return dims;
  }
  dims.out = {d.batch, d.seqlen_q, d.num_heads, d.head_dim_v};
  if (logsumexp) dims.logsumexp = {d.batch, d.num_heads, d.seqlen_q};
  if (d.return_weights == ReturnWeights::kPerHead) dims.weights = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  if (d.return_weights == ReturnWeights::kMean) dims.weights = {d.batch, d.seqlen_q, d.seqlen_k};
  if (d.return_column_sums) dims.column_sums = {d.batch, d.num_heads, d.seqlen_k};
  return dims;
}

struct InputName {
  const char* name;
  Array Inputs::*array;
  Tensor ForwardArgs::*tensor;
};
constexpr InputName kInputs[] = {
    {"query", &Inputs::query, &ForwardArgs::query},
    {"key", &Inputs::key, &ForwardArgs::key},
    {"value", &Inputs::value, &ForwardArgs::value},
    {"attn_mask", &Inputs::attn_mask, &ForwardArgs::attn_mask},
    {"attn_bias", &Inputs::attn_bias, &ForwardArgs::attn_bias},
    {"alibi_slopes", &Inputs::alibi_slopes, &ForwardArgs::alibi_slopes},
    {"seqlens_q", &Inputs::seqlens_q, &ForwardArgs::seqlens_q},
    {"seqlens_k", &Inputs::seqlens_k, &ForwardArgs::seqlens_k},
    {"cu_seqlens_q", &Inputs::cu_seqlens_q, &ForwardArgs::cu_seqlens_q},
    {"cu_seqlens_k", &Inputs::cu_seqlens_k, &ForwardArgs::cu_seqlens_k},
    {"query_offsets", &Inputs::query_offsets, &ForwardArgs::query_offsets},
};

ForwardArgs dense_args(const Inputs& in) {
  ForwardArgs args;
  for (const InputName& operand : kInputs) args.*operand.tensor = view(in.*operand.array);
  args.dropout_seed = in.dropout_seed;
  args.dropout_offset = in.dropout_offset;
  return args;
}

// The reference in arithmetic of T; wide: results in float64.
template <class T>
Outputs reference_outputs(const AttentionDesc& desc, const Inputs& in, bool wide) {
  const OutputDims dims = output_dims(desc, true);
  const DType out = wide ? DType::kFloat64 : desc.dtype;
  const DType statistics = wide ? DType::kFloat64 : statistics_dtype(desc);
  auto array = [](DType dtype, const std::vector<int64_t>& d) { return d.empty() ? Array() : Array(dtype, d); };
  Outputs o;
  o.out = array(out, dims.out);
  o.logsumexp = array(statistics, dims.logsumexp);
  o.weights = array(out, dims.weights);
  o.column_sums = array(statistics, dims.column_sums);
  ForwardArgs args = dense_args(in);
  args.out = view(o.out);
  args.logsumexp = view(o.logsumexp);
  args.weights = view(o.weights);
  args.column_sums = view(o.column_sums);
  reference::forward<T>(desc, args);
  return o;
}

// The distance from |x| to the next number of `dtype`.
double ulp(double x, DType dtype) {
  int digits = 24, min_exponent = -125;
  if (dtype == DType::kBFloat16) digits = 8;
  if (dtype == DType::kFloat16) digits = 11, min_exponent = -13;
  if (dtype == DType::kFloat64) digits = 53, min_exponent = -1021;
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent, min_exponent) - digits);
}

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

struct Judge {
  const char* name;
  const Array &got, &exact, &naive;
  std::function<double(int64_t)> magnitude;  // whose ulps element n may err by
  double rmse_factor;
  int64_t row;  // neighbours that share a softmax: their errors are not independent
  std::vector<std::string>* faults;

  void run() const {
    if (!got.given() && !exact.given()) return;
    if (got.dims != exact.dims) return faults->push_back(format("%s: wrong dims", name));
    double naive_max = 0, sum = 0, naive_sum = 0, square = 0, naive_square = 0;
    const int64_t size = got.size();
    for (int64_t n = 0; n < size; ++n) {
      const double error = naive.at(n) - exact.at(n);
      if (std::isfinite(error)) naive_max = std::max(naive_max, std::fabs(error));
    }
    int64_t bad = 0, first = -1, counted = 0;
    double worst = 0;
    for (int64_t n = 0; n < size; ++n) {
      const double g = got.at(n), e = exact.at(n), w = naive.at(n);
      if (std::isfinite(e) && !std::isfinite(w) && !std::isfinite(g))
        continue;  // float32 overflows where float64 does not
      if (!std::isfinite(e)) {
        if (!(std::isnan(e) ? std::isnan(g) : g == e) && bad++ == 0) first = n;
        continue;
      }
      const double error = g - e, allowed = 2 * naive_max + 4 * ulp(magnitude(n), got.dtype);
      if (!(std::fabs(error) <= allowed)) {
        if (bad++ == 0 || std::fabs(error) > worst) first = n;
        worst = std::max(worst, std::fabs(error));
      }
      if (!std::isfinite(w)) continue;
      const double outward = e < 0 ? -1 : 1;  // drift is growth or shrinkage
      ++counted;
      sum += outward * error;
      naive_sum += outward * (w - e);
      square += error * error;
      naive_square += (w - e) * (w - e);
    }
    if (bad > 0) {
      faults->push_back(format("%s: %lld of %lld elements wrong, worst at %s: %.9g, expected %.9g +- %.3g", name,
                               static_cast<long long>(bad), static_cast<long long>(size), position(first).c_str(),
                               got.at(first), exact.at(first), 2 * naive_max + 4 * ulp(magnitude(first), got.dtype)));
    }
    if (counted >= 4096) judge_statistics(static_cast<double>(counted), sum, naive_sum, square, naive_square);
  }

  void judge_statistics(double count, double sum, double naive_sum, double square, double naive_square) const {
    const double rmse = std::sqrt(square / count), allowed = rmse_factor * std::sqrt(naive_square / count);
    if (!(rmse <= allowed)) faults->push_back(format("%s: RMSE %.4g, allowed %.4g", name, rmse, allowed));
    // Six standard errors of the mean of count / row independent samples.
    const double noise = 6 * rmse / std::sqrt(count / static_cast<double>(row));
    const double drift = std::fabs(sum / count), naive_drift = std::fabs(naive_sum / count);
    if (!(drift <= naive_drift + noise)) {
      faults->push_back(format("%s: mean signed error %.4g, allowed %.4g", name, drift, naive_drift + noise));
    }
  }

  std::string position(int64_t n) const {
    std::string text = "]";
    for (size_t d = got.dims.size(); d-- > 0;) {
      text = (d == 0 ? "[" : ", ") + std::to_string(n % got.dims[d]) + text;
      n /= got.dims[d];
    }
    return text;
  }
};

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

Executor& executor(int threads) {
  static std::map<int, std::unique_ptr<Executor>> pools;
  std::unique_ptr<Executor>& pool = pools[threads];
  if (!pool && threads == 0) pool = std::make_unique<ReversedExecutor>();
  if (!pool) pool.reset(new_thread_pool(threads));
  return *pool;
}

std::string difference(const Outputs& a, const Outputs& b) {
  for (Array Outputs::*array : {&Outputs::out, &Outputs::logsumexp, &Outputs::weights, &Outputs::column_sums}) {
    const Array &x = a.*array, &y = b.*array;
    if (x == y) continue;
    const char* name = array == &Outputs::out ? "out" : array == &Outputs::logsumexp ? "logsumexp" : "weights or sums";
    if (x.dims != y.dims) return std::string(name) + ": dims differ";
    const size_t element = dtype_size_bytes(x.dtype);
    int64_t n = 0;
    while (std::memcmp(&x.bytes[n * element], &y.bytes[n * element], element) == 0) ++n;
    return format("%s: element %lld is %.9g, other %.9g", name, static_cast<long long>(n), x.at(n), y.at(n));
  }
  return "";
}

Outputs run(const Kernel& kernel, const AttentionDesc& desc, const Inputs& in, const RunOptions& options) {
  Random random(options.layout_seed);
  auto layout = [&] {
    return options.layout == Layout::kMixed ? static_cast<Layout>(random.integer(0, kNumLayouts - 1)) : options.layout;
  };
  ForwardArgs args;
  args.dropout_seed = in.dropout_seed;
  args.dropout_offset = in.dropout_offset;
  std::vector<Placed> inputs;
  for (const InputName& operand : kInputs) {
    inputs.push_back(Placed::input(in.*operand.array, layout(), options.guard));
    args.*operand.tensor = inputs.back().tensor();
  }
  const OutputDims dims = output_dims(desc, options.logsumexp);
  const DType statistics = statistics_dtype(desc);
  const Placed out = Placed::output(desc.dtype, dims.out, layout(), options.guard);
  const Placed logsumexp = Placed::output(statistics, dims.logsumexp, layout(), options.guard);
  const Placed weights = Placed::output(desc.dtype, dims.weights, layout(), options.guard);
  const Placed column_sums = Placed::output(statistics, dims.column_sums, layout(), options.guard);
  args.out = out.tensor();
  args.logsumexp = logsumexp.tensor();
  args.weights = weights.tensor();
  args.column_sums = column_sums.tensor();

  Executor& threads = executor(options.threads);
  const size_t workspace_bytes = kernel.workspace_bytes(desc, threads.num_threads());
  const GuardedBytes workspace(workspace_bytes, options.guard, 0xff);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace_bytes;
  Outputs o;
  if (options.through_plan) {
    const Result<Plan> plan = polyhead::plan(desc, {kernel.name, &threads});
    const Status status = plan.ok() ? plan->forward(args) : plan.status();
    if (!status.ok()) o.faults.push_back("plan: " + status.message());
  } else {
    kernel.forward(desc, args, threads);
  }
  o.out = out.result("out", &o.faults);
  o.logsumexp = logsumexp.result("logsumexp", &o.faults);
  o.weights = weights.result("weights", &o.faults);
  o.column_sums = column_sums.result("column_sums", &o.faults);
  for (size_t n = 0; n < inputs.size(); ++n) {
    if (!inputs[n].unchanged()) o.faults.push_back(std::string(kInputs[n].name) + " was written");
  }
  if (workspace_bytes % 64 != 0) o.faults.push_back("workspace_bytes is no multiple of 64");
  return o;
}

Expected expected(const AttentionDesc& desc, const Inputs& in) {
  Expected e;
  e.exact = reference_outputs<double>(desc, in, true);
  e.naive = desc.dtype == DType::kFloat64 ? reference_outputs<double>(desc, in, false)
                                          : reference_outputs<float>(desc, in, false);
  Inputs absolute = in;
  for (int64_t n = 0; n < absolute.value.size(); ++n) absolute.value.set(n, std::fabs(absolute.value.at(n)));
  e.magnitude = reference_outputs<double>(desc, absolute, true).out;
  return e;
}

std::string mismatch(const Outputs& got, const Expected& want, const Problem& problem) {
  const AttentionDesc& desc = problem.desc;
  const bool shifted = problem.fill == Fill::kShiftUp || problem.fill == Fill::kShiftDown;
  const double rmse = desc.dtype == DType::kBFloat16 || shifted ? 1.5 : 1.1;
  const double statistics_rmse = shifted ? 1.5 : 1.1;
  const Outputs& exact = want.exact;
  std::vector<std::string> faults = got.faults;

  Judge{"out", got.out,         exact.out, want.naive.out, [&](int64_t n) { return want.magnitude.at(n); },
        rmse,  desc.head_dim_v, &faults}
      .run();
  // |L| <= largest |S| + log(keys)
  const double log_keys = std::log(static_cast<double>(desc.seqlen_k) + 1);
  if (got.logsumexp.given()) {
    Judge{"logsumexp",
          got.logsumexp,
          exact.logsumexp,
          want.naive.logsumexp,
          [&](int64_t n) { return std::fabs(exact.logsumexp.at(n)) + log_keys; },
          statistics_rmse,
          1,
          &faults}
        .run();
  }
  Judge{"weights", got.weights,   exact.weights, want.naive.weights, [&](int64_t n) { return exact.weights.at(n); },
        rmse,      desc.seqlen_k, &faults}
      .run();
  Judge{"column_sums",
        got.column_sums,
        exact.column_sums,
        want.naive.column_sums,
        [&](int64_t n) { return exact.column_sums.at(n); },
        statistics_rmse,
        desc.seqlen_k,
        &faults}
      .run();
  judge_hidden_rows(desc, got, exact.logsumexp, &faults);

  std::string text;
  for (const std::string& fault : faults) text += (text.empty() ? "" : "\n") + fault;
  return text;
}

}  // namespace polyhead::testing
