// polyhead_block.h: translates to polyhead/block.h and back; computes nothing.
#include "polyhead/block.h"

#include <cstddef>
#include <utility>

#include "capi/fields.h"
#include "capi/last_error.h"
#include "capi/layer.h"
#include "polyhead/polyhead.h"

using polyhead::ActivationKind;
using polyhead::AttentionBlock;
using polyhead::AttentionBlockBackwardArgs;
using polyhead::AttentionBlockDesc;
using polyhead::AttentionBlockForwardArgs;
using polyhead::DType;
using polyhead::FeedForwardBlock;
using polyhead::FeedForwardBlockBackwardArgs;
using polyhead::FeedForwardBlockDesc;
using polyhead::FeedForwardBlockForwardArgs;
using polyhead::FeedForwardWeights;
using polyhead::NormDesc;
using polyhead::NormKind;
using polyhead::NormWeights;
using polyhead::PlanOptions;
using polyhead::Result;
using polyhead::Status;
using namespace polyhead::capi;

struct polyhead_attention_block {
  AttentionBlock block;
  polyhead_layer layer;
};

struct polyhead_feed_forward_block {
  FeedForwardBlock block;
};

namespace {

// Sizes of the structs in the first version of the header, on 64-bit machines.
constexpr size_t kFirstAttentionDescSize = 48;
constexpr size_t kFirstAttentionForwardSize = 232;
constexpr size_t kFirstAttentionBackwardSize = 872;
constexpr size_t kFirstFeedForwardDescSize = 112;
constexpr size_t kFirstFeedForwardForwardSize = 304;
constexpr size_t kFirstFeedForwardBackwardSize = 248;
static_assert(sizeof(void*) != 8 || sizeof(polyhead_attention_block_desc) == kFirstAttentionDescSize);
static_assert(sizeof(void*) != 8 || sizeof(polyhead_attention_block_forward_args) == kFirstAttentionForwardSize);
static_assert(sizeof(void*) != 8 || sizeof(polyhead_attention_block_backward_args) == kFirstAttentionBackwardSize);
static_assert(sizeof(void*) != 8 || sizeof(polyhead_feed_forward_block_desc) == kFirstFeedForwardDescSize);
static_assert(sizeof(void*) != 8 || sizeof(polyhead_feed_forward_block_forward_args) == kFirstFeedForwardForwardSize);
static_assert(sizeof(void*) != 8 || sizeof(polyhead_feed_forward_block_backward_args) == kFirstFeedForwardBackwardSize);
static_assert(sizeof(polyhead_feed_forward_weights) == 6 * sizeof(polyhead_tensor));

constexpr polyhead_norm_desc kDefaultNorm = {POLYHEAD_LAYER_NORM, 1, 1, 1, 1e-5};

polyhead_attention_block_desc default_attention_desc() {
  polyhead_attention_block_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.norm = kDefaultNorm;
  return desc;
}

polyhead_feed_forward_block_desc default_feed_forward_desc() {
  polyhead_feed_forward_block_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.batch = 1;
  desc.activation = POLYHEAD_GELU;
  desc.bias1 = desc.bias2 = desc.residual = 1;
  desc.norm = kDefaultNorm;
  return desc;
}

// The arguments of a call: nothing given.
template <class Args>
Args no_args() {
  Args args = {};
  args.struct_size = sizeof args;
  return args;
}

Status translate(const polyhead_norm_desc& from, NormDesc* to) {
  Fields fields("norm");
  fields.choice(from.kind, NormKind::kRmsNorm, "kind", "polyhead_norm_kind", &to->kind);
  fields.boolean(from.pre, "pre", &to->pre);
  fields.boolean(from.gamma, "gamma", &to->gamma);
  fields.boolean(from.beta, "beta", &to->beta);
  to->eps = from.eps;
  return fields.status;
}

Status translate(const polyhead_norm_weights& from, const char* gamma, const char* beta, NormWeights* to) {
  const TensorField tensors[] = {{from.gamma, gamma, &to->gamma}, {from.beta, beta, &to->beta}};
  return translate_all(tensors);
}

Status translate(const polyhead_attention_block_desc* from, AttentionBlockDesc* to) {
  polyhead_attention_block_desc c = default_attention_desc();
  if (Status s = take(from, kFirstAttentionDescSize, "desc", &c); !s.ok()) return s;
  if (Status s = need(c.layer, "desc.layer"); !s.ok()) return s;
  if (Status s = translate(c.norm, &to->norm); !s.ok()) return s;
  return polyhead::capi::translate(c.layer, &to->layer);
}

Status translate(const polyhead_attention_block_forward_args* from, const char* name, AttentionBlockForwardArgs* to) {
  auto c = no_args<polyhead_attention_block_forward_args>();
  if (Status s = take(from, kFirstAttentionForwardSize, name, &c); !s.ok()) return s;
  if (Status s = need(c.layer, "args.layer"); !s.ok()) return s;
  if (Status s = translate(c.norm, "norm.gamma", "norm.beta", &to->norm); !s.ok()) return s;
  return polyhead::capi::translate(c.layer, "args.layer", &to->layer);
}

Status translate(const polyhead_attention_block_backward_args* from, AttentionBlockBackwardArgs* to) {
  auto c = no_args<polyhead_attention_block_backward_args>();
  if (Status s = take(from, kFirstAttentionBackwardSize, "args", &c); !s.ok()) return s;
  if (Status s = need(c.forward, "args.forward"); !s.ok()) return s;
  if (Status s = translate(c.forward, "args.forward", &to->forward); !s.ok()) return s;
  if (Status s = translate_gradients(c, to); !s.ok()) return s;
  if (Status s = translate(c.grad_norm, "grad_norm.gamma", "grad_norm.beta", &to->grad_norm); !s.ok()) return s;
  Fields fields("args");
  fields.boolean(c.accumulate, "accumulate", &to->accumulate);
  fields.zero(c.reserved, "reserved");
  if (!fields.status.ok()) return fields.status;
  return polyhead::capi::translate(c.grad_weights, &to->grad_weights);
}

Status translate(const polyhead_feed_forward_block_desc* from, FeedForwardBlockDesc* to) {
  polyhead_feed_forward_block_desc c = default_feed_forward_desc();
  if (Status s = take(from, kFirstFeedForwardDescSize, "desc", &c); !s.ok()) return s;
  to->batch = c.batch;
  to->seqlen = c.seqlen;
  to->size = c.size;
  to->inner_size = c.inner_size;
  to->inner_dropout_p = c.inner_dropout_p;
  to->output_dropout_p = c.output_dropout_p;
  Fields fields;
  fields.choice(c.activation, ActivationKind::kSilu, "activation", "polyhead_activation_kind", &to->activation);
  fields.boolean(c.bias1, "bias1", &to->bias1);
  fields.boolean(c.bias2, "bias2", &to->bias2);
  fields.boolean(c.residual, "residual", &to->residual);
  fields.choice(c.dtype, DType::kInt64, "dtype", "polyhead_dtype", &to->dtype);
  fields.zero(c.reserved, "reserved");
  return fields.status.ok() ? translate(c.norm, &to->norm) : fields.status;
}

// NULL: none are given.
Status translate(const polyhead_feed_forward_weights* from, FeedForwardWeights* to) {
  if (from == nullptr) return {};
  const TensorField tensors[] = {{from->weight1, "weights.weight1", &to->weight1},
                                 {from->bias1, "weights.bias1", &to->bias1},
                                 {from->weight2, "weights.weight2", &to->weight2},
                                 {from->bias2, "weights.bias2", &to->bias2}};
  if (Status s = translate_all(tensors); !s.ok()) return s;
  return translate(from->norm, "weights.norm.gamma", "weights.norm.beta", &to->norm);
}

Status translate(const polyhead_feed_forward_block_forward_args* from, const char* name,
                 FeedForwardBlockForwardArgs* to) {
  auto c = no_args<polyhead_feed_forward_block_forward_args>();
  if (Status s = take(from, kFirstFeedForwardForwardSize, name, &c); !s.ok()) return s;
  const TensorField tensors[] = {{c.x, "x", &to->x}, {c.out, "out", &to->out}};
  if (Status s = translate_all(tensors); !s.ok()) return s;
  to->inner_dropout_seed = c.inner_dropout_seed;
  to->output_dropout_seed = c.output_dropout_seed;
  to->inner_dropout_offset = c.inner_dropout_offset;
  to->output_dropout_offset = c.output_dropout_offset;
  translate_memory(c, to);
  return translate(c.weights, &to->weights);
}

Status translate(const polyhead_feed_forward_block_backward_args* from, FeedForwardBlockBackwardArgs* to) {
  auto c = no_args<polyhead_feed_forward_block_backward_args>();
  if (Status s = take(from, kFirstFeedForwardBackwardSize, "args", &c); !s.ok()) return s;
  if (Status s = need(c.forward, "args.forward"); !s.ok()) return s;
  if (Status s = translate(c.forward, "args.forward", &to->forward); !s.ok()) return s;
  const TensorField tensors[] = {{c.grad_out, "grad_out", &to->grad_out}, {c.grad_x, "grad_x", &to->grad_x}};
  if (Status s = translate_all(tensors); !s.ok()) return s;
  Fields fields("args");
  fields.boolean(c.accumulate, "accumulate", &to->accumulate);
  fields.zero(c.reserved, "reserved");
  if (!fields.status.ok()) return fields.status;
  return translate(c.grad_weights, &to->grad_weights);
}

// One of the numbers that a block tells.
template <class Handle, class Block>
size_t bytes_of(const Handle* handle, size_t (Block::*bytes)() const) {
  if (guarded([&] { return need(handle, "block"); }) != POLYHEAD_OK) return 0;
  return (handle->block.*bytes)();
}

}  // namespace

