#include "model.h"

#include <algorithm>
#include <utility>

namespace polyhead::demo {

Result<Model> Model::make(const ModelDesc& desc, AttentionKind kind) {
  if (Status status = check_model_desc(desc); !status.ok()) return status;
  auto attention = kind == AttentionKind::kFused ? fused_attention(desc) : unfused_attention(desc);
  if (!attention.ok()) return attention.status();
  auto feed_forward = feed_forward_block(feed_forward_block_desc(desc, desc.batch, desc.context));
  if (!feed_forward.ok()) return feed_forward.status();
  const int64_t num_rows = desc.num_rows(), size = desc.size;
  const Result<MatrixProduct> products[] = {product_of({num_rows, kNumBytes, size}),
                                            product_of({num_rows, size, kNumBytes}),
                                            product_of({kNumBytes, size, num_rows})};
  for (const auto& product : products) {
    if (!product.ok()) return product.status();
  }
  Model model(desc, std::move(*attention), std::move(*feed_forward), {*products[0], *products[1], *products[2]});
  if (Status status = model.allocate_memory(); !status.ok()) return status;
  return model;
}

Status Model::allocate_memory() {
  Status failed;
  const auto take = [&](tools::Buffer& to, size_t bytes) {
    Result<tools::Buffer> buffer = allocate(bytes);
    if (buffer.ok()) {
      to = std::move(*buffer);
    } else {
      failed = buffer.status();
    }
  };
  layers_.resize(static_cast<size_t>(desc_.num_layers));
  for (LayerMemory& memory : layers_) {
    take(memory.x, rows_bytes());
    take(memory.attended, rows_bytes());
    take(memory.attention_saved, attention_->saved_bytes());
    take(memory.feed_forward_saved, feed_forward_.reserve_bytes());
  }
  const auto num_rows = static_cast<size_t>(desc_.num_rows());
  for (tools::Buffer* to : {&last_, &normed_, &grad_, &grad_other_}) take(*to, rows_bytes());
  take(statistics_, 2 * num_rows * sizeof(float));
  take(logits_, num_rows * static_cast<size_t>(kNumBytes) * sizeof(float));
  take(workspace_, workspace_bytes());
  return failed;
}

size_t Model::workspace_bytes() const {
  return std::max({attention_->workspace_bytes(), feed_forward_.workspace_bytes(),
                   feed_forward_.backward_workspace_bytes(), head_.logits.workspace_bytes(),
                   head_.grad_normed.workspace_bytes(), head_.grad_byte_vectors.workspace_bytes()});
}

size_t Model::attention_bytes() const {
  return layers_.size() * attention_->saved_bytes() + attention_->workspace_bytes();
}

size_t Model::memory_bytes() const {
  const auto num_rows = static_cast<size_t>(desc_.num_rows());
  const size_t layer = 2 * rows_bytes() + attention_->saved_bytes() + feed_forward_.reserve_bytes();
  const size_t logits = num_rows * static_cast<size_t>(kNumBytes) * sizeof(float);
  return layers_.size() * layer + 4 * rows_bytes() + 2 * num_rows * sizeof(float) + logits + workspace_bytes();
}

Result<double> Model::loss(const ModelParameters& parameters, const Bytes& bytes) {
  Status status = forward_blocks(parameters, bytes.inputs);
  if (status.ok()) status = forward_head(parameters);
  if (!status.ok()) return status;
  return cross_entropy(floats(logits_), bytes.targets, desc_.num_rows());
}

Result<double> Model::loss_and_gradients(const ModelParameters& parameters, const Bytes& bytes,
                                         const ModelParameters& gradients) {
  const Result<double> mean = loss(parameters, bytes);
  if (!mean.ok()) return mean;
  Status status = backward_head(parameters, gradients);
  if (status.ok()) status = backward_blocks(parameters, gradients);
  if (!status.ok()) return status;
  embed_backward(bytes.inputs, floats(grad_), desc_.num_rows(), desc_.context, desc_.size, gradients.byte_vectors,
                 gradients.position_vectors);
  return mean;
}

FeedForwardBlockForwardArgs Model::feed_forward_args(const LayerParameters& parameters,
                                                     const LayerMemory& memory) const {
  FeedForwardBlockForwardArgs args;
  args.x = rows(floats(memory.attended));
  args.weights = parameters.feed_forward;
  args.reserve = memory.feed_forward_saved.get();
  args.reserve_bytes = feed_forward_.reserve_bytes();
  args.workspace = workspace_.get();
  args.workspace_bytes = workspace_bytes();
  return args;
}

Status Model::forward_blocks(const ModelParameters& parameters, const uint8_t* inputs) {
  embed(inputs, desc_.num_rows(), desc_.context, desc_.size, parameters.byte_vectors, parameters.position_vectors,
        floats(layers_[0].x));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerParameters& layer = parameters.layers[i];
    const LayerMemory& memory = layers_[i];
    Status status = attention_->forward({layer.attention, layer.attention_norm}, floats(memory.x),
                                        {memory.attention_saved.get(), workspace_.get()}, floats(memory.attended));
    if (!status.ok()) return status;
    FeedForwardBlockForwardArgs args = feed_forward_args(layer, memory);
    args.out = rows(floats(i + 1 < layers_.size() ? layers_[i + 1].x : last_));
    if (status = feed_forward_.forward(args); !status.ok()) return status;
  }
  return {};
}

