// Text that goes on: a prompt passes the model in one call, then each byte once; they look back at keys and values in the
// pages of a cache.
#pragma once

#include <map>
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

  /// Reads bytes, which become those from number position() on of the text, at most `context` of them. The logits [256] of
  /// the byte that follows stand in logits() until the next call.
  Status read(std::string_view bytes);
  Status read(uint8_t byte) { return read(std::string_view(reinterpret_cast<const char*>(&byte), 1)); }
  int64_t position() const { return position_; }
  void forget() { position_ = 0; }  // the text begins anew
  const float* logits() const { return logits_.data(); }

 private:
  struct Blocks {  // that take so many bytes a call
    AttentionBlock attention;
    FeedForwardBlock feed_forward;
  };

  Decoder(const ModelDesc& desc, const ModelParameters& parameters, KvCache cache, MatrixProduct head)
      : desc_(desc), parameters_(&parameters), cache_(std::move(cache)), head_(std::move(head)) {}
  Status set_up(int64_t num_bytes);
  Status attend(const LayerParameters& parameters, const tools::Buffer& pool, int64_t num_bytes);
  Status feed_forward(const LayerParameters& parameters, int64_t num_bytes);
  Tensor rows(const std::vector<float>& data, int64_t num_rows) const {
    return Tensor(data.data(), DType::kFloat32, {1, num_rows, desc_.size});
  }

  ModelDesc desc_;
  const ModelParameters* parameters_;
  KvCache cache_;
  MatrixProduct head_;
  std::map<int64_t, Blocks> blocks_;  // by how many bytes they take
  tools::Buffer workspace_;
  size_t workspace_bytes_ = 0;
  std::vector<tools::Buffer> pools_;  // of each layer
  std::vector<int64_t> pages_, slots_;
  std::vector<float> x_, normed_, attended_, logits_;
  int64_t position_ = 0;
};

/// Reads `prompt` and writes num_bytes after it, each drawn with probability softmax(logits / temperature). Where the
/// model's context is full, the last half of it is read anew and the rest is forgotten.
Result<std::string> sample(const ModelDesc& desc, const ModelParameters& parameters, std::string_view prompt,
                           int64_t num_bytes, double temperature, uint64_t seed);

}  // namespace polyhead::demo