extern "C" {

polyhead_status polyhead_attention_block_desc_init(polyhead_attention_block_desc* desc, size_t struct_size) {
  return guarded(
      [&] { return init_struct(desc, struct_size, kFirstAttentionDescSize, "desc", default_attention_desc()); });
}

polyhead_status polyhead_attention_block_forward_args_init(polyhead_attention_block_forward_args* args,
                                                           size_t struct_size) {
  const auto none = no_args<polyhead_attention_block_forward_args>();
  return guarded([&] { return init_struct(args, struct_size, kFirstAttentionForwardSize, "args", none); });
}

polyhead_status polyhead_attention_block_backward_args_init(polyhead_attention_block_backward_args* args,
                                                            size_t struct_size) {
  const auto none = no_args<polyhead_attention_block_backward_args>();
  return guarded([&] { return init_struct(args, struct_size, kFirstAttentionBackwardSize, "args", none); });
}

polyhead_status polyhead_attention_block_create(const polyhead_attention_block_desc* desc,
                                                const polyhead_plan_options* options,
                                                polyhead_attention_block** block) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    *block = nullptr;
    if (Status s = need(desc, "desc"); !s.ok()) return s;
    AttentionBlockDesc checked;
    PlanOptions chosen;
    if (Status s = translate(desc, &checked); !s.ok()) return s;
    if (Status s = polyhead::capi::translate(options, &chosen); !s.ok()) return s;
    const Result<AttentionBlock> made = polyhead::attention_block(checked, chosen);
    if (!made.ok()) return made.status();
    *block = new polyhead_attention_block{*made, {made->layer()}};
    return {};
  });
}

