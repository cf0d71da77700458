//   pre-norm:   n = norm(x)   y = x + layer(n)          z = x + layer(x)   y = norm(z)   :post-norm
// Saved for backward: z, and the norm's statistics, beside what the layer saves; n is computed once more.
#include <new>
#include <optional>
#include <utility>

#include "core/sentence.h"
#include "layer/call.h"
#include "layer/checks_args.h"
#include "layer/fingerprint.h"
#include "layer/norm.h"
#include "linear/product.h"

namespace polyhead {

struct AttentionBlockState {
  AttentionBlockDesc desc;
  std::optional<Layer> layer;
  const linear::Kernel* linear = nullptr;
  Executor* executor = nullptr;
  uint64_t fingerprint = 0;
  int64_t size = 0;  // of what is normed
  bool normed = false, pre = false;

  // The layer's memory comes first in each workspace.
  size_t layer_reserve = 0, saved_rows = 0, saved_mean = 0, saved_rstd = 0, reserve_bytes = 0;
  size_t forward_rows = 0, forward_bytes = 0;
  size_t backward_rows = 0, backward_normed = 0, backward_sums = 0, backward_bytes = 0;

  int64_t num_rows() const { return desc.layer.batch * desc.layer.beam * desc.layer.seqlen_q; }
  // [batch, beam, seqlen_q, size] of this memory.
  Tensor rows_at(void* memory, size_t offset) const {
    return Tensor(static_cast<char*>(memory) + offset, desc.layer.dtype,
                  {desc.layer.batch, desc.layer.beam, desc.layer.seqlen_q, size});
  }
};

namespace {

uint64_t fingerprint_of(const AttentionBlockDesc& desc) {
  Fingerprint print;
  print.add(polyhead::fingerprint_of(desc.layer));
  print.add(static_cast<int64_t>(desc.norm.kind));
  for (const bool flag : {desc.norm.pre, desc.norm.gamma, desc.norm.beta}) print.add(flag);
  print.add(desc.norm.eps);
  return print.value();
}

bool lay_out_block(AttentionBlockState& s) {
  const LayerDesc& d = s.desc.layer;
  const size_t element = dtype_size_bytes(d.dtype), statistic = d.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t rows = s.normed ? s.num_rows() : 0;
  MemoryMap reserve, forward, backward;
  reserve.take_bytes(sizeof(ReserveHeader));
  s.layer_reserve = reserve.take_bytes(s.layer->reserve_bytes());
  s.saved_rows = reserve.take({s.pre ? 0 : rows, s.size}, element);
  s.saved_mean = reserve.take({rows}, statistic);
  s.saved_rstd = reserve.take({rows}, statistic);
  s.reserve_bytes = reserve.bytes();
  forward.take_bytes(s.layer->workspace_bytes());
  s.forward_rows = forward.take({rows, s.size}, element);
  s.forward_bytes = forward.bytes();
  backward.take_bytes(s.layer->backward_workspace_bytes());
  s.backward_rows = backward.take({rows, s.size}, element);
  s.backward_normed = backward.take({s.pre ? rows : 0, s.size}, element);
  if (!reserve.fits() || !forward.fits() || !backward.fits()) return false;
  s.backward_sums = backward.take_bytes(s.normed ? s.linear->sums_workspace_bytes(rows, s.size, d.dtype) : 0);
  s.backward_bytes = backward.bytes();
  return backward.fits();
}

// What the block reads and writes itself; the layer checks the rest.
class BlockOperands {
 public:
  BlockOperands(const AttentionBlockState& state, const AttentionBlockForwardArgs& args)
      : s_(state), args_(args), operands_(state.desc.layer.attention) {}

