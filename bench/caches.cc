// Decoding from caches: contiguous, in pages, and in formats with scales, in turns. One query a sequence, 32 heads of 128, 8
// key/value heads:   caches BATCH KEYS ROUNDS THREADS   (8 4096 11 1)
// Prints the least and the median time, the least of the contiguous form of the query's dtype beside it, and bytes read a second.
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

constexpr int64_t kHeads = 32, kHeadsKv = 8, kDim = 128;
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

// One way to keep keys and values, and a call on it.
class Form {
 public:
  Form(int64_t batch, int64_t keys, DType query, DType stored, int64_t page_size, int64_t group, Executor* executor)
      : cache_(*kv_cache({.num_pages = page_size > 0 ? batch * keys / page_size : batch,
                          .page_size = page_size > 0 ? page_size : keys,
                          .num_heads_kv = kHeadsKv,
                          .head_dim = kDim,
                          .head_dim_v = kDim,
                          .key_dtype = stored,
                          .value_dtype = stored,
                          .key_group = group,
                          .value_group = group})),
        memory_(allocate(cache_.bytes())),
        rows_(allocate(static_cast<size_t>(2 * batch * kHeads * kDim) * sizeof(float))) {
    AttentionDesc d{.batch = batch,
                    .seqlen_q = 1,
                    .seqlen_k = keys,
                    .num_heads = kHeads,
                    .num_heads_kv = kHeadsKv,
                    .head_dim = kDim,
                    .head_dim_v = kDim,
                    .dtype = query};
    if (stored != query) d.key_dtype = d.value_dtype = stored, d.key_group = d.value_group = group;
    const KvTensors pool = cache_.tensors(memory_.get());
    args_.query = Tensor(rows_.get(), query, {batch, 1, kHeads, kDim});
    args_.out = Tensor(rows_.get() + batch * kHeads * kDim * 4, query, {batch, 1, kHeads, kDim});
    args_.key = pool.key, args_.value = pool.value;
    args_.key_scales = pool.key_scales, args_.value_scales = pool.value_scales;
    if (page_size > 0) {
      d.page_size = page_size, d.num_pages = cache_.desc().num_pages, d.has_seqlens_k = true;
      table_.resize(static_cast<size_t>(d.num_pages));
      std::iota(table_.begin(), table_.end(), 0);
      std::shuffle(table_.begin(), table_.end(), std::mt19937(1));
      lengths_.assign(static_cast<size_t>(batch), keys);
      args_.page_table = Tensor(table_.data(), DType::kInt64, {batch, keys / page_size});
      args_.seqlens_k = Tensor(lengths_.data(), DType::kInt64, {batch});
    }
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

  void print(const std::string& name, double contiguous) {
    const double ms = least(), gigabytes = static_cast<double>(cache_.bytes()) / 1e6 / ms;
    std::printf("%-22s %8.3f %8.3f ms   contiguous / this %5.3f   %5.1f GB/s\n", name.c_str(), ms, ms_[ms_.size() / 2],
                contiguous / ms, gigabytes);
  }

 private:
  KvCache cache_;
  Memory memory_, rows_, workspace_{nullptr, std::free};
  std::vector<int64_t> table_, lengths_;
  ForwardArgs args_;
  std::unique_ptr<Plan> plan_;
  std::vector<double> ms_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: caches BATCH KEYS ROUNDS THREADS\n");
    return 2;
  }
  const int64_t batch = std::atoll(argv[1]), keys = std::atoll(argv[2]);
  const std::unique_ptr<Executor> executor(new_thread_pool(std::atoi(argv[4])));
  constexpr struct {
    const char* name;
    DType stored;  // kFloat32: as the query
    int64_t page_size, group;
  } kForms[] = {{"contiguous", DType::kFloat32, 0, 0},
                {"pages of 64", DType::kFloat32, 64, 0},
                {"pages of 16", DType::kFloat32, 16, 0},
                {"pages of 1", DType::kFloat32, 1, 0},
                {"int8", DType::kInt8, 0, 0},
                {"int8, pages of 16", DType::kInt8, 16, 0},
                {"int8, groups of 64", DType::kInt8, 0, 64},
                {"float8_e4m3", DType::kFloat8E4M3, 0, 0},
                {"float8_e5m2", DType::kFloat8E5M2, 0, 0},
                {"int4, groups of 32", DType::kInt4x2, 0, 32}};
  for (const DType query : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<std::unique_ptr<Form>> forms;
    for (const auto& form : kForms) {
      const DType stored = form.stored == DType::kFloat32 ? query : form.stored;
      forms.push_back(std::make_unique<Form>(batch, keys, query, stored, form.page_size, form.group, executor.get()));
    }
    for (int round = 0; round < std::atoi(argv[3]); ++round) {
      for (const auto& form : forms) form->run();
    }
    for (size_t n = 0; n < forms.size(); ++n) {
      forms[n]->print(std::string(dtype_name(query)) + " " + kForms[n].name, forms[0]->least());
    }
  }
}