void polyhead_attention_block_destroy(polyhead_attention_block* block) { delete block; }

const polyhead_layer* polyhead_attention_block_layer(const polyhead_attention_block* block) {
  if (guarded([&] { return need(block, "block"); }) != POLYHEAD_OK) return nullptr;
  return &block->layer;
}

size_t polyhead_attention_block_workspace_bytes(const polyhead_attention_block* block) {
  return bytes_of(block, &AttentionBlock::workspace_bytes);
}
size_t polyhead_attention_block_backward_workspace_bytes(const polyhead_attention_block* block) {
  return bytes_of(block, &AttentionBlock::backward_workspace_bytes);
}
size_t polyhead_attention_block_reserve_bytes(const polyhead_attention_block* block) {
  return bytes_of(block, &AttentionBlock::reserve_bytes);
}

polyhead_status polyhead_attention_block_forward(const polyhead_attention_block* block,
                                                 const polyhead_attention_block_forward_args* args) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    AttentionBlockForwardArgs tensors;
    if (Status s = translate(args, "args", &tensors); !s.ok()) return s;
    return block->block.forward(tensors);
  });
}

polyhead_status polyhead_attention_block_backward(const polyhead_attention_block* block,
                                                  const polyhead_attention_block_backward_args* args) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    AttentionBlockBackwardArgs tensors;
    if (Status s = translate(args, &tensors); !s.ok()) return s;
    return block->block.backward(tensors);
  });
}