  Status add_inputs() {
    const LayerForwardArgs& layer = args_.layer;
    if (layer.step != -1 || layer.key_cache.given() || layer.value_cache.given()) {
      return invalid("a step or a cache is given: a block has neither");
    }
    if (layer.residual.given()) return invalid("layer.residual is given: a block adds its query");
    if (layer.key.given() != layer.value.given()) {
      return invalid(sentence("layer.", layer.key.given() ? "value" : "key",
                              " is missing: give key and value, or neither for self-attention"));
    }
    const LayerDesc& d = s_.desc.layer;
    const bool as_query =
        d.key_size == d.query_size && d.value_size == d.query_size && d.seqlen_k == d.seqlen_q && d.beam_kv == d.beam;
    if (!layer.key.given() && !as_query) {
      return invalid("key and value are not given, but the layer's differ from query in size, length or beam");
    }
    Status status = add_rows(Role::kInput, "query", layer.query, d.query_size);
    if (status.ok()) {
      status = add_norm_weights(operands_, Role::kInput, s_.desc.norm, args_.norm, s_.size, d.dtype);
    }
    return status;
  }
  Status add_rows(Role role, const char* name, const Tensor& t, int64_t size) {
    const LayerDesc& d = s_.desc.layer;
    return operands_.add(role, name, t, d.dtype,
                         {{"batch", d.batch}, {"beam", d.beam}, {"seqlen_q", d.seqlen_q}, {"size", size}});
  }
  Status add_grad_norm(const NormWeights& weights) {
    return add_norm_weights(operands_, Role::kOutput, s_.desc.norm, weights, s_.size, s_.desc.layer.dtype);
  }
  Status add_reserve() {
    const LayerForwardArgs& layer = args_.layer;
    if (layer.reserve == nullptr) return {};
    if (layer.reserve_bytes < s_.reserve_bytes) {
      return invalid(sentence("reserve_bytes is ", layer.reserve_bytes, ", needs ", s_.reserve_bytes));
    }
    if (reinterpret_cast<uintptr_t>(layer.reserve) % 64 != 0) return invalid("reserve is not aligned to 64 bytes");
    const auto bytes = static_cast<int64_t>(s_.reserve_bytes);
    reserve_ = Tensor(layer.reserve, DType::kBool, {bytes});
    return operands_.add(Role::kOutput, "reserve", reserve_, DType::kBool, {{"bytes", bytes}});
  }
  Status check_workspace(size_t needed) const {
    return operands_.check_workspace(args_.layer.workspace, args_.layer.workspace_bytes, needed);
  }

 private:
  const AttentionBlockState& s_;
  const AttentionBlockForwardArgs& args_;
  Operands operands_;
  Tensor reserve_;  // memory as an operand, which outlives its being added
};

// The layer's arguments: what it reads instead of x, and its part of the memory.
LayerForwardArgs layer_args(const AttentionBlockState& s, const AttentionBlockForwardArgs& args, const Tensor& x) {
  LayerForwardArgs layer = args.layer;
  layer.query = x;
  if (!layer.key.given()) layer.key = layer.value = x;
  if (s.desc.layer.residual) layer.residual = args.layer.query;
  if (layer.reserve != nullptr) {
    layer.reserve = static_cast<char*>(layer.reserve) + s.layer_reserve;
    layer.reserve_bytes = s.layer->reserve_bytes();
  }
  return layer;
}

}  // namespace

const AttentionBlockDesc& AttentionBlock::desc() const { return state_->desc; }
const Layer& AttentionBlock::layer() const { return *state_->layer; }
size_t AttentionBlock::workspace_bytes() const { return state_->forward_bytes; }
size_t AttentionBlock::backward_workspace_bytes() const { return state_->backward_bytes; }
size_t AttentionBlock::reserve_bytes() const { return state_->reserve_bytes; }

Result<AttentionBlock> attention_block(const AttentionBlockDesc& desc, const PlanOptions& options) try {
  if (Status status = check_norm_desc(desc.norm); !status.ok()) return status;
  Result<std::shared_ptr<const LayerState>> layer_state = make_layer_state(desc.layer, options, true);
  if (!layer_state.ok()) return layer_state.status();
  Layer made_layer;
  made_layer.state_ = std::move(*layer_state);
  if (desc.layer.residual && made_layer.out_size() != desc.layer.query_size) {
    return Status(StatusCode::kInvalidArgument,
                  sentence("residual adds query to out: out size is ", made_layer.out_size(), ", must be query_size ",
                           desc.layer.query_size));
  }
  auto state = std::make_shared<AttentionBlockState>();
  state->desc = desc;
  state->layer = std::move(made_layer);
  state->linear = linear::find_kernel(state->layer->kernel_name());
  state->executor = options.executor != nullptr ? options.executor : &default_executor();
  state->normed = desc.norm.kind != NormKind::kNone;
  state->pre = state->normed && desc.norm.pre;
  state->size = state->pre ? desc.layer.query_size : state->layer->out_size();
  state->fingerprint = fingerprint_of(desc);
  if (!lay_out_block(*state)) {
    return Status(StatusCode::kInvalidArgument, "the block is too large: its memory passes the address space");
  }
  AttentionBlock made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kOutOfMemory, "out of memory");
}

