#include "testing/problem.h"

#include <algorithm>

#include "testing/words.h"

namespace polyhead::testing {

bool has_gradient(DType captured) {
  return captured != DType::kBool && captured != DType::kInt32 && captured != DType::kInt64;
}

GradientSet gradients_there(const AttentionDesc& desc) {
  const bool captured = std::any_of(desc.captures.begin(), desc.captures.end(),
                                    [](const CaptureShape& shape) { return has_gradient(shape.dtype); });
  return 7U | (desc.attn_bias.given ? 8U : 0U) | (desc.alibi_slopes_ndim > 0 ? 16U : 0U) |
         (desc.has_sink_logits ? 32U : 0U) | (captured ? kCapturedGradients : 0U);
}

std::string gradient_names(GradientSet needs) {
  std::string text;
  for (size_t n = 0; n < kNumGradients; ++n) {
    if (needs >> n & 1) text += (text.empty() ? "" : ",") + std::string(kGradients[n].operand);
  }
  if (needs & kCapturedGradients) text += text.empty() ? "captured" : ",captured";
  return text;
}

Result<GradientSet> needed_gradients(const Problem& problem) {
  const GradientSet there = gradients_there(problem.desc);
  if (problem.needs == kAllGradients) return there;
  if (const GradientSet missing = problem.needs & ~there; missing != 0) {
    return invalid("--needs names " + gradient_names(missing) + ", which this problem has not");
  }
  return problem.needs;
}

Problem problem_of(const char* name, DType dtype, int64_t batch, int64_t heads, int64_t q, int64_t k, int64_t dim) {
  Problem p;
  p.name = name;
  p.desc.dtype = dtype;
  p.desc.batch = batch;
  p.desc.num_heads = p.desc.num_heads_kv = heads;
  p.desc.seqlen_q = q;
  p.desc.seqlen_k = k;
  p.desc.head_dim = p.desc.head_dim_v = dim;
  return p;
}

}  // namespace polyhead::testing
