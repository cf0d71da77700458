// Caches of keys and values: what append, copy and read store, in any pieces and strides; what they refuse; who holds pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "polyhead/cache.h"
#include "testing/formats.h"

namespace polyhead {
namespace {

constexpr int64_t kPositions = 50;
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Numbers of a dtype in memory of their own, whose bytes start as `fill`.
struct Numbers {
  Tensor tensor;
  std::vector<uint8_t> bytes;

  Numbers(DType dtype, std::initializer_list<int64_t> dims, uint8_t fill = 0xff) : tensor(nullptr, dtype, dims) {
    bytes.resize(static_cast<size_t>(tensor.num_elements()) * dtype_size_bytes(dtype), fill);
    tensor.data = bytes.data();
  }
  double at(int64_t n) const { return load_element(bytes.data(), tensor.dtype, n); }
};

Numbers random_numbers(DType dtype, std::initializer_list<int64_t> dims, unsigned seed) {
  Numbers x(dtype, dims);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (int64_t n = 0; n < x.tensor.num_elements(); ++n) store_element(x.bytes.data(), dtype, n, normal(random));
  return x;
}

Numbers integers(const std::vector<int64_t>& values, DType dtype = DType::kInt64) {
  Numbers x(dtype, {static_cast<int64_t>(values.size())});
  for (size_t n = 0; n < values.size(); ++n) {
    if (dtype == DType::kInt64) reinterpret_cast<int64_t*>(x.bytes.data())[n] = values[n];
    if (dtype == DType::kInt32) reinterpret_cast<int32_t*>(x.bytes.data())[n] = static_cast<int32_t>(values[n]);
  }
  return x;
}

// The first or last rows of a tensor.
Tensor rows(Tensor t, int64_t first, int64_t count) {
  t.data = static_cast<char*>(t.data) + first * t.strides[0] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  t.dims[0] = count;
  return t;
}

KvCacheDesc small_desc() {
  return {.num_pages = 5, .page_size = 4, .num_heads_kv = 2, .head_dim = 16, .head_dim_v = 6, .rotary_dim = 12};
}

// A cache in memory of its own, NaN at first, and tokens for it.
struct Cache {
  KvCache cache;
  std::unique_ptr<uint8_t[], void (*)(void*)> memory;
  KvTensors pool;

  explicit Cache(const KvCacheDesc& desc)
      : cache(*kv_cache(desc)),
        memory(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(cache.bytes(), 64))), std::free),
        pool(cache.tensors(memory.get())) {
    std::memset(memory.get(), 0xff, cache.bytes());
  }
  bool operator==(const Cache& other) const {
    return std::memcmp(memory.get(), other.memory.get(), cache.bytes()) == 0;
  }
  double key(int64_t slot, int64_t n) const {
    const int64_t heads = cache.desc().num_heads_kv * cache.desc().head_dim;
    return load_element(pool.key.data, pool.key.dtype, slot * heads + n);
  }
};

struct Tokens {
  Numbers key, value, query, query_out, cos, sin, positions, slots;

  Tokens(const KvCacheDesc& d, const std::vector<int64_t>& to, DType dtype = DType::kFloat32)
      : key(random_numbers(dtype, {size(to), d.num_heads_kv, d.head_dim}, 1)),
        value(random_numbers(dtype, {size(to), d.num_heads_kv, d.head_dim_v}, 2)),
        query(random_numbers(dtype, {size(to), 6, d.head_dim}, 3)),
        query_out(dtype, {size(to), 6, d.head_dim}),
        cos(random_numbers(DType::kFloat32, {kPositions, d.rotary_dim / 2}, 4)),
        sin(random_numbers(DType::kFloat32, {kPositions, d.rotary_dim / 2}, 5)),
        positions(integers(any_positions(to.size()), DType::kInt32)),
        slots(integers(to)) {}

  KvAppendArgs args(bool rotary) {
    KvAppendArgs a{.key = key.tensor, .value = value.tensor, .slots = slots.tensor};
    a.query = query.tensor, a.query_out = query_out.tensor;
    if (rotary) a.positions = positions.tensor, a.cos = cos.tensor, a.sin = sin.tensor;
    return a;
  }

