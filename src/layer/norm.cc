#include "layer/norm.h"

#include <cmath>

#include "core/sentence.h"
#include "linear/product.h"

namespace polyhead {
namespace {

linear::Norm kind_of(const NormDesc& desc) {
  return desc.kind == NormKind::kRmsNorm ? linear::Norm::kRmsNorm : linear::Norm::kLayerNorm;
}

}  // namespace

Status check_norm_desc(const NormDesc& desc) {
  const auto kind = static_cast<int32_t>(desc.kind);
  if (kind < 0 || kind > 2) {
    return invalid(sentence("norm.kind is ", kind, ", must be 0 (none), 1 (layer norm) or 2 (RMS norm)"));
  }
  if (desc.kind != NormKind::kNone && !(desc.eps > 0 && std::isfinite(desc.eps))) {
    return invalid(sentence("norm.eps is ", desc.eps, ", must be a positive finite number"));
  }
  return {};
}

Status add_norm_weights(Operands& operands, Role role, const NormDesc& desc, const NormWeights& weights, int64_t size,
                        DType dtype) {
  const bool gradient = role == Role::kOutput;
  const struct {
    const char* name;
    const Tensor& tensor;
    bool asked;
  } all[] = {{gradient ? "grad_norm.gamma" : "norm.gamma", weights.gamma, desc.gamma},
             {gradient ? "grad_norm.beta" : "norm.beta", weights.beta, desc.beta}};
  for (const auto& w : all) {
    if (!w.asked || desc.kind == NormKind::kNone) {
      if (Status status = unasked(w.name, w.tensor); !status.ok()) return status;
      continue;
    }
    if (gradient && !w.tensor.given()) continue;
    const DType expected = w.tensor.dtype == DType::kFloat32 ? DType::kFloat32 : dtype;
    if (Status status = operands.add(role, w.name, w.tensor, expected, {{"size", size}}); !status.ok()) return status;
  }
  return {};
}

linear::NormForwardArgs norm_forward_args(const NormDesc& desc, const NormWeights& weights) {
  linear::NormForwardArgs args;
  args.norm = kind_of(desc);
  args.eps = desc.eps;
  args.gamma = weight_matrix(weights.gamma);
  args.beta = weight_matrix(weights.beta);
  return args;
}

linear::NormBackwardArgs norm_backward_args(const NormDesc& desc, const NormWeights& weights) {
  linear::NormBackwardArgs args;
  args.norm = kind_of(desc);
  args.gamma = weight_matrix(weights.gamma);
  return args;
}

}  // namespace polyhead
