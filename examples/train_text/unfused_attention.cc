//   n = norm(x)   q | k | v = n Wqkv + b   S = q k^T   P = softmax(scale S), causal   O = P v   out = x + O Wo + bo
// Saved for backward: n, q | k | v, O and P [batch, num_heads, context, context]. Backward, from the end:
//   dO = g Wo^T     dP = dO v^T     dv = P^T dO     dS = scale P (dP - rowsum(dP P))     dq = dS k     dk = dS^T q
//   dn = d(q | k | v) Wqkv^T        dx = norm'(dn) + g
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention_part.h"
#include "lanes.h"
#include "parallel.h"
#include "products.h"
#include "rows.h"

namespace polyhead::demo {
namespace {

// Row i of S becomes that of P: it sees keys 0 .. i.
void softmax_row(float* s, int64_t i, int64_t num_keys, float scale) {
  const float most = max_of(s, i + 1);
  for (int64_t j = 0; j <= i; ++j) s[j] = exp_of_negative((s[j] - most) * scale);
  const float share = 1 / sum_of(i + 1, [&](int64_t j) { return s[j]; });
  for (int64_t j = 0; j <= i; ++j) s[j] *= share;
  std::fill(s + i + 1, s + num_keys, 0.0f);
}

// Row i of dP becomes that of dS.
void softmax_row_backward(const float* p, float* dp, int64_t i, int64_t num_keys, float scale) {
  const float sum = sum_of(i + 1, [&](int64_t j) { return dp[j] * p[j]; });
  for (int64_t j = 0; j <= i; ++j) dp[j] = scale * p[j] * (dp[j] - sum);
  std::fill(dp + i + 1, dp + num_keys, 0.0f);
}

// The products of a pass. Whole ones run on all threads; those of one head on the thread that has the head.
struct AllProducts {
  MatrixProduct qkv, out, grad_heads, grad_out_weight, grad_qkv_weight, grad_normed;
  MatrixProduct scores, values;  // [context, head_dim] [head_dim, context], and [context, context] [context, head_dim]

  size_t whole_bytes() const {
    return std::max({qkv.workspace_bytes(), out.workspace_bytes(), grad_heads.workspace_bytes(),
                     grad_out_weight.workspace_bytes(), grad_qkv_weight.workspace_bytes(),
                     grad_normed.workspace_bytes()});
  }
  size_t head_bytes() const { return (std::max(scores.workspace_bytes(), values.workspace_bytes()) + 63) / 64 * 64; }
};

class UnfusedAttention final : public AttentionPart {
 public:
  UnfusedAttention(const ModelDesc& desc, AllProducts products, std::unique_ptr<Executor> one_thread)
      : desc_(desc), one_thread_(std::move(one_thread)), products_(std::move(products)) {}

  size_t saved_bytes() const override { return saved(nullptr).end; }
  size_t workspace_bytes() const override {
    return scratch(nullptr).end + products_.whole_bytes() + static_cast<size_t>(num_heads()) * products_.head_bytes();
  }
  Status forward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory,
                 float* out) const override;
  Status backward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory, const float* grad_out,
                  const AttentionWeights& gradients, float* grad_x) const override;

 private:
  // Arrays one behind the other, each aligned to 64 bytes; without memory, to ask for their size.
  class Arrays {
   public:
    explicit Arrays(std::byte* memory) : memory_(memory) {}
    float* take(int64_t count) {
      auto* const data = memory_ == nullptr ? nullptr : reinterpret_cast<float*>(memory_ + bytes_);
      bytes_ += (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
      return data;
    }
    size_t bytes() const { return bytes_; }

   private:
    std::byte* memory_;
    size_t bytes_ = 0;
  };
  struct Saved {
    float *normed, *qkv, *weights, *heads;  // n, q | k | v, P, O
    NormStatistics statistics;
    size_t end;
  };
  struct Scratch {
    float *grad_heads, *grad_qkv, *grad_normed, *grad_weights;  // dO, d(q | k | v), dn, dP and dS
    size_t end;
  };

  int64_t num_heads() const { return desc_.batch * desc_.num_heads; }  // of all sequences
  int64_t num_weights() const { return num_heads() * desc_.context * desc_.context; }
  float* of_head(float* all, int64_t head) const { return all + head * desc_.context * desc_.context; }

