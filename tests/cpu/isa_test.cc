// Instruction sets: what the compiler may use is what detection demands, and the order in which kernels are asked.
#include "cpu/isa/isa.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>

#include "contract/kernel.h"
#include "contract/linear.h"
#include "cpu/isa/order.h"
#include "cpu/isa/peak.h"
#include "polyhead/cuda.h"

namespace polyhead::cpu {
namespace {

// The CPU features that the compiler may use under these flags, by its predefined macros: "__AVX2__" is AVX2.
std::set<std::string> features_under(const std::string& flags) {
  const std::string command = "'" POLYHEAD_CXX "' " + flags + " -dM -E -x c++ /dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  std::set<std::string> names;
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
    std::string define, name;
    std::istringstream(line) >> define >> name;
    if (name == "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16") name = "__CX16__";
    if (name == "__AMXBF16__") name = "__AMX_BF16__";  // clang 14's spelling
    if (name == "__AMXTILE__") name = "__AMX_TILE__";
    if (name.size() > 4 && name.rfind("__", 0) == 0 && name.substr(name.size() - 2) == "__") {
      names.insert(name.substr(2, name.size() - 4));
    }
  }
  EXPECT_TRUE(pipe != nullptr && pclose(pipe) == 0) << command;
  return names;
}

TEST(Isa, DetectionDemandsWhatTheCompilerMayUse) {
  const struct {
    Isa isa;
    const char* flags;
  } rows[] = {
#define ROW(name, features) {Isa::name, POLYHEAD_FLAGS_##name},
      POLYHEAD_ISAS(ROW)
#undef ROW
  };
  const std::set<std::string> everywhere = features_under("");
  ASSERT_FALSE(everywhere.empty());
  for (const auto& row : rows) {
    std::istringstream words(isa_features(row.isa));
    std::set<std::string> demanded;
    for (std::string word; words >> word;) demanded.insert(word);
    std::set<std::string> allowed;
    for (const std::string& name : features_under(row.flags)) {
      if (everywhere.count(name) == 0) allowed.insert(name);
    }
    allowed.erase("CRC32");  // part of SSE4.2
    EXPECT_EQ(allowed, demanded) << isa_name(row.isa) << ": " << row.flags;
  }
}

TEST(Isa, WhatIsMissingIsNamed) {
  EXPECT_EQ(why_not(Isa::generic), "");
  for (int i = 0; i < kNumIsas; ++i) {
    const Isa isa{i};
    const std::string reason = why_not(isa);
    EXPECT_EQ(reason.empty(), has(isa));
    const bool refused = reason.rfind("the system does not let this process use AMX: ", 0) == 0;
    EXPECT_TRUE(reason.empty() || refused || reason.rfind("this CPU has no ", 0) == 0) << reason;
  }
}

using Rates = std::array<double, 5>;

// The order by as many of the rates as this build has sets.
IsaOrder order_by(const Rates& rates) {
  double of_this_build[kNumIsas];
  for (int i = 0; i < kNumIsas; ++i) of_this_build[i] = rates[i];
  return order_isas(of_this_build);
}

TEST(IsaOrder, MadeUpMeasurements) {
  if (kNumIsas < 5) GTEST_SKIP() << "this build has " << kNumIsas << " instruction sets, the measurements are for five";
  using Order = std::array<int, 5>;
  const struct {
    Rates rates;
    Order expected;
  } rows[] = {
      {{0, 0, 0, 0, 0}, {0, 1, 2, 3, 4}},        // nothing was measured
      {{0, 240, 120, 0, 0}, {0, 1, 2, 3, 4}},    // Zen 4
      {{2400, 66, 134, 0, 0}, {0, 2, 1, 3, 4}},  // Sapphire Rapids
      {{0, 66, 134, 0, 0}, {0, 2, 1, 3, 4}},     // the same where the system refuses AMX
      {{0, 100, 119, 0, 0}, {0, 1, 2, 3, 4}},    // not clear
      {{0, 100, 121, 0, 0}, {0, 2, 1, 3, 4}},    // clear
      {{100, 66, 134, 0, 0}, {2, 0, 1, 3, 4}},   // AMX that somebody emulates
      {{0, 100, 110, 130, 0}, {0, 3, 1, 2, 4}},  // the fastest goes first; between the others it is not clear
      {{0, 100, 150, 200, 0}, {0, 3, 2, 1, 4}},  // each clear against the next
      {{0, 0, 134, 0, 0}, {0, 1, 2, 3, 4}},      // what was not measured stays where the list has it
  };
  for (const auto& row : rows) {
    const IsaOrder order = order_by(row.rates);
    Order numbers;
    for (int i = 0; i < kNumIsas; ++i) numbers[i] = static_cast<int>(order.isas[i]);
    EXPECT_EQ(numbers, row.expected) << row.rates[0] << ", " << row.rates[1];
  }
}

TEST(IsaOrder, SaysWhatWasMeasured) {
  if (kNumIsas < 5) GTEST_SKIP() << "this build has " << kNumIsas << " instruction sets, the measurements are for five";
  EXPECT_STREQ(order_by({0, 66, 134, 0, 0}).measured,
               ("measured: cpu_" + std::string(isa_name(Isa{2})) + " before cpu_" + isa_name(Isa{1}) +
                ", 2.03 times as fast in products of bfloat16")
                   .c_str());
  EXPECT_STREQ(order_by({0, 100, 119, 0, 0}).measured, "");
}

// A layer has one attention kernel for calls of any length, and its products are that kernel's.
TEST(CpuKernels, TakeOrRefuseADtypeWhateverTheLength) {
  for (const Kernel* kernel : kernel_list()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      AttentionDesc desc;
      desc.dtype = dtype;
      desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 64;
      AttentionDesc stored = desc;  // as a cache stores them
      stored.key_dtype = stored.value_dtype = DType::kInt8;
      const std::string reason = kernel->why_not(desc), reason_stored = kernel->why_not(stored);
      for (const int64_t size : {1, 12, 13, 16, 17}) {
        stored.seqlen_q = size;
        EXPECT_EQ(kernel->why_not(stored), reason_stored) << kernel->name << ", stored, " << size << " queries";
        desc.seqlen_q = size;
        EXPECT_EQ(kernel->why_not(desc), reason) << kernel->name << ", " << size << " queries";
        desc.seqlen_k = desc.head_dim = desc.head_dim_v = size;
        EXPECT_EQ(kernel->why_not(desc), reason) << kernel->name << ", all sizes " << size;
        desc.seqlen_k = desc.head_dim = desc.head_dim_v = 64;
      }
    }
  }
}