 private:
  static int64_t size(const std::vector<int64_t>& to) { return static_cast<int64_t>(to.size()); }
  static std::vector<int64_t> any_positions(size_t count) {
    std::vector<int64_t> positions(count);
    for (size_t n = 0; n < count; ++n) positions[n] = static_cast<int64_t>(n * 37 % kPositions);
    return positions;
  }
};

// One head, turned as the header says, in double.
std::vector<double> turned(const KvCacheDesc& d, const Tokens& t, const Numbers& from, int64_t token, int64_t head) {
  const int64_t D = d.head_dim, heads = from.tensor.dims[1], pairs = d.rotary_dim / 2;
  std::vector<double> x(static_cast<size_t>(D)), y(x);
  for (int64_t n = 0; n < D; ++n) x[n] = from.at((token * heads + head) * D + n);
  const int64_t position = token * 37 % kPositions;
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t first = d.interleaved ? 2 * p : p, second = d.interleaved ? 2 * p + 1 : p + pairs;
    const double c = t.cos.at(position * pairs + p), s = t.sin.at(position * pairs + p), a = x[first], b = x[second];
    x[first] = a * c - b * s;
    x[second] = a * s + b * c;
  }
  if (!d.hadamard) return x;
  for (int64_t i = 0; i < D; ++i) {
    for (int64_t j = 0; j < D; ++j) {
      y[i] += (__builtin_popcountll(static_cast<uint64_t>(i & j)) % 2 == 0 ? 1 : -1) * x[j] / std::sqrt(double(D));
    }
  }
  return y;
}

double allowed(DType dtype, double x) {
  const double ulp = dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  return ulp * (std::fabs(x) + (dtype == DType::kFloat16 ? 0x1p-14 : 0)) + 2e-6;
}

TEST(KvCache, StoresWhatTheHeaderSays) {
  for (int n = 0; n < 24; ++n) {
    KvCacheDesc d = small_desc();
    d.interleaved = n % 2 == 1, d.hadamard = n / 2 % 2 == 1, d.rotary_dim = n / 4 % 2 == 1 ? 0 : 12;
    d.key_dtype = kFloatTypes[n / 8], d.value_dtype = kFloatTypes[(n / 8 + n) % 3];
    Cache cache(d);
    const std::vector<int64_t> slots = {7, -1, 0, 19, 12};
    Tokens tokens(d, slots, kFloatTypes[n % 3]);
    ASSERT_EQ(cache.cache.append(cache.pool, tokens.args(d.rotary_dim > 0)).message(), "");
    for (size_t i = 0; i < slots.size(); ++i) {
      for (int64_t h = 0; h < 6; ++h) {
        const std::vector<double> x = turned(d, tokens, tokens.query, static_cast<int64_t>(i), h);
        for (int64_t c = 0; c < 16; ++c) {
          const double got = tokens.query_out.at((static_cast<int64_t>(i) * 6 + h) * 16 + c);
          ASSERT_NEAR(got, x[c], allowed(tokens.query_out.tensor.dtype, x[c])) << n;
        }
      }
      for (int64_t h = 0; h < 2 && slots[i] >= 0; ++h) {
        const std::vector<double> x = turned(d, tokens, tokens.key, static_cast<int64_t>(i), h);
        for (int64_t c = 0; c < 16; ++c) ASSERT_NEAR(cache.key(slots[i], h * 16 + c), x[c], allowed(d.key_dtype, x[c]));
        for (int64_t c = 0; c < 6; ++c) {
          const double x_v = tokens.value.at((static_cast<int64_t>(i) * 2 + h) * 6 + c);
          const double got = load_element(cache.pool.value.data, d.value_dtype, (slots[i] * 2 + h) * 6 + c);
          ASSERT_NEAR(got, x_v, allowed(d.value_dtype, x_v));
        }
      }
    }
    // What nobody wrote still holds what it held.
    for (const int64_t slot : {1, 6, 8, 11, 18}) ASSERT_TRUE(std::isnan(cache.key(slot, 3)));
  }
}

