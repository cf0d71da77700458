//   pre-norm:   n = norm(x)   u = n W1 + b1   h = g1 activation(u)   y = x + g2 (h W2 + b2)        g: dropout
//   post-norm:  n = x, and z = x + g2 (h W2 + b2), y = norm(z)
// Saved for backward: u, z, and the norm's statistics; n and h are computed once more.
#include <new>
#include <utility>

#include "contract/where.h"
#include "core/sentence.h"
#include "layer/call_checks.h"
#include "layer/fingerprint.h"
#include "layer/places.h"

namespace polyhead {

struct FeedForwardBlockState {
  FeedForwardBlockDesc desc;
  const linear::Kernel* linear = nullptr;
  Run run;
  uint64_t fingerprint = 0;
  bool pre = false, post = false;  // a norm
  PackedLayout packed;             // of weight1 and weight2

  size_t reserve_bytes = 0;
  StepList train_steps, infer_steps, backward_steps;
  StepList pack;  // no steps: what pack_weights() is given

  Machine machine() const { return {linear, run, &packed}; }
};

namespace {

using Gives = ProductStep::Gives;

enum Argument : int {
  kX,
  kWeight1,
  kWeight2,
  kBias1,
  kBias2,
  kGamma,
  kBeta,
  kOut,
  kGradOut,
  kGradX,
  kGradWeight1,  // in the order of the weights
  kGradWeight2,
  kGradBias1,
  kGradBias2,
  kGradGamma,
  kGradBeta,
};
constexpr int kInnerDropout = 0, kOutputDropout = 1;  // of Call::dropouts

constexpr ArgumentSet only(int argument) { return ArgumentSet{1} << argument; }

Status check_desc(const FeedForwardBlockDesc& d) {
  Status status =
      check_not_negative({{"batch", d.batch}, {"seqlen", d.seqlen}, {"size", d.size}, {"inner_size", d.inner_size}});
  if (!status.ok()) return status;
  const auto activation = static_cast<int32_t>(d.activation);
  if (activation < 0 || activation > 4) {
    return invalid(sentence("activation is ", activation, ", must be an ActivationKind: 0 to 4"));
  }
  status = check_probability("inner_dropout_p", d.inner_dropout_p);
  if (status.ok()) status = check_probability("output_dropout_p", d.output_dropout_p);
  if (!status.ok()) return status;
  if (d.dtype != DType::kFloat32 && d.dtype != DType::kBFloat16 && d.dtype != DType::kFloat16 &&
      d.dtype != DType::kFloat64) {
    return invalid(sentence("dtype is ", dtype_name(d.dtype), ", takes float32, bfloat16, float16 or float64"));
  }
  return check_norm_desc(d.norm);
}

// [batch, 1, seqlen, size]
Place take_rows(const FeedForwardBlockDesc& d, int64_t size, Memory& memory) {
  return memory.take(d.dtype, {d.batch, 1, d.seqlen, size});
}

struct Saved {
  Place u, z, mean, rstd;
};

Saved take_saved(const FeedForwardBlockState& s, Memory& reserve) {
  const FeedForwardBlockDesc& d = s.desc;
  const DType sums = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Saved saved;
  reserve.map.take_bytes(sizeof(ReserveHeader));
  saved.u = take_rows(d, d.inner_size, reserve);
  if (s.post) saved.z = take_rows(d, d.size, reserve);
  if (s.pre || s.post) {
    saved.mean = reserve.take(sums, {d.batch, d.seqlen});
    saved.rstd = reserve.take(sums, {d.batch, d.seqlen});
  }
  return saved;
}

void expect_rows(const FeedForwardBlockDesc& d, int argument, const char* name, Role role, StepList* list) {
  Expected e =
      expect(argument, name, {d.dtype, {{"batch", d.batch}, {"beam", 1}, {"seqlen", d.seqlen}, {"size", d.size}}});
  e.role = role;
  if (argument == kGradX) e.kind = Expected::Kind::kOptional;
  list->expected.push_back(e);
}

enum class WeightUse { kForward, kBackward, kMatrices, kGradients };

void expect_weights(const FeedForwardBlockDesc& d, WeightUse use, StepList* list) {
  const bool gradients = use == WeightUse::kGradients;
  const Dim size{"size", d.size}, inner{"inner_size", d.inner_size};
  const auto add = [&](int argument, const char* name, const char* grad_name, bool asked,
                       std::initializer_list<Dim> dims) {
    Expected e = expect(gradients ? argument - kWeight1 + kGradWeight1 : argument, gradients ? grad_name : name,
                        {d.dtype, dims});
    if (!asked) {
      e.kind = Expected::Kind::kRefused;
    } else if (gradients) {
      e.kind = Expected::Kind::kOptional, e.role = Role::kOutput;
    } else if (use == WeightUse::kForward && dims.size() == 2) {
      e.kind = Expected::Kind::kUnlessPacked;
    }
    list->expected.push_back(e);
  };
  add(kWeight1, "weights.weight1", "grad_weights.weight1", true, {size, inner});
  add(kWeight2, "weights.weight2", "grad_weights.weight2", true, {inner, size});
  if (use == WeightUse::kMatrices) return;
  add(kBias1, "weights.bias1", "grad_weights.bias1", d.bias1, {inner});
  add(kBias2, "weights.bias2", "grad_weights.bias2", d.bias2, {size});
  expect_norm(d.norm, gradients ? Role::kOutput : Role::kInput, gradients ? kGradGamma : kGamma, d.size, d.dtype, list);
}

bool lay_out_forward(FeedForwardBlockState& s, bool training, StepList* list) {
  const FeedForwardBlockDesc& d = s.desc;
  Memory workspace(Place::Room::kWorkspace), reserve(Place::Room::kReserve);
  Saved saved;
  if (training) saved = take_saved(s, reserve);
  const Place x = argument(kX), y = argument(kOut), gamma = argument(kGamma), beta = argument(kBeta);
  const Place n = s.pre ? take_rows(d, d.size, workspace) : x, h = take_rows(d, d.inner_size, workspace);
  const Place z = !s.post ? y : training ? saved.z : take_rows(d, d.size, workspace);
  s.reserve_bytes = training ? reserve.map.bytes() : s.reserve_bytes;
  if (!reserve.map.fits()) return false;

  expect_rows(d, kX, "x", Role::kInput, list);
  expect_weights(d, WeightUse::kForward, list);
  expect_rows(d, kOut, "out", Role::kOutput, list);
  if (s.pre) list->steps.emplace_back(NormStep{d.norm, x, n, gamma, beta, saved.mean, saved.rstd});
  ProductStep first = {Gives::kY, n, argument(kWeight1), argument(kBias1), h};
  first.packed = 0;
  first.epilogue.pre_activation = saved.u;
  first.epilogue.activation = static_cast<linear::Activation>(d.activation);
  ProductStep second = {Gives::kY, h, argument(kWeight2), argument(kBias2), z};
  second.packed = 1;
  if (d.residual) second.epilogue.residual = x;
  if (training) first.epilogue.dropout = kInnerDropout, second.epilogue.dropout = kOutputDropout;
  list->steps.emplace_back(first);
  list->steps.emplace_back(second);
  if (s.post) list->steps.emplace_back(NormStep{d.norm, z, y, gamma, beta, saved.mean, saved.rstd});
  return finish(s.machine(), workspace, list);
}

// The lines above, from the last to the first:
//   dz = gradient of norm (post), or dy   dY = g2 dz   db2 = sum of dY   dW2 = h^T dY   du = activation'(u) g1 (dY W2^T)
//   db1 = sum of du   dW1 = n^T du   dn = du W1^T   dx = gradient of norm (pre), or dn   dx += dz, or dy
bool lay_out_backward(FeedForwardBlockState& s, StepList* list) {
  const FeedForwardBlockDesc& d = s.desc;
  Memory workspace(Place::Room::kWorkspace), reserve(Place::Room::kReserve);
  const Saved saved = take_saved(s, reserve);
  const bool dropped = d.output_dropout_p > 0;
  const Place x = argument(kX), gamma = argument(kGamma), grad_y = argument(kGradOut), grad_x = argument(kGradX);
  const Place inner = take_rows(d, d.inner_size, workspace);                       // h, then du
  const Place rows = s.pre || s.post ? take_rows(d, d.size, workspace) : Place();  // n, then its gradient; or that of z
  const Place dY_memory = dropped ? take_rows(d, d.size, workspace) : Place();
  const Place dz = s.post ? rows : grad_y, dY = dropped ? dY_memory : dz;

  expect_rows(d, kX, "x", Role::kInput, list);
  expect_weights(d, WeightUse::kBackward, list);
  expect_rows(d, kGradOut, "grad_out", Role::kInput, list);
  expect_rows(d, kGradX, "grad_x", Role::kOutput, list);
  expect_weights(d, WeightUse::kGradients, list);

  std::vector<Step>& steps = list->steps;
  NormBackwardStep norm = {d.norm, x,  gamma,  saved.mean,           saved.rstd,
                           rows,   {}, grad_x, argument(kGradGamma), argument(kGradBeta)};
  if (s.post) {
    norm.x = saved.z;
    norm.grad_y = grad_y;
    norm.grad_x = rows;
    steps.emplace_back(norm);
  }
  EpiloguePlaces output_gradient, again, inner_gradient;
  if (dropped) output_gradient.gradient = true, output_gradient.dropout = kOutputDropout;
  steps.emplace_back(PointwiseStep{dz, dY_memory, output_gradient, argument(kGradBias2)});
  again.activation = inner_gradient.activation = static_cast<linear::Activation>(d.activation);
  again.dropout = inner_gradient.dropout = kInnerDropout;
  steps.emplace_back(PointwiseStep{saved.u, inner.only_for(only(kGradWeight2)), again});
  steps.emplace_back(ProductStep{Gives::kW, inner, argument(kGradWeight2), {}, dY});
  inner_gradient.gradient = true;
  inner_gradient.pre_activation = saved.u;
  steps.emplace_back(ProductStep{Gives::kX, inner, argument(kWeight2), {}, dY, inner_gradient});
  if (s.pre) {
    steps.emplace_back(NormStep{d.norm, x, rows.only_for(only(kGradWeight1)), gamma, argument(kBeta), {}, {}});
  }
  steps.emplace_back(ProductStep{Gives::kW, s.pre ? rows : x, argument(kGradWeight1), argument(kGradBias1), inner});
  EpiloguePlaces input_gradient;
  if (!s.pre && d.residual) input_gradient.residual = dz;
  const Place dn = s.pre ? rows.only_for(only(kGradX) | only(kGradGamma) | only(kGradBeta)) : grad_x;
  steps.emplace_back(ProductStep{Gives::kX, dn, argument(kWeight1), {}, inner, input_gradient});
  if (s.pre) {
    if (d.residual) norm.residual = grad_y;
    steps.emplace_back(norm);
  }
  return reserve.map.fits() && finish(s.machine(), workspace, list);
}

void set_weights(const FeedForwardWeights& weights, int first_argument, Call* call) {
  const Tensor* const in_order[] = {&weights.weight1, &weights.weight2,    &weights.bias1,
                                    &weights.bias2,   &weights.norm.gamma, &weights.norm.beta};
  for (const Tensor* weight : in_order) call->tensors[first_argument++] = *weight;
}

Call call_of(const FeedForwardBlockDesc& d, const FeedForwardBlockForwardArgs& args) {
  Call call;
  call.tensors[kX] = with_beam(args.x, 4);
  call.tensors[kOut] = with_beam(args.out, 4);
  set_weights(args.weights, kWeight1, &call);
  set_memory(args, &call);
  call.dropouts = {{{"inner_dropout", d.inner_dropout_p, args.inner_dropout_seed, args.inner_dropout_offset},
                    {"output_dropout", d.output_dropout_p, args.output_dropout_seed, args.output_dropout_offset}}};
  return call;
}

Status check(const FeedForwardBlockState& s, const StepList& list, uint64_t stage, const Call& call) {
  return check_call(list, s.packed, {s.reserve_bytes, s.fingerprint, stage, "block"}, call);
}

}  // namespace

const FeedForwardBlockDesc& FeedForwardBlock::desc() const { return state_->desc; }
size_t FeedForwardBlock::packed_weights_bytes() const { return state_->packed.bytes; }
size_t FeedForwardBlock::workspace_bytes() const { return state_->train_steps.workspace_bytes; }
size_t FeedForwardBlock::backward_workspace_bytes() const { return state_->backward_steps.workspace_bytes; }
const char* FeedForwardBlock::kernel_name() const { return state_->linear->name; }
size_t FeedForwardBlock::reserve_bytes() const { return state_->reserve_bytes; }

Result<FeedForwardBlock> feed_forward_block(const FeedForwardBlockDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  auto state = std::make_shared<FeedForwardBlockState>();
  FeedForwardBlockState& s = *state;
  s.desc = desc;
  const Result<Where> where = planned_where(options.where);
  if (!where.ok()) return where.status();
  Result<const linear::Kernel*> kernel = linear::choose_kernel(desc.dtype, options.kernel, *where->device);
  if (!kernel.ok()) return kernel.status();
  s.linear = *kernel;
  s.run = *where->executor;
  s.pre = desc.norm.kind != NormKind::kNone && desc.norm.pre;
  s.post = desc.norm.kind != NormKind::kNone && !desc.norm.pre;
  s.fingerprint = fingerprint_of(desc);
  const MatrixSize weights[] = {{desc.size, desc.inner_size}, {desc.inner_size, desc.size}};
  if (!lay_out_forward(s, true, &s.train_steps) || !lay_out_packed(*s.linear, desc.dtype, weights, &s.packed) ||
      !lay_out_forward(s, false, &s.infer_steps) || !lay_out_backward(s, &s.backward_steps)) {
    return invalid("the block is too large: its memory passes the address space");
  }
  share_workspace({&s.train_steps, &s.infer_steps});
  expect_weights(desc, WeightUse::kMatrices, &s.pack);
  FeedForwardBlock made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status FeedForwardBlock::pack_weights(const FeedForwardWeights& weights, void* packed, size_t bytes) const try {
  const FeedForwardBlockState& s = *state_;
  const linear::Matrix matrices[] = {weight_matrix(weights.weight1), weight_matrix(weights.weight2)};
  Call call;
  set_weights(weights, kWeight1, &call);
  if (Status status = check_pack(s.pack, s.packed, packed, bytes, call); !status.ok()) return status;
  write_packed(*s.linear, s.packed, matrices, packed, s.run);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status FeedForwardBlock::forward(const FeedForwardBlockForwardArgs& args) const try {
  const FeedForwardBlockState& s = *state_;
  const Call call = call_of(s.desc, args);
  const StepList& list = call.reserve != nullptr ? s.train_steps : s.infer_steps;
  if (Status status = check(s, list, 0, call); !status.ok()) return status;
  if (call.reserve != nullptr) begin_reserve(call.reserve, s.fingerprint, call.dropouts);
  return run(s.machine(), list, call);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status FeedForwardBlock::backward(const FeedForwardBlockBackwardArgs& args) const try {
  const FeedForwardBlockState& s = *state_;
  Call call = call_of(s.desc, args.forward);
  call.tensors[kGradOut] = with_beam(args.grad_out, 4);
  call.tensors[kGradX] = with_beam(args.grad_x, 4);
  set_weights(args.grad_weights, kGradWeight1, &call);
  call.accumulate = args.accumulate;
  if (Status status = check(s, s.backward_steps, ReserveHeader::kForwardDone, call); !status.ok()) return status;
  return run(s.machine(), s.backward_steps, call);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