  Saved saved(std::byte* memory) const {
    Arrays arrays(memory);
    const int64_t rows = desc_.num_rows(), size = desc_.size;
    Saved all{};
    all.normed = arrays.take(rows * size);
    all.qkv = arrays.take(rows * 3 * size);
    all.weights = arrays.take(num_weights());
    all.heads = arrays.take(rows * size);
    all.statistics = {arrays.take(rows), arrays.take(rows)};
    all.end = arrays.bytes();
    return all;
  }
  Scratch scratch(std::byte* memory) const {
    Arrays arrays(memory);
    const int64_t rows = desc_.num_rows(), size = desc_.size;
    Scratch all{};
    all.grad_heads = arrays.take(rows * size);
    all.grad_qkv = arrays.take(rows * 3 * size);
    all.grad_normed = arrays.take(rows * size);
    all.grad_weights = arrays.take(num_weights());
    all.end = arrays.bytes();
    return all;
  }

  // [context, head_dim] of a head in rows of `row_size`: part 0, 1, 2 are q, k, v.
  Tensor head_of(const float* rows, int64_t row_size, int64_t head, int part = 0) const {
    const int64_t b = head / desc_.num_heads, h = head % desc_.num_heads;
    const float* first = rows + b * desc_.context * row_size + part * desc_.size + h * desc_.head_dim();
    return matrix(first, desc_.context, desc_.head_dim(), row_size);
  }
  Tensor weights_of(float* all, int64_t head) const { return matrix(of_head(all, head), desc_.context, desc_.context); }
  Tensor rows_of(const float* data, int64_t columns) const { return matrix(data, desc_.num_rows(), columns); }
  // Query, key and value lie side by side, as GPT-2 stores them.
  Tensor qkv_weight(const Tensor& query) const {
    return matrix(static_cast<const float*>(query.data), desc_.size, 3 * desc_.size);
  }

  std::byte* whole_workspace(const AttentionMemory& memory) const { return memory.workspace + scratch(nullptr).end; }
  std::byte* head_workspace(const AttentionMemory& memory, int64_t head) const {
    return whole_workspace(memory) + products_.whole_bytes() + static_cast<size_t>(head) * products_.head_bytes();
  }

  template <class Pass>
  Status for_heads(const Pass& pass) const {
    std::vector<Status> done(static_cast<size_t>(num_heads()));
    for_each(num_heads(), [&](int64_t head) { done[static_cast<size_t>(head)] = pass(head); });
    for (const Status& status : done) {
      if (!status.ok()) return status;
    }
    return {};
  }
  Status attend(const Saved& s, const AttentionMemory& memory, int64_t head) const;
  Status attend_backward(const Saved& s, const Scratch& d, const AttentionMemory& memory, int64_t head) const;

  ModelDesc desc_;
  std::unique_ptr<Executor> one_thread_;
  AllProducts products_;
};

Status UnfusedAttention::attend(const Saved& s, const AttentionMemory& memory, int64_t head) const {
  const int64_t context = desc_.context, stride = 3 * desc_.size;
  const float scale = 1 / std::sqrt(static_cast<float>(desc_.head_dim()));
  std::byte* const workspace = head_workspace(memory, head);
  const Tensor weights = weights_of(s.weights, head);
  const Tensor q = head_of(s.qkv, stride, head, 0), k = head_of(s.qkv, stride, head, 1);
  if (Status status = multiply(products_.scores, {q, transposed(k), weights}, workspace); !status.ok()) return status;
  float* rows = of_head(s.weights, head);
  for (int64_t i = 0; i < context; ++i) softmax_row(rows + i * context, i, context, scale);
  return multiply(products_.values, {weights, head_of(s.qkv, stride, head, 2), head_of(s.heads, desc_.size, head)},
                  workspace);
}

Status UnfusedAttention::forward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory,
                                 float* out) const {
  const int64_t size = desc_.size, rows = desc_.num_rows();
  const Saved s = saved(memory.saved);
  std::byte* const workspace = whole_workspace(memory);
  norm_forward(x, weights.norm, rows, size, s.normed, s.statistics);
  const Tensor bias(weights.layer.query_bias.data, DType::kFloat32, {3 * size});
  Status status =
      multiply(products_.qkv,
               {rows_of(s.normed, size), qkv_weight(weights.layer.query), rows_of(s.qkv, 3 * size), bias}, workspace);
  if (status.ok()) status = for_heads([&](int64_t head) { return attend(s, memory, head); });
  if (!status.ok()) return status;
  std::copy_n(x, rows * size, out);
  return multiply(products_.out,
                  {rows_of(s.heads, size), weights.layer.out, rows_of(out, size), weights.layer.out_bias, true},
                  workspace);
}

