// Decoding with a key/value cache and grouped heads: 8 query heads share 2 key/value heads, and one plan serves every
// step. The queries stand at the end of the keys (bottom-right), wherever each sequence's cache ends.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "polyhead/attention.h"

constexpr int64_t kBatch = 2, kCapacity = 48, kHeads = 8, kHeadsKv = 2, kDim = 16;

// Attention of `seqlen_q` new tokens over a cache of kCapacity places, of which lengths[b] are filled.
static bool attend(int64_t seqlen_q, const float* query, const float* key, const float* value, const int32_t* lengths,
                   float* out) {
  polyhead::AttentionDesc desc;
  desc.batch = kBatch;
  desc.seqlen_q = seqlen_q;
  desc.seqlen_k = kCapacity;
  desc.num_heads = kHeads;
  desc.num_heads_kv = kHeadsKv;
  desc.head_dim = desc.head_dim_v = kDim;
  desc.has_seqlens_k = true;
  desc.causal = true;
  desc.align = polyhead::Align::kBottomRight;
  const auto plan = polyhead::plan(desc);  // a program that decodes keeps it
  if (!plan.ok()) return std::fprintf(stderr, "%s\n", plan.status().message().c_str()), false;

  std::vector<std::byte> workspace(plan->workspace_bytes() + 64);
  polyhead::ForwardArgs args;
  args.query = {query, desc.dtype, {kBatch, seqlen_q, kHeads, kDim}};
  args.key = {key, desc.dtype, {kBatch, kCapacity, kHeadsKv, kDim}};
  args.value = {value, desc.dtype, {kBatch, kCapacity, kHeadsKv, kDim}};
  args.seqlens_k = {lengths, polyhead::DType::kInt32, {kBatch}};
  args.out = {out, desc.dtype, {kBatch, seqlen_q, kHeads, kDim}};
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();
  const polyhead::Status status = plan->forward(args);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok();
}

int main() {
  constexpr int64_t kRow = kHeads * kDim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> query(kBatch * kCapacity * kRow), key(kBatch * kCapacity * kHeadsKv * kDim), value(key.size());
  for (auto* operand : {&query, &key, &value}) {
    for (float& x : *operand) x = normal(random);
  }

  // All tokens at once, as a prompt is read ...
  std::vector<float> at_once(query.size());
  const int32_t full[kBatch] = {kCapacity, kCapacity};
  if (!attend(kCapacity, query.data(), key.data(), value.data(), full, at_once.data())) return 1;

  // ... and one token a step, behind a cache that grows; the second sequence is 10 tokens ahead.
  float worst = 0;
  for (int32_t step = 0; step < kCapacity - 10; ++step) {
    const int32_t lengths[kBatch] = {step + 1, step + 11};
    float token[kBatch * kRow], out[kBatch * kRow];
    for (int64_t b = 0; b < kBatch; ++b) {
      std::copy_n(&query[(b * kCapacity + lengths[b] - 1) * kRow], kRow, token + b * kRow);
    }
    if (!attend(1, token, key.data(), value.data(), lengths, out)) return 1;
    for (int64_t i = 0; i < kBatch * kRow; ++i) {
      const int64_t row = i / kRow * kCapacity + lengths[i / kRow] - 1;
      worst = std::fmax(worst, std::fabs(out[i] - at_once[row * kRow + i % kRow]));
    }
  }
  std::printf("decoding step by step differs from all at once by at most %.1e\n", worst);
  return worst < 1e-5f ? 0 : 1;
}
