// Decoding from caches: contiguous, in pages, and in formats with scales, in turns. One query a sequence, 32 heads of 128, 8
// key/value heads or as many as are given:   caches BATCH KEYS ROUNDS THREADS [NAME [HEADS_KV]]   (8 4096 11 1)
// With a NAME only what has it in its own: 8 4096 11 1 shared 32.
// Packed: the same queries end to end (cu_seqlens_q), and beside them a prompt's last 512 queries, alone and with them.
// Prints the least and the median time, the least of the contiguous form of the query's dtype beside it, and bytes read a second.
// Shared: all sequences have the pages of the first, as a prompt that they share; beside the same pages of each its own.
// Pages lie in random order. With HUGE_PAGES=1 in the environment the caches ask for pages of 2 MiB.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "polyhead/attention.h"
#include "polyhead/cache.h"

namespace {

using namespace polyhead;

constexpr int64_t kHeads = 32, kDim = 128, kPrompt = 512;
constexpr size_t kHugePage = size_t{2} << 20;

void need(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "caches: %s\n", status.message().c_str());
  std::exit(1);
}

using Memory = std::unique_ptr<char, void (*)(void*)>;

Memory allocate(size_t bytes) {
  bytes = (bytes / kHugePage + 1) * kHugePage;
  Memory memory(static_cast<char*>(std::aligned_alloc(kHugePage, bytes)), std::free);
  if (std::getenv("HUGE_PAGES") != nullptr) madvise(memory.get(), bytes, MADV_HUGEPAGE);
  std::fill_n(memory.get(), bytes, char{0x3c});  // a number about 0.01 in every dtype, and as a scale
  return memory;
}

// One way to keep keys and values, and who asks.
struct Kind {
  const char* name;
  DType stored = DType::kFloat32;  // kFloat32: as the query
  int64_t page_size = 0, group = 0;
  bool packed = false, decodes = true, prompt = false, shared = false;
};

// A kind and a call on it: BATCH sequences of one query, and one of kPrompt where there is a prompt.
class Form {
 public:
  Form(const Kind& kind, int64_t batch, int64_t keys, int64_t heads_kv, DType query, Executor* executor)
      : name_(std::string(dtype_name(query)) + " " + kind.name), memory_(nullptr, std::free) {
    const DType stored = kind.stored == DType::kFloat32 ? query : kind.stored;
    const int64_t page = kind.page_size > 0 ? kind.page_size : keys;
    for (int64_t b = 0; kind.decodes && b < batch; ++b) add_sequence(1, keys);
    if (kind.prompt) add_sequence(kPrompt, keys);
    const auto sequences = static_cast<int64_t>(lengths_.size());
    cache_ = std::make_unique<KvCache>(*kv_cache({.num_pages = sequences * (keys / page),
                                                  .page_size = page,
                                                  .num_heads_kv = heads_kv,
                                                  .head_dim = kDim,
                                                  .head_dim_v = kDim,
                                                  .key_dtype = stored,
                                                  .value_dtype = stored,
                                                  .key_group = kind.group,
                                                  .value_group = kind.group}));
    memory_ = allocate(cache_->bytes());
    AttentionDesc d{.batch = sequences,
                    .seqlen_q = kind.packed ? starts_q_.back() : 1,
                    .seqlen_k = keys,
                    .num_heads = kHeads,
                    .num_heads_kv = heads_kv,
                    .head_dim = kDim,
                    .head_dim_v = kDim,
                    .dtype = query};
    if (stored != query) d.key_dtype = d.value_dtype = stored, d.key_group = d.value_group = kind.group;
    d.causal = true, d.align = Align::kBottomRight;
    const KvTensors pool = cache_->tensors(memory_.get());
    args_.key = pool.key, args_.value = pool.value;
    args_.key_scales = pool.key_scales, args_.value_scales = pool.value_scales;
    if (kind.page_size > 0) {
      d.page_size = page, d.num_pages = cache_->desc().num_pages, d.has_seqlens_k = true;
      table_.resize(static_cast<size_t>(d.num_pages));
      std::iota(table_.begin(), table_.end(), 0);
      std::shuffle(table_.begin(), table_.end(), std::mt19937(1));
      for (size_t n = 0; kind.shared && n < table_.size(); ++n)
        table_[n] = table_[n % static_cast<size_t>(keys / page)];
      args_.page_table = Tensor(table_.data(), DType::kInt64, {sequences, keys / page});
      args_.seqlens_k = Tensor(lengths_.data(), DType::kInt64, {sequences});
    }
    rows_ = allocate(static_cast<size_t>(2 * starts_q_.back() * kHeads * kDim) * sizeof(float));
    args_.query = Tensor(rows_.get(), query, {sequences, 1, kHeads, kDim});
    args_.out = Tensor(rows_.get() + starts_q_.back() * kHeads * kDim * 4, query, {sequences, 1, kHeads, kDim});
    if (kind.packed) pack(d);
    auto made = plan(d, {.where = {.executor = executor}});
    need(made.status());
    plan_ = std::make_unique<Plan>(*made);
    workspace_ = allocate(plan_->workspace_bytes());
    args_.workspace = workspace_.get(), args_.workspace_bytes = plan_->workspace_bytes();
    run();
    ms_.clear();
  }

