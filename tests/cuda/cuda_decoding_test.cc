// What decoding leaves to the device: caches hold bit for bit what the CPU stores there, whatever slots and positions say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "device_under_test.h"
#include "layer_block.h"
#include "layer_on_cache.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kPositions = 9, kHeads = 3, kGroups = 2;

struct Format {
  const char* name;
  DType tokens, query_out;
  KvCacheDesc cache;
};

// Rows of bytes are even in number: two in a half-word are one to the interpreter, and would be a race of their writers.
std::vector<Format> formats() {
  constexpr DType f32 = DType::kFloat32, bf16 = DType::kBFloat16, f16 = DType::kFloat16, int8 = DType::kInt8,
                  e4m3 = DType::kFloat8E4M3, e5m2 = DType::kFloat8E5M2, int4 = DType::kInt4x2;
  const auto cache = [](int64_t page_size, int64_t dim, int64_t dim_v, DType key, DType value, int64_t key_group = 0,
                        int64_t value_group = 0) {
    KvCacheDesc d;
    d.page_size = page_size, d.num_pages = 40 / page_size + 1, d.num_heads_kv = kGroups;
    d.head_dim = dim, d.head_dim_v = dim_v, d.key_dtype = key, d.value_dtype = value;
    d.key_group = key_group, d.value_group = value_group;
    return d;
  };
  std::vector<Format> all = {{"float32", f32, f32, cache(3, 16, 6, f32, f32)},
                             {"bfloat16", bf16, bf16, cache(1, 80, 64, bf16, f16)},
                             {"float16", f16, f32, cache(16, 64, 1, bf16, f32)},
                             {"int8", bf16, bf16, cache(4, 64, 48, int8, int8, 0, 16)},
                             {"int8_groups", f32, f16, cache(5, 256, 96, int8, e4m3, 16, 32)},
                             {"float8", f16, f16, cache(3, 16, 8, e4m3, e5m2)},
                             {"int4", f32, f32, cache(2, 64, 8, int4, int4, 32)},
                             {"no_numbers", f32, f32, cache(3, 0, 0, int8, f16)}};
  all[0].cache.rotary_dim = 12;
  all[1].cache.rotary_dim = 64, all[1].cache.interleaved = true;
  all[2].cache.hadamard = true;
  all[3].cache.rotary_dim = 32, all[3].cache.hadamard = true;
  all[4].cache.rotary_dim = 256, all[4].cache.interleaved = all[4].cache.hadamard = true;
  all[5].cache.rotary_dim = 2;
  return all;
}

// Tokens of all kinds of numbers: zeros, equal ones, small and large ones, NaN, infinities.
Array tokens_of(DType dtype, int64_t count, int64_t heads, int64_t dim, uint64_t seed) {
  Random random(seed);
  Array a(dtype, {count, heads, dim});
  for (int64_t n = 0; n < a.size(); ++n) {
    const int64_t token = n / std::max<int64_t>(heads * dim, 1), d = n % std::max<int64_t>(dim, 1);
    const double kinds[] = {0,
                            0.3,
                            1e-41 * random.normal(),
                            1e30 * random.normal(),
                            d == 3 ? NAN : random.normal(),
                            d == 5 ? -HUGE_VAL : random.normal()};
    a.set(n, token < 6 ? kinds[token] : random.normal() * (d % 3 == 1 ? 20 : 1));
  }
  return a;
}

struct Tokens {
  Array key, value, query, slots, positions, cos, sin;

  Tokens(const Format& format, std::vector<int64_t> to, std::vector<int64_t> at, DType integers)
      : cos(DType::kFloat32, {kPositions, format.cache.rotary_dim / 2}), sin(cos) {
    const KvCacheDesc& d = format.cache;
    const auto count = static_cast<int64_t>(to.size());
    key = tokens_of(format.tokens, count, kGroups, d.head_dim, 1);
    value = tokens_of(format.tokens, count, kGroups, d.head_dim_v, 2);
    query = tokens_of(format.tokens, count, kHeads, d.head_dim, 3);
    slots = positions = Array(integers, {count});
    for (int64_t n = 0; n < count; ++n) {
      const auto set = [&](Array& a, int64_t x) {
        if (integers == DType::kInt32) reinterpret_cast<int32_t*>(a.bytes.data())[n] = static_cast<int32_t>(x);
        if (integers == DType::kInt64) reinterpret_cast<int64_t*>(a.bytes.data())[n] = x;
      };
      set(slots, to[static_cast<size_t>(n)]), set(positions, at[static_cast<size_t>(n)]);
    }
    for (int64_t n = 0; n < cos.size(); ++n) {
      const auto angle = static_cast<double>(n);
      cos.set(n, std::cos(angle)), sin.set(n, std::sin(angle));
    }
  }

