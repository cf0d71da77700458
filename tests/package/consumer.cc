// A C++ user's program: causal attention of 2 queries on 2 keys, where the first query sees the first key only.
#include <polyhead/attention.h>
#include <polyhead/kernels.h>

#include <cstdio>
#include <vector>

int main() {
  polyhead::AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = 2;
  desc.head_dim = desc.head_dim_v = 4;
  desc.causal = true;
  const polyhead::Result<polyhead::Plan> plan = polyhead::plan(desc);
  if (!plan.ok()) {
    std::puts(plan.status().message().c_str());
    return 1;
  }
  const float query[8] = {}, key[8] = {}, value[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  float out[8] = {};
  std::vector<char> memory(plan->workspace_bytes() + 64);
  polyhead::ForwardArgs args;
  args.query = polyhead::Tensor(query, polyhead::DType::kFloat32, {1, 2, 1, 4});
  args.key = polyhead::Tensor(key, polyhead::DType::kFloat32, {1, 2, 1, 4});
  args.value = polyhead::Tensor(value, polyhead::DType::kFloat32, {1, 2, 1, 4});
  args.out = polyhead::Tensor(out, polyhead::DType::kFloat32, {1, 2, 1, 4});
  args.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();
  const polyhead::Status status = plan->forward(args);
  std::printf("polyhead %s, %s: %g %g %g %g | %g %g %g %g %s\n", polyhead::version(), plan->kernel_name(), out[0],
              out[1], out[2], out[3], out[4], out[5], out[6], out[7], status.message().c_str());
  return status.ok() && out[0] == 1 && out[3] == 4 && out[4] == 3 && out[7] == 6 ? 0 : 1;
}
