// What one call costs beside the arithmetic: Plan::forward at [1, 1, 1, 16], the fastest of many runs, as JSON.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "polyhead/attention.h"

int main() {
  constexpr int kRuns = 200, kCallsPerRun = 5000;
  polyhead::AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = 1;
  desc.head_dim = desc.head_dim_v = 16;
  const polyhead::Result<polyhead::Plan> plan = polyhead::plan(desc);
  if (!plan.ok()) {
    std::fprintf(stderr, "overhead: %s\n", plan.status().message().c_str());
    return 1;
  }
  float query[16] = {1}, key[16] = {1}, value[16] = {1}, out[16];
  polyhead::ForwardArgs args;
  args.query = {query, desc.dtype, {1, 1, 1, 16}};
  args.key = {key, desc.dtype, {1, 1, 1, 16}};
  args.value = {value, desc.dtype, {1, 1, 1, 16}};
  args.out = {out, desc.dtype, {1, 1, 1, 16}};
  std::vector<char> workspace(plan->workspace_bytes() + 64);
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();

  double best_us = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int call = 0; call < kCallsPerRun; ++call) {
      if (const polyhead::Status status = plan->forward(args); !status.ok()) {
        std::fprintf(stderr, "overhead: %s\n", status.message().c_str());
        return 1;
      }
    }
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    best_us = std::min(best_us, elapsed.count() / kCallsPerRun);
  }
  std::printf("{\"kernel\": \"%s\", \"forward_us\": %.4f}\n", plan->kernel_name(), best_us);
}