TEST(KvCache, OneByOneOrAllAtOnceOnAnyThreadsAndStrides) {
  KvCacheDesc d = small_desc();
  d.num_pages = 40, d.hadamard = true, d.key_dtype = DType::kBFloat16;
  std::vector<int64_t> slots;
  for (int64_t n = 0; n < 100; ++n) slots.push_back(n * 61 % 160);
  slots[7] = -1;
  Cache whole(d), pieces_(d), strided(d);
  Tokens tokens(d, slots), again(d, slots);
  ASSERT_TRUE(whole.cache.append(whole.pool, tokens.args(true)).ok());
  const std::unique_ptr<Executor> one(new_thread_pool(1)), three(new_thread_pool(3));
  for (int64_t first = 0; first < 100;) {
    const int64_t count = std::min<int64_t>(1 + first % 5, 100 - first);
    KvAppendArgs a = again.args(true);
    for (Tensor KvAppendArgs::*t : {&KvAppendArgs::key, &KvAppendArgs::value, &KvAppendArgs::query,
                                    &KvAppendArgs::query_out, &KvAppendArgs::positions, &KvAppendArgs::slots}) {
      a.*t = rows(a.*t, first, count);
    }
    a.executor = first % 2 == 0 ? one.get() : three.get();
    ASSERT_TRUE(pieces_.cache.append(pieces_.pool, a).ok());
    first += count;
  }
  EXPECT_TRUE(pieces_ == whole);
  EXPECT_EQ(again.query_out.bytes, tokens.query_out.bytes);

  // The same tokens, last first, into a pool of [pages, G, page_size, D], query in place.
  KvAppendArgs a = tokens.args(true);
  Numbers turned_in_place = tokens.query;
  a.query = turned_in_place.tensor, a.query.data = turned_in_place.bytes.data(), a.query_out = a.query;
  for (Tensor* t : {&a.key, &a.value, &a.query, &a.query_out, &a.positions, &a.slots}) {
    *t = rows(*t, t->dims[0] - 1, t->dims[0]);
    t->strides[0] = -t->strides[0];
  }
  KvTensors heads_first = strided.pool;
  for (Tensor* t : {&heads_first.key, &heads_first.value}) {
    t->strides[2] = d.page_size * t->dims[3], t->strides[1] = t->dims[3];
  }
  ASSERT_EQ(strided.cache.append(heads_first, a).message(), "");
  EXPECT_EQ(turned_in_place.bytes, tokens.query_out.bytes);
  Numbers all_slots = integers(slots), key(DType::kFloat32, {99, 2, 16}), other(DType::kFloat32, {99, 2, 16});
  reinterpret_cast<int64_t*>(all_slots.bytes.data())[7] = slots[99];
  const Tensor read_slots = rows(all_slots.tensor, 0, 99);
  ASSERT_EQ(whole.cache.read(whole.pool, read_slots, key.tensor, {}).message(), "");
  ASSERT_EQ(whole.cache.read(heads_first, read_slots, other.tensor, {}).message(), "");
  EXPECT_EQ(key.bytes, other.bytes);
}

TEST(KvCache, CopiesThatOverlap) {
  KvCacheDesc d = small_desc();
  d.rotary_dim = 0, d.value_dtype = DType::kFloat16;
  std::vector<int64_t> all(20);
  for (size_t n = 0; n < all.size(); ++n) all[n] = static_cast<int64_t>(n);
  Cache cache(d);
  Tokens tokens(d, all);
  ASSERT_TRUE(cache.cache.append(cache.pool, tokens.args(false)).ok());
  Cache before(d);
  std::memcpy(before.memory.get(), cache.memory.get(), cache.cache.bytes());
  const std::vector<int64_t> from = {0, 1, 2, 3, 4, 5, 5}, to = {1, 2, 3, 4, 5, 0, 19};
  ASSERT_EQ(cache.cache.copy(cache.pool, integers(from).tensor, integers(to, DType::kInt32).tensor).message(), "");
  for (size_t n = 0; n < from.size(); ++n) EXPECT_EQ(cache.key(to[n], 17), before.key(from[n], 17));
  EXPECT_EQ(cache.key(6, 17), before.key(6, 17));
}

