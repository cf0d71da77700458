// Hostile calls of a cache of keys and values, as capi_fuzz_test.cc makes them of attention: tensors that are not as the header
// says, and numbers that name nothing. A refused call writes nothing, an accepted one what it names.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "fuzz.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kPositions = 12;

polyhead_kv_cache_desc random_cache(Hostile& random) {
  static constexpr int32_t kStored[] = {POLYHEAD_FLOAT32, POLYHEAD_BFLOAT16,    POLYHEAD_FLOAT16,    POLYHEAD_INT8,
                                        POLYHEAD_INT4X2,  POLYHEAD_FLOAT8_E4M3, POLYHEAD_FLOAT8_E5M2};
  polyhead_kv_cache_desc d;
  EXPECT_EQ(polyhead_kv_cache_desc_init(&d, sizeof d), POLYHEAD_OK);
  d.num_pages = random.between(0, 4), d.page_size = random.between(1, 5), d.num_heads_kv = random.between(1, 2);
  d.head_dim = 2 * random.between(1, 8), d.head_dim_v = 2 * random.between(1, 8);
  d.key_dtype = random.pick(kStored), d.value_dtype = random.pick(kStored);
  if (d.key_dtype >= POLYHEAD_INT8 && d.head_dim == 16 && random.chance(50)) d.key_group = 16;
  if (d.value_dtype >= POLYHEAD_INT8 && d.head_dim_v == 16 && random.chance(50)) d.value_group = 16;
  d.rotary_dim = 2 * random.between(0, d.head_dim / 2), d.interleaved = random.chance(50);
  d.hadamard = (d.head_dim & (d.head_dim - 1)) == 0 && random.chance(30);
  return d;
}

// A cache and one call of each kind on it.
class Cache {
 public:
  Cache(Hostile& random, const polyhead_kv_cache_desc& desc, const polyhead_kv_cache* cache, Surroundings& s)
      : random_(random), d_(desc), cache_(cache), s_(s), n_(random.between(0, std::min<int64_t>(6, num_slots()))) {
    EXPECT_EQ(polyhead_kv_append_args_init(&args_, sizeof args_), POLYHEAD_OK);
  }

  void append() {
    args_.executor = s_.executors[static_cast<size_t>(random_.below(static_cast<int64_t>(s_.executors.size())))];
    add("slots", &args_.slots, {POLYHEAD_INT64, {n_}}, Role::kIntegers);
    tokens("key", &args_.key, d_.num_heads_kv, d_.head_dim, Role::kInput, false);
    tokens("value", &args_.value, d_.num_heads_kv, d_.head_dim_v, Role::kInput, false);
    if (d_.rotary_dim > 0) {
      add("positions", &args_.positions, {POLYHEAD_INT64, {n_}}, Role::kIntegers);
      add("cos", &args_.cos, {POLYHEAD_FLOAT32, {kPositions, d_.rotary_dim / 2}}, Role::kInput);
      add("sin", &args_.sin, {POLYHEAD_FLOAT32, {kPositions, d_.rotary_dim / 2}}, Role::kInput);
    }
    if (random_.chance(50)) {
      const int64_t heads = random_.between(0, 4);
      tokens("query", &args_.query, heads, d_.head_dim, Role::kInput);
      tokens("query_out", &args_.query_out, heads, d_.head_dim, Role::kOutput);
    }
    judge(
        -1, [&] { return polyhead_kv_cache_append(cache_, &pool_, &args_); }, &args_.slots);
  }

  void copy() {
    polyhead_tensor from = {}, to = {};
    add("to", &to, {POLYHEAD_INT64, {n_}}, Role::kIntegers);
    add("from", &from, {POLYHEAD_INT64, {n_}}, Role::kIntegers);
    judge(
        0, [&] { return polyhead_kv_cache_copy(cache_, &pool_, &from, &to, nullptr); }, &to);
  }

  void read() {
    polyhead_tensor slots = {}, &key = args_.key, &value = args_.value;
    reads_ = true;
    add("slots", &slots, {POLYHEAD_INT64, {n_}}, Role::kIntegers);
    tokens("key", &key, d_.num_heads_kv, d_.head_dim, Role::kOutput);
    tokens("value", &value, d_.num_heads_kv, d_.head_dim_v, Role::kOutput);
    judge(
        0, [&] { return polyhead_kv_cache_read(cache_, &pool_, &slots, &key, &value, nullptr); }, nullptr);
  }