  void run() {
    const auto start = std::chrono::steady_clock::now();
    need(plan_->forward(args_));
    ms_.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }

  double least() {
    std::sort(ms_.begin(), ms_.end());
    return ms_.front();
  }

  void print(double contiguous) {
    const double ms = least(), gigabytes = static_cast<double>(cache_->bytes()) / 1e6 / ms;
    std::printf("%-40s %8.3f %8.3f ms   contiguous / this %5.3f   %5.1f GB/s\n", name_.c_str(), ms, ms_[ms_.size() / 2],
                contiguous / ms, gigabytes);
  }

 private:
  void add_sequence(int64_t queries, int64_t keys) {
    lengths_.push_back(keys);
    starts_q_.push_back(starts_q_.back() + queries);
    starts_k_.push_back(starts_k_.back() + keys);
  }

  void pack(AttentionDesc& d) {
    d.packed = true;
    const int64_t starts = d.batch + 1;
    args_.cu_seqlens_q = Tensor(starts_q_.data(), DType::kInt64, {starts});
    for (Tensor* t : {&args_.query, &args_.out}) *t = Tensor(t->data, t->dtype, {d.seqlen_q, kHeads, kDim});
    if (d.page_size > 0) return;
    d.seqlen_k = starts_k_.back();
    args_.cu_seqlens_k = Tensor(starts_k_.data(), DType::kInt64, {starts});
    for (Tensor* t : {&args_.key, &args_.value}) *t = Tensor(t->data, t->dtype, {d.seqlen_k, d.num_heads_kv, kDim});
  }

  std::string name_;
  std::unique_ptr<KvCache> cache_;
  Memory memory_, rows_{nullptr, std::free}, workspace_{nullptr, std::free};
  std::vector<int64_t> table_, lengths_, starts_q_{0}, starts_k_{0};
  ForwardArgs args_;
  std::unique_ptr<Plan> plan_;
  std::vector<double> ms_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5 || argc > 7) {
    std::fprintf(stderr, "usage: caches BATCH KEYS ROUNDS THREADS [NAME [HEADS_KV]]\n");
    return 2;
  }
  const int64_t batch = std::atoll(argv[1]), keys = std::atoll(argv[2]);
  const int64_t heads_kv = argc > 6 ? std::atoll(argv[6]) : 8;
  const std::unique_ptr<Executor> executor(new_thread_pool(std::atoi(argv[4])));
  const Kind kinds[] = {{.name = "contiguous"},
                        {.name = "packed", .packed = true},
                        {.name = "pages of 64", .page_size = 64},
                        {.name = "pages of 16", .page_size = 16},
                        {.name = "packed, pages of 16", .page_size = 16, .packed = true},
                        {.name = "pages of 1", .page_size = 1},
                        {.name = "pages of 256", .page_size = 256},
                        {.name = "pages of 256, shared", .page_size = 256, .shared = true},
                        {.name = "pages of 16, shared", .page_size = 16, .shared = true},
                        {.name = "packed, pages of 16, shared", .page_size = 16, .packed = true, .shared = true},
                        {.name = "int8", .stored = DType::kInt8},
                        {.name = "int8, pages of 16", .stored = DType::kInt8, .page_size = 16},
                        {.name = "int8, pages of 16, shared", .stored = DType::kInt8, .page_size = 16, .shared = true},
                        {.name = "int8, groups of 64", .stored = DType::kInt8, .group = 64},
                        {.name = "float8_e4m3", .stored = DType::kFloat8E4M3},
                        {.name = "float8_e5m2", .stored = DType::kFloat8E5M2},
                        {.name = "int4, groups of 32", .stored = DType::kInt4x2, .group = 32},
                        {.name = "a prompt", .packed = true, .decodes = false, .prompt = true},
                        {.name = "packed, and a prompt", .packed = true, .prompt = true},
                        {.name = "packed, and a prompt, pages of 16", .page_size = 16, .packed = true, .prompt = true}};
  for (const DType query : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<std::unique_ptr<Form>> forms;
    for (const Kind& kind : kinds) {
      if (argc > 5 && std::string(kind.name).find(argv[5]) == std::string::npos) continue;
      forms.push_back(std::make_unique<Form>(kind, batch, keys, heads_kv, query, executor.get()));
    }
    for (int round = 0; round < std::atoi(argv[3]); ++round) {
      for (const auto& form : forms) form->run();
    }
    for (const auto& form : forms) form->print(forms[0]->least());
  }
}