// The bytes of a token's row of a contiguous pool.
std::vector<uint8_t> row_bytes(const Tensor& pool, int64_t slot) {
  const auto bytes = static_cast<size_t>(pool.dims[2] * pool.dims[3]) * dtype_size_bytes(pool.dtype);
  const auto* const first = static_cast<const uint8_t*>(pool.data) + static_cast<size_t>(slot) * bytes;
  return {first, first + bytes};
}

// Zero, constant, subnormal and NaN groups; infinity; what is left of a token that another format rounded.
Numbers edge_tokens(int64_t dim) {
  Numbers x = random_numbers(DType::kFloat32, {9, 2, dim}, 11);
  float* const numbers = reinterpret_cast<float*>(x.bytes.data());
  const float edges[] = {0, -0.75f, 1e-42f, NAN, 3e38f, INFINITY, 1e-7f};
  for (int64_t token = 0; token < 7; ++token) {
    const bool whole = token != 3 && token != 5;
    for (int64_t n = 0; n < (whole ? 2 * dim : 1); ++n) numbers[token * 2 * dim + n] = edges[token];
  }
  return x;
}

TEST(KvCache, RoundsEachGroupByItself) {
  const std::vector<int64_t> slots = {4, 0, 19, 7, 8, 9, 1, 12, 13};
  for (const DType format : {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt4x2}) {
    for (const int64_t group : {0, 16, 32}) {
      const KvCacheDesc d{.num_pages = 5,
                          .page_size = 4,
                          .num_heads_kv = 2,
                          .head_dim = 64,
                          .head_dim_v = 32,
                          .key_dtype = format,
                          .value_dtype = format,
                          .key_group = group,
                          .value_group = group};
      Cache cache(d), pieces_(d), copied(d);
      const Numbers key = edge_tokens(64), value = edge_tokens(32), to = integers(slots);
      ASSERT_EQ(cache.cache.append(cache.pool, {key.tensor, value.tensor, to.tensor}).message(), "");
      for (int64_t n = 0; n < 9; ++n) {
        const KvAppendArgs one{rows(key.tensor, n, 1), rows(value.tensor, n, 1), rows(to.tensor, n, 1)};
        ASSERT_EQ(pieces_.cache.append(pieces_.pool, one).message(), "");
      }
      EXPECT_TRUE(pieces_ == cache);

      const struct {
        const Numbers& tokens;
        Tensor KvTensors::*numbers;
        Tensor KvTensors::*scales;
      } sides[] = {{key, &KvTensors::key, &KvTensors::key_scales},
                   {value, &KvTensors::value, &KvTensors::value_scales}};
      for (const auto& side : sides) {
        testing::Array tokens(DType::kFloat32, {9, 2, side.tokens.tensor.dims[2]});
        tokens.bytes = side.tokens.bytes;
        const testing::Stored want = testing::stored(tokens, format, group);
        const Tensor &numbers = cache.pool.*side.numbers, &scales = cache.pool.*side.scales;
        Numbers read(DType::kFloat32, {9, 2, tokens.dims[2]});
        const bool keys = side.numbers == &KvTensors::key;
        ASSERT_EQ(cache.cache.read(cache.pool, to.tensor, keys ? read.tensor : Tensor(), keys ? Tensor() : read.tensor)
                      .message(),
                  "");
        const std::vector<float> stored = testing::stored_numbers<float>(want.numbers, want.scales);
        for (size_t n = 0; n < stored.size(); ++n) {
          const double got = read.at(static_cast<int64_t>(n));
          ASSERT_TRUE(got == static_cast<double>(stored[n]) || (std::isnan(got) && std::isnan(stored[n]))) << n;
        }
        for (int64_t n = 0; n < 9; ++n) {
          EXPECT_EQ(row_bytes(numbers, slots[static_cast<size_t>(n)]), testing::rows(want.numbers, n, n + 1).bytes);
          const testing::Array scale = testing::rows(want.scales, n, n + 1);
          if (n == 3 || n == 5) continue;  // NaN
          EXPECT_EQ(row_bytes(scales, slots[static_cast<size_t>(n)]), scale.bytes);
        }
      }

      // Bytes are copied, not rounded again; what nobody wrote holds what it held.
      std::memcpy(copied.memory.get(), cache.memory.get(), cache.cache.bytes());
      ASSERT_EQ(
          copied.cache.copy(copied.pool, to.tensor, integers({5, 6, 10, 11, 14, 15, 16, 17, 18}).tensor).message(), "");
      EXPECT_EQ(row_bytes(copied.pool.key, 15), row_bytes(cache.pool.key, 9));
      EXPECT_EQ(row_bytes(copied.pool.value_scales, 6), row_bytes(cache.pool.value_scales, 0));
      EXPECT_EQ(row_bytes(copied.pool.value, 2), row_bytes(Cache(d).pool.value, 2));
    }
  }
}

