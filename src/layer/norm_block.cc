#include "layer/norm_block.h"

#include "layer/arguments.h"

namespace polyhead {

void NormBlock::emit(Pass pass, Memory& workspace, Memory& reserve, StepList* list) const {
  const auto take_rows = [&](Memory& memory) { return memory.take(dtype, {batch, beam, seqlen, size}); };
  const Place x = argument(kArgQuery), y = argument(kArgOut), gamma = argument(kArgGamma), beta = argument(kArgBeta);
  const Place grad_x = argument(kArgGradQuery), grad_y = argument(kArgGradOut);
  const Place n = pre() ? take_rows(workspace) : x;
  const Place z = post() ? take_rows(has_reserve(pass) ? reserve : workspace) : y;
  Place mean, rstd;
  if (has_reserve(pass) && (pre() || post())) {
    const DType sums = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    mean = reserve.take(sums, {batch, beam, seqlen});
    rstd = reserve.take(sums, {batch, beam, seqlen});
  }
  expect(pass, list);
  InnerPlaces f;
  f.in = n, f.out = z;
  if (residual) f.residual = x;
  std::vector<Step>& steps = list->steps;
  if (!is_backward(pass)) {
    if (pre()) steps.emplace_back(NormStep{norm, x, n, gamma, beta, mean, rstd});
    emit_inner(pass, f, workspace, reserve, &steps);
    if (post()) steps.emplace_back(NormStep{norm, z, y, gamma, beta, mean, rstd});
    return;
  }
  Place gradient;  // of n, or of z
  if (pre() || post()) gradient = pre() && grad_in_over_in ? n : take_rows(workspace);
  NormBackwardStep back = {
      norm, x, gamma, mean, rstd, gradient, {}, grad_x, argument(kArgGradGamma), argument(kArgGradBeta)};
  f.grad_out = post() ? gradient : grad_y;
  f.grad_in = pre() ? gradient.only_for(only(kArgGradQuery) | only(kArgGradGamma) | only(kArgGradBeta)) : grad_x;
  if (residual) (pre() ? back.residual : f.grad_past) = f.grad_out;
  if (post()) {
    back.x = z, back.grad_y = grad_y, back.grad_x = gradient;
    steps.emplace_back(back);
  }
  if (pre()) steps.emplace_back(NormStep{norm, x, n.only_for(in_wanted_by), gamma, beta, {}, {}});
  emit_inner(pass, f, workspace, reserve, &steps);
  if (pre()) steps.emplace_back(back);
}

}  // namespace polyhead