Status UnfusedAttention::attend_backward(const Saved& s, const Scratch& d, const AttentionMemory& memory,
                                         int64_t head) const {
  const int64_t context = desc_.context, stride = 3 * desc_.size;
  const float scale = 1 / std::sqrt(static_cast<float>(desc_.head_dim()));
  std::byte* const workspace = head_workspace(memory, head);
  const auto part = [&](const float* qkv, int which) { return head_of(qkv, stride, head, which); };
  const Tensor P = weights_of(s.weights, head), dP = weights_of(d.grad_weights, head);
  const Tensor dO = head_of(d.grad_heads, desc_.size, head);
  Status status = multiply(products_.scores, {dO, transposed(part(s.qkv, 2)), dP}, workspace);
  if (status.ok()) status = multiply(products_.values, {transposed(P), dO, part(d.grad_qkv, 2)}, workspace);
  if (!status.ok()) return status;
  const float* p = of_head(s.weights, head);
  float* ds = of_head(d.grad_weights, head);
  for (int64_t i = 0; i < context; ++i) softmax_row_backward(p + i * context, ds + i * context, i, context, scale);
  status = multiply(products_.values, {dP, part(s.qkv, 1), part(d.grad_qkv, 0)}, workspace);
  if (!status.ok()) return status;
  return multiply(products_.values, {transposed(dP), part(s.qkv, 0), part(d.grad_qkv, 1)}, workspace);
}

Status UnfusedAttention::backward(const AttentionWeights& weights, const float* x, const AttentionMemory& memory,
                                  const float* grad_out, const AttentionWeights& gradients, float* grad_x) const {
  const int64_t size = desc_.size, num_rows = desc_.num_rows();
  const Saved s = saved(memory.saved);
  const Scratch d = scratch(memory.workspace);
  std::byte* const workspace = whole_workspace(memory);
  const Tensor g = rows_of(grad_out, size), dqkv = rows_of(d.grad_qkv, 3 * size);
  Status status =
      multiply(products_.grad_heads, {g, transposed(weights.layer.out), rows_of(d.grad_heads, size)}, workspace);
  if (status.ok()) {
    status =
        multiply(products_.grad_out_weight, {transposed(rows_of(s.heads, size)), g, gradients.layer.out}, workspace);
  }
  sum_columns(grad_out, num_rows, size, static_cast<float*>(gradients.layer.out_bias.data));
  if (status.ok()) status = for_heads([&](int64_t head) { return attend_backward(s, d, memory, head); });
  if (status.ok()) {
    const Tensor to = qkv_weight(gradients.layer.query);
    status = multiply(products_.grad_qkv_weight, {transposed(rows_of(s.normed, size)), dqkv, to}, workspace);
  }
  sum_columns(d.grad_qkv, num_rows, 3 * size, static_cast<float*>(gradients.layer.query_bias.data));
  if (status.ok()) {
    status = multiply(products_.grad_normed,
                      {dqkv, transposed(qkv_weight(weights.layer.query)), rows_of(d.grad_normed, size)}, workspace);
  }
  if (!status.ok()) return status;
  NormGradient norm;
  norm.x = x;
  norm.statistics = s.statistics;
  norm.grad_y = d.grad_normed;
  norm.residual = grad_out;
  norm.grad_x = grad_x;
  norm_backward(norm, weights.norm, gradients.norm, num_rows, size);
  return {};
}

}  // namespace

Result<std::unique_ptr<AttentionPart>> unfused_attention(const ModelDesc& desc) {
  std::unique_ptr<Executor> one_thread(new_thread_pool(1));
  if (one_thread == nullptr) return Status(StatusCode::kOutOfMemory, "no memory for a thread pool");
  const int64_t rows = desc.num_rows(), size = desc.size, context = desc.context, head_dim = desc.head_dim();
  const Result<MatrixProduct> made[] = {product_of({rows, 3 * size, size, true}),
                                        product_of({rows, size, size, true}),
                                        product_of({rows, size, size}),
                                        product_of({size, size, rows}),
                                        product_of({size, 3 * size, rows}),
                                        product_of({rows, size, 3 * size}),
                                        product_of({context, context, head_dim}, *one_thread),
                                        product_of({context, head_dim, context}, *one_thread)};
  for (const Result<MatrixProduct>& product : made) {
    if (!product.ok()) return product.status();
  }
  AllProducts products{*made[0], *made[1], *made[2], *made[3], *made[4], *made[5], *made[6], *made[7]};
  return std::unique_ptr<AttentionPart>(
      std::make_unique<UnfusedAttention>(desc, std::move(products), std::move(one_thread)));
}

}  // namespace polyhead::demo