struct Refused {
  void (*change)(KvAppendArgs& args, int64_t* slots, int32_t* positions);
  const char* message;
};

TEST(KvCache, WhatAppendRefusesNamesItAndWritesNothing) {
  const Refused cases[] = {
      {[](auto& a, auto*, auto*) { a.slots = {}; }, "slots is missing"},
      {[](auto& a, auto*, auto*) { a.key = {}; }, "key is missing"},
      {[](auto& a, auto*, auto*) { a.key.dims[0] = 2; }, "key dim 0 is 2, expected tokens 3"},
      {[](auto& a, auto*, auto*) { a.key.dtype = DType::kFloat64; }, "key is float64, expected float32"},
      {[](auto& a, auto*, auto*) { a.value.dims[2] = 16; }, "value dim 2 is 16, expected head_dim_v 6"},
      {[](auto& a, auto*, auto*) { a.positions = {}; }, "positions is missing"},
      {[](auto& a, auto*, auto*) { a.cos.dims[1] = 8; }, "cos dim 1 is 8, expected rotary_dim / 2 6"},
      {[](auto& a, auto*, auto*) { a.sin.dims[0] = 49; }, "sin dim 0 is 49, expected positions 50"},
      {[](auto& a, auto*, auto*) { a.slots.dims[0] = -3; }, "slots dim 0 is -3, must not be negative"},
      {[](auto& a, auto*, auto*) { a.cos.dims[0] = a.sin.dims[0] = INT64_MIN; },
       "cos dim 0 is -9223372036854775808, must not be negative"},
      {[](auto& a, auto*, auto*) { a.query.dims[1] = a.query_out.dims[1] = -1; },
       "query dim 1 is -1, must not be negative"},
      {[](auto& a, auto*, auto*) {
         for (Tensor* t : {&a.slots, &a.positions, &a.key, &a.value, &a.query}) {
           t->dims[0] = INT64_MAX / 2, t->strides[0] = 0;
         }
         a.query = a.query_out = {};
       },
       "out of memory"},
      {[](auto& a, auto*, auto*) { a.stream = &a; }, "stream is given, but the CPU has no streams"},
      {[](auto& a, auto*, auto*) { a.slots.device = Device::kCuda; },
       "slots is not on the CPU, where this call computes"},
      {[](auto& a, auto*, auto*) { a.query_out = {}; }, "query_out is missing"},
      {[](auto& a, auto*, auto*) { a.query = {}; }, "query_out is given, but query is missing"},
      {[](auto& a, auto*, auto*) { a.query_out.data = a.key.data; }, "query_out overlaps key"},
      {[](auto&, auto* slots, auto*) { slots[1] = 20; },
       "slots[1] is 20, must be -1 to 19: -1 is nowhere, else a slot of the cache"},
      {[](auto&, auto* slots, auto*) { slots[2] = -2; },
       "slots[2] is -2, must be -1 to 19: -1 is nowhere, else a slot of the cache"},
      {[](auto&, auto* slots, auto*) { slots[2] = slots[0]; }, "slots holds 3 twice: a slot takes one token"},
      {[](auto&, auto*, auto* positions) { positions[0] = 50; },
       "positions[0] is 50, must be 0 to 49: the rows of cos"},
      {[](auto&, auto*, auto* positions) { positions[1] = -1; },
       "positions[1] is -1, must be 0 to 49: the rows of cos"},
  };
  const KvCacheDesc d = small_desc();
  for (const Refused& bad : cases) {
    Cache cache(d), untouched(d);
    Tokens tokens(d, {3, 9, -1});
    const std::vector<uint8_t> before = tokens.query_out.bytes;
    KvAppendArgs args = tokens.args(true);
    bad.change(args, reinterpret_cast<int64_t*>(tokens.slots.bytes.data()),
               reinterpret_cast<int32_t*>(tokens.positions.bytes.data()));
    EXPECT_EQ(cache.cache.append(cache.pool, args).message(), bad.message);
    EXPECT_TRUE(cache == untouched);
    EXPECT_EQ(tokens.query_out.bytes, before);
  }
  Cache cache(d);
  Numbers twice = integers({4, 4}), far = integers({4, 20}), good = integers({1, 2});
  EXPECT_EQ(cache.cache.copy(cache.pool, good.tensor, twice.tensor).message(),
            "to holds 4 twice: a slot takes one token");
  EXPECT_EQ(cache.cache.copy(cache.pool, far.tensor, good.tensor).message(),
            "from[1] is 20, must be 0 to 19: the slots of the cache");
  Tensor backwards = good.tensor;
  backwards.dims[0] = -2;
  EXPECT_EQ(cache.cache.copy(cache.pool, backwards, backwards).message(), "from dim 0 is -2, must not be negative");
  EXPECT_EQ(cache.cache.read(cache.pool, backwards, {}, {}).message(), "slots dim 0 is -2, must not be negative");
  EXPECT_EQ(cache.cache.read(cache.pool, good.tensor, {}, {}).message(),
            "key and value are missing, one must be given");
  KvTensors pool = cache.pool;
  pool.value.dims[1] = 5;
  EXPECT_EQ(cache.cache.copy(pool, good.tensor, good.tensor).message(), "pool.value dim 1 is 5, expected page_size 4");
}

