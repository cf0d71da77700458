#include "scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "polyhead/matrix_product.h"

namespace polyhead::onnxruntime {
namespace {

// [batch, rows, heads, dim] -> [rows, dim] of one head
Tensor head_of(const Tensor& tensor, int64_t batch, int64_t head) {
  Tensor out = permuted(part(part(tensor, 0, batch, 1), 2, head, 1), {1, 3, 0, 2});
  out.ndim = 2;
  return out;
}

// scores = Q K^T, head by head.
Status multiply(Call& call, const AttentionDesc& desc, const Tensor& query, const Tensor& key, const Tensor& scores) {
  MatrixProductDesc sizes;
  sizes.m = desc.seqlen_q;
  sizes.n = key.dims[1];
  sizes.k = desc.head_dim;
  sizes.dtype = desc.dtype;
  const Result<MatrixProduct> product = matrix_product(sizes, {.where = {.executor = &call.executor()}});
  if (!product.ok()) return product.status();
  MatrixProductArgs args;
  args.workspace_bytes = product->workspace_bytes();
  Status status = call.scratch(args.workspace_bytes, args.workspace);
  for (int64_t b = 0; b < desc.batch; ++b) {
    for (int64_t h = 0; h < desc.num_heads && status.ok(); ++h) {
      args.a = head_of(query, b, h);
      args.b = permuted(head_of(key, b, h / (desc.num_heads / desc.num_heads_kv)), {1, 0});
      args.c = head_of(permuted(scores, {0, 2, 1, 3}), b, h);
      status = product->forward(args);
    }
  }
  return status;
}

struct Finish {
  Scores kind;
  const AttentionDesc* desc;
  const ForwardArgs* args;
  Tensor scores;
  double scale;
  int pieces;

  int64_t integer(const Tensor& tensor, int64_t b, int64_t otherwise) const {
    return tensor.given() ? static_cast<const int64_t*>(tensor.data)[b] : otherwise;
  }

  // The bias of a pair, -inf where it is hidden.
  double bias(int64_t b, int64_t h, int64_t i, int64_t j) const {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    const int64_t position = i + integer(args->query_offsets, b, desc->query_offset.value_or(0));
    if (j >= integer(args->seqlens_k, b, desc->seqlen_k) || (desc->causal && j > position)) return kHidden;
    if (desc->window_left >= 0 && j < position - desc->window_left) return kHidden;
    if (desc->window_right >= 0 && j > position + desc->window_right) return kHidden;
    const auto place = [&](const Tensor& t) {
      const int64_t at[4] = {b, h, i, j};
      int64_t sum = 0;
      for (int k = 0; k < 4; ++k) sum += t.dims[k] == 1 ? 0 : at[k] * t.strides[k];
      return sum;
    };
    const Tensor &mask = args->attn_mask, &added = args->attn_bias;
    if (mask.given() && !static_cast<const bool*>(mask.data)[place(mask)]) return kHidden;
    return added.given() ? load_element(added.data, added.dtype, place(added)) : 0;
  }

  void run(int piece) const {
    const int64_t rows = scores.dims[0] * scores.dims[1] * scores.dims[2], keys = scores.dims[3];
    for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) {
      const int64_t i = row % scores.dims[2], h = row / scores.dims[2] % scores.dims[1],
                    b = row / scores.dims[2] / scores.dims[1];
      for (int64_t j = 0; j < keys; ++j) {
        double score = scale * load_element(scores.data, scores.dtype, row * keys + j);
        if (kind != Scores::kPlain && desc->softcap > 0) score = desc->softcap * std::tanh(score / desc->softcap);
        if (kind == Scores::kMasked) score += bias(b, h, i, j);
        store_element(scores.data, scores.dtype, row * keys + j, score);
      }
    }
  }
};

}  // namespace

Status write_scores(Call& call, Scores kind, const AttentionDesc& desc, const ForwardArgs& args, const Tensor& key,
                    const Tensor& scores) {
  if (scores.num_elements() == 0) return {};
  if (Status status = multiply(call, desc, args.query, key, scores); !status.ok()) return status;
  const double scale = desc.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(desc.head_dim, 1))));
  Finish job{kind, &desc, &args, scores, scale, call.executor().num_threads()};
  call.executor().parallel_for(
      job.pieces, [](void* self, int i) { static_cast<const Finish*>(self)->run(i); }, &job);
  return {};
}

}  // namespace polyhead::onnxruntime
