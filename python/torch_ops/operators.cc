// The kernels of torch.ops.polyhead.* on the CPU and on CUDA devices, registered where this library is loaded.
// polyhead/torch/_ops.py runs the same calls over the Python binding where this library is not there.
#include <array>
#include <memory>
#include <span>
#include <utility>

#include "block_operators.h"
#include "call_counts.h"
#include "capture.h"
#include "merge_operators.h"
#include "operands.h"
#include "operator_kernel.h"
#include "plan_cache.h"
#include "polyhead/api.h"
#include "polyhead/attention.h"
#include "schemas.h"
#include "stable_abi.h"
#include "stable_tensor.h"

// Read by polyhead/torch/_cpp.py: the operator that torch did not take, or null.
extern "C" POLYHEAD_API const char* polyhead_torch_not_registered();

namespace polyhead::torch_ops {
namespace {

constexpr uint64_t kNumForwardArguments = 3 + kNumSharedOptions + 3;
constexpr uint64_t kNumBackwardArguments = 8 + kNumSharedOptions;
constexpr uint64_t kNumProgramArguments = CapturingProgram::kNumArguments;

std::shared_ptr<const Plan> plan_of(const Operands& operands) {
  auto plan = python::cached_plan(operands.desc, operands.kernel, operands.place.where());
  check(plan.status());
  return *plan;
}

// Those of the overloads below_autograd and inference.
Options plain_options(ArgumentReader& arguments) {
  Options options;
  options.causal = arguments.flag();
  options.scale = arguments.optional_real();
  options.align = arguments.integer();
  const int64_t layout = arguments.integer();
  options.heads_first = layout != 0;
  options.same_heads = layout == 1;
  return options;
}

// For args.out, with the strides that torch gives [B, H, S, D]: polyhead/torch/_strides.py has the rule.
StableTensor new_out_of_torch(ForwardArgs& args) {
  bool like_query = args.query.dims[3] == args.value.dims[3];
  for (const Tensor* each : {&args.query, &args.key, &args.value}) {
    like_query = like_query && each->strides[3] == 1 && each->num_elements() > 0;
  }
  Tensor seen = heads_and_rows_swapped(args.out);
  StableTensor out =
      like_query ? new_tensor_like(seen, heads_and_rows_swapped(args.query), "out") : new_tensor(seen, "out");
  args.out = heads_and_rows_swapped(seen);
  return out;
}

// Computes operands, whose desc is complete; logsumexp where its tensor has dims.
StableTensor run_forward(Operands& operands, StableTensor& logsumexp, StableTensor& weights,
                         StableTensor& column_sums) {
  const AttentionDesc& d = operands.desc;
  ForwardArgs& args = operands.args;
  const auto plan = plan_of(operands);
  args.out = expected_tensor(d, &ForwardArgs::out);
  StableTensor out = operands.heads_first ? new_out_of_torch(args) : new_tensor(args.out, "out");
  if (args.logsumexp.given()) logsumexp = new_tensor(args.logsumexp, "logsumexp");
  if (d.return_weights != ReturnWeights::kNone) {
    args.attn_weights = expected_tensor(d, &ForwardArgs::attn_weights);
    weights = new_tensor(args.attn_weights, "attn_weights");
  }
  if (d.return_column_sums) {
    args.column_sums = expected_tensor(d, &ForwardArgs::column_sums);
    column_sums = new_tensor(args.column_sums, "column_sums");
  }
  operands.place.forward(*plan, args);
  count_call(Counted::kAttentionForward, d, plan->kernel_name());
  return out;
}

// What stands for logsumexp where there is none.
StableTensor nothing() {
  Tensor empty(nullptr, DType::kFloat32, {0});
  return new_tensor(empty, "logsumexp");
}

// What a call asks for besides out and logsumexp.
struct Asked {
  explicit Asked(ArgumentReader& arguments)
      : return_weights(arguments.integer()), return_column_sums(arguments.flag()), out_float32(arguments.flag()) {}

