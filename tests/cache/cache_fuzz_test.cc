// Slots, positions, page tables and lengths, right ones and hostile ones: a call is refused exactly where a number that it would
// use is wrong, and then nothing has been written; else nothing is read or written but what the numbers name. All memory lies
// between pages that nobody may touch. One cache in five is wild: keys, values, scales, cos and sin are any bits there are, and
// what comes of them is only to lie where it belongs. More rounds: POLYHEAD_FUZZ_RUNS; others: POLYHEAD_FUZZ_SEED.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "capi/hostile.h"
#include "core/dtype.h"
#include "kernels_to_test.h"
#include "polyhead/attention.h"
#include "polyhead/cache.h"
#include "testing/guard.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kPositions = 20;
constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr DType kFormats[] = {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt4x2};

// Calls of one kind.
struct Count {
  const char* what;
  int64_t accepted = 0, refused = 0;
};

// Tensors in memory of their own, against the page in front or behind.
class Memory {
 public:
  Memory(Hostile& random, bool wild) : random_(random), wild_(wild) {}

  Tensor bytes(DType dtype, std::initializer_list<int64_t> dims, uint8_t fill) {
    Tensor t(nullptr, dtype, dims);
    const auto size = static_cast<size_t>(t.num_elements()) * dtype_size_bytes(dtype);
    all_.emplace_back(size, random_.chance(50) ? Guard::kEnd : Guard::kStart, fill);
    t.data = all_.back().data();
    return t;
  }
  Tensor numbers(DType dtype, std::initializer_list<int64_t> dims) {
    const Tensor t = bytes(dtype, dims, 0);
    for (int64_t n = 0; n < t.num_elements(); ++n) {
      const bool hostile = wild_ && random_.chance(50);
      store_element(t.data, dtype, n,
                    hostile ? random_.hostile_number() : static_cast<double>(random_.between(-8, 8)) / 4);
    }
    return t;
  }
  // int32 or int64; what the tensor then holds goes back to `values`.
  Tensor integers(std::vector<int64_t>* values, std::initializer_list<int64_t> dims) {
    const bool narrow = random_.chance(50);
    const Tensor t = bytes(narrow ? DType::kInt32 : DType::kInt64, dims, 0);
    for (size_t n = 0; n < values->size(); ++n) {
      int64_t& value = (*values)[n];
      if (narrow) value = static_cast<int32_t>(value);
      if (narrow) static_cast<int32_t*>(t.data)[n] = static_cast<int32_t>(value);
      if (!narrow) static_cast<int64_t*>(t.data)[n] = value;
    }
    return t;
  }
  std::vector<std::vector<uint8_t>> copy() const {
    std::vector<std::vector<uint8_t>> copies;
    for (const GuardedBytes& each : all_) copies.emplace_back(each.data(), each.data() + each.size());
    return copies;
  }

 private:
  Hostile& random_;
  bool wild_;
  std::vector<GuardedBytes> all_;
};

KvCacheDesc random_cache(Hostile& random) {
  static constexpr int64_t kPageSizes[] = {1, 2, 3, 7, 16, 48}, kHeadDims[] = {2, 8, 16, 20, 32, 64};
  const DType dtype = random.pick(kFloats);
  KvCacheDesc d{.num_pages = random.between(1, 6), .page_size = random.pick(kPageSizes)};
  d.num_heads_kv = random.between(1, 3);
  d.head_dim = random.pick(kHeadDims), d.head_dim_v = random.pick(kHeadDims);
  d.key_dtype = random.chance(50) ? dtype : random.pick(kFormats);
  d.value_dtype = random.chance(50) ? dtype : random.pick(kFormats);
  const auto scaled = [](DType t) { return std::find(kFormats, std::end(kFormats), t) != std::end(kFormats); };
  if (scaled(d.key_dtype) && d.head_dim % 16 == 0 && random.chance(50)) d.key_group = 16;
  if (scaled(d.value_dtype) && d.head_dim_v % 16 == 0 && random.chance(50)) d.value_group = 16;
  d.rotary_dim = 2 * random.between(0, d.head_dim / 2), d.interleaved = random.chance(50);
  d.hadamard = (d.head_dim & (d.head_dim - 1)) == 0 && random.chance(30);
  return d;
}

// A cache, whose bytes start as 0 or, if wild, as any, and calls on it.
class Fuzzed {
 public:
  Fuzzed(Hostile& random, const KvCacheDesc& desc)
      : random_(random),
        wild_(random.chance(20)),
        d_(desc),
        cache_(*kv_cache(desc)),
        memory_(random, wild_),
        pool_(cache_.tensors(nullptr)) {
    const bool heads_outside = random.chance(40);
    for (const auto each : kTensors) {
      Tensor& t = pool_.*each;
      if (t.ndim == 0) continue;
      t = memory_.bytes(t.dtype, {t.dims[0], t.dims[1], t.dims[2], t.dims[3]}, 0);
      auto* const bytes = static_cast<uint8_t*>(t.data);
      if (wild_) std::generate_n(bytes, row_bytes(t) * rows(t), [&] { return static_cast<uint8_t>(random_.next()); });
      if (heads_outside) t.strides[1] = t.dims[3], t.strides[2] = t.dims[1] * t.dims[3];
    }
  }

