// Attention over one sequence: make a plan once, run it as often as there are tensors for it.
#include <cstdio>
#include <vector>

#include "polyhead/attention.h"

int main() {
  polyhead::AttentionDesc desc;
  desc.batch = 2;
  desc.seqlen_q = desc.seqlen_k = 128;
  desc.num_heads = desc.num_heads_kv = 4;
  desc.head_dim = desc.head_dim_v = 64;
  desc.causal = true;

  const auto plan = polyhead::plan(desc);  // checks the desc, picks the best kernel of this machine
  if (!plan.ok()) return std::fprintf(stderr, "%s\n", plan.status().message().c_str()), 1;

  // [batch, seqlen, num_heads, head_dim]; each value is its token's position, so the mean of the keys seen is known.
  std::vector<float> query(2 * 128 * 4 * 64, 0.0f), key(query), value(query.size()), out(query.size());
  for (size_t i = 0; i < value.size(); ++i) value[i] = static_cast<float>(i / (4 * 64) % 128);
  std::vector<std::byte> workspace(plan->workspace_bytes() + 64);

  polyhead::ForwardArgs args;
  args.query = {query.data(), desc.dtype, {2, 128, 4, 64}};
  args.key = {key.data(), desc.dtype, {2, 128, 4, 64}};
  args.value = {value.data(), desc.dtype, {2, 128, 4, 64}};
  args.out = {out.data(), desc.dtype, {2, 128, 4, 64}};
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();
  if (const polyhead::Status status = plan->forward(args); !status.ok()) {
    return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  }

  // Scores of 0 weigh all keys alike: token i gives the mean of 0 .. i.
  const float last = out.back(), expected = 127 / 2.0f;
  std::printf("%s: the last token sees the mean of 0..127: %.3f\n", plan->kernel_name(), last);
  return last > expected - 1e-3f && last < expected + 1e-3f ? 0 : 1;
}
