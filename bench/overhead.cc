// What one call costs beside the arithmetic: Plan::forward and Plan::backward at [1, 1, 1, 16], the fastest of many runs,
// as JSON.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "polyhead/attention.h"

namespace {

constexpr int kRuns = 200, kCallsPerRun = 5000;

// Of one call; negative if it fails.
template <class Call>
double best_us(Call call) {
  double best = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < kCallsPerRun; ++n) {
      if (const polyhead::Status status = call(); !status.ok()) {
        std::fprintf(stderr, "overhead: %s\n", status.message().c_str());
        return -1;
      }
    }
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count() / kCallsPerRun);
  }
  return best;
}

}  // namespace

int main() {
  polyhead::AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = 1;
  desc.head_dim = desc.head_dim_v = 16;
  const polyhead::Result<polyhead::Plan> plan = polyhead::plan(desc);
  if (!plan.ok()) {
    std::fprintf(stderr, "overhead: %s\n", plan.status().message().c_str());
    return 1;
  }
  float query[16] = {1}, key[16] = {1}, value[16] = {1}, out[16], logsumexp[1];
  const auto tensor = [&](float* data) { return polyhead::Tensor(data, desc.dtype, {1, 1, 1, 16}); };
  const size_t workspace_bytes = std::max(plan->workspace_bytes(), plan->backward_workspace_bytes());
  std::vector<char> workspace(workspace_bytes + 64);
  polyhead::ForwardArgs forward;
  forward.query = tensor(query);
  forward.key = tensor(key);
  forward.value = tensor(value);
  forward.out = tensor(out);
  forward.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  forward.workspace_bytes = workspace_bytes;
  const double forward_us = best_us([&] { return plan->forward(forward); });

  float grad_out[16] = {1}, grad_query[16], grad_key[16], grad_value[16];
  forward.logsumexp = polyhead::Tensor(logsumexp, polyhead::DType::kFloat32, {1, 1, 1});
  if (!plan->forward(forward).ok()) return 1;
  polyhead::BackwardArgs backward;
  backward.forward = forward;
  backward.grad_out = tensor(grad_out);
  backward.grad_query = tensor(grad_query);
  backward.grad_key = tensor(grad_key);
  backward.grad_value = tensor(grad_value);
  const double backward_us = best_us([&] { return plan->backward(backward); });
  if (forward_us < 0 || backward_us < 0) return 1;
  std::printf("{\"kernel\": \"%s\", \"forward_us\": %.4f, \"backward_us\": %.4f}\n", plan->kernel_name(), forward_us,
              backward_us);
}
