// Text written byte by byte: each byte passes the model once, and looks back at keys and values kept in caches.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory.h"
#include "parameters.h"
#include "products.h"

namespace polyhead::demo {

class Decoder {
 public:
  /// `parameters` must outlive it.
  static Result<Decoder> make(const ModelDesc& desc, const ModelParameters& parameters);

  /// Reads a byte, which becomes number position() of the text, at most `context` of them. The logits [256] of the byte
  /// that follows stand in logits() until the next call.
  Status read(uint8_t byte);
  Status read(std::string_view bytes);
  int64_t position() const { return position_; }
  void forget() { position_ = 0; }  // the text begins anew
  const float* logits() const { return logits_.data(); }

 private:
  struct Caches {
    tools::Buffer keys, values;  // [1, context, num_heads, head_dim]
  };

  Decoder(const ModelDesc& desc, const ModelParameters& parameters, Layer layer, FeedForwardBlock feed_forward,
          MatrixProduct head)
      : desc_(desc),
        parameters_(&parameters),
        layer_(std::move(layer)),
        feed_forward_(std::move(feed_forward)),
        head_(std::move(head)) {}
  Status attend(const LayerParameters& parameters, const Caches& caches);
  Status feed_forward(const LayerParameters& parameters);
  Tensor row(const std::vector<float>& data) const { return Tensor(data.data(), DType::kFloat32, {1, 1, desc_.size}); }

  ModelDesc desc_;
  const ModelParameters* parameters_;
  Layer layer_;
  FeedForwardBlock feed_forward_;
  MatrixProduct head_;
  size_t workspace_bytes_ = 0;
  tools::Buffer workspace_;
  std::vector<Caches> caches_;
  std::vector<float> x_, normed_, attended_, logits_;
  int64_t position_ = 0;
};

/// Reads `prompt` and writes num_bytes after it, each drawn with probability softmax(logits / temperature). Where the
/// model's context is full, the last half of it is read anew and the rest is forgotten.
Result<std::string> sample(const ModelDesc& desc, const ModelParameters& parameters, std::string_view prompt,
                           int64_t num_bytes, double temperature, uint64_t seed);

}  // namespace polyhead::demo
