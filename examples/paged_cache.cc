// A cache of keys and values in pages: one text that is read once and goes on in two ways. The two share the pages of what
// they have in common; a page is copied when one of them writes to it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "polyhead/attention.h"
#include "polyhead/cache.h"

using polyhead::DType;
using polyhead::Tensor;

constexpr int64_t kPages = 6, kPageSize = 4, kHeads = 4, kHeadsKv = 2, kDim = 16, kPrompt = 10;

static void need(const polyhead::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// Gives a sequence one more token, whose key and value are `row`.
static void append(const polyhead::KvCache& cache, const polyhead::KvTensors& pool, polyhead::PageTable& table,
                   int64_t sequence, const float* row) {
  polyhead::PageTable::Copy copy;
  const int64_t token = table.length(sequence);
  need(table.resize(sequence, token + 1, &copy));
  for (int64_t n = 0; copy.to >= 0 && n < token % kPageSize; ++n) {
    const int64_t from = copy.from * kPageSize + n, to = copy.to * kPageSize + n;
    need(cache.copy(pool, {&from, DType::kInt64, {1}}, {&to, DType::kInt64, {1}}));
  }
  const int64_t slot = table.slot(sequence, token);
  polyhead::KvAppendArgs args;
  args.key = args.value = {row, DType::kFloat32, {1, kHeadsKv, kDim}};
  args.slots = {&slot, DType::kInt64, {1}};
  need(cache.append(pool, args));
}

// One query of each of `batch` sequences.
static std::vector<float> attend(const polyhead::AttentionDesc& desc, polyhead::ForwardArgs args) {
  std::vector<float> out(static_cast<size_t>(desc.batch * kHeads * kDim));
  const auto plan = polyhead::plan(desc);
  need(plan.status());
  std::vector<std::byte> workspace(plan->workspace_bytes() + 64);
  args.out = {out.data(), DType::kFloat32, {desc.batch, 1, kHeads, kDim}};
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = plan->workspace_bytes();
  need(plan->forward(args));
  return out;
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows((kPrompt + 2) * kHeadsKv * kDim), query(2 * kHeads * kDim);
  for (auto* numbers : {&rows, &query}) {
    for (float& x : *numbers) x = normal(random);
  }
  const auto row = [&](int64_t n) { return rows.data() + n * kHeadsKv * kDim; };

  const auto cache = polyhead::kv_cache({kPages, kPageSize, kHeadsKv, kDim, kDim});
  auto table = polyhead::page_table(kPages, kPageSize);
  need(cache.status());
  need(table.status());
  std::vector<std::byte> memory(cache->bytes() + 64);
  const auto pool = cache->tensors(memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64);
  const int64_t first = *table->add();
  for (int64_t n = 0; n < kPrompt; ++n) append(*cache, pool, *table, first, row(n));
  const int64_t second = *table->fork(first);
  append(*cache, pool, *table, first, row(kPrompt));
  append(*cache, pool, *table, second, row(kPrompt + 1));

  std::vector<int64_t> pages;  // [2, 3]
  for (const int64_t sequence : {first, second}) {
    pages.insert(pages.end(), table->pages(sequence).begin(), table->pages(sequence).end());
  }
  const int64_t lengths[2] = {kPrompt + 1, kPrompt + 1};
  polyhead::AttentionDesc desc{.batch = 2, .seqlen_q = 1, .seqlen_k = 3 * kPageSize, .num_heads = kHeads};
  desc.num_heads_kv = kHeadsKv, desc.head_dim = desc.head_dim_v = kDim;
  desc.has_seqlens_k = true, desc.page_size = kPageSize, desc.num_pages = kPages;
  polyhead::ForwardArgs args{.query = {query.data(), DType::kFloat32, {2, 1, kHeads, kDim}}};
  args.key = pool.key, args.value = pool.value;
  args.page_table = {pages.data(), DType::kInt64, {2, 3}};
  args.seqlens_k = {lengths, DType::kInt64, {2}};
  const std::vector<float> out = attend(desc, args);

  // The second text's keys one after the other, by themselves.
  std::copy_n(row(kPrompt + 1), kHeadsKv * kDim, rows.data() + kPrompt * kHeadsKv * kDim);
  polyhead::AttentionDesc alone{.seqlen_q = 1, .seqlen_k = kPrompt + 1, .num_heads = kHeads};
  alone.num_heads_kv = kHeadsKv, alone.head_dim = alone.head_dim_v = kDim;
  polyhead::ForwardArgs of_second{.query = {&query[kHeads * kDim], DType::kFloat32, {1, 1, kHeads, kDim}}};
  of_second.key = of_second.value = {rows.data(), DType::kFloat32, {1, kPrompt + 1, kHeadsKv, kDim}};
  const std::vector<float> expected = attend(alone, of_second);
  float worst = 0;
  for (size_t n = 0; n < expected.size(); ++n) {
    worst = std::fmax(worst, std::fabs(expected[n] - out[kHeads * kDim + n]));
  }
  std::printf("two texts in %ld pages (apart they had 6); from keys by themselves at most %.1e\n",
              static_cast<long>(kPages - table->num_free()), worst);
  return worst < 1e-6f && table->num_free() == 2 ? 0 : 1;
}