  void append(Count* count) {
    const int64_t n = std::min(random_.between(0, 7), num_slots()), heads = d_.num_heads_kv * random_.between(1, 2);
    Memory own(random_, wild_);
    std::vector<int64_t> slots = some_slots(n, true), positions(static_cast<size_t>(n));
    for (int64_t& position : positions) position = random_.below(kPositions);
    spoil({&slots, &positions});
    KvAppendArgs args;
    args.slots = own.integers(&slots, {n});
    if (d_.rotary_dim > 0) {
      args.positions = own.integers(&positions, {n});
      args.cos = own.numbers(DType::kFloat32, {kPositions, d_.rotary_dim / 2});
      args.sin = own.numbers(DType::kFloat32, {kPositions, d_.rotary_dim / 2});
    }
    args.key = own.numbers(random_.pick(kFloats), {n, d_.num_heads_kv, d_.head_dim});
    args.value = own.numbers(random_.pick(kFloats), {n, d_.num_heads_kv, d_.head_dim_v});
    if (random_.chance(50)) {
      args.query = own.numbers(random_.pick(kFloats), {n, heads, d_.head_dim});
      args.query_out = own.bytes(random_.pick(kFloats), {n, heads, d_.head_dim}, 0xff);
    }
    const bool right_positions = d_.rotary_dim == 0 || within(positions, 0, kPositions - 1);
    const bool right = within(slots, -1, num_slots() - 1) && distinct(slots) && right_positions;
    judge(count, own, right, {"slots", "positions"}, slots, [&] { return cache_.append(pool_, args); });
  }

  void copy(Count* count) {
    const int64_t n = random_.between(0, 7);
    Memory own(random_, wild_);
    std::vector<int64_t> from(static_cast<size_t>(n)), to = some_slots(n, false);
    from.resize(to.size());
    for (int64_t& slot : from) slot = random_.below(num_slots());
    spoil({&from, &to});
    const Tensor read = own.integers(&from, {size(from)}), written = own.integers(&to, {size(to)});
    const bool right = within(from, 0, num_slots() - 1) && within(to, 0, num_slots() - 1) && distinct(to);
    judge(count, own, right, {"from", "to"}, to, [&] { return cache_.copy(pool_, read, written); });
  }

  void read(Count* count) {
    Memory own(random_, wild_);
    std::vector<int64_t> slots(static_cast<size_t>(random_.between(0, 7)));
    for (int64_t& slot : slots) slot = random_.below(num_slots());
    spoil({&slots});
    const Tensor from = own.integers(&slots, {size(slots)});
    const Tensor key = own.bytes(random_.pick(kFloats), {size(slots), d_.num_heads_kv, d_.head_dim}, 0xff);
    const Tensor value = own.bytes(random_.pick(kFloats), {size(slots), d_.num_heads_kv, d_.head_dim_v}, 0xff);
    const bool right = within(slots, 0, num_slots() - 1);
    judge(count, own, right, {"slots"}, {}, [&] { return cache_.read(pool_, from, key, value); });
    if (right) expect_finite({key, value});
  }

  // What no length reaches holds NaN, and the table there any number.
  void attention(Count* count) {
    AttentionDesc d = attention_desc();
    const int64_t pages = d.seqlen_k / d.page_size;
    std::vector<int64_t> lengths(static_cast<size_t>(d.batch)), table(static_cast<size_t>(d.batch * pages));
    for (int64_t& length : lengths) length = random_.between(0, d.seqlen_k);
    for (int64_t n = 0; n < size(table); ++n) {
      const bool reached = n % pages * d.page_size < lengths[static_cast<size_t>(n / pages)];
      table[static_cast<size_t>(n)] = reached ? random_.below(d_.num_pages) : random_.hostile_integer();
    }
    spoil({&lengths, &table});
    Memory own(random_, wild_);
    ForwardArgs args;
    args.seqlens_k = own.integers(&lengths, {d.batch});
    args.page_table = own.integers(&table, {d.batch, pages});
    std::set<int64_t> seen;
    const bool right = find_seen(d, lengths, table, &seen);
    const KvTensors pool = nan_but(seen, own);
    args.key = pool.key, args.value = pool.value;
    args.key_scales = pool.key_scales, args.value_scales = pool.value_scales;
    args.query = own.numbers(d.dtype, {d.batch, d.seqlen_q, d.num_heads, d.head_dim});
    args.out = own.bytes(d.dtype, {d.batch, d.seqlen_q, d.num_heads, d.head_dim_v}, 0xff);
    if (d.attn_mask.given) {
      args.attn_mask = own.bytes(DType::kBool, {1, 1, d.seqlen_q, d.attn_mask.dims[3]}, 1);
    }
    for (const Kernel* kernel : kernels_to_test()) {
      if (refuses(kernel->name, kernel->why_not(d))) continue;
      const Result<Plan> made = plan(d, {.kernel = kernel->name});
      ASSERT_TRUE(made.ok()) << made.status().message();
      const GuardedBytes workspace(made->workspace_bytes(), Guard::kStart, 0xff);
      args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      std::memset(args.out.data, 0xff, static_cast<size_t>(args.out.num_elements()) * dtype_size_bytes(d.dtype));
      judge(count, own, right, {"seqlens_k", "page_table"}, {}, [&] { return made->forward(args); });
      if (right) expect_finite({args.out});
    }
  }

