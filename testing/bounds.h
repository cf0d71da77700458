// What a kernel's errors are held to, beside the 4 ulp (errors.h): docs/semantics.md's factors, and how far errors
// depend on one another.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "polyhead/attention.h"
#include "testing/errors.h"

namespace polyhead::testing {

struct ForwardBounds {
  Bound out, logsumexp, attn_weights, column_sums;
};

// Whether operands of N(0, 1) give scores so alike that every weight is near 1 / keys.
inline bool has_equal_weights(const AttentionDesc& desc) {
  const auto dim = static_cast<double>(desc.head_dim);
  return dim == 0 || std::fabs(desc.scale.value_or(1 / std::sqrt(dim))) * std::sqrt(dim) < 0.1;
}

// Whether a kernel multiplies bfloat16 in pairs: P, and in backward dS, are rounded to bfloat16 before they meet a matrix.
inline bool multiplies_pairs(std::string_view kernel, const AttentionDesc& desc) {
  if (desc.dtype != DType::kBFloat16 || key_dtype(desc) != desc.dtype || value_dtype(desc) != desc.dtype) return false;
  constexpr std::string_view kNames[] = {"bf16", "amx", "cuda"};
  return std::any_of(std::begin(kNames), std::end(kNames),
                     [&](std::string_view name) { return kernel.find(name) != std::string_view::npos; });
}

// Tensor cores add 16 products at a time to a sum, and cut off what float32 has no digits for (arXiv:2512.07004): half an ulp
// on average, so much of a sum whose leading digits are distributed as 1 / x. They cut products off too, whose signs differ.
inline constexpr double kCut = 0.72 * 0x1p-24;
inline constexpr int64_t kAddedAtATime = 16;

// Whether a kernel's sums of products are tensor cores': of 16-bit elements, none of which are stored in another format.
inline bool sums_on_tensor_cores(std::string_view kernel, const AttentionDesc& desc) {
  const bool halves = desc.dtype == DType::kBFloat16 || desc.dtype == DType::kFloat16;
  return halves && key_dtype(desc) == desc.dtype && value_dtype(desc) == desc.dtype &&
         kernel.find("cuda") != std::string_view::npos;
}

inline constexpr double kRmse = 1.1;

// Of what a program captures: any number of pairs adds to an element.
inline constexpr Bound kCapturedBound = {3, kRmse, 1};

// same: every weight of a row is the same number. shifted: all logits are large beside their differences, so that the
// rounding of the scale is one error of every L. alike: all queries are one vector.
inline ForwardBounds forward_bounds(const AttentionDesc& desc, bool same, bool shifted, bool alike, bool pairs) {
  const auto dim_v = static_cast<double>(std::max<int64_t>(desc.head_dim_v, 1));
  const auto keys = static_cast<double>(std::max<int64_t>(desc.seqlen_k, 1));
  // Elements of a row share a softmax, and so its errors, but not the rounding to a half type, which outweighs those,
  // unless a row's weights are rounded to bfloat16 before they meet V. Equal weights are the same sum of values for all
  // queries that share a head of them.
  const bool halves = out_dtype(desc) == DType::kFloat16 || out_dtype(desc) == DType::kBFloat16;
  const double group =
      static_cast<double>(desc.num_heads) / static_cast<double>(std::max<int64_t>(desc.num_heads_kv, 1));
  const double queries = group * static_cast<double>(std::max<int64_t>(desc.seqlen_q, 1));
  const double same_rows = alike ? queries : 1;
  const double rows = same ? HUGE_VAL : has_equal_weights(desc) ? queries : same_rows;
  const bool half_weights = desc.dtype == DType::kFloat16 || desc.dtype == DType::kBFloat16;
  return {{2, kRmse, halves && !pairs ? rows : rows * dim_v},
          {2, kRmse, same || shifted ? HUGE_VAL : same_rows},
          {2, kRmse,
           same           ? HUGE_VAL
           : half_weights ? same_rows
                          : keys * same_rows},
          {2, kRmse, same ? HUGE_VAL : keys * same_rows}};
}

// Of query, key, value, attn_bias, alibi_slopes and sink_logits. repeated: elements of grad_out are one number.
inline std::array<Bound, 6> gradient_bounds(const AttentionDesc& desc, bool same, bool repeated, bool pairs) {
  const auto dim = static_cast<double>(std::max<int64_t>(desc.head_dim, 1));
  const auto dim_v = static_cast<double>(std::max<int64_t>(desc.head_dim_v, 1));
  const auto keys = static_cast<double>(std::max<int64_t>(desc.seqlen_k, 1));
  const auto queries = static_cast<double>(std::max<int64_t>(desc.num_heads * desc.seqlen_q, 1));
  // Elements of a row share the errors of its dS. Keys share those that belong to a query: of exp(-L) and rowsum dO O.
  // Rows of the same weights have the same L, whose error then counts as often as one number of grad_out does.
  const double sharing = std::max(1.0, keys * static_cast<double>(desc.num_heads_kv) / queries);
  const bool one_error = same ? repeated || pairs : pairs && has_equal_weights(desc);
  return {{{3, kRmse, dim},
           {3, kRmse, dim * sharing},
           {3, kRmse, one_error ? HUGE_VAL : dim_v * sharing},
           {3, kRmse, keys},
           {3, kRmse, 1},
           {3, kRmse, 1}}};
}

// Rows that a layer is judged by: what it errs by on average is not computed (deviation.h), so that there be more.
inline constexpr int64_t kLayerRows = 1024;

// Of a layer's result, where the roundings of q, k, v and O on the way add to those of attention. Elements of a row, and
// rows of a head, share most of them; gradients of a bias and of slopes are sums over these.
inline Bound layer_bound(std::string_view result, double dependent = 64) {
  const bool sums = result == "grad_attn_bias" || result == "grad_alibi_slopes" || result == "grad_sink_logits" ||
                    result.starts_with("grad_captures");
  return {result.starts_with("grad_") ? 3.0 : 2.0, 2, sums ? 1 : dependent};
}

}  // namespace polyhead::testing
