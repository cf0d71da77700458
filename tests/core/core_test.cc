#include <gtest/gtest.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/sentence.h"
#include "core/threads.h"
#include "polyhead/kernels.h"
#include "polyhead/tensor.h"

namespace polyhead {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(Tensor, NamesAndSizesOfDtypes) {
  const struct {
    DType dtype;
    const char* name;
    size_t size_bytes;
  } rows[] = {{DType::kFloat32, "float32", 4}, {DType::kBFloat16, "bfloat16", 2}, {DType::kFloat16, "float16", 2},
              {DType::kFloat64, "float64", 8}, {DType::kBool, "bool", 1},         {DType::kInt32, "int32", 4},
              {DType::kInt64, "int64", 8},     {DType{99}, "an unknown dtype", 0}};
  for (const auto& row : rows) {
    EXPECT_STREQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_size_bytes(row.dtype), row.size_bytes) << row.name;
  }
}

TEST(Tensor, ContiguousViews) {
  const Tensor t(nullptr, DType::kFloat32, {2, 3, 0, 5});
  EXPECT_EQ(t.num_elements(), 0);
  EXPECT_EQ(t.strides[0], 15);
  EXPECT_EQ(t.strides[1], 5);
  EXPECT_EQ(t.strides[2], 5);
  EXPECT_EQ(t.strides[3], 1);
  EXPECT_FALSE(Tensor().given());
  EXPECT_EQ(Tensor().num_elements(), 0);
}

TEST(Sentence, JoinsWordsAndNumbers) {
  EXPECT_EQ(sentence("a ", 3, " b ", int64_t{-7}, " c ", 0.5, " ", std::string("d"), size_t{9}), "a 3 b -7 c 0.5 d9");
  EXPECT_EQ(sentence(std::numeric_limits<double>::quiet_NaN(), " ", -std::numeric_limits<double>::infinity()),
            "nan -inf");
}

// Element e of a view lies at bytes [offset, offset + size).
std::vector<int64_t> byte_offsets(const Tensor& t) {
  std::vector<int64_t> offsets{0};
  for (int i = 0; i < t.ndim; ++i) {
    std::vector<int64_t> next;
    for (const int64_t at : offsets) {
      for (int64_t k = 0; k < t.dims[i]; ++k)
        next.push_back(at + k * t.strides[i] * static_cast<int64_t>(dtype_size_bytes(t.dtype)));
    }
    offsets = next;
  }
  return offsets;
}

std::multiset<uintptr_t> bytes_of(const Tensor& t) {
  std::multiset<uintptr_t> bytes;
  for (const int64_t offset : byte_offsets(t)) {
    for (size_t k = 0; k < dtype_size_bytes(t.dtype); ++k) {
      bytes.insert(reinterpret_cast<uintptr_t>(t.data) + static_cast<uintptr_t>(offset) + k);
    }
  }
  return bytes;
}

Tensor random_view(std::mt19937& random, int max_dims, int64_t max_stride, int64_t min_stride) {
  auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  Tensor t;
  t.data = reinterpret_cast<void*>(static_cast<uintptr_t>(1000000 + pick(0, 60)));
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kBool, DType::kFloat64};
  t.dtype = dtypes[pick(0, 3)];
  t.ndim = static_cast<int32_t>(pick(1, max_dims));
  for (int i = 0; i < t.ndim; ++i) {
    t.dims[i] = pick(0, 9) == 0 ? 0 : pick(1, 4);
    t.strides[i] = t.dims[i] <= 1 ? pick(-kMax, kMax) : pick(min_stride, max_stride);
  }
  return t;
}

TEST(Layout, MemoryRangeIsFirstToLastByte) {
  std::mt19937 random(1);
  for (int n = 0; n < 3000; ++n) {
    const Tensor t = random_view(random, 5, 12, -12);
    const auto bytes = bytes_of(t);
    MemoryRange range;
    ASSERT_TRUE(memory_range(t, &range));
    if (bytes.empty()) {
      EXPECT_EQ(range.begin, range.end);
    } else {
      EXPECT_EQ(range.begin, *bytes.begin());
      EXPECT_EQ(range.end, *bytes.rbegin() + 1);
    }
  }
}

TEST(Layout, MemoryRangeRefusesWhatLeavesTheAddressSpace) {
  const struct {
    uintptr_t data;
    int64_t dim, stride;
    bool fits;
  } rows[] = {{4096, 3, kMax, false},      {4096, 3, -kMax, false},      {4096, 2, kMax / 4 - 1, true},
              {4096, 2, kMax / 4, false},  {4096, 2, -1024, true},       {4096, 2, -1025, false},
              {~uintptr_t{7}, 1, 1, true}, {~uintptr_t{7}, 2, 1, false}, {4096, kMax, 2, false},
              {4096, 2, -kMax - 1, false}, {4096, 1, -kMax - 1, true}};
  for (const auto& row : rows) {
    Tensor t(reinterpret_cast<void*>(row.data), DType::kFloat32, {row.dim});
    t.strides[0] = row.stride;
    MemoryRange range;
    EXPECT_EQ(memory_range(t, &range), row.fits) << row.data << " " << row.dim << " " << row.stride;
  }
}

