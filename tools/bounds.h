// What a kernel's errors are held to, beside the 4 ulp (errors.h): docs/semantics.md's factors, and how far errors
// depend on one another.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "errors.h"
#include "polyhead/attention.h"

namespace polyhead::tools {

struct ForwardBounds {
  Bound out, logsumexp, weights, column_sums;
};

// shifted: logits that are large beside their differences.
inline ForwardBounds forward_bounds(const AttentionDesc& desc, bool shifted) {
  const bool is_bf16 = desc.dtype == DType::kBFloat16, is_f16 = desc.dtype == DType::kFloat16;
  const double rmse = shifted ? 1.5 : 1.1, out_rmse = is_bf16 ? 1.5 : rmse;
  const auto dim_v = static_cast<double>(std::max<int64_t>(desc.head_dim_v, 1));
  const auto keys = static_cast<double>(std::max<int64_t>(desc.seqlen_k, 1));
  // Elements of a row share a softmax, and so its errors, but not the rounding to a half type, which outweighs those;
  // not in bfloat16, where a row's weights are rounded to bfloat16 before they meet V.
  return {
      {2, out_rmse, is_f16 ? 1 : dim_v}, {2, rmse, 1}, {2, out_rmse, is_bf16 || is_f16 ? 1 : keys}, {2, rmse, keys}};
}

// Whether operands of N(0, 1) give scores so alike that every weight is near 1 / keys.
inline bool has_equal_weights(const AttentionDesc& desc) {
  const auto dim = static_cast<double>(desc.head_dim);
  return dim == 0 || std::fabs(desc.scale.value_or(1 / std::sqrt(dim))) * std::sqrt(dim) < 0.1;
}

// Of query, key, value, attn_bias and alibi_slopes. bfloat16: P and dS are rounded before they meet a matrix; with
// shifted logits keys have much in common, over which a rounded dS no longer sums to 0; equal weights share one
// rounding, which does not average out.
inline std::array<Bound, 5> gradient_bounds(const AttentionDesc& desc, bool shifted, bool equal_weights) {
  const bool is_bf16 = desc.dtype == DType::kBFloat16;
  const double rmse = !is_bf16 ? 1.5 : shifted ? HUGE_VAL : 2;
  const auto dim = static_cast<double>(std::max<int64_t>(desc.head_dim, 1));
  const auto dim_v = static_cast<double>(std::max<int64_t>(desc.head_dim_v, 1));
  const auto keys = static_cast<double>(std::max<int64_t>(desc.seqlen_k, 1));
  const auto queries = static_cast<double>(std::max<int64_t>(desc.num_heads * desc.seqlen_q, 1));
  // Elements of a row share the errors of its dS. Keys share those that belong to a query: of exp(-L) and rowsum dO O.
  const double sharing = std::max(1.0, keys * static_cast<double>(desc.num_heads_kv) / queries);
  const double all_values = (desc.packed ? 1.0 : static_cast<double>(std::max<int64_t>(desc.batch, 1))) * keys *
                            static_cast<double>(std::max<int64_t>(desc.num_heads_kv, 1)) * dim_v;
  return {{{3, rmse, dim, true},
           {3, rmse, dim * sharing, true},
           {3, rmse, is_bf16 && equal_weights ? all_values : dim_v * sharing, true},
           {3, rmse, keys, true},
           {3, rmse, 1, true}}};
}

// Of a layer's results, where the roundings of q, k, v and O on the way add to those of attention. Elements of a row,
// and rows of a head, share most of them.
inline Bound layer_bound(bool gradient, double dependent = 64) { return {gradient ? 3.0 : 2.0, 2, dependent, true}; }

}  // namespace polyhead::tools