TEST(IsaOrder, TheListsOfKernelsFollowThisMachines) {
  const IsaOrder& order = isa_order();
  EXPECT_EQ(&order, &isa_order());
  const size_t others = cuda_machine().runtime_version != 0 ? 2 : 1;  // cuda_sm80, if this build has it, and reference
#ifdef __x86_64__
  constexpr size_t kByName = 1;  // cpu_amx_float32
#else
  constexpr size_t kByName = 0;
#endif
  ASSERT_EQ(kernel_list().size(), kNumIsas + kByName + others);
  ASSERT_EQ(linear::kernel_list().size(), kNumIsas + kByName + others);
  for (int i = 0; i < kNumIsas; ++i) {
    EXPECT_EQ(kernel_list()[i]->name, "cpu_" + std::string(isa_name(order.isas[i])));
    EXPECT_STREQ(kernel_list()[i]->name, linear::kernel_list()[i]->name);
  }
  AttentionDesc desc;  // which all of them take
  desc.dtype = DType::kBFloat16;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 32;
  EXPECT_EQ(explain(desc).measured, order.measured);
  for (int i = 0; i < kNumIsas; ++i) {  // a forced kernel is the one that runs, wherever it stands
    if (!has(Isa{i})) continue;
    const std::string name = "cpu_" + std::string(isa_name(Isa{i}));
    EXPECT_EQ(explain(desc, {.kernel = name}).kernel, name);
  }
}

// Measured anew, and for longer: what is clearly faster stands before.
TEST(IsaOrder, AgreesWithALongerMeasurement) {
#ifdef POLYHEAD_EMULATED
  GTEST_SKIP() << "an emulator's instructions take other times than a CPU's";
#endif
  const IsaOrder& order = isa_order();
  double rates[kNumIsas] = {};
  for (int round = 0; round < 40; ++round) {
    for (int i = 0; i < kNumIsas; ++i) {
      if (has(Isa{i})) rates[i] = std::max(rates[i], peak_flops(Isa{i}, DType::kBFloat16, 2000));
    }
  }
  for (int i = 0; i + 1 < kNumIsas; ++i) {
    const int first = static_cast<int>(order.isas[i]), second = static_cast<int>(order.isas[i + 1]);
    if (rates[first] == 0 || rates[second] == 0) continue;
    EXPECT_LT(rates[second] / rates[first], kClearMargin * kClearMargin)
        << isa_name(Isa{second}) << " is behind " << isa_name(Isa{first});
  }
}

}  // namespace
}  // namespace polyhead::cpu