TEST(KvCache, DescsThatMakeNoSense) {
  const std::pair<void (*)(KvCacheDesc&), const char*> cases[] = {
      {[](auto& d) { d.num_pages = -1; }, "num_pages is -1, must be 0 or more"},
      {[](auto& d) { d.page_size = 0; }, "page_size is 0, must be 1 or more"},
      {[](auto& d) { d.rotary_dim = 18; }, "rotary_dim is 18, must be even and at most head_dim 16"},
      {[](auto& d) { d.rotary_dim = 5; }, "rotary_dim is 5, must be even and at most head_dim 16"},
      {[](auto& d) { d.head_dim = 24, d.hadamard = true; }, "head_dim is 24, must be a power of 2 for hadamard"},
      {[](auto& d) { d.key_dtype = DType::kFloat64; },
       "key_dtype is float64, takes float32, bfloat16, float16, int8, float8_e4m3, float8_e5m2 or int4x2"},
      {[](auto& d) { d.value_dtype = DType::kBool; },
       "value_dtype is bool, takes float32, bfloat16, float16, int8, float8_e4m3, float8_e5m2 or int4x2"},
      {[](auto& d) { d.head_dim_v = 7, d.value_dtype = DType::kInt4x2; },
       "head_dim_v is 7, must be even where value_dtype is int4x2"},
      {[](auto& d) { d.key_group = 16; }, "key_group is 16, but float32 has no scales: leave it 0"},
      {[](auto& d) { d.value_dtype = DType::kInt8, d.value_group = 3; },
       "value_group is 3, must be 0 (one scale for a row), or a multiple of 16 that divides head_dim_v 6"},
      {[](auto& d) { d.num_pages = INT64_MAX; },
       "the cache is too large: num_pages 9223372036854775807 * page_size 4 * num_heads_kv 2 * (head_dim 16 + "
       "head_dim_v "
       "6) elements pass the address space"}};
  for (const auto& [change, message] : cases) {
    KvCacheDesc d = small_desc();
    change(d);
    EXPECT_EQ(kv_cache(d).status().message(), message);
  }
}