  // Without queries.
  KvAppendArgs args() const {
    return {.key = view(key),
            .value = view(value),
            .slots = view(slots),
            .positions = view(positions),
            .cos = view(cos),
            .sin = view(sin)};
  }
};

// A cache after a call, or several: its bytes, 0xff where nothing was written, and the turned queries.
struct Stored {
  KvTensors pool;
  std::vector<uint8_t> memory;
  Array query_out;
};

// Heads before pages, or as KvCache::tensors has it.
KvTensors pool_in(const KvCacheDesc& d, bool heads_first, std::vector<uint8_t>* memory) {
  const KvCache cache = *kv_cache(d);
  memory->assign(cache.bytes() + 64, 0xff);
  void* start = memory->data();
  size_t room = memory->size();
  KvTensors pool = cache.tensors(std::align(64, cache.bytes(), start, room));
  for (Tensor* t : {&pool.key, &pool.value, &pool.key_scales, &pool.value_scales}) {
    if (!heads_first || !t->given()) continue;
    t->strides[0] = t->dims[1] * t->dims[3], t->strides[1] = t->dims[3], t->strides[2] = t->dims[0] * t->strides[0];
  }
  return pool;
}

Stored append(const Format& format, const Tokens& tokens, bool on_device, int64_t width, bool heads_first = false) {
  Stored stored;
  stored.pool = pool_in(format.cache, heads_first, &stored.memory);
  stored.query_out = unwritten(Array(format.query_out, tokens.query.dims));
  const std::string kernel = on_device ? device_under_test.kernel : "";
  const std::unique_ptr<Loan> loan = new_loan(kernel);
  const KvTensors pool = lend(*loan, stored.pool);
  const KvCache cache = *kv_cache(format.cache);
  for (int64_t first = 0, count = tokens.key.dims[0]; first < count; first += width) {
    LentCall lent(kernel);
    const auto rows = [&](const Array& a, bool written) {
      Tensor t = part(view(a), 0, first, std::min(width, count - first));
      lent.lend(&t, written);
      return t;
    };
    KvAppendArgs args{
        .key = rows(tokens.key, true), .value = rows(tokens.value, true), .slots = rows(tokens.slots, true)};
    args.query = rows(tokens.query, true), args.query_out = rows(stored.query_out, false);
    if (format.cache.rotary_dim > 0) {
      args.positions = rows(tokens.positions, true);
      args.cos = view(tokens.cos), args.sin = view(tokens.sin);
      for (Tensor* t : {&args.cos, &args.sin}) lent.lend(t, true);
    }
    if (on_device) args.stream = device_under_test.stream();
    EXPECT_EQ(cache.append(pool, args).message(), "");
    EXPECT_EQ(lent.finish(), "");
  }
  EXPECT_EQ(loan->finish(), "");
  return stored;
}

// The first element in which two differ, NaN being NaN.
std::string difference(const std::string& name, const Tensor& a, const Tensor& b) {
  for (int64_t n = 0; n < a.num_elements(); ++n) {
    int64_t at = 0, rest = n;
    for (int i = a.ndim - 1; i >= 0; --i) at += rest % a.dims[i] * a.strides[i], rest /= a.dims[i];
    const size_t bytes = dtype_size_bytes(a.dtype);
    const auto element = [&](const Tensor& t) {
      return static_cast<const char*>(t.data) + at * static_cast<int64_t>(bytes);
    };
    if (std::memcmp(element(a), element(b), bytes) == 0) continue;
    const double x = load_element(a.data, a.dtype, at), y = load_element(b.data, b.dtype, at);
    if (bytes > 1 && std::isnan(x) && std::isnan(y)) continue;
    return name + "[" + std::to_string(n) + "]: " + std::to_string(x) + " is not " + std::to_string(y);
  }
  return "";
}

