#include "merge_operators.h"

#include <string>
#include <utility>
#include <vector>

#include "polyhead/merge.h"
#include "stable_tensor.h"
#include "torch_executor.h"

namespace polyhead::torch_ops {
namespace {

constexpr const char* kOutShape = "[batch, seqlen_q, num_heads, head_dim_v], packed [total_q, num_heads, head_dim_v]";
constexpr const char* kSumsShape = "[batch, num_heads, seqlen_q], packed [num_heads, total_q]";

// The parts as the library takes them; it checks that their sizes and dtypes agree.
std::vector<Partial> views_of(const std::vector<StableTensor>& outs, const std::vector<StableTensor>& logsumexps) {
  if (outs.empty()) bad_value("outs is empty, must hold the out of each part");
  if (outs.size() != logsumexps.size()) {
    bad_value("logsumexps has %zu parts, outs has %zu", logsumexps.size(), outs.size());
  }
  std::vector<Partial> views(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const std::string number = std::to_string(i);
    views[i].out = view_of(outs[i], {("outs[" + number + "]").c_str(), 3, 4, kOutShape});
    views[i].logsumexp = view_of(logsumexps[i], {("logsumexps[" + number + "]").c_str(), 2, 3, kSumsShape});
  }
  return views;
}

void merge_forward(StableIValue* stack, uint64_t /*num_inputs*/, uint64_t /*num_outputs*/) {
  ArgumentReader arguments(stack);
  const std::vector<StableTensor> outs = arguments.tensors(), logsumexps = arguments.tensors();
  const std::vector<Partial> parts = views_of(outs, logsumexps);
  Partial merged = parts[0];
  StableTensor out = new_tensor(merged.out, "out"), logsumexp = new_tensor(merged.logsumexp, "logsumexp");
  check(merge(parts, merged, &current_executor()));
  stack[0] = result(std::move(out));
  stack[1] = result(std::move(logsumexp));
}

void merge_backward_kernel(StableIValue* stack, uint64_t /*num_inputs*/, uint64_t /*num_outputs*/) {
  ArgumentReader arguments(stack);
  const StableTensor grad_out = arguments.tensor(), grad_logsumexp = arguments.optional_tensor();
  const std::vector<StableTensor> outs = arguments.tensors(), logsumexps = arguments.tensors();
  const StableTensor out = arguments.tensor(), logsumexp = arguments.tensor();
  const std::vector<Partial> parts = views_of(outs, logsumexps);
  const Partial merged = {view_of(out, {"out", 3, 4, kOutShape}), view_of(logsumexp, {"logsumexp", 2, 3, kSumsShape})};
  Partial grad_merged;
  grad_merged.out = view_of(grad_out, {"grad_out", 3, 4, kOutShape});
  if (grad_logsumexp.given()) grad_merged.logsumexp = view_of(grad_logsumexp, {"grad_logsumexp", 2, 3, kSumsShape});

  std::vector<Partial> gradients = parts;
  std::vector<StableTensor> grad_outs, grad_logsumexps;
  for (Partial& gradient : gradients) {
    grad_outs.push_back(new_tensor(gradient.out, "grad_outs"));
    grad_logsumexps.push_back(new_tensor(gradient.logsumexp, "grad_logsumexps"));
  }
  check(merge_backward(parts, merged, grad_merged, gradients, &current_executor()));
  stack[0] = list_result(std::move(grad_outs));
  stack[1] = list_result(std::move(grad_logsumexps));
}

}  // namespace

std::span<const OperatorKernel> merge_kernels() {
  static constexpr OperatorKernel kKernels[] = {
      {"merge_forward", merge_forward},
      {"merge_backward", merge_backward_kernel},
  };
  return kKernels;
}

}  // namespace polyhead::torch_ops
