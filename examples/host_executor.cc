// A host's own threads compute instead of polyhead's pool, and the bits stay the same.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "polyhead/attention.h"

// The least that a host has to offer. A real one hands the pieces to the pool that it already keeps.
class HostThreads final : public polyhead::Executor {
 public:
  int num_threads() const override { return 3; }

  void parallel_for(int count, void (*body)(void* context, int index), void* context) override {
    std::vector<std::thread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(body, context, i);
    if (count > 0) body(context, 0);
    for (std::thread& thread : threads) thread.join();
  }
};

static std::vector<float> attend(const polyhead::AttentionDesc& desc, polyhead::Executor* executor,
                                 const std::vector<float>& query) {
  polyhead::PlanOptions options;
  options.where.executor = executor;  // null: polyhead's own pool
  const auto plan = polyhead::plan(desc, options);
  if (!plan.ok()) return std::fprintf(stderr, "%s\n", plan.status().message().c_str()), std::vector<float>();

  std::vector<float> out(query.size());
  std::vector<std::byte> workspace(plan->workspace_bytes() + 64);
  polyhead::ForwardArgs args;
  args.query = {query.data(), desc.dtype, {desc.batch, desc.seqlen_q, desc.num_heads, desc.head_dim}};
  args.key = args.value = args.query;
  args.out = {out.data(), desc.dtype, {desc.batch, desc.seqlen_q, desc.num_heads, desc.head_dim}};
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();
  const polyhead::Status status = plan->forward(args);
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().c_str()), std::vector<float>();
  return out;
}

int main() {
  polyhead::AttentionDesc desc;
  desc.batch = 2;
  desc.seqlen_q = desc.seqlen_k = 200;
  desc.num_heads = desc.num_heads_kv = 6;
  desc.head_dim = desc.head_dim_v = 32;
  std::vector<float> query(2 * 200 * 6 * 32);
  for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<float>(i % 97) / 97 - 0.5f;

  HostThreads host;
  const std::vector<float> ours = attend(desc, nullptr, query), theirs = attend(desc, &host, query);
  if (ours.empty() || theirs.empty()) return 1;
  const bool same = std::memcmp(ours.data(), theirs.data(), ours.size() * sizeof(float)) == 0;
  std::printf("polyhead's pool and three threads of the host: %s bits\n", same ? "the same" : "DIFFERENT");
  return same ? 0 : 1;
}
