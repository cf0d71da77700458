#include "testing/call.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "reference/attention.h"
#include "testing/pages.h"

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

BackwardArgs dense_args(const BackwardInputs& in) {
  BackwardArgs args;
  args.forward = dense_args(in.forward);
  args.forward.out = view(in.out);
  args.forward.logsumexp = view(in.logsumexp);
  args.grad_out = view(in.grad_out);
  args.grad_logsumexp = view(in.grad_logsumexp);
  args.delta = view(in.delta);
  args.accumulate = in.accumulate;
  return args;
}

template <class T>
Outputs reference_outputs(const AttentionDesc& desc, const Inputs& in, bool wide) {
  const OutputDims dims = output_dims(desc, true);
  const DType weights = wide ? DType::kFloat64 : desc.dtype;
  const DType statistics = wide ? DType::kFloat64 : statistics_dtype(desc);
  auto array = [](DType dtype, const std::vector<int64_t>& d) {
    Array a = d.empty() ? Array() : Array(dtype, d);
    std::fill(a.bytes.begin(), a.bytes.end(), uint8_t{0xff});  // NaN
    return a;
  };
  Outputs o;
  o.out = array(wide ? DType::kFloat64 : out_dtype(desc), dims.out);
  o.logsumexp = array(statistics, dims.logsumexp);
  o.attn_weights = array(weights, dims.attn_weights);
  o.column_sums = array(statistics, dims.column_sums);
  ForwardArgs args = dense_args(in);
  args.out = view(o.out);
  args.logsumexp = view(o.logsumexp);
  args.attn_weights = view(o.attn_weights);
  args.column_sums = view(o.column_sums);
  std::vector<Tensor> captures;
  for (const Array& a : in.captures) captures.push_back(view(a));
  args.captures = captures;
  AttentionDesc dense = desc;  // as the inputs are stored
  dense.page_size = dense.num_pages = 0;
  reference::forward<T>(dense, args);
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

// The first of either call, which may have written nothing because nothing was to be written.
template <class Results>
static std::string fault_of(const Results& a, const Results& b) {
  const std::vector<std::string>& faults = a.faults.empty() ? b.faults : a.faults;
  return faults.empty() ? "" : faults.front();
}

std::string difference(const Outputs& a, const Outputs& b) {
  std::string text = difference("out", a.out, b.out);
  if (text.empty()) text = difference("logsumexp", a.logsumexp, b.logsumexp);
  if (text.empty()) text = difference("attn_weights", a.attn_weights, b.attn_weights);
  if (text.empty()) text = difference("column_sums", a.column_sums, b.column_sums);
  return text.empty() ? fault_of(a, b) : text;
}

std::string difference(const Gradients& a, const Gradients& b, GradientSet asked) {
  std::string text;
  for (int n = 0; n < kNumGradients && text.empty(); ++n) {
    const auto gradient = kGradients[n].gradient;
    if (asked >> n & 1) text = difference(kGradients[n].name, a.*gradient, b.*gradient);
  }
  for (size_t n = 0; n < a.captures.size() && text.empty() && (asked & kCapturedGradients) != 0; ++n) {
    text = difference("grad_captures", a.captures[n], b.captures[n]);
  }
  return text.empty() ? fault_of(a, b) : text;
}

RunOptions run_options(const Problem& problem) {
  RunOptions options;
  options.layout = problem.layout;
  options.layout_seed = problem.layout_seed != 0 ? problem.layout_seed : problem.seed;
  options.guard = options.layout_seed % 2 == 0 ? Guard::kStart : Guard::kEnd;
  options.through_plan = true;
  return options;
}

Layout PlacedInputs::next_layout() {
  return options_.layout == Layout::kMixed ? static_cast<Layout>(random_.integer(0, kNumLayouts - 1)) : options_.layout;
}

Tensor PlacedInputs::add(const char* name, const Array& array, Layout layout) {
  names_.push_back(name);
  placed_.push_back(Placed::input(array, layout, options_.guard, next_gaps()));
  return placed_.back().tensor();
}

ForwardArgs PlacedInputs::add(const AttentionDesc& desc, const Inputs& in) {
  ForwardArgs args;
  args.dropout_seed = in.dropout_seed;
  args.dropout_offset = in.dropout_offset;
  const bool row =
      options_.layout == Layout::kQkv && side_by_side(desc) && in.query.given() && in.key.given() && in.value.given();
  if (row) add_row(in, args);
  const bool paged = desc.page_size > 0;
  if (paged) {
    const Pages pages = in_pages(desc, in, options_.layout_seed);
    args.key = add("key", pages.key);
    args.value = add("value", pages.value);
    args.key_scales = add("key_scales", pages.key_scales);
    args.value_scales = add("value_scales", pages.value_scales);
    args.page_table = add("page_table", pages.table);
  }
  for (const InputName& operand : kInputs) {
    const bool scales = operand.array == &Inputs::key_scales || operand.array == &Inputs::value_scales;
    const bool keys = operand.array == &Inputs::key || operand.array == &Inputs::value;
    const bool in_row = operand.array == &Inputs::query || keys;
    if (!(row && in_row) && !(paged && (keys || scales))) args.*operand.tensor = add(operand.name, in.*operand.array);
  }
  for (const Array& a : in.captures) captures_.push_back(a.given() ? add("a captured tensor", a) : Tensor());
  args.captures = captures_;
  return args;
}

// Query, key and value side by side in one row for each token.
void PlacedInputs::add_row(const Inputs& in, ForwardArgs& args) {
  const Array* const operands[] = {&in.query, &in.key, &in.value};
  const size_t lead = in.query.dims.size() - 2;  // [batch, rows] or [rows]
  std::vector<int64_t> dims(in.query.dims.begin(), in.query.dims.begin() + static_cast<std::ptrdiff_t>(lead));
  int64_t tokens = 1, width = 0;
  for (const int64_t d : dims) tokens *= d;
  for (const Array* operand : operands) width += operand->dims[lead] * operand->dims[lead + 1];
  dims.push_back(width);
  Array row(in.query.dtype, dims);
  auto to = row.bytes.begin();
  for (int64_t token = 0; token < tokens; ++token) {
    for (const Array* operand : operands) {
      const auto bytes = static_cast<std::ptrdiff_t>(operand->bytes.size()) / tokens;
      to = std::copy_n(operand->bytes.begin() + token * bytes, bytes, to);
    }
  }
  const Tensor placed = add("query, key or value", row, Layout::kBshd);
  Tensor parts[3] = {view(in.query), view(in.key), view(in.value)};
  split_row(placed, parts);
  args.query = parts[0];
  args.key = parts[1];
  args.value = parts[2];
}

BackwardArgs PlacedInputs::add(const AttentionDesc& desc, const BackwardInputs& in) {
  BackwardArgs args;
  args.forward = add(desc, in.forward);
  args.forward.out = add("out", in.out);
  args.forward.logsumexp = add("logsumexp", in.logsumexp);
  const Layout layout = next_layout();
  const bool expanded = in.repeated_grad_out && options_.layout == Layout::kMixed;
  args.grad_out = add("grad_out", in.grad_out, expanded ? Layout::kExpanded : layout);
  args.grad_logsumexp = add("grad_logsumexp", in.grad_logsumexp);
  args.delta = add("delta", in.delta);
  args.accumulate = in.accumulate;
  return args;
}

void PlacedInputs::check_unchanged(std::vector<std::string>* faults) const {
  for (size_t n = 0; n < placed_.size(); ++n) {
    if (!placed_[n].unchanged()) faults->push_back(std::string(names_[n]) + " was written");
  }
}

static bool returns_logsumexp(const AttentionDesc& desc, const RunOptions& options) {
  return options.logsumexp && desc.normalizer == Normalizer::kSoftmax;
}

PlacedOutputs::PlacedOutputs(const AttentionDesc& desc, const RunOptions& options, PlacedInputs& inputs)
    : out_(Placed::output(out_dtype(desc), output_dims(desc, true).out, inputs.next_layout(), options.guard,
                          OperandRole::kOutput, inputs.next_gaps())),
      logsumexp_(Placed::output(statistics_dtype(desc), output_dims(desc, returns_logsumexp(desc, options)).logsumexp,
                                inputs.next_layout(), options.guard, OperandRole::kOutput, inputs.next_gaps())),
      weights_(Placed::output(desc.dtype, output_dims(desc, true).attn_weights, inputs.next_layout(), options.guard,
                              OperandRole::kOutput, inputs.next_gaps())),
      column_sums_(Placed::output(statistics_dtype(desc), output_dims(desc, true).column_sums, inputs.next_layout(),
                                  options.guard, OperandRole::kOutput, inputs.next_gaps())) {}

void PlacedOutputs::give_to(ForwardArgs& args) const {
  args.out = out_.tensor();
  args.logsumexp = logsumexp_.tensor();
  args.attn_weights = weights_.tensor();
  args.column_sums = column_sums_.tensor();
}

Outputs PlacedOutputs::result() const {
  Outputs o;
  o.out = out_.result("out", &o.faults);
  o.logsumexp = logsumexp_.result("logsumexp", &o.faults);
  o.attn_weights = weights_.result("attn_weights", &o.faults);
  o.column_sums = column_sums_.result("column_sums", &o.faults);
  return o;
}

PlacedGradients::PlacedGradients(const AttentionDesc& desc, const ForwardArgs& forward, const BackwardInputs& in,
                                 GradientSet asked, const RunOptions& options, PlacedInputs& inputs) {
  for (int n = 0; n < kNumGradients; ++n) {
    const Tensor& input = forward.*kGradients[n].input_tensor;
    const Array& before = in.before.*kGradients[n].gradient;
    std::vector<int64_t> dims;
    if (input.given() && (asked >> n & 1)) dims.assign(input.dims, input.dims + input.ndim);
    const Layout layout = inputs.next_layout();
    const uint64_t gaps = inputs.next_gaps();
    of_.push_back(in.accumulate && !dims.empty()
                      ? Placed::accumulator(before, layout, options.guard, OperandRole::kGradient, gaps)
                      : Placed::output(gradient_dtype(desc, n, input.dtype), dims, layout, options.guard,
                                       OperandRole::kGradient, gaps));
  }
  for (size_t n = 0; n < desc.captures.size(); ++n) {
    const Tensor& input = forward.captures[n];
    std::vector<int64_t> dims;
    if (has_gradient(input.dtype) && (asked & kCapturedGradients) != 0) {
      dims.assign(input.dims, input.dims + input.ndim);
    }
    const Layout layout = inputs.next_layout();
    const uint64_t gaps = inputs.next_gaps();
    of_captures_.push_back(
        in.accumulate && !dims.empty()
            ? Placed::accumulator(in.before.captures[n], layout, options.guard, OperandRole::kGradient, gaps)
            : Placed::output(input.dtype, dims, layout, options.guard, OperandRole::kGradient, gaps));
    captures_.push_back(of_captures_.back().tensor());
  }
}

void PlacedGradients::give_to(BackwardArgs& args) const {
  for (int n = 0; n < kNumGradients; ++n) args.*kGradients[n].tensor = of_[static_cast<size_t>(n)].tensor();
  args.grad_captures = captures_;
}

Gradients PlacedGradients::result() const {
  Gradients g;
  for (int n = 0; n < kNumGradients; ++n) {
    g.*kGradients[n].gradient = of_[static_cast<size_t>(n)].result(kGradients[n].name, &g.faults);
  }
  for (const Placed& placed : of_captures_) g.captures.push_back(placed.result("grad_captures", &g.faults));
  return g;
}

Outputs run(const Kernel& kernel, const AttentionDesc& desc, const Inputs& in, const RunOptions& options) {
  PlacedInputs inputs(options);
  ForwardArgs args = inputs.add(desc, in);
  const PlacedOutputs outputs(desc, options, inputs);
  outputs.give_to(args);
  Executor& threads = options.executor ? *options.executor : executor(options.threads);
  const size_t workspace_bytes = kernel.workspace_bytes(desc, threads.num_threads()).value();
  const GuardedBytes workspace(workspace_bytes, options.guard, 0xff);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace_bytes;
  std::vector<std::string> faults;
  if (options.through_plan) {
    const Result<Plan> plan = polyhead::plan(desc, {kernel.name, {.executor = &threads}});
    const Status status = plan.ok() ? plan->forward(args) : plan.status();
    if (!status.ok()) faults.push_back("plan: " + status.message());
  } else {
    const Status status = kernel.forward(desc, args, threads);
    if (!status.ok()) faults.push_back("forward: " + status.message());
  }
  Outputs o = outputs.result();
  o.faults.insert(o.faults.begin(), faults.begin(), faults.end());
  inputs.check_unchanged(&o.faults);
  if (workspace_bytes % 64 != 0) o.faults.push_back("workspace_bytes is no multiple of 64");
  return o;
}

Gradients run(const Kernel& kernel, const AttentionDesc& desc, const BackwardInputs& in, const RunOptions& options,
              GradientSet asked) {
  PlacedInputs inputs(options);
  BackwardArgs args = inputs.add(desc, in);
  const PlacedGradients gradients(desc, args.forward, in, asked, options, inputs);
  gradients.give_to(args);
  Executor& threads = options.executor ? *options.executor : executor(options.threads);
  const size_t workspace_bytes = kernel.backward_workspace_bytes(desc, threads.num_threads()).value();
  const GuardedBytes workspace(workspace_bytes, options.guard, 0xff);
  args.forward.workspace = workspace.data();
  args.forward.workspace_bytes = workspace_bytes;
  std::vector<std::string> faults;
  if (options.through_plan) {
    const Result<Plan> plan = polyhead::plan(desc, {kernel.name, {.executor = &threads}});
    const Status status = plan.ok() ? plan->backward(args) : plan.status();
    if (!status.ok()) faults.push_back("plan: " + status.message());
  } else {
    const Status status = kernel.backward(desc, args, threads);
    if (!status.ok()) faults.push_back("backward: " + status.message());
  }
  Gradients g = gradients.result();
  g.faults.insert(g.faults.begin(), faults.begin(), faults.end());
  inputs.check_unchanged(&g.faults);
  if (workspace_bytes % 64 != 0) g.faults.push_back("backward_workspace_bytes is no multiple of 64");
  return g;
}

}  // namespace polyhead::testing