polyhead_status polyhead_feed_forward_block_desc_init(polyhead_feed_forward_block_desc* desc, size_t struct_size) {
  return guarded(
      [&] { return init_struct(desc, struct_size, kFirstFeedForwardDescSize, "desc", default_feed_forward_desc()); });
}

polyhead_status polyhead_feed_forward_block_forward_args_init(polyhead_feed_forward_block_forward_args* args,
                                                              size_t struct_size) {
  const auto none = no_args<polyhead_feed_forward_block_forward_args>();
  return guarded([&] { return init_struct(args, struct_size, kFirstFeedForwardForwardSize, "args", none); });
}

polyhead_status polyhead_feed_forward_block_backward_args_init(polyhead_feed_forward_block_backward_args* args,
                                                               size_t struct_size) {
  const auto none = no_args<polyhead_feed_forward_block_backward_args>();
  return guarded([&] { return init_struct(args, struct_size, kFirstFeedForwardBackwardSize, "args", none); });
}

polyhead_status polyhead_feed_forward_block_create(const polyhead_feed_forward_block_desc* desc,
                                                   const polyhead_plan_options* options,
                                                   polyhead_feed_forward_block** block) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    *block = nullptr;
    if (Status s = need(desc, "desc"); !s.ok()) return s;
    FeedForwardBlockDesc checked;
    PlanOptions chosen;
    if (Status s = translate(desc, &checked); !s.ok()) return s;
    if (Status s = polyhead::capi::translate(options, &chosen); !s.ok()) return s;
    const Result<FeedForwardBlock> made = polyhead::feed_forward_block(checked, chosen);
    if (!made.ok()) return made.status();
    *block = new polyhead_feed_forward_block{*made};
    return {};
  });
}

void polyhead_feed_forward_block_destroy(polyhead_feed_forward_block* block) { delete block; }

size_t polyhead_feed_forward_block_workspace_bytes(const polyhead_feed_forward_block* block) {
  return bytes_of(block, &FeedForwardBlock::workspace_bytes);
}
size_t polyhead_feed_forward_block_backward_workspace_bytes(const polyhead_feed_forward_block* block) {
  return bytes_of(block, &FeedForwardBlock::backward_workspace_bytes);
}
size_t polyhead_feed_forward_block_reserve_bytes(const polyhead_feed_forward_block* block) {
  return bytes_of(block, &FeedForwardBlock::reserve_bytes);
}
size_t polyhead_feed_forward_block_packed_weights_bytes(const polyhead_feed_forward_block* block) {
  return bytes_of(block, &FeedForwardBlock::packed_weights_bytes);
}

const char* polyhead_feed_forward_block_kernel_name(const polyhead_feed_forward_block* block) {
  if (guarded([&] { return need(block, "block"); }) != POLYHEAD_OK) return "";
  return block->block.kernel_name();
}

polyhead_status polyhead_feed_forward_block_pack_weights(const polyhead_feed_forward_block* block,
                                                         const polyhead_feed_forward_weights* weights, void* packed,
                                                         size_t bytes) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    if (Status s = need(weights, "weights"); !s.ok()) return s;
    FeedForwardWeights tensors;
    if (Status s = translate(weights, &tensors); !s.ok()) return s;
    return block->block.pack_weights(tensors, packed, bytes);
  });
}

polyhead_status polyhead_feed_forward_block_forward(const polyhead_feed_forward_block* block,
                                                    const polyhead_feed_forward_block_forward_args* args) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    FeedForwardBlockForwardArgs tensors;
    if (Status s = translate(args, "args", &tensors); !s.ok()) return s;
    return block->block.forward(tensors);
  });
}

polyhead_status polyhead_feed_forward_block_backward(const polyhead_feed_forward_block* block,
                                                     const polyhead_feed_forward_block_backward_args* args) {
  return guarded([&]() -> Status {
    if (Status s = need(block, "block"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    FeedForwardBlockBackwardArgs tensors;
    if (Status s = translate(args, &tensors); !s.ok()) return s;
    return block->block.backward(tensors);
  });
}

}  // extern "C"