  int64_t return_weights;
  bool return_column_sums, out_float32;
};

void run_forward(Operands& operands, const Asked& asked, StableIValue* stack) {
  const int64_t weights_asked = asked.return_weights;
  if (weights_asked < 0 || weights_asked > 2) {
    bad_value("return_weights is %lld, must be 0, 1 (per head) or 2 (mean)", static_cast<long long>(weights_asked));
  }
  operands.desc.return_weights = static_cast<ReturnWeights>(weights_asked);
  operands.desc.return_column_sums = asked.return_column_sums;
  if (asked.out_float32) operands.desc.out_dtype = DType::kFloat32;
  operands.args.logsumexp = expected_tensor(operands.desc, &ForwardArgs::logsumexp);
  StableTensor logsumexp, weights, column_sums;
  stack[0] = result(run_forward(operands, logsumexp, weights, column_sums));
  if (operands.desc.normalizer == Normalizer::kNone) logsumexp = nothing();
  stack[1] = result(std::move(logsumexp));
  stack[2] = optional_result(std::move(weights));
  stack[3] = optional_result(std::move(column_sums));
}

void attention_forward(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_forward", num_inputs, kNumForwardArguments);
  ArgumentReader arguments(stack);
  const StableTensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const Options options(arguments);
  const Asked asked(arguments);
  Operands operands(query, key, value, options);
  run_forward(operands, asked, stack);
}

void forward_of_cache(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_forward.cached", num_inputs, kNumForwardArguments + 3);
  ArgumentReader arguments(stack);
  const StableTensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  Options options(arguments);
  const Asked asked(arguments);
  options.page_table = arguments.optional_tensor();
  options.key_scales = arguments.optional_tensor();
  options.value_scales = arguments.optional_tensor();
  Operands operands(query, key, value, options);
  run_forward(operands, asked, stack);
}

void forward_of_program(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_forward.program", num_inputs, kNumForwardArguments + kNumProgramArguments);
  ArgumentReader arguments(stack);
  const StableTensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const Options options(arguments);
  const Asked asked(arguments);
  const CapturingProgram program(arguments);
  OperandsOfProgram operands(query, key, value, options, program);
  run_forward(operands, asked, stack);
}

void forward_below_autograd(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_forward.below_autograd", num_inputs, 7);
  ArgumentReader arguments(stack);
  const StableTensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const Options options = plain_options(arguments);
  Operands operands(query, key, value, options);
  operands.args.logsumexp = expected_tensor(operands.desc, &ForwardArgs::logsumexp);
  StableTensor logsumexp, weights, column_sums;
  stack[0] = result(run_forward(operands, logsumexp, weights, column_sums));
  stack[1] = result(std::move(logsumexp));
}

void forward_inference(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_forward.inference", num_inputs, 7);
  ArgumentReader arguments(stack);
  const StableTensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const Options options = plain_options(arguments);
  Operands operands(query, key, value, options);
  StableTensor logsumexp, weights, column_sums;
  stack[0] = result(run_forward(operands, logsumexp, weights, column_sums));
}

// The tensors of a backward call beside query, key, value and the options.
struct BackwardTensors {
  const StableTensor& grad_out;
  const StableTensor& grad_logsumexp;
  const StableTensor& out;
  const StableTensor& logsumexp;
};

// A new gradient of the shape of `input`, if needed.
StableTensor gradient(bool needed, const Tensor& input, bool is_given, const char* name, Tensor& view,
                      bool heads_first = false) {
  if (!needed) return {};
  if (!is_given) bad_value("needs names %s, which is not given", name);
  view = input;
  return new_tensor(view, name, heads_first);
}

constexpr size_t kNumPlainGradients = 6;  // of what is no capture
using PlainGradients = std::array<StableTensor, kNumPlainGradients>;
using CaptureGradients = std::array<StableTensor, Program::kMostCaptures>;

// Into `args`, where bits of `needs` say so.
CaptureGradients capture_gradients(const OperandsOfProgram& operands, int64_t needs, std::span<Tensor> views,
                                   BackwardArgs& args) {
  CaptureGradients grads;
  const size_t count = operands.args.captures.size();
  for (size_t i = 0; i < grads.size(); ++i) {
    const std::string name = "capture" + std::to_string(i);
    const bool needed = (needs >> (kNumPlainGradients + i) & 1) != 0;
    grads[i] = gradient(needed, operands.captures[i], i < count, name.c_str(), views[i]);
    if (needed) views[i] = python::as_capture(views[i]);
  }
  args.grad_captures = views.first(count);
  return grads;
}

// `args` may ask for gradients of captures already.
PlainGradients run_backward(Operands& operands, const BackwardTensors& tensors, int64_t needs, BackwardArgs& args) {
  const AttentionDesc& d = operands.desc;
  const int dims = d.packed ? 3 : 4;
  const char* const out_dims =
      d.packed ? "[total_q, num_heads, head_dim_v]" : "[batch, seqlen_q, num_heads, head_dim_v]";
  const char* const sums_dims = d.packed ? "[num_heads, total_q]" : "[batch, num_heads, seqlen_q]";
  args.grad_out = view_of(tensors.grad_out, {"grad_out", dims, dims, out_dims});
  operands.args.out = view_of(tensors.out, {"out", dims, dims, out_dims});
  if (operands.heads_first) {
    args.grad_out = heads_and_rows_swapped(args.grad_out);
    operands.args.out = heads_and_rows_swapped(operands.args.out);
  }
  if (d.normalizer == Normalizer::kSoftmax) {
    operands.args.logsumexp = view_of(tensors.logsumexp, {"logsumexp", dims - 1, dims - 1, sums_dims});
  }
  if (tensors.grad_logsumexp.given()) {
    args.grad_logsumexp = view_of(tensors.grad_logsumexp, {"grad_logsumexp", dims - 1, dims - 1, sums_dims});
  }
  // Out tells by itself whether it was asked for in float32; any other dtype than query's is refused as out's.
  const bool wider = d.dtype == DType::kBFloat16 || d.dtype == DType::kFloat16;
  if (wider && operands.args.out.dtype == DType::kFloat32) operands.desc.out_dtype = DType::kFloat32;
  const auto plan = plan_of(operands);

  const ForwardArgs& in = operands.args;
  Tensor grad_attn_bias;
  PlainGradients grads = {
      gradient((needs & 1) != 0, in.query, true, "query", args.grad_query, operands.heads_first),
      gradient((needs & 2) != 0, in.key, true, "key", args.grad_key, operands.heads_first),
      gradient((needs & 4) != 0, in.value, true, "value", args.grad_value, operands.heads_first),
      gradient((needs & 8) != 0, operands.attn_bias, in.attn_bias.given(), "attn_bias", grad_attn_bias),
      gradient((needs & 16) != 0, in.alibi_slopes, in.alibi_slopes.given(), "alibi_slopes", args.grad_alibi_slopes),
      gradient((needs & 32) != 0, in.sink_logits, in.sink_logits.given(), "sink_logits", args.grad_sink_logits),
  };
  if ((needs & 8) != 0) args.grad_attn_bias = python::widened_to_4d(grad_attn_bias);
  args.forward = operands.args;
  const int64_t all = (int64_t{1} << (kNumPlainGradients + args.grad_captures.size())) - 1;
  if ((needs & all) != 0) {
    operands.place.backward(*plan, args);
    count_call(Counted::kAttentionBackward, d, plan->kernel_name());
  }
  return grads;
}

// What both overloads begin with, in the order of the schema.
struct BackwardInputs {
  explicit BackwardInputs(ArgumentReader& arguments)
      : grad_out(arguments.tensor()),
        grad_logsumexp(arguments.optional_tensor()),
        query(arguments.tensor()),
        key(arguments.tensor()),
        value(arguments.tensor()),
        out(arguments.tensor()),
        logsumexp(arguments.tensor()),
        needs(arguments.integer()) {}

