// GroupProducts of warpgroups (wgmma) against plain loops: every width and type, operands in shared memory in each layout that a
// descriptor can tell, and in registers; as the interpreter executes them, and, compiled with POLYHEAD_ON_DEVICE, as a GPU
// of compute capability 9.0 does.
#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "group_products.h"
#include "tested_kernel.h"

namespace cuda_sim {
namespace {

std::string why_no_warpgroups() {
  const std::string why_not = why_not_here();
  return !why_not.empty() || is_hopper() ? why_not : "the GPU is not of compute capability 9.0";
}
using Words = OneKernel::Words;

constexpr uint64_t kTwoTens = 0x4120000041200000;  // of float32

int a_of(int row, int k) { return (row * 7 + k * 3) % 13; }
int b_of(int k, int column) { return (k * 5 + column * 11) % 15; }

uint16_t half(const std::string& type, int x) {  // of 0..15, exact in both
  if (x == 0) return 0;
  const int exponent = std::bit_width(static_cast<unsigned>(x)) - 1, fraction = (x << 10 >> exponent) & 0x3ff;
  return static_cast<uint16_t>(type == "bf16" ? (exponent + 127) << 7 | fraction >> 3
                                              : (exponent + 15) << 10 | fraction);
}

// Shared memory: A, and B behind it.
Words tiles(const GroupProduct& p) {
  std::vector<uint16_t> halves(static_cast<size_t>(p.a.bytes() + p.b.bytes()) / 2);
  for (int k = 0; k < kGroupDepth; ++k) {
    for (int row = 0; row < kGroupRows; ++row) halves[size_t(p.a.swizzled(row, k)) / 2] = half(p.type, a_of(row, k));
    for (int column = 0; column < p.columns; ++column) {
      halves[size_t(p.a.bytes() + p.b.swizzled(column, k)) / 2] = half(p.type, b_of(k, column));
    }
  }
  Words words(halves.size() / 4);
  std::memcpy(words.data(), halves.data(), 2 * halves.size());
  return words;
}

// [step, thread, word]
Words fragments_of_a(const GroupProduct& p) {
  std::vector<uint16_t> halves;
  for (int n = 0; n < kGroupDepth / 16 * 128 * 8; ++n) {
    const int e = n % 8, thread = n / 8 % 128, step = n / 1024, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + e / 2 % 2 * 8, k = step * 16 + lane % 4 * 2 + e % 2 + e / 4 * 8;
    halves.push_back(half(p.type, a_of(row, k)));
  }
  Words words(halves.size() / 4);
  std::memcpy(words.data(), halves.data(), 2 * halves.size());
  return words;
}

class Warpgroup : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_warpgroups(); !why.empty()) GTEST_SKIP() << why;
  }

  static void run(const std::string& body, std::vector<Words>& buffers) {
    try {
      TestedKernel kernel(kernel_text(body, static_cast<int>(buffers.size()), "sm_90a"));
      tested().merge(kernel.instructions());
      kernel.run(buffers, {{1, 1, 1}, {128, 1, 1}, 0});
    } catch (const std::runtime_error& error) {
      ADD_FAILURE() << error.what();
    }
  }

  static void check(GroupProduct p) {
    p.b.rows = p.columns;
    std::vector<Words> buffers = {tiles(p), Words(static_cast<size_t>(32 * p.columns), kTwoTens), fragments_of_a(p)};
    SCOPED_TRACE(p.name());
    run(body_of(p), buffers);
    std::vector<float> got(static_cast<size_t>(kGroupRows * p.columns));
    std::memcpy(got.data(), buffers[1].data(), 4 * got.size());
    for (int thread = 0; thread < 128; ++thread) {
      for (int n = 0; n < p.columns / 2; ++n) {
        const int row = thread / 4 % 8 + n / 2 % 2 * 8 + thread / 32 * 16;
        const int column = n / 4 * 8 + thread % 4 * 2 + n % 2;
        int want = p.adds ? 10 : 0;
        for (int k = 0; k < kGroupDepth; ++k) want += p.scale_a * p.scale_b * a_of(row, k) * b_of(k, column);
        ASSERT_EQ(got[static_cast<size_t>(thread * (p.columns / 2) + n)], static_cast<float>(want))
            << row << ", " << column;
      }
    }
  }

  static void stores_of_matrices();
  static void phases();
  static void products();

  static std::set<std::string>& tested() {
    static std::set<std::string> names;
    return names;
  }
};

