// Forward and backward of the whole model, in memory that is taken once.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "attention_part.h"
#include "memory.h"
#include "parameters.h"
#include "products.h"
#include "rows.h"

namespace polyhead::demo {

enum class AttentionKind { kFused, kUnfused };

class Model {
 public:
  static Result<Model> make(const ModelDesc& desc, AttentionKind kind);

  const ModelDesc& desc() const { return desc_; }

  /// The mean loss of a batch in nats, without gradients.
  Result<double> loss(const ModelParameters& parameters, const Bytes& bytes);

  /// The mean loss; `gradients` is overwritten, gaps between parameters excepted.
  Result<double> loss_and_gradients(const ModelParameters& parameters, const Bytes& bytes,
                                    const ModelParameters& gradients);

  /// All that loss_and_gradients works in, besides parameters and gradients; and what of it attention needs.
  size_t memory_bytes() const;
  size_t attention_bytes() const;

 private:
  struct LayerMemory {
    tools::Buffer x, attended;  // the inputs of the two blocks
    tools::Buffer attention_saved, feed_forward_saved;
  };
  struct Head {  // products with the transposed table of bytes: logits, and the gradients of what makes them
    MatrixProduct logits, grad_normed, grad_byte_vectors;
  };

  Model(const ModelDesc& desc, std::unique_ptr<AttentionPart> attention, FeedForwardBlock feed_forward, Head head)
      : desc_(desc), attention_(std::move(attention)), feed_forward_(std::move(feed_forward)), head_(std::move(head)) {}
  Status allocate_memory();
  Status forward_blocks(const ModelParameters& parameters, const uint8_t* inputs);
  Status forward_head(const ModelParameters& parameters);
  Status backward_head(const ModelParameters& parameters, const ModelParameters& gradients);
  Status backward_blocks(const ModelParameters& parameters, const ModelParameters& gradients);
  FeedForwardBlockForwardArgs feed_forward_args(const LayerParameters& parameters, const LayerMemory& memory) const;

  static float* floats(const tools::Buffer& buffer) { return reinterpret_cast<float*>(buffer.get()); }
  Tensor rows(const float* data) const {
    return Tensor(data, DType::kFloat32, {desc_.batch, desc_.context, desc_.size});
  }
  size_t rows_bytes() const { return static_cast<size_t>(desc_.num_rows() * desc_.size) * sizeof(float); }
  size_t workspace_bytes() const;

  ModelDesc desc_;
  std::unique_ptr<AttentionPart> attention_;
  FeedForwardBlock feed_forward_;
  Head head_;
  std::vector<LayerMemory> layers_;
  tools::Buffer last_, normed_, statistics_, logits_;  // x behind the last block, normed, mean and rstd
  tools::Buffer grad_, grad_other_;                    // of x: backward goes from one to the other
  tools::Buffer workspace_;
};

}  // namespace polyhead::demo