  BackwardTensors tensors() const { return {grad_out, grad_logsumexp, out, logsumexp}; }

  StableTensor grad_out, grad_logsumexp, query, key, value, out, logsumexp;
  int64_t needs;
};

void attention_backward(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_backward", num_inputs, kNumBackwardArguments);
  ArgumentReader arguments(stack);
  const BackwardInputs x(arguments);
  const Options options(arguments);

  Operands operands(x.query, x.key, x.value, options);
  BackwardArgs args;
  auto grads = run_backward(operands, x.tensors(), x.needs, args);
  for (size_t i = 0; i < grads.size(); ++i) stack[i] = result(std::move(grads[i]));
}

void backward_of_program(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_backward.program", num_inputs, kNumBackwardArguments + kNumProgramArguments);
  ArgumentReader arguments(stack);
  const BackwardInputs x(arguments);
  const Options options(arguments);
  const CapturingProgram program(arguments);

  OperandsOfProgram operands(x.query, x.key, x.value, options, program);
  BackwardArgs args;
  std::array<Tensor, Program::kMostCaptures> views;
  auto of_captures = capture_gradients(operands, x.needs, views, args);
  auto grads = run_backward(operands, x.tensors(), x.needs, args);
  for (size_t i = 0; i < grads.size(); ++i) stack[i] = result(std::move(grads[i]));
  for (size_t i = 0; i < of_captures.size(); ++i) stack[grads.size() + i] = result(std::move(of_captures[i]));
}

void backward_below_autograd(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_backward.below_autograd", num_inputs, 11);
  ArgumentReader arguments(stack);
  const StableTensor grad_out = arguments.tensor();
  const StableTensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const StableTensor out = arguments.tensor(), logsumexp = arguments.tensor();
  const int64_t needs = arguments.integer() & 7;
  const Options options = plain_options(arguments);

  Operands operands(query, key, value, options);
  BackwardArgs args;
  auto grads = run_backward(operands, {grad_out, {}, out, logsumexp}, needs, args);
  for (size_t i = 0; i < 3; ++i) stack[i] = result(std::move(grads[i]));
}

constexpr OperatorKernel kPlainKernels[] = {
    {"attention_forward.below_autograd", forward_below_autograd},
    {"attention_forward.inference", forward_inference},
    {"attention_backward.below_autograd", backward_below_autograd},
};
constexpr OperatorKernel kKernels[] = {
    // take a string
    {"attention_forward", attention_forward},
    {"attention_backward", attention_backward},
    {"attention_forward.cached", forward_of_cache},
    {"attention_forward.program", forward_of_program},
    {"attention_backward.program", backward_of_program},
};

// The name of what torch did not take; null: it took all.
const char* register_for(const char* dispatch_key, std::span<const std::span<const OperatorKernel>> all) {
  TorchLibraryHandle library = nullptr;  // never deleted: that would take the kernels away
  if (aoti_torch_library_init_impl("polyhead", dispatch_key, __FILE__, __LINE__, &library) != 0) return "the namespace";
  for (const auto& some : all) {
    for (const OperatorKernel& each : some) {
      if (aoti_torch_library_impl(library, each.name, each.kernel) != 0) return each.name;
    }
  }
  return nullptr;
}

const char* register_operators() {
  if (const char* schema = define_operators()) return schema;
  const bool has_lists_and_strings =
      torch_list_size != nullptr && torch_string_length != nullptr;  // else Python's: _ops.py
  const std::span<const OperatorKernel> none, with_strings = has_lists_and_strings ? kKernels : none;
  const std::span<const OperatorKernel> on_cuda[] = {kPlainKernels, with_strings, block_kernels()};
  const std::span<const OperatorKernel> on_cpu[] = {kPlainKernels, with_strings, block_kernels(),
                                                    has_lists_and_strings ? merge_kernels() : none};
  const char* failed = register_for("CPU", on_cpu);
  return failed == nullptr ? register_for("CUDA", on_cuda) : failed;
}

const char* const not_registered = register_operators();

}  // namespace
}  // namespace polyhead::torch_ops

const char* polyhead_torch_not_registered() { return polyhead::torch_ops::not_registered; }