// ldmatrix gets back what stmatrix put.
void Warpgroup::stores_of_matrices() {
  for (const int count : {1, 2, 4}) {
    for (const std::string trans : {"", ".trans"}) {
      SCOPED_TRACE(std::to_string(count) + trans);
      const std::string form = ".sync.aligned.m8n8.x" + std::to_string(count) + trans + ".shared.b16 ";
      const std::string from = list("%a", count), to = list("%b", count);
      std::string body =
          ".reg .b32 %a<4>; .reg .b32 %b<4>;\n"
          "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; shl.b32 %r3, %r1, 4; and.b32 %r3, %r3, 511; mov.u32 %r4, smem; "
          "add.u32 %r4, %r4, %r3; mul.wide.u32 %rd10, %r2, 16; add.s64 %rd11, %rd0, %rd10;\n"
          "setp.lt.u32 %p1, %r1, 32; @!%p1 ret; mov.u32 %a3, 0; ";
      for (int n = 0; n < count; ++n) {
        body += "add.u32 %a" + std::to_string(n) + ", %r1, " + std::to_string(1000 * (n + 1)) + "; mov.u32 %b" +
                std::to_string(n) + ", 0; ";
      }
      body += "\nstmatrix" + form + "[%r4], " + from + "; bar.warp.sync -1; fence.proxy.async; ldmatrix" + form + to +
              ", [%r4];\n";
      for (int n = 0; n < count; ++n) {
        body += "st.global.u32 [%rd11+" + std::to_string(4 * n) + "], %b" + std::to_string(n) + "; ";
      }
      std::vector<Words> buffers = {Words(64)};
      run(body, buffers);
      uint32_t got[32][4];
      std::memcpy(got, buffers[0].data(), 512);
      for (uint32_t lane = 0; lane < 32; ++lane) {
        for (uint32_t n = 0; n < static_cast<uint32_t>(count); ++n) EXPECT_EQ(got[lane][n], lane + 1000 * (n + 1));
      }
    }
  }
}

// Thread t gets what t ^ 96 wrote, again and again: between two phases of one barrier all have written, of the other all have
// read.
void Warpgroup::phases() {
  constexpr int kPhases = 3;
  for (const std::string space : {".shared", ".shared::cta"}) {
    const auto wait = [&](const std::string& barrier, int phase, const std::string& label) {
      return label + ": mbarrier.try_wait.parity" + space + ".b64 %p3, [%r20+" + barrier + "], " +
             std::to_string(phase % 2) + "; @!%p3 bra " + label + ";\n";
    };
    std::string body =
        "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0; mov.u32 %r20, "
        "smem; "
        "shl.b32 %r3, %r1, 2; xor.b32 %r4, %r3, 384; add.u32 %r3, %r3, %r20; add.u32 %r4, %r4, %r20; mul.wide.u32 "
        "%rd10, "
        "%r1, 4; add.s64 %rd11, %rd0, %rd10;\n@%p1 mbarrier.init" +
        space + ".b64 [%r20+512], 128; @%p1 mbarrier.init" + space + ".b64 [%r20+520], 8; bar.sync 0;\n";
    for (int n = 0; n < kPhases; ++n) {
      const std::string number = std::to_string(n);
      body += "add.u32 %r5, %r1, " + std::to_string(1000 * n) + "; st.shared.u32 [%r3], %r5; mbarrier.arrive" + space +
              ".b64 %rd12, [%r20+512];\n" + wait("512", n, "WRITTEN" + number) +
              "ld.shared.u32 %r6, [%r4]; st.global.u32 [%rd11+" + std::to_string(512 * n) +
              "], %r6; bar.warp.sync -1; @%p2 mbarrier.arrive" + space + ".b64 %rd12, [%r20+520], 2;\n" +
              wait("520", n, "READ" + number);
    }
    std::vector<Words> buffers = {Words(64 * kPhases)};
    run(body, buffers);
    uint32_t got[kPhases][128];
    std::memcpy(got, buffers[0].data(), sizeof got);
    for (uint32_t n = 0; n < kPhases; ++n) {
      for (uint32_t thread = 0; thread < 128; ++thread) EXPECT_EQ(got[n][thread], (thread ^ 96) + 1000 * n);
    }
  }
}

void Warpgroup::products() {
  for (int columns = 8; columns <= 256; columns += 8) {
    for (const char* type : {"bf16", "f16"}) {
      for (const bool in_registers : {false, true}) {
        GroupProduct p;
        p.type = type, p.columns = columns, p.in_registers = in_registers;
        p.adds = columns % 16 == 0, p.b.transposed = columns % 64 == 0;
        check(p);
      }
    }
  }
}

TEST_F(Warpgroup, GivesItsDocumentedResults) {
  stores_of_matrices();
  phases();
  products();
  if (!std::is_same_v<TestedKernel, OneKernel>) return;
  std::vector<Words> buffers = {Words(64)};  // a GPU would wait for registers that this kernel has not
  run("setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.inc.sync.aligned.u32 240;", buffers);
  for (const std::string& name : table_names()) {
    EXPECT_TRUE(tested().count(name) || !is_of_sm90(name)) << name << " has no test";
  }
}

TEST_F(Warpgroup, ReadsEveryLayout) {
  for (const int columns : {24, 64, 128}) {
    for (const int width : {1, 2, 4, 8}) {
      for (const bool a_transposed : {false, true}) {
        for (const bool b_transposed : {false, true}) {
          GroupProduct p;
          p.columns = columns, p.adds = false;
          p.a.width = width, p.a.transposed = a_transposed;
          p.b.width = width, p.b.transposed = b_transposed;
          check(p);
          p.in_registers = true;
          check(p);
        }
      }
    }
  }
}

TEST_F(Warpgroup, Negates) {
  for (const int scale_a : {1, -1}) {
    for (const int scale_b : {1, -1}) {
      GroupProduct p;
      p.scale_a = scale_a, p.scale_b = scale_b;
      check(p);
    }
  }
}

}  // namespace
}  // namespace cuda_sim
