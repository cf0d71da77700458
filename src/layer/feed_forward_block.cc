// f of a feed-forward block:   u = in W1 + b1   h = g1 activation(u)   out = residual + g2 (h W2 + b2)        g: dropout
// Saved for backward: u; h is computed once more.
#include <algorithm>
#include <new>
#include <utility>

#include "core/sentence.h"
#include "layer/arguments.h"
#include "layer/call_checks.h"
#include "layer/fingerprint.h"
#include "linear/product.h"

namespace polyhead {

struct FeedForwardBlockState : NormBlock {
  FeedForwardBlockDesc desc;

  void expect(Pass pass, StepList* list) const override;
  void emit_inner(Pass pass, const InnerPlaces& f, Memory& workspace, Memory& reserve,
                  std::vector<Step>* steps) const override;
  Status check(Pass, const Call&) const override { return {}; }
};

namespace {

using Gives = ProductStep::Gives;

enum Weight : int { kWeight1 = kArgWeights, kWeight2, kBias1, kBias2 };
enum WeightGradient : int { kGradWeight1 = kArgGradWeights, kGradWeight2, kGradBias1, kGradBias2 };
constexpr int kInnerDropout = 0, kOutputDropout = 1;  // of Call::dropouts

Status check_desc(const FeedForwardBlockDesc& d) {
  Status status =
      check_not_negative({{"batch", d.batch}, {"seqlen", d.seqlen}, {"size", d.size}, {"inner_size", d.inner_size}});
  if (!status.ok()) return status;
  MemoryMap rows;  // of empty vectors too
  rows.take({d.batch, d.seqlen, std::max<int64_t>({d.size, d.inner_size, 1})}, 8);
  if (!rows.fits()) return invalid("the block is too large: its memory passes the address space");
  status = check_activation(d.activation);
  if (status.ok()) status = check_probability("inner_dropout_p", d.inner_dropout_p);
  if (status.ok()) status = check_probability("output_dropout_p", d.output_dropout_p);
  if (!status.ok()) return status;
  if (d.dtype != DType::kFloat32 && d.dtype != DType::kBFloat16 && d.dtype != DType::kFloat16 &&
      d.dtype != DType::kFloat64) {
    return invalid(sentence("dtype is ", dtype_name(d.dtype), ", takes float32, bfloat16, float16 or float64"));
  }
  return check_norm_desc(d.norm);
}

void set_weights(const FeedForwardWeights& weights, int first_argument, Call* call) {
  const Tensor* const in_order[] = {&weights.weight1, &weights.weight2, &weights.bias1, &weights.bias2};
  for (const Tensor* weight : in_order) call->tensors[first_argument++] = *weight;
}

Call call_of(const FeedForwardBlockDesc& d, const FeedForwardBlockForwardArgs& args) {
  Call call;
  call.tensors[kArgQuery] = with_beam(args.x, 4);
  call.tensors[kArgOut] = with_beam(args.out, 4);
  set_weights(args.weights, kWeight1, &call);
  set_norm(args.weights.norm, kArgGamma, &call);
  set_memory(args, &call);
  call.dropouts = {{{"inner_dropout", d.inner_dropout_p, args.inner_dropout_seed, args.inner_dropout_offset},
                    {"output_dropout", d.output_dropout_p, args.output_dropout_seed, args.output_dropout_offset}}};
  return call;
}

}  // namespace

void FeedForwardBlockState::expect(Pass pass, StepList* list) const {
  const auto rows = [&](int argument, const char* told, Role role) {
    Expected& e = list->expected.emplace_back(polyhead::expect(
        argument, told, {dtype, {{"batch", batch}, {"beam", beam}, {"seqlen", seqlen}, {"size", size}}}));
    e.role = role;
    if (argument == kArgGradQuery) e.kind = Expected::Kind::kOptional;
  };
  rows(kArgQuery, "x", Role::kInput);
  expect_parameters(*this, is_backward(pass) ? ParameterUse::kBackward : ParameterUse::kForward, list);
  expect_norm(norm, Role::kInput, kArgGamma, size, dtype, list);
  if (!is_backward(pass)) return rows(kArgOut, "out", Role::kOutput);
  rows(kArgGradOut, "grad_out", Role::kInput);
  rows(kArgGradQuery, "grad_x", Role::kOutput);
  expect_parameters(*this, ParameterUse::kGradients, list);
  expect_norm(norm, Role::kOutput, kArgGradGamma, size, dtype, list);
}

// Backward, the lines above from the last to the first:
//   dY = g2 grad_out   db2 = sum of dY   dW2 = h^T dY   du = activation'(u) g1 (dY W2^T)
//   db1 = sum of du    dW1 = in^T du     grad_in = du W1^T + grad_past
void FeedForwardBlockState::emit_inner(Pass pass, const InnerPlaces& f, Memory& workspace, Memory& reserve,
                                       std::vector<Step>* steps) const {
  const auto take_rows = [&](int64_t columns, Memory& memory) {
    return memory.take(dtype, {batch, beam, seqlen, columns});
  };
  const Place u = has_reserve(pass) ? take_rows(desc.inner_size, reserve) : Place();
  const Place inner = take_rows(desc.inner_size, workspace);  // h, then du
  EpiloguePlaces activated;
  activated.activation = static_cast<linear::Activation>(desc.activation);
  if (pass != Pass::kInference) activated.dropout = kInnerDropout;
  if (!is_backward(pass)) {
    ProductStep first = {Gives::kY, f.in, argument(kWeight1), argument(kBias1), inner, activated};
    first.prepacked = 0;
    first.epilogue.pre_activation = u;
    ProductStep second = {Gives::kY, inner, argument(kWeight2), argument(kBias2), f.out};
    second.prepacked = 1;
    second.epilogue.residual = f.residual;
    if (pass == Pass::kTraining) second.epilogue.dropout = kOutputDropout;
    steps->emplace_back(first);
    steps->emplace_back(second);
    return;
  }
  const bool dropped = desc.output_dropout_p > 0;
  const Place dropped_rows = dropped ? take_rows(size, workspace) : Place(), dY = dropped ? dropped_rows : f.grad_out;
  EpiloguePlaces output_gradient, input_gradient, inner_gradient = activated;
  if (dropped) output_gradient.gradient = true, output_gradient.dropout = kOutputDropout;
  inner_gradient.gradient = true;
  inner_gradient.pre_activation = u;
  input_gradient.residual = f.grad_past;
  steps->emplace_back(PointwiseStep{f.grad_out, dropped_rows, output_gradient, argument(kGradBias2)});
  steps->emplace_back(PointwiseStep{u, inner.only_for(only(kGradWeight2)), activated});
  steps->emplace_back(ProductStep{Gives::kW, inner, argument(kGradWeight2), {}, dY});
  steps->emplace_back(ProductStep{Gives::kX, inner, argument(kWeight2), {}, dY, inner_gradient});
  steps->emplace_back(ProductStep{Gives::kW, f.in, argument(kGradWeight1), argument(kGradBias1), inner});
  steps->emplace_back(ProductStep{Gives::kX, f.grad_in, argument(kWeight1), {}, inner, input_gradient});
}

const FeedForwardBlockDesc& FeedForwardBlock::desc() const { return state_->desc; }
size_t FeedForwardBlock::prepacked_weights_bytes() const { return state_->prepacked.bytes; }
size_t FeedForwardBlock::workspace_bytes() const { return state_->workspace_bytes; }
size_t FeedForwardBlock::backward_workspace_bytes() const { return state_->backward_workspace_bytes; }
const char* FeedForwardBlock::kernel_name() const { return state_->linear->name; }
size_t FeedForwardBlock::reserve_bytes() const { return state_->reserve_bytes; }

Result<FeedForwardBlock> feed_forward_block(const FeedForwardBlockDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  auto state = std::make_shared<FeedForwardBlockState>();
  FeedForwardBlockState& s = *state;
  s.desc = desc;
  if (Status status = set_where(options.where, &s); !status.ok()) return status;
  const Result<const linear::Kernel*> kernel = linear::choose_kernel(desc.dtype, options.kernel, *s.where.device);
  if (!kernel.ok()) return kernel.status();
  s.linear = *kernel;
  const Dim size{"size", desc.size}, inner{"inner_size", desc.inner_size};
  const auto bias = [&](bool present, const Dim& dim) {
    return present ? OperandShape(desc.dtype, {dim}) : OperandShape();
  };
  s.parameters = {{"weights.weight1", "grad_weights.weight1", {desc.dtype, {size, inner}}},
                  {"weights.weight2", "grad_weights.weight2", {desc.dtype, {inner, size}}},
                  {"weights.bias1", "grad_weights.bias1", bias(desc.bias1, inner)},
                  {"weights.bias2", "grad_weights.bias2", bias(desc.bias2, size)}};
  s.num_matrices = 2;
  s.dtype = desc.dtype, s.norm = desc.norm, s.residual = desc.residual;
  s.batch = desc.batch, s.seqlen = desc.seqlen, s.size = desc.size;
  s.in_wanted_by = only(kGradWeight1), s.grad_in_over_in = true;
  s.fingerprint = fingerprint_of(desc);
  constexpr Pass kPasses[] = {Pass::kTraining, Pass::kInference, Pass::kBackward};
  const Status status = make_lists(s, kPasses);
  if (!status.ok()) return status;
  FeedForwardBlock made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status FeedForwardBlock::prepack_weights(const FeedForwardWeights& weights, void* prepacked, size_t bytes,
                                         const Where& where) const {
  Call call;
  call.where = where;
  set_weights(weights, kWeight1, &call);
  return polyhead::prepack_weights(*state_, call, prepacked, bytes);
}

Status FeedForwardBlock::forward(const FeedForwardBlockForwardArgs& args) const {
  return polyhead::forward(*state_, call_of(state_->desc, args));
}

Status FeedForwardBlock::backward(const FeedForwardBlockBackwardArgs& args) const {
  Call call = call_of(state_->desc, args.forward);
  call.tensors[kArgGradOut] = with_beam(args.grad_out, 4);
  call.tensors[kArgGradQuery] = with_beam(args.grad_x, 4);
  set_weights(args.grad_weights, kGradWeight1, &call);
  set_norm(args.grad_weights.norm, kArgGradGamma, &call);
  call.accumulate = args.accumulate;
  return compute(*state_, Pass::kBackward, call);
}

}  // namespace polyhead
