// Sequences of different lengths without padding: their rows one behind the other, told apart by cu_seqlens.
#include <cmath>
#include <cstdio>
#include <vector>

#include "polyhead/attention.h"

int main() {
  constexpr int64_t kBatch = 4, kHeads = 2, kDim = 32, kRow = kHeads * kDim;
  const int32_t cu_seqlens[kBatch + 1] = {0, 5, 5, 70, 100};  // 5, 0, 65 and 30 tokens

  polyhead::AttentionDesc desc;
  desc.packed = true;
  desc.batch = kBatch;
  desc.seqlen_q = desc.seqlen_k = 100;  // packed: the rows of all sequences together
  desc.num_heads = desc.num_heads_kv = kHeads;
  desc.head_dim = desc.head_dim_v = kDim;
  const auto plan = polyhead::plan(desc);
  if (!plan.ok()) return std::fprintf(stderr, "%s\n", plan.status().message().c_str()), 1;

  // The values of sequence b are all b, so whoever looks into a neighbour shows it.
  std::vector<float> query(100 * kRow, 0.5f), key(query), value(query.size()), out(query.size(), -1.0f);
  std::vector<float> logsumexp(kHeads * 100);
  for (int b = 0; b < kBatch; ++b) {
    for (int64_t i = cu_seqlens[b] * kRow; i < cu_seqlens[b + 1] * kRow; ++i) value[i] = static_cast<float>(b);
  }
  std::vector<std::byte> workspace(plan->workspace_bytes() + 64);

  polyhead::ForwardArgs args;
  args.query = {query.data(), desc.dtype, {100, kHeads, kDim}};
  args.key = {key.data(), desc.dtype, {100, kHeads, kDim}};
  args.value = {value.data(), desc.dtype, {100, kHeads, kDim}};
  args.cu_seqlens_q = {cu_seqlens, polyhead::DType::kInt32, {kBatch + 1}};
  args.cu_seqlens_k = args.cu_seqlens_q;
  args.out = {out.data(), desc.dtype, {100, kHeads, kDim}};
  args.logsumexp = {logsumexp.data(), polyhead::DType::kFloat32, {kHeads, 100}};
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();
  if (const polyhead::Status status = plan->forward(args); !status.ok()) {
    return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  }

  for (int b = 0; b < kBatch; ++b) {
    for (int64_t i = cu_seqlens[b] * kRow; i < cu_seqlens[b + 1] * kRow; ++i) {
      if (std::fabs(out[i] - static_cast<float>(b)) > 1e-5f) {
        return std::fprintf(stderr, "row %lld has %f, not %d\n", static_cast<long long>(i / kRow), out[i], b), 1;
      }
    }
  }
  std::printf("%s: 4 sequences, 100 rows, none looked at another\n", plan->kernel_name());
  return 0;
}
