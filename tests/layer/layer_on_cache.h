// A layer, or a block, whose keys and values live in a cache: its calls, a few time steps each, in pages at random places.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "device_under_test.h"
#include "layer_harness.h"
#include "polyhead/block.h"
#include "polyhead/cache.h"
#include "testing/guard.h"

namespace polyhead::testing {

// Rows [first, first + count) of a dim.
inline Tensor part(const Tensor& t, int dim, int64_t first, int64_t count) {
  Tensor p = t;
  if (!t.given()) return p;
  p.dims[dim] = count;
  if (t.num_elements() > 0)
    p.data = static_cast<char*>(t.data) + first * t.strides[dim] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  return p;
}

// Of masks and windows: the one index of all stays.
inline Tensor part_of_option(const Tensor& t, int dim, int64_t first, int64_t count) {
  return t.given() && t.dims[dim] > 1 ? part(t, dim, first, count) : t;
}

inline LayerWeights weights_of(const std::array<Array, kNumWeightKinds>& arrays) {
  LayerWeights weights;
  for (size_t n = 0; n < kNumWeightKinds; ++n) {
    if (arrays[n].given()) weights[static_cast<WeightKind>(n)] = view(arrays[n]);
  }
  return weights;
}

// A cache in NaN, and pages for `batch` sequences of `capacity` tokens: drawn, some listed nowhere. Entries behind a length
// are out of range.
struct PagesOfBatch {
  KvCacheDesc desc;
  int64_t batch = 0, capacity = 0;
  std::optional<GuardedBytes> memory;
  KvTensors pool;
  Array table;  // [batch, pages of a sequence]

  PagesOfBatch(KvCacheDesc of, int64_t sequences, int64_t most, uint64_t seed) : desc(of), batch(sequences) {
    const int64_t each = (most + desc.page_size - 1) / desc.page_size;
    capacity = each * desc.page_size;
    desc.num_pages = batch * each + 2;
    const Result<KvCache> cache = kv_cache(desc);
    memory.emplace((cache->bytes() + 63) / 64 * 64, Guard::kEnd, uint8_t{0xff});
    pool = cache->tensors(memory->data());
    std::vector<int64_t> pages(static_cast<size_t>(desc.num_pages));
    std::iota(pages.begin(), pages.end(), 0);
    Random random(seed, 77);
    for (size_t n = pages.size(); n > 1; --n)
      std::swap(pages[n - 1], pages[static_cast<size_t>(random.integer(0, static_cast<int64_t>(n) - 1))]);
    table = Array(DType::kInt64, {batch, each});
    for (int64_t n = 0; n < table.size(); ++n) table.set(n, static_cast<double>(pages[static_cast<size_t>(n)]));
  }

  int64_t slot(int64_t b, int64_t token) const {
    const auto page = static_cast<int64_t>(table.at(b * table.dims[1] + token / desc.page_size));
    return page * desc.page_size + token % desc.page_size;
  }
  Array table_for(const Array& lengths) const {
    Array to = table;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t p = 0; p < table.dims[1]; ++p) {
        if (p * desc.page_size >= static_cast<int64_t>(lengths.at(b)))
          to.set(b * table.dims[1] + p, p % 2 == 0 ? -7 : 1e15);
      }
    }
    return to;
  }
};

// How a problem is computed.
struct Cut {
  const char* kernel = "";
  int threads = 1;
  std::vector<int64_t> widths = {};  // time steps of the calls, the last again and again; none: all in one
  int64_t page_size = 3;
  bool tokens_join = false;  // each call's tokens join the cache; else the first call's keys do, all of them
};

inline Array integers_of(const std::vector<int64_t>& values, std::vector<int64_t> dims) {
  Array a(DType::kInt32, std::move(dims));
  for (size_t n = 0; n < values.size(); ++n) a.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
  return a;
}

inline KvCacheDesc format_of(const LayerDesc& d, int64_t page_size) {
  KvCacheDesc cache;
  cache.page_size = page_size;
  cache.num_heads_kv = d.num_heads_kv;
  cache.head_dim = head_dim_of(d), cache.head_dim_v = head_dim_v_of(d);
  cache.key_dtype = cache.value_dtype = d.dtype;
  return cache;
}

// A call's tensors and memory, but for the pool, lent to where it is computed, from lend() to finish(). Each memory once.
class LentCall {
 public:
  explicit LentCall(const std::string& kernel) : on_device_(on_device(kernel)), loan_(new_loan(kernel)) {}

  void lend(LayerForwardArgs* args);
  void lend(Tensor* t, bool written);
  // What went wrong, or "".
  std::string finish() { return loan_->finish(); }

 private:
  bool on_device_;
  std::deque<std::vector<char>> copies_;
  std::unique_ptr<Loan> loan_;
  std::vector<std::pair<Tensor, Tensor>> lent_;  // as it was, and as it is
};

// The pool, in which nothing has been written.
inline KvTensors lend(Loan& loan, KvTensors pool) {
  for (Tensor* t : {&pool.key, &pool.value, &pool.key_scales, &pool.value_scales}) {
    if (t->given()) loan.lend(*t, false);
  }
  return pool;
}

// The numbers of one call that starts at time `first`.
struct OneCall {
  Array seqlens_q, seqlens_k, offsets, slots, table;

  OneCall(const LayerProblem& problem, const LayerInputs& in, const PagesOfBatch& pages, const Cut& cut, int64_t first,
          int64_t width);
};

// Whether each call's tokens may join: what a query sees has come before it.
bool may_join(const LayerProblem& problem);

// The layer of `width` time steps that computes a part of the problem.
LayerDesc on_cache(const LayerProblem& problem, const PagesOfBatch& pages, const Cut& cut, int64_t width);

// Out and attn_weights, as inference on a cache gives them.
LayerResults run_on_cache(const LayerProblem& problem, const LayerInputs& in, const Cut& cut);

}  // namespace polyhead::testing