 private:
  // query without query_out or the other way round; nothing to read into
  bool incomplete() const {
    const bool nothing_to_read = reads_ && args_.key.ndim == 0 && args_.value.ndim == 0;
    return (args_.query.ndim > 0) != (args_.query_out.ndim > 0) || nothing_to_read;
  }
  int64_t num_slots() const { return d_.num_pages * d_.page_size; }

  void add(const char* name, polyhead_tensor* t, const Shape& shape, Role role) {
    operands_.push_back({name, t, shape, role});
  }
  void tokens(const char* name, polyhead_tensor* t, int64_t heads, int64_t dim, Role role, bool optional = true) {
    Shape shape{POLYHEAD_FLOAT32, {n_, heads, dim}};
    shape.any_width = true;
    add(name, t, shape, role);
    operands_.back().optional = optional;
  }

  void add_pool() {
    const auto side = [&](const char* name, polyhead_tensor* numbers, polyhead_tensor* scales, int32_t dtype,
                          int64_t dim, int64_t group) {
      const bool pairs = dtype == POLYHEAD_INT4X2;
      Shape shape{dtype, {d_.num_pages, d_.page_size, d_.num_heads_kv, pairs ? dim / 2 : dim}};
      add(name, numbers, shape, Role::kOutput);
      if (dtype < POLYHEAD_INT8) return;
      shape.dtype = pairs ? int32_t{POLYHEAD_FLOAT16} : int32_t{POLYHEAD_FLOAT32};
      shape.dims[3] = group > 0 ? dim / group : 1;
      add(name, scales, shape, Role::kOutput);
    };
    side("pool.key", &pool_.key, &pool_.key_scales, d_.key_dtype, d_.head_dim, d_.key_group);
    side("pool.value", &pool_.value, &pool_.value_scales, d_.value_dtype, d_.head_dim_v, d_.value_group);
  }