TEST(Layout, ViewsThatOverlapThemselvesAreFound) {
  std::mt19937 random(2);
  int overlapping = 0;
  for (int n = 0; n < 3000; ++n) {
    const Tensor t = random_view(random, 4, 20, 0);
    const auto bytes = bytes_of(t);
    const bool shared = std::set<uintptr_t>(bytes.begin(), bytes.end()).size() != bytes.size();
    overlapping += shared;
    EXPECT_TRUE(!shared || overlaps_itself(t));
  }
  EXPECT_GT(overlapping, 500);
  Tensor t(&random, DType::kFloat32, {2, 3, 4, 5});  // strides 60 20 5 1
  EXPECT_FALSE(overlaps_itself(t));
  std::swap(t.strides[0], t.strides[2]);  // any order
  std::swap(t.dims[0], t.dims[2]);
  EXPECT_FALSE(overlaps_itself(t));
  t.strides[2] += 7;  // with a gap
  EXPECT_FALSE(overlaps_itself(t));
  t.strides[2] = 59;
  EXPECT_TRUE(overlaps_itself(t));
  Tensor ones(&random, DType::kFloat32, {1, 1, 5});
  ones.strides[0] = ones.strides[1] = 0;  // strides of single indices mean nothing
  EXPECT_FALSE(overlaps_itself(ones));
  Tensor empty(&random, DType::kFloat64, {0, 2, 3});  // under UBSan: no product of a stride that nobody uses
  empty.strides[1] = std::numeric_limits<int64_t>::max();
  empty.strides[2] = 0;
  EXPECT_FALSE(overlaps_itself(empty));
}

TEST(Layout, SharedBytesAreNeverMissed) {
  std::mt19937 random(3);
  int sharing = 0, apart = 0;
  for (int n = 0; n < 20000; ++n) {
    const Tensor a = random_view(random, 3, 16, -16), b = random_view(random, 3, 16, -16);
    const auto bytes_a = bytes_of(a);
    bool shared = false;
    for (const uintptr_t byte : bytes_of(b)) shared = shared || bytes_a.count(byte) > 0;
    sharing += shared;
    apart += !may_share_memory(a, b);
    ASSERT_TRUE(!shared || may_share_memory(a, b));
  }
  EXPECT_GT(sharing, 1000);
  EXPECT_GT(apart, 1000);
}

TEST(Layout, ColumnsOfOneBufferAreApart) {
  std::vector<float> buffer(2 * 7 * 4 * 3 * 8);  // [batch, seqlen, query | key | value | out, heads, dim]
  auto column = [&](int64_t index) {
    Tensor t(buffer.data() + index * 24, DType::kFloat32, {2, 7, 3, 8});
    t.strides[0] = 7 * 96;
    t.strides[1] = 96;
    return t;
  };
  for (int64_t a = 0; a < 4; ++a) {
    for (int64_t b = 0; b < 4; ++b) EXPECT_EQ(may_share_memory(column(a), column(b)), a == b) << a << " " << b;
  }
  Tensor wide = column(2);
  wide.dims[3] = 9;
  EXPECT_TRUE(may_share_memory(wide, column(3)));
  EXPECT_FALSE(may_share_memory(column(1), column(3)));
  Tensor every_other(buffer.data(), DType::kFloat32, {50}), the_rest(buffer.data() + 1, DType::kFloat32, {50});
  every_other.strides[0] = the_rest.strides[0] = 2;
  EXPECT_FALSE(may_share_memory(every_other, the_rest));
}

TEST(Threads, NumberFromTheEnvironment) {
  const struct {
    const char* text;
    int expected;
  } rows[] = {{nullptr, 5}, {"", 5},    {"1", 1},  {"16", 16}, {"1024", 1024}, {"1025", 5}, {"99999999999999999999", 5},
              {"0", 5},     {"-2", 5},  {"+2", 5}, {" 2", 5},  {"2 ", 5},      {"2x", 5},   {"two", 5},
              {"0x2", 5},   {"1.5", 5}, {"007", 7}};
  for (const auto& row : rows)
    EXPECT_EQ(parse_num_threads(row.text, 5), row.expected) << (row.text ? row.text : "null");
  EXPECT_EQ(parse_num_threads(nullptr, 0), 1);
  EXPECT_EQ(parse_num_threads(nullptr, 1 << 20), kMaxThreads);
}

TEST(Machine, KernelsEndWithTheReference) {
  const auto names = kernels();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "reference");
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
}

#if defined(__aarch64__)
TEST(Machine, CpuFeaturesAreThoseOfTheSystem) {
  EXPECT_EQ(cpu_features(), (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0 ? "neon" : "");
}
#else
TEST(Machine, CpuFeaturesAreThoseOfTheSystem) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) flags.insert(word);
    break;
  }
  auto all = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (flags.count(name) == 0) return false;
    }
    return true;
  };
  std::string expected;
  const bool avx2 = all({"avx2", "fma", "f16c", "popcnt", "sse4_2"});
  const bool avx512 = avx2 && all({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "bmi1", "bmi2", "abm",
                                   "movbe", "cx16", "lahf_lm"});
  const bool bf16 = avx512 && all({"avx512_bf16", "avx512_vnni"});
  if (bf16 && all({"amx_bf16", "amx_tile"})) expected += "amx ";  // the system was asked, and agreed
  if (bf16) expected += "avx512bf16 ";
  if (avx512) expected += "avx512 ";
  if (avx2) expected += "avx2 ";
  if (!expected.empty()) expected.pop_back();
  EXPECT_EQ(cpu_features(), expected);
}
#endif

TEST(Machine, VersionHasThreeNumbers) {
  int major = -1, minor = -1, patch = -1;
  char rest = 0;
  EXPECT_EQ(std::sscanf(version(), "%d.%d.%d%c", &major, &minor, &patch, &rest), 3) << version();
}

}  // namespace
}  // namespace polyhead