Status Model::forward_head(const ModelParameters& parameters) {
  const int64_t num_rows = desc_.num_rows();
  norm_forward(floats(last_), parameters.norm, num_rows, desc_.size, floats(normed_),
               {floats(statistics_), floats(statistics_) + num_rows});
  return multiply(head_.logits,
                  {matrix(floats(normed_), num_rows, desc_.size),
                   transposed(matrix(parameters.byte_vectors, kNumBytes, desc_.size)),
                   matrix(floats(logits_), num_rows, kNumBytes)},
                  workspace_.get());
}

// The table of bytes has two gradients: this one, and that of the embedding, which is added to it.
Status Model::backward_head(const ModelParameters& parameters, const ModelParameters& gradients) {
  const int64_t num_rows = desc_.num_rows();
  const Tensor grad_logits = matrix(floats(logits_), num_rows, kNumBytes);
  const Tensor normed = matrix(floats(normed_), num_rows, desc_.size);
  Status status = multiply(head_.grad_byte_vectors,
                           {transposed(grad_logits), normed, matrix(gradients.byte_vectors, kNumBytes, desc_.size)},
                           workspace_.get());
  if (!status.ok()) return status;
  const Tensor byte_vectors = matrix(parameters.byte_vectors, kNumBytes, desc_.size);
  const Tensor grad_normed = matrix(floats(grad_other_), num_rows, desc_.size);
  status = multiply(head_.grad_normed, {grad_logits, byte_vectors, grad_normed}, workspace_.get());
  if (!status.ok()) return status;
  NormGradient norm;
  norm.x = floats(last_);
  norm.statistics = {floats(statistics_), floats(statistics_) + num_rows};
  norm.grad_y = floats(grad_other_);
  norm.grad_x = floats(grad_);
  norm_backward(norm, parameters.norm, gradients.norm, num_rows, desc_.size);
  return {};
}

Status Model::backward_blocks(const ModelParameters& parameters, const ModelParameters& gradients) {
  for (size_t i = layers_.size(); i-- > 0;) {
    const LayerParameters &layer = parameters.layers[i], &grad_layer = gradients.layers[i];
    const LayerMemory& memory = layers_[i];
    FeedForwardBlockBackwardArgs args;
    args.forward = feed_forward_args(layer, memory);
    args.grad_out = rows(floats(grad_));
    args.grad_x = rows(floats(grad_other_));
    args.grad_weights = grad_layer.feed_forward;
    Status status = feed_forward_.backward(args);
    if (!status.ok()) return status;
    status = attention_->backward({layer.attention, layer.attention_norm}, floats(memory.x),
                                  {memory.attention_saved.get(), workspace_.get()}, floats(grad_other_),
                                  {grad_layer.attention, grad_layer.attention_norm}, floats(grad_));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace polyhead::demo
