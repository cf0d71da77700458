#include "harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "reference/attention.h"

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

template <class... A>
std::string format(const char* text, A... a) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, a...);
  return buffer;
}

}  // namespace

ForwardArgs dense_args(const Inputs& in) {
  ForwardArgs args;
  for (const InputName& operand : kInputs) args.*operand.tensor = view(in.*operand.array);
  args.dropout_seed = in.dropout_seed;
  args.dropout_offset = in.dropout_offset;
  return args;
}

template <class T>
Outputs reference_outputs(const AttentionDesc& desc, const Inputs& in, bool wide) {
  const OutputDims dims = output_dims(desc, true);
  const DType out = wide ? DType::kFloat64 : desc.dtype;
  const DType statistics = wide ? DType::kFloat64 : statistics_dtype(desc);
  auto array = [](DType dtype, const std::vector<int64_t>& d) {
    Array a = d.empty() ? Array() : Array(dtype, d);
    std::fill(a.bytes.begin(), a.bytes.end(), uint8_t{0xff});  // NaN
    return a;
  };
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

template Outputs reference_outputs<double>(const AttentionDesc&, const Inputs&, bool);
template Outputs reference_outputs<float>(const AttentionDesc&, const Inputs&, bool);

Executor& executor(int threads) {
  static std::map<int, std::unique_ptr<Executor>> pools;
  std::unique_ptr<Executor>& pool = pools[threads];
  if (!pool && threads == 0) pool = std::make_unique<ReversedExecutor>();
  if (!pool) pool.reset(new_thread_pool(threads));
  return *pool;
}

std::string difference(const char* name, const Array& x, const Array& y) {
  if (x == y) return "";
  if (x.dims != y.dims) return std::string(name) + ": dims differ";
  const size_t element = dtype_size_bytes(x.dtype);
  int64_t n = 0;
  while (std::memcmp(&x.bytes[n * element], &y.bytes[n * element], element) == 0) ++n;
  return format("%s: element %lld is %.9g, other %.9g", name, static_cast<long long>(n), x.at(n), y.at(n));
}

std::string difference(const Outputs& a, const Outputs& b) {
  std::string text = difference("out", a.out, b.out);
  if (text.empty()) text = difference("logsumexp", a.logsumexp, b.logsumexp);
  if (text.empty()) text = difference("weights", a.weights, b.weights);
  if (text.empty()) text = difference("column_sums", a.column_sums, b.column_sums);
  return text;
}

Layout PlacedInputs::next_layout() {
  return options_.layout == Layout::kMixed ? static_cast<Layout>(random_.integer(0, kNumLayouts - 1)) : options_.layout;
}

Tensor PlacedInputs::add(const char* name, const Array& array, Layout layout) {
  names_.push_back(name);
  placed_.push_back(Placed::input(array, layout, options_.guard));
  return placed_.back().tensor();
}

ForwardArgs PlacedInputs::add(const Inputs& in) {
  ForwardArgs args;
  args.dropout_seed = in.dropout_seed;
  args.dropout_offset = in.dropout_offset;
  for (const InputName& operand : kInputs) args.*operand.tensor = add(operand.name, in.*operand.array);
  return args;
}

void PlacedInputs::check_unchanged(std::vector<std::string>* faults) const {
  for (size_t n = 0; n < placed_.size(); ++n) {
    if (!placed_[n].unchanged()) faults->push_back(std::string(names_[n]) + " was written");
  }
}

Outputs run(const Kernel& kernel, const AttentionDesc& desc, const Inputs& in, const RunOptions& options) {
  PlacedInputs inputs(options);
  ForwardArgs args = inputs.add(in);
  const OutputDims dims = output_dims(desc, options.logsumexp);
  const DType statistics = statistics_dtype(desc);
  const Placed out = Placed::output(desc.dtype, dims.out, inputs.next_layout(), options.guard);
  const Placed logsumexp = Placed::output(statistics, dims.logsumexp, inputs.next_layout(), options.guard);
  const Placed weights = Placed::output(desc.dtype, dims.weights, inputs.next_layout(), options.guard);
  const Placed column_sums = Placed::output(statistics, dims.column_sums, inputs.next_layout(), options.guard);
  args.out = out.tensor();
  args.logsumexp = logsumexp.tensor();
  args.weights = weights.tensor();
  args.column_sums = column_sums.tensor();

  Executor& threads = executor(options.threads);
  const size_t workspace_bytes = kernel.workspace_bytes(desc, threads.num_threads()).value();
  const GuardedBytes workspace(workspace_bytes, options.guard, 0xff);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace_bytes;
  Outputs o;
  if (options.through_plan) {
    const Result<Plan> plan = polyhead::plan(desc, {kernel.name, {.executor = &threads}});
    const Status status = plan.ok() ? plan->forward(args) : plan.status();
    if (!status.ok()) o.faults.push_back("plan: " + status.message());
  } else {
    const Status status = kernel.forward(desc, args, threads);
    if (!status.ok()) o.faults.push_back("forward: " + status.message());
  }
  o.out = out.result("out", &o.faults);
  o.logsumexp = logsumexp.result("logsumexp", &o.faults);
  o.weights = weights.result("weights", &o.faults);
  o.column_sums = column_sums.result("column_sums", &o.faults);
  inputs.check_unchanged(&o.faults);
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

}  // namespace polyhead::testing