 private:
  using Integers = std::vector<int64_t>;
  static constexpr Tensor KvTensors::*kTensors[] = {&KvTensors::key, &KvTensors::value, &KvTensors::key_scales,
                                                    &KvTensors::value_scales};

  int64_t num_slots() const { return d_.num_pages * d_.page_size; }
  static int64_t size(const Integers& x) { return static_cast<int64_t>(x.size()); }
  static bool within(const Integers& x, int64_t least, int64_t most) {
    return std::all_of(x.begin(), x.end(), [&](int64_t n) { return n >= least && n <= most; });
  }
  static bool distinct(Integers slots) {
    std::erase(slots, -1);
    return std::set<int64_t>(slots.begin(), slots.end()).size() == slots.size();
  }

  Integers some_slots(int64_t n, bool some_nowhere) {
    Integers all(static_cast<size_t>(num_slots()));
    for (int64_t slot = 0; slot < num_slots(); ++slot) all[static_cast<size_t>(slot)] = slot;
    for (size_t i = all.size(); i > 1; --i)
      std::swap(all[i - 1], all[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    all.resize(static_cast<size_t>(std::min(n, num_slots())));
    for (int64_t& slot : all) slot = some_nowhere && random_.chance(10) ? -1 : slot;
    return all;
  }

  // One number of one of the lists, in two rounds of five.
  void spoil(std::initializer_list<Integers*> lists) {
    Integers& list = **(lists.begin() + random_.below(static_cast<int64_t>(lists.size())));
    if (list.empty() || random_.chance(60)) return;
    int64_t& spoiled = list[static_cast<size_t>(random_.below(size(list)))];
    switch (random_.below(3)) {
      case 0: spoiled = random_.hostile_integer(); break;
      case 1: spoiled = list[static_cast<size_t>(random_.below(size(list)))]; break;
      case 2: spoiled += random_.between(-num_slots(), num_slots()); break;
    }
  }

  AttentionDesc attention_desc() {
    AttentionDesc d;
    const auto is_float = [](DType t) { return std::find(kFloats, std::end(kFloats), t) != std::end(kFloats); };
    d.dtype = is_float(d_.key_dtype) ? d_.key_dtype : is_float(d_.value_dtype) ? d_.value_dtype : random_.pick(kFloats);
    if (!is_float(d_.key_dtype)) d.key_dtype = d_.key_dtype, d.key_group = d_.key_group;
    if (!is_float(d_.value_dtype)) d.value_dtype = d_.value_dtype, d.value_group = d_.value_group;
    d.batch = random_.between(1, 3), d.seqlen_q = random_.between(1, 5), d.has_seqlens_k = true;
    d.page_size = d_.page_size, d.num_pages = d_.num_pages, d.seqlen_k = d.page_size * random_.between(0, 5);
    d.num_heads_kv = d_.num_heads_kv, d.num_heads = d_.num_heads_kv * random_.between(1, 3);
    d.head_dim = d_.head_dim, d.head_dim_v = d_.head_dim_v;
    if (random_.chance(30)) d.causal = true, d.align = Align::kBottomRight;
    d.mask_at_end = random_.chance(30);
    if (d.mask_at_end) d.attn_mask = {true, DType::kBool, {1, 1, d.seqlen_q, random_.between(0, d.seqlen_k)}};
    return d;
  }

  // Whether lengths and the pages that they reach into are right; the slots that attention then reads.
  bool find_seen(const AttentionDesc& d, const Integers& lengths, const Integers& table,
                 std::set<int64_t>* seen) const {
    if (!within(lengths, 0, d.seqlen_k)) return false;
    for (int64_t b = 0; b < d.batch; ++b) {
      for (int64_t key = 0; key < lengths[static_cast<size_t>(b)]; ++key) {
        const int64_t page = table[static_cast<size_t>((b * d.seqlen_k + key) / d.page_size)];
        if (page < 0 || page >= d.num_pages) return false;
        seen->insert(page * d.page_size + key % d.page_size);
      }
    }
    return true;
  }

  // A copy of the pool in which all other slots are NaN.
  KvTensors nan_but(const std::set<int64_t>& slots, Memory& memory) const {
    KvTensors copy = pool_;
    for (const auto each : kTensors) {
      Tensor& t = copy.*each;
      if (t.ndim == 0) continue;
      t = memory.bytes(t.dtype, {t.dims[0], t.dims[1], t.dims[2], t.dims[3]}, 0xff);
      for (const int64_t slot : slots) {
        for (int64_t h = 0; h < t.dims[2]; ++h) std::memcpy(row(t, slot, h), row(pool_.*each, slot, h), row_bytes(t));
      }
    }
    return copy;
  }

  uint8_t* row(const Tensor& t, int64_t slot, int64_t head) const {
    const int64_t at = slot / d_.page_size * t.strides[0] + slot % d_.page_size * t.strides[1] + head * t.strides[2];
    return static_cast<uint8_t*>(t.data) + at * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  }
  static size_t rows(const Tensor& t) { return static_cast<size_t>(t.dims[0] * t.dims[1] * t.dims[2]); }
  static size_t row_bytes(const Tensor& t) { return static_cast<size_t>(t.dims[3]) * dtype_size_bytes(t.dtype); }

  std::vector<std::vector<uint8_t>> stored() const {
    std::vector<std::vector<uint8_t>> slots(static_cast<size_t>(num_slots()));
    for (int64_t slot = 0; slot < num_slots(); ++slot) {
      auto& bytes = slots[static_cast<size_t>(slot)];
      for (const auto each : kTensors) {
        const Tensor& t = pool_.*each;
        for (int64_t h = 0; t.ndim > 0 && h < t.dims[2]; ++h) {
          bytes.insert(bytes.end(), row(t, slot, h), row(t, slot, h) + row_bytes(t));
        }
      }
    }
    return slots;
  }

  // `written`: slots that a call may write to, if it is right.
  template <class Call>
  void judge(Count* count, const Memory& own, bool right, const std::vector<std::string>& names,
             const Integers& written, Call call) {
    const auto memory = own.copy(), slots = stored();
    const Status status = call();
    ++(status.ok() ? count->accepted : count->refused);
    ASSERT_EQ(status.ok(), right) << status.message();
    auto after = stored();
    for (const int64_t slot : written) {
      if (right && slot >= 0) after[static_cast<size_t>(slot)] = slots[static_cast<size_t>(slot)];
    }
    EXPECT_TRUE(after == slots) << "a slot that nobody named has changed";
    if (right) return;
    EXPECT_TRUE(own.copy() == memory) << "refused, but memory has changed: " << status.message();
    EXPECT_TRUE(std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return status.message().starts_with(name + "[") || status.message().starts_with(name + " holds ");
    })) << status.message();
  }