void expect_same_pool(const Stored& got, const Stored& want) {
  const std::pair<const char*, Tensor KvTensors::*> tensors[] = {{"key", &KvTensors::key},
                                                                 {"value", &KvTensors::value},
                                                                 {"key_scales", &KvTensors::key_scales},
                                                                 {"value_scales", &KvTensors::value_scales}};
  for (const auto& [name, tensor] : tensors) EXPECT_EQ(difference(name, got.pool.*tensor, want.pool.*tensor), "");
}

void expect_same(const Stored& got, const Stored& want) {
  expect_same_pool(got, want);
  EXPECT_EQ(difference("query_out", view(got.query_out), view(want.query_out)), "");
}

// In one call or several, in a pool of any strides; and a byte that the CPU leaves alone is left alone.
TEST(CudaDecoding, StoresTheBitsOfTheCpu) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const Tokens tokens(format, {7, 0, 12, 31, -1, 20, 2, 3, 19, 30, 11}, {0, 8, 3, 3, 1, 2, 7, 6, 5, 4, 0},
                        DType::kInt64);
    const Stored want = append(format, tokens, false, 100);
    const Stored got = append(format, tokens, true, 100);
    expect_same(got, want);
    expect_same(append(format, tokens, true, 3), want);
    expect_same(append(format, tokens, true, 4, true), append(format, tokens, false, 100, true));
  }
}

TEST(CudaDecoding, TrustsNoSlotAndNoPosition) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  for (Format format : formats()) {
    SCOPED_TRACE(format.name);
    const int64_t end = format.cache.num_pages * format.cache.page_size;
    for (const DType integers : {DType::kInt64, DType::kInt32}) {
      const bool wide = integers == DType::kInt64;
      const int64_t most = wide ? kMost : INT32_MAX, least = wide ? kLeast : INT32_MIN;
      const Tokens wild(format, {end, 1, least, most, end - 1, -2, 0}, {3, least, 1, 2, most, 0, kPositions}, integers);
      const Tokens cut(format, {-1, 1, -1, -1, end - 1, -1, 0}, {3, 0, 1, 2, kPositions - 1, 0, kPositions - 1},
                       integers);
      expect_same(append(format, wild, true, 100), append(format, cut, false, 100));
    }
  }
}

using Slots = std::vector<int64_t>;

Array slots_of(const Slots& values, DType dtype) {
  Array a(dtype, {static_cast<int64_t>(values.size())});
  for (size_t n = 0; n < values.size(); ++n) {
    if (dtype == DType::kInt32) reinterpret_cast<int32_t*>(a.bytes.data())[n] = static_cast<int32_t>(values[n]);
    if (dtype == DType::kInt64) reinterpret_cast<int64_t*>(a.bytes.data())[n] = values[n];
  }
  return a;
}

// A pool of any bytes but those of a scale that is NaN.
Stored drawn(const KvCacheDesc& desc, bool heads_first) {
  Stored stored;
  stored.pool = pool_in(desc, heads_first, &stored.memory);
  Random random(5);
  std::generate_n(static_cast<uint8_t*>(stored.pool.key.data), kv_cache(desc)->bytes(),
                  [&] { return static_cast<uint8_t>(random.integer(0, 63)); });
  return stored;
}

// call(cache, pool, lent), where it is computed.
template <class Call>
void on_pool(const KvCacheDesc& desc, Stored& stored, bool on_device, const Call& call) {
  const std::string kernel = on_device ? device_under_test.kernel : "";
  const std::unique_ptr<Loan> loan = new_loan(kernel);
  KvTensors pool = stored.pool;
  for (Tensor* t : {&pool.key, &pool.value, &pool.key_scales, &pool.value_scales}) {
    if (t->given()) loan->lend(*t, true);
  }
  LentCall lent(kernel);
  EXPECT_EQ(call(*kv_cache(desc), pool, lent).message(), "");
  EXPECT_EQ(lent.finish(), "");
  EXPECT_EQ(loan->finish(), "");
}

void copy(const KvCacheDesc& desc, Stored& stored, bool on_device, const Slots& from, const Slots& to, DType dtype) {
  const Array sources = slots_of(from, dtype), targets = slots_of(to, dtype);
  on_pool(desc, stored, on_device, [&](const KvCache& cache, const KvTensors& pool, LentCall& lent) {
    Tensor read = view(sources), written = view(targets);
    lent.lend(&read, true), lent.lend(&written, true);
    return cache.copy(pool, read, written, on_device ? device_under_test.stream() : nullptr);
  });
}

