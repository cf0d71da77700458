// polyhead_block.h: translates to polyhead/block.h and back; computes nothing.
#include "polyhead/block.h"

#include "capi/handles.h"

using namespace polyhead::capi;

struct polyhead_attention_block {
  polyhead::AttentionBlock block;
  polyhead_layer layer{block.layer()};
};

struct polyhead_feed_forward_block {
  polyhead::FeedForwardBlock block;
};

static_assert(sizeof(polyhead_feed_forward_weights) == 6 * sizeof(polyhead_tensor));

extern "C" {

polyhead_status polyhead_attention_block_desc_init(polyhead_attention_block_desc* desc, size_t struct_size) {
  return guarded([&] { return init(desc, struct_size, "desc"); });
}

polyhead_status polyhead_attention_block_forward_args_init(polyhead_attention_block_forward_args* args,
                                                           size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_attention_block_backward_args_init(polyhead_attention_block_backward_args* args,
                                                            size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_attention_block_create(const polyhead_attention_block_desc* desc,
                                                const polyhead_plan_options* options,
                                                polyhead_attention_block** block) {
  return create(desc, options, "block", block, polyhead::attention_block);
}

void polyhead_attention_block_destroy(polyhead_attention_block* block) { delete block; }

const polyhead_layer* polyhead_attention_block_layer(const polyhead_attention_block* block) {
  return ask(block, "block", static_cast<const polyhead_layer*>(nullptr), [](const auto& b) { return &b.layer; });
}

size_t polyhead_attention_block_workspace_bytes(const polyhead_attention_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.workspace_bytes(); });
}
size_t polyhead_attention_block_backward_workspace_bytes(const polyhead_attention_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.backward_workspace_bytes(); });
}
size_t polyhead_attention_block_reserve_bytes(const polyhead_attention_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.reserve_bytes(); });
}

polyhead_status polyhead_attention_block_forward(const polyhead_attention_block* block,
                                                 const polyhead_attention_block_forward_args* args) {
  return call(block, "block", args, [](const auto& b, const auto& tensors) { return b.block.forward(tensors); });
}

polyhead_status polyhead_attention_block_backward(const polyhead_attention_block* block,
                                                  const polyhead_attention_block_backward_args* args) {
  return call(block, "block", args, [](const auto& b, const auto& tensors) { return b.block.backward(tensors); });
}

polyhead_status polyhead_feed_forward_block_desc_init(polyhead_feed_forward_block_desc* desc, size_t struct_size) {
  return guarded([&] { return init(desc, struct_size, "desc"); });
}

polyhead_status polyhead_feed_forward_block_forward_args_init(polyhead_feed_forward_block_forward_args* args,
                                                              size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_feed_forward_block_backward_args_init(polyhead_feed_forward_block_backward_args* args,
                                                               size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_feed_forward_block_create(const polyhead_feed_forward_block_desc* desc,
                                                   const polyhead_plan_options* options,
                                                   polyhead_feed_forward_block** block) {
  return create(desc, options, "block", block, polyhead::feed_forward_block);
}

void polyhead_feed_forward_block_destroy(polyhead_feed_forward_block* block) { delete block; }

size_t polyhead_feed_forward_block_workspace_bytes(const polyhead_feed_forward_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.workspace_bytes(); });
}
size_t polyhead_feed_forward_block_backward_workspace_bytes(const polyhead_feed_forward_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.backward_workspace_bytes(); });
}
size_t polyhead_feed_forward_block_reserve_bytes(const polyhead_feed_forward_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.reserve_bytes(); });
}
size_t polyhead_feed_forward_block_prepacked_weights_bytes(const polyhead_feed_forward_block* block) {
  return ask(block, "block", size_t{0}, [](const auto& b) { return b.block.prepacked_weights_bytes(); });
}

const char* polyhead_feed_forward_block_kernel_name(const polyhead_feed_forward_block* block) {
  return ask(block, "block", "", [](const auto& b) { return b.block.kernel_name(); });
}

polyhead_status polyhead_feed_forward_block_prepack_weights(const polyhead_feed_forward_block* block,
                                                            const polyhead_feed_forward_weights* weights,
                                                            void* prepacked, size_t bytes) {
  return pack(block, "block", weights, prepacked, bytes,
              [](const auto& b, const auto&... given) { return b.block.prepack_weights(given...); });
}

polyhead_status polyhead_feed_forward_block_forward(const polyhead_feed_forward_block* block,
                                                    const polyhead_feed_forward_block_forward_args* args) {
  return call(block, "block", args, [](const auto& b, const auto& tensors) { return b.block.forward(tensors); });
}

polyhead_status polyhead_feed_forward_block_backward(const polyhead_feed_forward_block* block,
                                                     const polyhead_feed_forward_block_backward_args* args) {
  return call(block, "block", args, [](const auto& b, const auto& tensors) { return b.block.backward(tensors); });
}

}  // extern "C"
