// Extreme sizes to make plans of, and memory to run those with that succeed: inputs of one element, outputs and
// workspaces between pages that nobody may touch.
//
//   POLYHEAD_FUZZ_RUNS=100000    this many descs in each test; POLYHEAD_FUZZ_SEED=2: others
//   POLYHEAD_FUZZ_FIRST=n        begins with number n
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/memory_size.h"
#include "polyhead/executor.h"
#include "setting.h"
#include "testing/guard.h"

namespace polyhead::testing {

constexpr size_t kMostBytes = size_t{16} << 20;  // of an array or workspace that is made
constexpr int64_t kMostWork = int64_t{1} << 22;  // multiply-adds of a call that is run

// A size that something may go wrong at: near 0, 2^31, 2^32, 2^62 and other powers, or a divisor of 2^64.
inline int64_t extreme_size(Random& random) {
  static constexpr int kPowers[] = {16, 20, 24, 31, 32, 33, 40, 48, 52, 54, 55, 56, 57, 58, 59, 60, 61, 62};
  const int64_t power = int64_t{1} << kPowers[random.integer(0, 17)];
  switch (random.integer(0, 4)) {
    case 0: return power;
    case 1: return power + random.integer(-3, 3);
    case 2:
      return static_cast<int64_t>(UINT64_MAX / static_cast<uint64_t>(random.integer(3, 5000))) + random.integer(-1, 2);
    case 3: return 0;
    default: return power / random.integer(1, 100) + random.integer(0, 2);
  }
}

// The sizes of one desc. Of most descs few are extreme, or every plan would be refused.
class Sizes {
 public:
  explicit Sizes(Random& random) : random_(random) {
    static constexpr int kPercents[] = {0, 6, 12, 25, 50};
    percent_ = kPercents[random.integer(0, 4)];
  }
  int64_t operator()() {
    if (random_.integer(0, 99) < percent_) return extreme_size(random_);
    return random_.integer(0, 9) < 7 ? random_.integer(1, 3) : random_.integer(0, 70);
  }

 private:
  Random& random_;
  int percent_;
};

inline DType random_dtype(Random& random) {
  const int64_t n = random.integer(0, 9);
  return n < 5 ? DType::kFloat32 : n < 7 ? DType::kBFloat16 : n < 9 ? DType::kFloat16 : DType::kFloat64;
}

// Multiply-adds of what is really computed: a factor of 0 makes them none.
inline bool little_work(std::initializer_list<int64_t> factors) {
  MemorySize work = 1;
  for (const int64_t factor : factors) work = work * factor;
  return work <= MemorySize(kMostWork);
}

// The arrays of a call.
class FuzzArrays {
 public:
  // One element, with strides 0.
  static Tensor input(DType dtype, std::initializer_list<int64_t> dims) {
    static double element = 0;  // in every floating-point dtype
    static uint8_t visible = 1;
    Tensor t;
    t.data = dtype == DType::kBool ? static_cast<void*>(&visible) : &element;
    t.dtype = dtype;
    for (const int64_t dim : dims) t.dims[t.ndim++] = dim;
    return t;
  }
  // Row by row. False if it would be too large.
  bool output(DType dtype, std::initializer_list<int64_t> dims, Tensor* to) {
    MemorySize bytes = dtype_size_bytes(dtype);
    for (const int64_t dim : dims) bytes = bytes * dim;
    if (bytes > MemorySize(kMostBytes)) return false;
    made_.emplace_back(bytes.value(), Guard::kEnd, 0xff);
    Tensor t = input(dtype, dims);
    t.data = made_.back().data();
    int64_t stride = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      t.strides[i] = stride;
      if (__builtin_mul_overflow(stride, t.dims[i] > 0 ? t.dims[i] : 1, &stride)) stride = 0;  // of an empty array
    }
    *to = t;
    return true;
  }
  bool output_like(const Tensor& t, Tensor* to) {
    switch (t.ndim) {
      case 0: return false;
      case 1: return output(t.dtype, {t.dims[0]}, to);
      case 2: return output(t.dtype, {t.dims[0], t.dims[1]}, to);
      case 3: return output(t.dtype, {t.dims[0], t.dims[1], t.dims[2]}, to);
      default: return output(t.dtype, {t.dims[0], t.dims[1], t.dims[2], t.dims[3]}, to);
    }
  }

 private:
  std::vector<GuardedBytes> made_;
};

// How many there were; printed at the end of a test.
struct Figures {
  const char* of;
  int64_t plans = 0, refused = 0, forward = 0, backward = 0;

  explicit Figures(const char* what) : of(what) {}
  ~Figures() {
    std::printf("%s: %lld plans, %lld refused, %lld forward and %lld backward calls\n", of,
                static_cast<long long>(plans), static_cast<long long>(refused), static_cast<long long>(forward),
                static_cast<long long>(backward));
  }
};

// Which desc it is, for the trace of a failure.
inline std::string told(int64_t n, std::initializer_list<std::pair<const char*, int64_t>> fields) {
  std::string text = "POLYHEAD_FUZZ_RUNS=1 POLYHEAD_FUZZ_SEED=" + std::to_string(setting("POLYHEAD_FUZZ_SEED", 1)) +
                     " POLYHEAD_FUZZ_FIRST=" + std::to_string(n) + ":";
  for (const auto& [name, value] : fields) text += std::string(" ") + name + " " + std::to_string(value);
  return text;
}

// Calls `test(random, n)` for every desc that the settings ask for.
template <class Test>
void fuzz(int64_t runs, uint64_t stream, const Test& test) {
  const auto seed = static_cast<uint64_t>(setting("POLYHEAD_FUZZ_SEED", 1));
  const int64_t first = setting("POLYHEAD_FUZZ_FIRST", 0), end = first + setting("POLYHEAD_FUZZ_RUNS", runs);
  for (int64_t n = first; n < end && !::testing::Test::HasFatalFailure(); ++n) {
    Random random((seed * 1000003 + stream) * 1000033 + static_cast<uint64_t>(n));
    test(random, n);
  }
}

}  // namespace polyhead::testing