  // Slots, those to be written each once and first of the operands, and positions; some are hostile. Whether all are right:
  // slots from `least` on.
  bool write_numbers(int64_t least, bool writes) {
    bool right = true;
    for (size_t n = 0; n < operands_.size(); ++n) {
      const Operand& operand = operands_[n];
      if (operand.role != Role::kIntegers) continue;
      const bool positions = operand.tensor == &args_.positions, each_once = writes && n == 0;
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n_; ++i) {
        int64_t value = positions ? random_.below(kPositions) : (i * 7 + 3) % std::max<int64_t>(num_slots(), 1);
        if (seen.contains(value)) value = least;
        if (random_.chance(5)) value = random_.chance(50) ? random_.hostile_integer() : value + random_.between(-2, 9);
        const polyhead_tensor& t = *operand.tensor;
        if (t.dtype == POLYHEAD_INT32) static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(value);
        if (t.dtype == POLYHEAD_INT64) static_cast<int64_t*>(t.data)[i] = value;
        if (t.dtype == POLYHEAD_INT32) value = static_cast<int32_t>(value);
        right = right && value >= (positions ? 0 : least) && value < (positions ? kPositions : num_slots());
        right = right && (!each_once || value < 0 || seen.insert(value).second);
      }
      s_.arena.accept(n);
    }
    return right;
  }

  // The slots that a call is given; none where they do not lie in memory.
  std::vector<int64_t> written_slots(const polyhead_tensor& slots) const {
    std::vector<int64_t> all;
    if (slots.ndim != 1 || !s_.arena.contains(reach(slots))) return all;
    for (int64_t i = 0; i < n_; ++i) {
      const void* const at = moved(slots.data, i * slots.strides[0] * element_bytes(slots.dtype));
      int64_t slot = 0;
      int32_t narrow = 0;
      if (slots.dtype == POLYHEAD_INT64) std::memcpy(&slot, at, sizeof slot);
      if (slots.dtype == POLYHEAD_INT32) std::memcpy(&narrow, at, sizeof narrow), slot = narrow;
      if (slot >= 0) all.push_back(slot);
    }
    return all;
  }

  // What an accepted call may write: its outputs, and of the pool the rows at `slots`.
  std::vector<Reach> writable(const std::vector<int64_t>& slots) const {
    std::vector<Reach> all;
    for (const Operand& operand : operands_) {
      const polyhead_tensor& t = *operand.tensor;
      const bool of_pool = &t >= &pool_.key && &t <= &pool_.value_scales;
      if (operand.role != Role::kOutput) continue;
      if (!of_pool) all.push_back(reach(t));
      if (!of_pool || t.ndim != 4) continue;
      for (const int64_t slot : slots) {
        polyhead_tensor row = t;
        row.ndim = 2, std::copy_n(t.dims + 2, 2, row.dims), std::copy_n(t.strides + 2, 2, row.strides);
        const int64_t to = slot / d_.page_size * t.strides[0] + slot % d_.page_size * t.strides[1];
        row.data = moved(t.data, to * element_bytes(t.dtype));
        all.push_back(reach(row));
      }
    }
    return all;
  }

  // `least`: the smallest number that is a slot here. `slots`: where the pool is written.
  template <class Call>
  void judge(int64_t least, Call call, const polyhead_tensor* slots) {
    add_pool();
    for (size_t n = 0; n < operands_.size(); ++n)
      *operands_[n].tensor = right_tensor(random_, operands_[n], n, s_.arena);
    const bool right = write_numbers(least, slots != nullptr) && !incomplete();
    const int64_t num_spoiled = random_.chance(50) ? 0 : random_.between(1, 3);
    for (int64_t i = 0; i < num_spoiled; ++i) spoil(random_, operands_, s_.arena);
    const std::string wrong = wrong_ones(operands_) + (incomplete() ? " what belongs together" : "");
    // Read before the call: copy() may write over them.
    const std::vector<int64_t> written = slots == nullptr ? std::vector<int64_t>() : written_slots(*slots);
    const polyhead_status status = call();
    ++s_.outcomes[status];
    if (num_spoiled == 0) {
      EXPECT_EQ(status == POLYHEAD_OK, right) << polyhead_last_error();
    }
    if (status == POLYHEAD_OK) {
      EXPECT_EQ(wrong, "") << "accepted, though these are not as the header says";
      EXPECT_EQ(s_.arena.count_damage(writable(written)), 0) << "wrote elsewhere than where it is told";
    } else {
      EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
      EXPECT_STRNE(polyhead_last_error(), "");
      EXPECT_EQ(s_.arena.count_damage({}), 0) << "refused, but wrote: " << polyhead_last_error();
    }
  }

  Hostile& random_;
  const polyhead_kv_cache_desc& d_;
  const polyhead_kv_cache* cache_;
  Surroundings& s_;
  int64_t n_;  // tokens of the call
  std::vector<Operand> operands_;
  polyhead_kv_append_args args_;
  polyhead_kv_tensors pool_ = {};
  bool reads_ = false;
};

TEST(KvCacheFuzz, Calls) {
  Surroundings s;
  repeat("kv_cache_fuzz_test", 5000, [&](Hostile& random) {
    polyhead_kv_cache_desc desc = random_cache(random);
    const polyhead_kv_cache_desc asked = desc;
    if (random.chance(10)) random.spoil_word(&desc, sizeof desc);
    polyhead_kv_cache* made = nullptr;
    const polyhead_status status = polyhead_kv_cache_create(&desc, &made);
    if (status != POLYHEAD_OK) {
      EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT);
      EXPECT_STRNE(polyhead_last_error(), "");
      return;
    }
    const bool same = std::memcmp(&desc, &asked, sizeof desc) == 0;
    for (int calls = 0; calls < 4 && same; ++calls) {
      Cache cache(random, desc, made, s);
      switch (random.below(3)) {
        case 0: cache.append(); break;
        case 1: cache.copy(); break;
        case 2: cache.read(); break;
      }
    }
    polyhead_kv_cache_destroy(made);
  });
  expect_balanced("key/value cache", s);
}

}  // namespace
}  // namespace polyhead::testing
