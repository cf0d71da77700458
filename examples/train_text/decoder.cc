#include "decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "rows.h"
#include "testing/random.h"

namespace polyhead::demo {

namespace {

constexpr int64_t kPageSize = 16;

// Room for `context` bytes.
KvCacheDesc cache_desc(const ModelDesc& desc) {
  KvCacheDesc cache;
  cache.num_pages = (desc.context + kPageSize - 1) / kPageSize;
  cache.page_size = kPageSize;
  cache.num_heads_kv = desc.num_heads;
  cache.head_dim = cache.head_dim_v = desc.head_dim();
  return cache;
}

}  // namespace

Result<Decoder> Decoder::make(const ModelDesc& desc, const ModelParameters& parameters) {
  if (Status status = check_model_desc(desc); !status.ok()) return status;
  Result<KvCache> cache = kv_cache(cache_desc(desc));
  if (!cache.ok()) return cache.status();
  Result<MatrixProduct> head = product_of({1, kNumBytes, desc.size});
  if (!head.ok()) return head.status();
  Decoder decoder(desc, parameters, std::move(*cache), std::move(*head));
  for (int64_t i = 0; i < desc.num_layers; ++i) {
    Result<tools::Buffer> pool = allocate(decoder.cache_.bytes());
    if (!pool.ok()) return pool.status();
    decoder.pools_.push_back(std::move(*pool));
  }
  decoder.pages_.resize(static_cast<size_t>(decoder.cache_.desc().num_pages));
  std::iota(decoder.pages_.begin(), decoder.pages_.end(), 0);  // one text, whose pages lie in order
  decoder.logits_.resize(static_cast<size_t>(kNumBytes));
  if (Status status = decoder.set_up(1); !status.ok()) return status;
  return decoder;
}

// Makes the blocks for so many bytes a call, and what they work in.
Status Decoder::set_up(int64_t num_bytes) {
  if (blocks_.count(num_bytes) == 0) {
    AttentionBlockDesc block = attention_block_desc(desc_);
    block.layer.batch = 1;
    block.layer.seqlen_q = num_bytes;
    block.layer.seqlen_k = cache_.desc().num_pages * kPageSize;
    block.layer.cache = cache_.desc();
    block.layer.attention.align = Align::kBottomRight;  // the last byte sees all
    Result<AttentionBlock> attention = attention_block(block);
    if (!attention.ok()) return attention.status();
    Result<FeedForwardBlock> feed_forward = feed_forward_block(feed_forward_block_desc(desc_, 1, num_bytes));
    if (!feed_forward.ok()) return feed_forward.status();
    blocks_.emplace(num_bytes, Blocks{std::move(*attention), std::move(*feed_forward)});
  }
  const Blocks& blocks = blocks_.at(num_bytes);
  const size_t needed =
      std::max({blocks.attention.workspace_bytes(), blocks.feed_forward.workspace_bytes(), head_.workspace_bytes()});
  if (needed > workspace_bytes_) {
    Result<tools::Buffer> workspace = allocate(needed);
    if (!workspace.ok()) return workspace.status();
    workspace_ = std::move(*workspace);
    workspace_bytes_ = needed;
  }
  for (std::vector<float>* data : {&x_, &normed_, &attended_})
    data->resize(static_cast<size_t>(num_bytes * desc_.size));
  slots_.resize(static_cast<size_t>(num_bytes));
  std::iota(slots_.begin(), slots_.end(), position_);
  return {};
}

Status Decoder::attend(const LayerParameters& parameters, const tools::Buffer& pool, int64_t num_bytes) {
  const int64_t length = position_ + num_bytes;
  AttentionBlockForwardArgs args;
  args.layer.query = rows(x_, num_bytes);
  args.layer.weights = parameters.attention;
  args.layer.seqlens_k = Tensor(&length, DType::kInt64, {1});
  args.layer.cache.pool = cache_.tensors(pool.get());
  args.layer.cache.page_table = Tensor(pages_.data(), DType::kInt64, {1, cache_.desc().num_pages});
  args.layer.cache.slots = Tensor(slots_.data(), DType::kInt64, {1, num_bytes});
  args.layer.out = rows(attended_, num_bytes);
  args.layer.workspace = workspace_.get();
  args.layer.workspace_bytes = workspace_bytes_;
  args.norm = parameters.attention_norm;
  return blocks_.at(num_bytes).attention.forward(args);
}

Status Decoder::feed_forward(const LayerParameters& parameters, int64_t num_bytes) {
  FeedForwardBlockForwardArgs args;
  args.x = rows(attended_, num_bytes);
  args.weights = parameters.feed_forward;
  args.out = rows(x_, num_bytes);
  args.workspace = workspace_.get();
  args.workspace_bytes = workspace_bytes_;
  return blocks_.at(num_bytes).feed_forward.forward(args);
}

Status Decoder::read(std::string_view bytes) {
  const auto num_bytes = static_cast<int64_t>(bytes.size());
  if (num_bytes > desc_.context - position_) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the text is longer than the model's context of {} bytes", desc_.context)};
  }
  if (num_bytes == 0) return {};
  if (Status status = set_up(num_bytes); !status.ok()) return status;
  embed(reinterpret_cast<const uint8_t*>(bytes.data()), num_bytes, num_bytes, desc_.size, parameters_->byte_vectors,
        parameters_->position_vectors + position_ * desc_.size, x_.data());
  for (size_t i = 0; i < pools_.size(); ++i) {
    Status status = attend(parameters_->layers[i], pools_[i], num_bytes);
    if (status.ok()) status = feed_forward(parameters_->layers[i], num_bytes);
    if (!status.ok()) return status;
  }
  position_ += num_bytes;
  norm_forward(x_.data() + (num_bytes - 1) * desc_.size, parameters_->norm, 1, desc_.size, normed_.data(), {});
  return multiply(
      head_,
      {matrix(normed_.data(), 1, desc_.size), transposed(matrix(parameters_->byte_vectors, kNumBytes, desc_.size)),
       matrix(logits_.data(), 1, kNumBytes)},
      workspace_.get());
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