// Chains, circles, one source for many, and a token onto itself; and slots that nobody has.
TEST(CudaDecoding, CopiesWhatTheCpuDoes) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  const Slots from{0, 1, 2, 9, 8, 7, 30, 30, 30, 12, 5}, to{1, 2, 3, 8, 7, 9, 31, 32, 30, 12, 39};
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const int64_t end = format.cache.num_pages * format.cache.page_size;
    for (const bool heads_first : {false, true}) {
      for (const DType dtype : {DType::kInt32, DType::kInt64}) {
        Stored want = drawn(format.cache, heads_first), got = drawn(format.cache, heads_first);
        copy(format.cache, want, false, from, to, dtype);
        Slots wild_from = from, wild_to = to;
        const bool wide = dtype == DType::kInt64;
        for (const int64_t far : {int64_t{-1}, end, wide ? kMost : INT32_MAX, wide ? kLeast : INT32_MIN}) {
          wild_from.insert(wild_from.begin() + 2, {far, 17, far}), wild_to.insert(wild_to.begin() + 2, {16, far, far});
        }
        copy(format.cache, got, true, wild_from, wild_to, dtype);
        expect_same_pool(got, want);
      }
    }
  }
}

// All tokens the other way round, in units of 16 bytes, of elements, of halves of them: as many as a block has memory for.
TEST(CudaDecoding, CopiesAsManyTokensAsFit) {
  constexpr DType kTypes[][2] = {
      {DType::kFloat32, DType::kFloat32}, {DType::kBFloat16, DType::kFloat16}, {DType::kInt8, DType::kInt4x2}};
  for (const auto& [key, value] : kTypes) {
    for (const int64_t count : {100, 1600, 6400, 25400, 50688}) {
      SCOPED_TRACE(std::string(dtype_name(key)) + " " + std::to_string(count));
      if (key == DType::kInt8 && count > 25344) continue;  // neighbouring bytes would be two blocks' (see formats())
      KvCacheDesc desc{.num_pages = count / 32 + 1, .page_size = 32};
      desc.head_dim = count <= 6400 ? 16 : 2, desc.head_dim_v = 2 * desc.head_dim;
      desc.key_dtype = key, desc.value_dtype = value;
      Stored want = drawn(desc, false), got = drawn(desc, false);
      Slots from(static_cast<size_t>(count)), to(from);
      for (size_t n = 0; n < from.size(); ++n) {
        from[n] = static_cast<int64_t>(n), to[n] = static_cast<int64_t>(from.size() - 1 - n);
      }
      copy(desc, want, false, from, to, DType::kInt64);
      copy(desc, got, true, from, to, DType::kInt64);
      expect_same_pool(got, want);
    }
  }
}

TEST(CudaDecoding, ReadsWhatTheCpuDoes) {
  constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const KvCacheDesc& d = format.cache;
    const int64_t end = d.num_pages * d.page_size;
    for (const DType dtype : kFloats) {
      for (const bool heads_first : {false, true}) {
        const Tokens tokens(format, {7, 0, 12, 31, -1, 20, 2, 3, 19, 30, 11}, {0, 8, 3, 3, 1, 2, 7, 6, 5, 4, 0},
                            DType::kInt64);
        Stored stored = append(format, tokens, false, 100, heads_first);
        const auto read = [&](bool on_device, const Slots& slots, bool with_key, bool with_value) {
          const auto n = static_cast<int64_t>(slots.size());
          std::pair<Array, Array> both{unwritten(Array(dtype, {n, kGroups, d.head_dim})),
                                       unwritten(Array(dtype, {n, kGroups, d.head_dim_v}))};
          const Array numbers = slots_of(slots, DType::kInt32);
          on_pool(d, stored, on_device, [&](const KvCache& cache, const KvTensors& pool, LentCall& lent) {
            Tensor key = with_key ? view(both.first) : Tensor(), value = with_value ? view(both.second) : Tensor();
            Tensor from = view(numbers);
            lent.lend(&from, true), lent.lend(&key, false), lent.lend(&value, false);
            return cache.read(pool, from, key, value, on_device ? device_under_test.stream() : nullptr);
          });
          return both;
        };
        const auto expect_same = [&](const auto& got, const auto& want) {
          EXPECT_EQ(difference("key", view(got.first), view(want.first)), "");
          EXPECT_EQ(difference("value", view(got.second), view(want.second)), "");
        };
        expect_same(read(true, {30, 7, 7, 0, 11, 2}, true, true), read(false, {30, 7, 7, 0, 11, 2}, true, true));
        expect_same(read(true, {2}, true, false), read(false, {2}, true, false));
        expect_same(read(true, {3}, false, true), read(false, {3}, false, true));
        const auto nobody = read(true, {-1, static_cast<int64_t>(end), INT32_MIN, INT32_MAX}, true, true);
        for (const Array* a : {&nobody.first, &nobody.second}) {
          for (int64_t n = 0; n < a->size(); ++n) EXPECT_EQ(a->at(n), 0);
        }
      }
    }
  }
}