Status AttentionBlock::forward(const AttentionBlockForwardArgs& given) const try {
  const AttentionBlockState& s = *state_;
  AttentionBlockForwardArgs args = given;
  args.layer.query = with_beam(args.layer.query, 4);
  args.layer.out = with_beam(args.layer.out, 4);
  BlockOperands operands(s, args);
  Status status = operands.add_inputs();
  if (status.ok()) status = operands.add_rows(Role::kOutput, "out", args.layer.out, s.layer->out_size());
  if (status.ok()) status = operands.add_reserve();
  if (status.ok()) status = operands.check_workspace(s.forward_bytes);
  if (!status.ok()) return status;

  char* const reserve = static_cast<char*>(args.layer.reserve);
  const Tensor rows =
      reserve != nullptr && !s.pre ? s.rows_at(reserve, s.saved_rows) : s.rows_at(args.layer.workspace, s.forward_rows);
  LayerForwardArgs layer = with_beams(s.desc.layer, layer_args(s, args, s.pre ? rows : args.layer.query));
  if (s.normed && !s.pre) layer.out = rows;
  if (status = check_forward(*s.layer->state_, layer); !status.ok()) return status;

  linear::NormForwardArgs norm = norm_forward_args(s.desc.norm, args.norm);
  if (reserve != nullptr) {
    norm.mean = reserve + s.saved_mean;
    norm.rstd = reserve + s.saved_rstd;
    begin_reserve(reserve, s.fingerprint, dropouts_of(s.desc.layer, layer));
  }
  if (s.pre) {
    norm.x = token_matrix(args.layer.query);
    norm.y = token_matrix(rows);
    s.linear->norm_forward(norm, *s.executor);
  }
  if (status = s.layer->forward(layer); !status.ok()) return status;
  if (s.normed && !s.pre) {
    norm.x = token_matrix(rows);
    norm.y = token_matrix(args.layer.out);
    s.linear->norm_forward(norm, *s.executor);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

namespace {

class BlockBackward {
 public:
  BlockBackward(const AttentionBlockState& state, const AttentionBlockBackwardArgs& args)
      : s_(state),
        args_(args),
        reserve_(static_cast<char*>(args.forward.layer.reserve)),
        workspace_(static_cast<char*>(args.forward.layer.workspace)),
        rows_(state.rows_at(workspace_, state.backward_rows)),
        normed_(state.rows_at(workspace_, state.backward_normed)) {}

  // What the layer is asked for: gradients of n or x, given those of y or z.
  LayerBackwardArgs layer() const {
    LayerBackwardArgs layer;
    layer.forward = layer_args(s_, args_.forward, s_.pre ? normed_ : args_.forward.layer.query);
    layer.grad_out = s_.normed && !s_.pre ? rows_ : args_.grad_out;
    const bool self = !args_.forward.layer.key.given();
    const bool wanted = args_.grad_query.given() || args_.grad_norm.gamma.given() || args_.grad_norm.beta.given();
    if (!s_.pre || wanted) layer.grad_query = s_.pre ? rows_ : args_.grad_query;
    layer.grad_key = self ? layer.grad_query : args_.grad_key;
    layer.grad_value = self ? layer.grad_query : args_.grad_value;
    layer.grad_attn_bias = args_.grad_attn_bias;
    layer.grad_alibi_slopes = args_.grad_alibi_slopes;
    layer.grad_weights = args_.grad_weights;
    layer.accumulate = args_.accumulate;
    return with_beams(s_.desc.layer, layer);
  }

  // First of all: the gradient of z, or n once more.
  void before_layer() const {
    if (!s_.normed) return;
    if (!s_.pre) return norm(s_.rows_at(reserve_, s_.saved_rows), args_.grad_out, {}, rows_);
    linear::NormForwardArgs again = norm_forward_args(s_.desc.norm, args_.forward.norm);
    again.x = token_matrix(args_.forward.layer.query);
    again.y = token_matrix(normed_);
    s_.linear->norm_forward(again, *s_.executor);
  }

  // The gradient of x, last of all.
  void input() const {
    const Tensor& x = args_.forward.layer.query;
    const bool residual = s_.desc.layer.residual;
    if (s_.pre) return norm(x, rows_, residual ? args_.grad_out : Tensor(), args_.grad_query);
    if (!residual || !args_.grad_query.given()) return;
    linear::PointwiseArgs add;
    add.x = add.y = token_matrix(args_.grad_query);
    add.epilogue.residual = token_matrix(s_.normed ? rows_ : args_.grad_out);
    s_.linear->pointwise(add, *s_.executor);
  }

 private:
  void norm(const Tensor& x, const Tensor& grad_y, const Tensor& residual, const Tensor& grad_x) const {
    linear::NormBackwardArgs norm = norm_backward_args(s_.desc.norm, args_.forward.norm);
    norm.x = token_matrix(x);
    norm.mean = reserve_ + s_.saved_mean;
    norm.rstd = reserve_ + s_.saved_rstd;
    norm.grad_y = token_matrix(grad_y);
    norm.residual = token_matrix(residual);
    norm.grad_x = token_matrix(grad_x);
    norm.grad_gamma = weight_matrix(args_.grad_norm.gamma);
    norm.grad_beta = weight_matrix(args_.grad_norm.beta);
    norm.accumulate_parameters = args_.accumulate;
    norm.workspace = workspace_ + s_.backward_sums;
    const bool any = norm.grad_x.given() || norm.grad_gamma.given() || norm.grad_beta.given();
    if (any) s_.linear->norm_backward(norm, *s_.executor);
  }

  const AttentionBlockState& s_;
  const AttentionBlockBackwardArgs& args_;
  char* reserve_;
  char* workspace_;
  Tensor rows_;    // the gradient between norm and layer
  Tensor normed_;  // pre-norm: n
};

bool any_weight(const LayerWeights& weights) {
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    if (weight_of(weights, static_cast<WeightKind>(kind)).given()) return true;
  }
  return false;
}

}  // namespace

Status AttentionBlock::backward(const AttentionBlockBackwardArgs& given) const try {
  const AttentionBlockState& s = *state_;
  AttentionBlockBackwardArgs args = given;
  for (Tensor* t : {&args.forward.layer.query, &args.grad_out, &args.grad_query}) *t = with_beam(*t, 4);
  BlockOperands operands(s, args.forward);
  Status status = operands.add_inputs();
  if (status.ok() && args.forward.layer.reserve == nullptr) {
    status = invalid("reserve is null: backward needs what forward wrote there");
  }
  if (status.ok()) status = operands.add_rows(Role::kInput, "grad_out", args.grad_out, s.layer->out_size());
  if (status.ok()) status = operands.add_reserve();
  if (status.ok() && args.grad_query.given()) {
    status = operands.add_rows(Role::kOutput, "grad_query", args.grad_query, s.desc.layer.query_size);
  }
  if (status.ok() && !args.forward.layer.key.given() && (args.grad_key.given() || args.grad_value.given())) {
    status = invalid("grad_key or grad_value is given: with self-attention grad_query has all");
  }
  if (status.ok()) status = operands.add_grad_norm(args.grad_norm);
  if (status.ok()) status = operands.check_workspace(s.backward_bytes);
  if (!status.ok()) return status;
  status = check_reserve(args.forward.layer.reserve, s.fingerprint, ReserveHeader::kForwardDone,
                         dropouts_of(s.desc.layer, args.forward.layer), "block");
  if (!status.ok()) return status;

  const BlockBackward backward(s, args);
  const LayerBackwardArgs layer = backward.layer();
  const bool weights = any_weight(args.grad_weights);
  status = check_backward_data(*s.layer->state_, layer);
  if (status.ok() && weights) status = check_backward_weights(*s.layer->state_, layer, ReserveHeader::kForwardDone);
  if (!status.ok()) return status;
  backward.before_layer();
  status = s.layer->backward_data(layer);
  if (status.ok() && weights) status = s.layer->backward_weights(layer);
  if (status.ok()) backward.input();
  return status;
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

}  // namespace polyhead