  void expect_finite(std::initializer_list<Tensor> tensors) const {
    if (wild_) return;
    for (const Tensor& t : tensors) {
      for (int64_t n = 0; n < t.num_elements(); ++n) {
        ASSERT_TRUE(std::isfinite(load_element(t.data, t.dtype, n))) << "element " << n;
      }
    }
  }

  Hostile& random_;
  const bool wild_;
  KvCacheDesc d_;
  KvCache cache_;
  Memory memory_;
  KvTensors pool_;
};

TEST(CacheFuzz, RefusesWrongNumbersAndNoOthers) {
  Count counts[] = {{"append"}, {"copy"}, {"read"}, {"attention on every kernel"}};
  int64_t runs = 0;
  repeat("cache_fuzz_test", 300, [&](Hostile& random) {
    ++runs;
    Fuzzed cache(random, random_cache(random));
    for (int calls = 0; calls < 12 && !::testing::Test::HasFailure(); ++calls) {
      const int64_t verb = random.below(4);
      Count* const count = &counts[verb];
      switch (verb) {
        case 0: cache.append(count); break;
        case 1: cache.copy(count); break;
        case 2: cache.read(count); break;
        case 3: cache.attention(count); break;
      }
    }
  });
  for (const auto& [what, accepted, refused] : counts) {
    std::printf("%s: %lld accepted, %lld refused\n", what, static_cast<long long>(accepted),
                static_cast<long long>(refused));
    if (runs < 100) continue;
    EXPECT_GT(accepted, refused) << what << " is tested by refusals only";
    EXPECT_GT(refused, accepted / 20) << what << " is not tested by refusals";
  }
}

}  // namespace
}  // namespace polyhead::testing