// Work is put on the stream: nobody waits for it.
TEST(CudaDecoding, ComesBackAtOnce) {
  const Format format = formats()[0];
  const Tokens tokens(format, {4}, {1}, DType::kInt64);
  std::vector<uint8_t> memory;
  KvTensors pool = pool_in(format.cache, false, &memory);
  const std::vector<uint8_t> before = memory;
  LentCall lent(device_under_test.kernel);
  KvAppendArgs args = tokens.args();
  for (Tensor* t : {&pool.key, &pool.value}) lent.lend(t, false);
  for (Tensor* t : {&args.key, &args.value, &args.slots, &args.positions, &args.cos, &args.sin}) lent.lend(t, true);
  args.stream = device_under_test.stream();
  EXPECT_EQ(kv_cache(format.cache)->append(pool, args).message(), "");
  EXPECT_EQ(memory, before);
  EXPECT_EQ(lent.finish(), "");
  EXPECT_NE(memory, before);
}

TEST(CudaDecoding, RefusesWhatItDoesNotTake) {
  Format format = formats()[0];
  const auto refused = [&](bool lend_key, bool lend_pool) {
    const Tokens tokens(format, {4}, {1}, DType::kInt64);
    std::vector<uint8_t> memory;
    KvTensors pool = pool_in(format.cache, false, &memory);
    LentCall lent(device_under_test.kernel);
    KvAppendArgs args = tokens.args();
    if (format.cache.rotary_dim == 0) args.positions = args.cos = args.sin = {};
    for (Tensor* t : {&args.value, &args.slots, &args.positions, &args.cos, &args.sin}) lent.lend(t, true);
    if (lend_key) lent.lend(&args.key, true);
    if (lend_pool) {
      for (Tensor* t : {&pool.key, &pool.value}) lent.lend(t, false);
    }
    const std::string message = kv_cache(format.cache)->append(pool, args).message();
    EXPECT_EQ(lent.finish(), "");
    return message;
  };
  EXPECT_EQ(refused(false, true), "key is not on cuda, where this call computes");
  EXPECT_EQ(refused(true, false), "slots is not on the CPU, where this call computes");
  format.cache.rotary_dim = 0, format.cache.head_dim = 1025;
  EXPECT_EQ(refused(true, true), "head_dim is 1025, cuda_sm80 takes caches of 0 to 1024");
}

TEST(CudaDecoding, RefusesToCopyMoreThanItHasMemoryFor) {
  KvCacheDesc desc{.num_pages = 50689, .page_size = 1, .num_heads_kv = 1, .head_dim = 1, .head_dim_v = 1};
  Stored stored = drawn(desc, false);
  const Array none = slots_of(Slots(50689, -1), DType::kInt32);
  LentCall lent(device_under_test.kernel);
  KvTensors pool = stored.pool;
  Tensor from = view(none), to = view(none);
  for (Tensor* t : {&pool.key, &pool.value}) lent.lend(t, false);
  lent.lend(&from, true), lent.lend(&to, true);
  EXPECT_EQ(kv_cache(desc)->copy(pool, from, to, device_under_test.stream()).message(),
            "from has 50689 tokens, cuda_sm80 copies 0 to 50688 in a call");
  EXPECT_EQ(kv_cache(desc)->copy(stored.pool, view(none), view(none), device_under_test.stream()).message(),
            "stream is given, but the CPU has no streams");
  EXPECT_EQ(lent.finish(), "");
}

}  // namespace
}  // namespace polyhead::testing