// Sequences grow, fork, shrink and end at random; a pool of numbers follows what the table says, a model what is meant.
TEST(PageTable, SequencesKeepTheirTokensWhateverOthersDo) {
  constexpr int64_t kPages = 24, kPageSize = 4;
  std::mt19937 random(9);
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  PageTable table = std::move(*page_table(kPages, kPageSize));
  std::map<int64_t, std::vector<int64_t>> meant;
  std::vector<int64_t> pool(kPages * kPageSize, -1);
  int64_t token = 0, refused = 0, copied = 0;
  for (int step = 0; step < 20000; ++step) {
    if (meant.empty() || (meant.size() < 8 && draw(20) == 0)) meant[*table.add()];
    auto any = meant.begin();
    std::advance(any, draw(static_cast<int64_t>(meant.size())));
    const int64_t sequence = any->first, length = static_cast<int64_t>(any->second.size());
    if (draw(30) == 0) {
      ASSERT_TRUE(table.remove(sequence).ok());
      meant.erase(any);
    } else if (draw(12) == 0 && meant.size() < 8) {
      meant[*table.fork(sequence)] = any->second;
    } else {
      const int64_t to = draw(3) == 0 ? draw(length + 1) : length + draw(6);
      PageTable::Copy copy;
      if (!table.resize(sequence, to, &copy).ok()) {
        ++refused;
        ASSERT_EQ(table.length(sequence), length);
        continue;
      }
      if (copy.to >= 0) {
        ++copied;
        std::copy_n(pool.begin() + copy.from * kPageSize, kPageSize, pool.begin() + copy.to * kPageSize);
      }
      any->second.resize(static_cast<size_t>(to), -1);
      for (int64_t n = length; n < to; ++n) {
        any->second[static_cast<size_t>(n)] = token;
        pool[static_cast<size_t>(table.slot(sequence, n))] = token++;
      }
    }
    std::vector<int64_t> holders(kPages);
    for (const auto& [number, tokens] : meant) {
      ASSERT_EQ(table.length(number), static_cast<int64_t>(tokens.size()));
      ASSERT_EQ(table.pages(number).size(), (tokens.size() + kPageSize - 1) / kPageSize);
      for (const int64_t page : table.pages(number)) ++holders[static_cast<size_t>(page)];
      for (size_t n = 0; n < tokens.size(); ++n) {
        ASSERT_EQ(pool[static_cast<size_t>(table.slot(number, static_cast<int64_t>(n)))], tokens[n]) << step;
      }
    }
    ASSERT_EQ(table.num_free(), std::count(holders.begin(), holders.end(), 0));
    for (int64_t page = 0; page < kPages; ++page)
      ASSERT_EQ(table.num_holders(page), holders[static_cast<size_t>(page)]);
  }
  EXPECT_GT(refused, 10);
  EXPECT_GT(copied, 10);
}

TEST(PageTable, Refuses) {
  EXPECT_EQ(page_table(-1, 4).status().message(), "num_pages is -1, must not be negative");
  EXPECT_EQ(page_table(1, 0).status().message(), "page_size is 0, must be 1 or more");
  PageTable table = std::move(*page_table(2, 4));
  PageTable::Copy copy;
  const int64_t sequence = *table.add();
  EXPECT_EQ(table.resize(sequence, -1, &copy).message(), "length is -1, must not be negative");
  EXPECT_EQ(table.resize(sequence, 9, &copy).message(), "length is 9, which needs 3 more pages, 2 are free");
  EXPECT_EQ(table.resize(7, 1, &copy).message(), "sequence is 7, there is none of that number");
  EXPECT_EQ(table.fork(7).status().message(), "sequence is 7, there is none of that number");
  EXPECT_EQ(table.remove(7).message(), "sequence is 7, there is none of that number");
  EXPECT_EQ(table.length(7), -1);
  EXPECT_TRUE(table.pages(7).empty());
  EXPECT_EQ(table.slot(sequence, 0), -1);
}

}  // namespace
}  // namespace polyhead
