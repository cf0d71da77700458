// How a layer is made, and what it tells about itself.
#include <new>
#include <utility>

#include "attention/checks.h"
#include "core/sentence.h"
#include "layer/checks_args.h"
#include "layer/packed.h"

namespace polyhead {
namespace {

constexpr int kOutMatrix = static_cast<int>(WeightKind::kOut);  // matrices come before biases

Status out_of_memory() { return {StatusCode::kOutOfMemory, "out of memory"}; }

void set_sizes(LayerState& s) {
  const LayerDesc& d = s.desc;
  const auto dim = [](int64_t projected, int64_t size) { return projected > 0 ? projected : size; };
  s.projections[kQuery] = {"query",
                           d.query_size,
                           d.beam,
                           d.seqlen_q,
                           d.num_heads,
                           dim(d.query_proj_size, d.query_size),
                           d.query_proj_size > 0,
                           d.query_bias};
  s.projections[kKey] = {"key",
                         d.key_size,
                         d.beam_kv,
                         d.seqlen_k,
                         d.num_heads_kv,
                         dim(d.key_proj_size, d.key_size),
                         d.key_proj_size > 0,
                         d.key_bias};
  s.projections[kValue] = {"value",
                           d.value_size,
                           d.beam_kv,
                           d.seqlen_k,
                           d.num_heads_kv,
                           dim(d.value_proj_size, d.value_size),
                           d.value_proj_size > 0,
                           d.value_bias};
  s.joined = d.beam == d.beam_kv && d.seqlen_q == d.seqlen_k;
  for (const Projection& p : s.projections) s.joined = s.joined && p.on;
}

AttentionDesc sized_attention(const LayerState& s) {
  AttentionDesc attention = s.desc.attention;
  attention.batch = s.desc.batch;
  attention.seqlen_q = s.desc.seqlen_q;
  attention.seqlen_k = s.desc.seqlen_k;
  attention.num_heads = s.desc.num_heads;
  attention.num_heads_kv = s.desc.num_heads_kv;
  attention.head_dim = s.projections[kQuery].dim;
  attention.head_dim_v = s.projections[kValue].dim;
  attention.dtype = s.desc.dtype;
  attention.has_windows = s.desc.has_windows;
  return attention;
}

// One query, whose place among the keys comes with each call, as do the numbers of keys.
AttentionDesc one_step(AttentionDesc attention) {
  const bool diagonal =
      attention.causal || attention.window_left >= 0 || attention.window_right >= 0 || attention.alibi_slopes_ndim > 0;
  attention.seqlen_q = 1;
  attention.has_seqlens_q = false;
  attention.has_seqlens_k = true;
  attention.align = Align::kUnset;
  attention.query_offset.reset();
  attention.has_query_offsets = diagonal;
  for (BroadcastOperand* operand : {&attention.attn_mask, &attention.attn_bias}) operand->dims[2] = 1;
  return attention;
}

// Products beyond those that plan() checks.
Status check_memory_sizes(const LayerState& s) {
  const size_t element = 8;
  const struct {
    const char* name;
    int64_t rows, columns;
  } matrices[] = {{"query", s.desc.seqlen_q, s.desc.query_size},
                  {"key", s.desc.seqlen_k, s.desc.key_size},
                  {"value", s.desc.seqlen_k, s.desc.value_size},
                  {"out", s.desc.seqlen_q, s.out_size}};
  for (const auto& m : matrices) {
    MemoryMap map;
    map.take({s.desc.batch, s.desc.beam, m.rows, m.columns}, element);
    if (map.fits()) continue;
    return {StatusCode::kInvalidArgument,
            sentence(m.name, " is too large: batch ", s.desc.batch, " * beam ", s.desc.beam, " * time steps ", m.rows,
                     " * size ", m.columns, " elements pass the address space")};
  }
  return {};
}

Status make_plans(LayerState& s, const PlanOptions& options) {
  s.asked = sized_attention(s);
  if (Status status = check_desc(s.asked); !status.ok()) return status;
  AttentionDesc inference = s.asked;
  inference.dropout_p = 0;
  const std::pair<std::optional<Plan>*, AttentionDesc> plans[] = {
      {&s.train, s.asked}, {&s.infer, inference}, {&s.step, one_step(inference)}};
  for (const auto& [to, desc] : plans) {
    Result<Plan> made = plan(desc, options);
    if (!made.ok()) return made.status();
    *to = *made;
  }
  s.executor = options.executor != nullptr ? options.executor : &default_executor();
  s.linear = linear::find_kernel(s.infer->kernel_name());
  if (s.linear != nullptr) return {};
  return {StatusCode::kInternal, sentence("kernel ", s.infer->kernel_name(), " has no matrix products")};
}

bool lay_out_packed_weights(LayerState& s) {
  MatrixSize sizes[kOutMatrix + 1];
  for (int i = 0; i <= kOutMatrix; ++i) {
    const WeightLayout& layout = s.weights[i];
    if (layout.present) sizes[i] = {layout.dims[0], layout.dims[1]};
  }
  return lay_out_packed(*s.linear, s.desc.dtype, sizes, &s.packed);
}

}  // namespace

Result<std::shared_ptr<const LayerState>> make_layer_state(const LayerDesc& desc, const PlanOptions& options,
                                                           bool gradients_in_workspace) {
  if (Status status = check_layer_desc(desc); !status.ok()) return status;
  auto state = std::make_shared<LayerState>();
  LayerState& s = *state;
  s.desc = desc;
  set_sizes(s);
  MemoryMap heads, weights;
  heads.take({desc.num_heads, s.projections[kValue].dim}, 8);
  if (heads.fits()) s.heads_size = desc.num_heads * s.projections[kValue].dim;
  s.out_size = s.out_projected() ? desc.out_proj_size : s.heads_size;
  if (Status status = check_memory_sizes(s); !status.ok()) return status;
  if (Status status = make_plans(s, options); !status.ok()) return status;
  lay_out_weights(s, weights);
  s.weights_bytes = weights.bytes();
  s.gradients.in_workspace = gradients_in_workspace;
  if (!weights.fits() || !lay_out_packed_weights(s) || !lay_out_memory(s)) {
    return Status(StatusCode::kInvalidArgument, "the layer is too large: its memory passes the address space");
  }
  s.fingerprint = fingerprint_of(desc);
  return std::shared_ptr<const LayerState>(std::move(state));
}

Result<Layer> layer(const LayerDesc& desc, const PlanOptions& options) try {
  Result<std::shared_ptr<const LayerState>> state = make_layer_state(desc, options, false);
  if (!state.ok()) return state.status();
  Layer made;
  made.state_ = std::move(*state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

const LayerDesc& Layer::desc() const { return state_->desc; }
const char* Layer::kernel_name() const { return state_->infer->kernel_name(); }
int64_t Layer::out_size() const { return state_->out_size; }
size_t Layer::weights_bytes() const { return state_->weights_bytes; }
size_t Layer::packed_weights_bytes() const { return state_->packed.bytes; }
size_t Layer::workspace_bytes() const { return state_->forward.bytes; }
size_t Layer::backward_workspace_bytes() const { return state_->backward.bytes; }
size_t Layer::reserve_bytes() const { return state_->reserve.bytes; }
LayerWeights Layer::weights_in(void* buffer) const { return tensors_of(*state_, buffer); }

Status Layer::pack_weights(const LayerWeights& weights, void* packed, size_t bytes) const try {
  const LayerState& s = *state_;
  if (Status status = check_pack_weights(s, weights, packed, bytes); !status.ok()) return status;
  linear::Matrix matrices[kOutMatrix + 1];
  for (int i = 0; i <= kOutMatrix; ++i) matrices[i] = weight_matrix(weight_of(weights, static_cast<WeightKind>(i)));
  write_packed(*s.linear, s.packed, matrices, packed, *s.executor);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

WeightLayout Layer::weight_layout(WeightKind kind) const {
  const auto index = static_cast<int32_t>(kind);
  return index >= 0 && index < kNumWeightKinds ? state_->weights[index] : WeightLayout();
}

}  // namespace polyhead
