#include "decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "rows.h"
#include "testing/random.h"

namespace polyhead::demo {

Result<Decoder> Decoder::make(const ModelDesc& desc, const ModelParameters& parameters) {
  if (Status status = check_model_desc(desc); !status.ok()) return status;
  Result<Layer> layer = polyhead::layer(layer_desc(desc, /*batch=*/1));
  if (!layer.ok()) return layer.status();
  Result<FeedForwardBlock> feed_forward = feed_forward_block(feed_forward_block_desc(desc, 1, 1));
  if (!feed_forward.ok()) return feed_forward.status();
  Result<MatrixProduct> head = product_of({1, kNumBytes, desc.size});
  if (!head.ok()) return head.status();
  Decoder decoder(desc, parameters, std::move(*layer), std::move(*feed_forward), std::move(*head));

  decoder.workspace_bytes_ = std::max(
      {decoder.layer_.workspace_bytes(), decoder.feed_forward_.workspace_bytes(), decoder.head_.workspace_bytes()});
  Result<tools::Buffer> workspace = allocate(decoder.workspace_bytes_);
  if (!workspace.ok()) return workspace.status();
  decoder.workspace_ = std::move(*workspace);
  const size_t cache_bytes = static_cast<size_t>(desc.context * desc.size) * sizeof(float);
  for (int64_t i = 0; i < desc.num_layers; ++i) {
    Result<tools::Buffer> keys = allocate(cache_bytes), values = allocate(cache_bytes);
    if (!keys.ok()) return keys.status();
    if (!values.ok()) return values.status();
    decoder.caches_.push_back({std::move(*keys), std::move(*values)});
  }
  for (std::vector<float>* row : {&decoder.x_, &decoder.normed_, &decoder.attended_}) {
    row->resize(static_cast<size_t>(desc.size));
  }
  decoder.logits_.resize(static_cast<size_t>(kNumBytes));
  return decoder;
}

// attended = x + layer(norm(x)), as AttentionBlock has it; the block takes whole sequences, the layer also one step.
Status Decoder::attend(const LayerParameters& parameters, const Caches& caches) {
  norm_forward(x_.data(), parameters.attention_norm, 1, desc_.size, normed_.data(), {});
  LayerForwardArgs args;
  args.query = args.key = args.value = row(normed_);
  args.residual = row(x_);
  args.weights = parameters.attention;
  args.key_cache = Tensor(caches.keys.get(), DType::kFloat32, {1, desc_.context, desc_.num_heads, desc_.head_dim()});
  args.value_cache =
      Tensor(caches.values.get(), DType::kFloat32, {1, desc_.context, desc_.num_heads, desc_.head_dim()});
  args.step = position_;
  args.out = row(attended_);
  args.workspace = workspace_.get();
  args.workspace_bytes = workspace_bytes_;
  return layer_.forward(args);
}

Status Decoder::feed_forward(const LayerParameters& parameters) {
  FeedForwardBlockForwardArgs args;
  args.x = row(attended_);
  args.weights = parameters.feed_forward;
  args.out = row(x_);
  args.workspace = workspace_.get();
  args.workspace_bytes = workspace_bytes_;
  return feed_forward_.forward(args);
}

Status Decoder::read(uint8_t byte) {
  if (position_ >= desc_.context) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the text is longer than the model's context of {} bytes", desc_.context)};
  }
  embed(&byte, 1, 1, desc_.size, parameters_->byte_vectors, parameters_->position_vectors + position_ * desc_.size,
        x_.data());
  for (size_t i = 0; i < caches_.size(); ++i) {
    Status status = attend(parameters_->layers[i], caches_[i]);
    if (status.ok()) status = feed_forward(parameters_->layers[i]);
    if (!status.ok()) return status;
  }
  ++position_;
  norm_forward(x_.data(), parameters_->norm, 1, desc_.size, normed_.data(), {});
  return multiply(
      head_,
      {matrix(normed_.data(), 1, desc_.size), transposed(matrix(parameters_->byte_vectors, kNumBytes, desc_.size)),
       matrix(logits_.data(), 1, kNumBytes)},
      workspace_.get());
}

Status Decoder::read(std::string_view bytes) {
  for (const char byte : bytes) {
    if (Status status = read(static_cast<uint8_t>(byte)); !status.ok()) return status;
  }
  return Status();
}

Result<std::string> sample(const ModelDesc& desc, const ModelParameters& parameters, std::string_view prompt,
                           int64_t num_bytes, double temperature, uint64_t seed) {
  if (prompt.empty()) return Status(StatusCode::kInvalidArgument, "the prompt is empty, it needs a byte at least");
  Result<Decoder> decoder = Decoder::make(desc, parameters);
  if (!decoder.ok()) return decoder.status();
  if (Status status = decoder->read(prompt); !status.ok()) return status;
  std::string text(prompt);
  testing::Random random(seed, 0);
  std::vector<double> weights(static_cast<size_t>(kNumBytes));
  for (int64_t n = 0; n < num_bytes; ++n) {
    const float* logits = decoder->logits();
    const double most = static_cast<double>(*std::max_element(logits, logits + kNumBytes));
    double sum = 0;
    for (size_t c = 0; c < weights.size(); ++c) {
      weights[c] = std::exp((static_cast<double>(logits[c]) - most) / temperature);
      sum += weights[c];
    }
    double left = random.uniform() * sum;
    size_t drawn = 0;
    while (drawn + 1 < weights.size() && left >= weights[drawn]) left -= weights[drawn++];
    text += static_cast<char>(drawn);
    std::string_view unread(text.data() + text.size() - 1, 1);
    if (decoder->position() == desc.context) {  // full: the second half of what it has read, from the first position on
      decoder->forget();
      unread = std::string_view(text).substr(text.size() - static_cast<size_t>(desc.context + 1) / 2);
    }
    if (Status status = decoder->read(unread); !status.ok()) return status;
  }
  return text.substr(prompt.size());
}

}  // namespace polyhead::demo
