// Each instruction against its result by the PTX ISA, worked out by hand: as the interpreter executes it, and, compiled with
// POLYHEAD_ON_DEVICE, as a GPU does.
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <set>

#include "agreement.h"
#include "instruction_rows.h"
#include "statement.h"
#include "tested_kernel.h"

namespace cuda_sim {
namespace {

using Words = OneKernel::Words;

class Instructions : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_here(); !why.empty()) GTEST_SKIP() << why;
  }

  // Runs `body` on one warp whose buffers are `buffers`, and remembers which instructions it has.
  static void run(const std::string& body, std::vector<Words>& buffers, Shape shape = {{1, 1, 1}, {32, 1, 1}, 0}) {
    try {
      TestedKernel kernel(kernel_text(body, static_cast<int>(buffers.size())));
      tested().merge(kernel.instructions());
      kernel.run(buffers, shape);
    } catch (const std::runtime_error& error) {
      ADD_FAILURE() << error.what() << "\n" << body;
    }
  }

  static std::set<std::string>& tested() {
    static std::set<std::string> names;
    return names;
  }

  // A GPU's approximations may err as the ISA says.
  static bool is_result(const Row& r, uint64_t got) {
    const bool may_err = !std::is_same_v<TestedKernel, OneKernel> && allowed(r.statement, 1) > 0;
    return may_err ? agree(r.statement, got, r.result) : got == r.result;
  }

  static void row(const Row& r) {
    std::vector<Words> buffers = {{r.a, r.b, r.c}, Words(64)};
    run(body_of(r.statement, false), buffers);
    for (const size_t lane : {0, 31}) {
      EXPECT_TRUE(is_result(r, buffers[1][2 * lane]))
          << std::hex << r.statement << ": " << buffers[1][2 * lane] << " is not " << r.result;
      EXPECT_EQ(buffers[1][2 * lane + 1], r.second) << std::hex << r.statement;
    }
  }

  // eq ne lt le gt ge of a and b, by how they stand to each other: '<', '=', '>', '?' (one is NaN).
  static bool holds(const std::string& name, char relation) {
    if (name == "num") return relation != '?';
    if (name == "nan") return relation == '?';
    if (relation == '?') return name.size() == 3;
    const std::string where = name.substr(0, 2) == "eq"   ? "="
                              : name.substr(0, 2) == "ne" ? "<>"
                              : name.substr(0, 2) == "lt" ? "<"
                              : name.substr(0, 2) == "le" ? "<="
                              : name.substr(0, 2) == "gt" ? ">"
                                                          : ">=";
    return where.find(relation) != std::string::npos;
  }

  static void compare(const std::string& type, uint64_t a, uint64_t b, char relation) {
    const bool wide = type.substr(1) == "64";
    const std::string operands = wide ? ", A, B" : ", a, b";
    std::vector<std::string> names = {"eq", "ne", "lt", "le", "gt", "ge"};
    if (type[0] == 'f') names.insert(names.end(), {"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
    if (type[0] == 'b') names = {"eq", "ne"};
    for (const std::string& name : names) {
      const uint64_t yes = holds(name, relation);
      const auto one = [&](const std::string& statement, uint64_t c, uint64_t first, uint64_t second = 0) {
        row({statement.c_str(), a, b, c, first, second});
      };
      one("setp." + name + "." + type + " p" + operands, 0, yes);
      one("setp." + name + "." + type + " p|q" + operands, 0, yes, 1 - yes);
      if (type[0] == 'b') continue;
      for (uint64_t c : {0, 1}) {
        one("setp." + name + ".and." + type + " p" + operands + ", u", c, yes & c);
        one("setp." + name + ".or." + type + " p" + operands + ", u", c, yes | c);
        one("setp." + name + ".xor." + type + " p" + operands + ", u", c, yes ^ c);
      }
    }
  }

  static void compares() {
    for (const std::string bits : {"16", "32", "64"}) {
      const uint64_t minus = bits == "16" ? 0xffff : bits == "32" ? 0xffffffff : ~uint64_t{0};
      for (const char kind : {'s', 'u', 'b'}) {
        compare(kind + bits, 5, 5, '=');
        compare(kind + bits, 5, 6, '<');
        if (kind != 'b') compare(kind + bits, minus, 1, kind == 's' ? '<' : '>');
      }
    }
    compare("f32", f(1), f(2), '<');
    compare("f32", f(-0.0f), f(0), '=');
    compare("f32", f(std::numeric_limits<float>::quiet_NaN()), f(0), '?');
    compare("f64", f64(1), f64(-2), '>');
    compare("f64", f64(2), f64(2), '=');
    compare("f64", f64(std::numeric_limits<double>::quiet_NaN()), f64(0), '?');
  }

  static void shuffles();
  static void members();
  static void matrices();
  static void loads_of_matrices();
  static void copies();
  static void addresses();
  static void atomics();
};

// Lane n holds 100 + n; `c` is the clamp and the mask of segments. What lanes get, and where the predicate holds.
void Instructions::shuffles() {
  const auto one = [](const std::string& mode, int b, int c, auto source) {
    const std::string operands = ", " + std::to_string(b) + ", " + std::to_string(c) + ", -1;\n";
    std::vector<Words> buffers = {Words(64)};
    run("mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 100; shfl.sync." + mode + ".b32 %r3|%p1, %r2" + operands +
            "shfl.sync." + mode + ".b32 %r4, %r2" + operands +
            "selp.u32 %r5, 1, 0, %p1; mul.wide.u32 %rd10, %r1, 16; add.s64 %rd11, %rd0, %rd10;\n"
            "st.global.v4.u32 [%rd11], {%r3, %r4, %r5, 0};",
        buffers);
    for (int lane = 0; lane < 32; ++lane) {
      const int from = source(lane);  // negative: out of range, its own value
      const uint64_t value = 100 + static_cast<uint64_t>(from < 0 ? lane : from);
      EXPECT_EQ(buffers[0][2 * static_cast<size_t>(lane)], value << 32 | value) << mode << " lane " << lane;
      EXPECT_EQ(buffers[0][2 * static_cast<size_t>(lane) + 1], from >= 0) << mode << " lane " << lane;
    }
  };
  one("bfly", 5, 0x1f, [](int lane) { return lane ^ 5; });
  one("up", 3, 0, [](int lane) { return lane < 3 ? -1 : lane - 3; });
  one("down", 4, 0x1f, [](int lane) { return lane > 27 ? -1 : lane + 4; });
  one("idx", 7, 0x1f, [](int) { return 7; });
  one("down", 2, 0x181f, [](int lane) { return lane % 8 > 5 ? -1 : lane + 2; });  // segments of 8 lanes
  one("idx", 3, 0x1c1f, [](int lane) { return lane / 4 * 4 + 3; });               // of 4
}

// Lanes 0..9 have a predicate that holds.
void Instructions::members() {
  std::vector<Words> buffers = {Words(12)};
  run("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 10; setp.lt.u32 %p2, %r1, 32; add.u32 %r2, %r1, 3; sub.u32 %r12, "
      "%r1, 16;\n"
      "vote.sync.ballot.b32 %r3, %p1, -1; vote.sync.all.pred %p3, %p1, -1; vote.sync.any.pred %p4, %p1, -1;\n"
      "vote.sync.uni.pred %p5, %p1, -1; vote.sync.all.pred %p6, %p2, -1; vote.sync.uni.pred %p7, !%p2, -1;\n"
      "selp.u32 %r4, 1, 0, %p3; @%p4 or.b32 %r4, %r4, 2; @%p5 or.b32 %r4, %r4, 4; @%p6 or.b32 %r4, %r4, 8; @%p7 or.b32 "
      "%r4, %r4, 16;\n"
      "redux.sync.add.u32 %r5, %r2, -1; redux.sync.add.s32 %r6, %r12, -1; redux.sync.min.u32 %r7, %r2, -1; "
      "redux.sync.max.u32 %r8, %r12, -1;\n"
      "redux.sync.min.s32 %r9, %r12, -1; redux.sync.max.s32 %r10, %r12, -1; redux.sync.and.b32 %r11, %r3, -1; "
      "redux.sync.or.b32 %r13, %r1, -1;\n"
      "redux.sync.xor.b32 %r14, %r2, -1; @!%p1 bra.uni OTHERS; activemask.b32 %r15; bra SAME;\nOTHERS: activemask.b32 "
      "%r15;\nSAME: bar.warp.sync -1;\n"
      "setp.ne.u32 %p8, %r1, 31; @%p8 ret.uni;\n"
      "st.global.v4.u32 [%rd0], {%r3, %r4, %r5, %r6}; st.global.v4.u32 [%rd0+16], {%r7, %r8, %r9, %r10};\n"
      "st.global.v4.u32 [%rd0+32], {%r11, %r13, %r14, %r15}; mov.u32 %r16, %lanemask_lt; mov.u32 %r17, %lanemask_ge; "
      "st.global.v2.u32 [%rd0+48], {%r16, %r17};\n"
      "mov.u32 %r18, %lanemask_eq; mov.u32 %r19, %lanemask_le; st.global.v2.u32 [%rd0+56], {%r18, %r19}; mov.u32 %r20, "
      "%lanemask_gt; st.global.u32 [%rd0+64], %r20; exit;",
      buffers);
  uint32_t got[24];
  std::memcpy(got, buffers[0].data(), sizeof got);
  const uint32_t want[] = {0x3ff,
                           2 + 8 + 16,
                           31 * 16 + 96,
                           static_cast<uint32_t>(31 * 16 - 512),
                           3,
                           0xffffffff,
                           static_cast<uint32_t>(-16),
                           15,
                           0x3ff,
                           31,
                           0 ^ 1 ^ 2 ^ 32 ^ 33 ^ 34,
                           ~0x3ffu,
                           0x7fffffff,
                           0x80000000,
                           0x80000000,
                           0xffffffff,
                           0};
  for (size_t n = 0; n < std::size(want); ++n) EXPECT_EQ(got[n], want[n]) << n;
}

// Products of small whole numbers, by the plain formula.
void Instructions::matrices() {
  const auto half = [](int x, bool bf16) -> uint16_t {  // of 0..15, exact in both
    if (x == 0) return 0;
    int exponent = 0;
    while (x >> (exponent + 1)) ++exponent;
    const int fraction = (x << 10 >> exponent) & 0x3ff;
    return static_cast<uint16_t>(bf16 ? (exponent + 127) << 7 | fraction >> 3 : (exponent + 15) << 10 | fraction);
  };
  const auto a = [](int row, int k) { return (row * 7 + k * 3) % 13; };
  const auto b = [](int k, int column) { return (k * 5 + column * 11) % 15; };
  const std::string lanes =
      "mov.u32 %r1, %laneid; shr.u32 %r2, %r1, 2; and.b32 %r3, %r1, 3; mul.wide.u32 %rd10, %r1, 4; ";
  for (const std::string type : {"bf16", "f16", "tf32"}) {
    const bool tf32 = type == "tf32";
    for (const int depth : {tf32 ? 8 : 16, tf32 ? 4 : 8}) {
      const size_t pack = tf32 ? 1 : 2, halves = static_cast<size_t>(depth) / (4 * pack);
      std::vector<Words> buffers = {Words(128), Words(128)};
      uint32_t words[7][32] = {};  // A, B, C as the lanes hold them
      for (size_t lane = 0; lane < 32; ++lane) {
        const int g = static_cast<int>(lane) / 4, t = static_cast<int>(lane) % 4;
        for (size_t n = 0; n < 3 * halves; ++n) {
          const int first = static_cast<int>(n < 2 * halves ? n / 2 : n - 2 * halves) * 4 * static_cast<int>(pack) +
                            t * static_cast<int>(pack);
          const auto value = [&](int k) { return n < 2 * halves ? a(g + 8 * static_cast<int>(n % 2), k) : b(k, g); };
          words[n][lane] =
              tf32 ? static_cast<uint32_t>(f(static_cast<float>(value(first)))) | 0x1fff  // whose low bits nobody reads
                   : uint32_t{half(value(first + 1), type == "bf16")} << 16 | half(value(first), type == "bf16");
        }
      }
      std::memcpy(buffers[0].data(), words, 6 * 128);
      std::string body =
          lanes + "add.s64 %rd11, %rd0, %rd10; mul.wide.u32 %rd12, %r1, 16; add.s64 %rd13, %rd1, %rd12;\n";
      std::string operands[2];
      for (size_t n = 0; n < 3 * halves; ++n) {
        const std::string reg = "%r" + std::to_string(10 + n);
        body += "ld.global.u32 " + reg + ", [%rd11+" + std::to_string(128 * n) + "];\n";
        std::string& list = operands[n < 2 * halves ? 0 : 1];
        list += (list.empty() ? "" : ", ") + reg;
      }
      run(body + "mov.f32 %f1, 0f41200000; mma.sync.aligned.m16n8k" + std::to_string(depth) + ".row.col.f32." + type +
              "." + type + ".f32 {%f2, %f3, %f4, %f5}, {" + operands[0] + "}, {" + operands[1] +
              "}, {%f1, %f1, 0f00000000, %f1};\nst.global.v4.f32 [%rd13], {%f2, %f3, %f4, %f5};",
          buffers);
      float got[32][4];
      std::memcpy(got, buffers[1].data(), 512);
      for (int lane = 0; lane < 32; ++lane) {
        for (int n = 0; n < 4; ++n) {
          const int row = lane / 4 + 8 * (n / 2), column = lane % 4 * 2 + n % 2;
          float want = n == 2 ? 0 : 10;
          for (int k = 0; k < depth; ++k) want += static_cast<float>(a(row, k) * b(k, column));
          EXPECT_EQ(got[lane][n], want) << type << " k " << depth << " lane " << lane << " " << n;
        }
      }
    }
  }
}

// Element n of shared memory is 1000 + n; matrices lie one behind the other.
void Instructions::loads_of_matrices() {
  const std::string lanes = "mov.u32 %r1, %laneid; mul.wide.u32 %rd10, %r1, 4;\n";
  for (const size_t count : {1, 2, 4}) {
    for (const std::string trans : {"", ".trans"}) {
      std::vector<Words> buffers = {Words(64), Words(64)};
      uint16_t elements[256];
      for (uint16_t n = 0; n < 256; ++n) elements[n] = static_cast<uint16_t>(n + 1000);
      std::memcpy(buffers[0].data(), elements, 512);
      std::string list;
      for (size_t n = 0; n < count; ++n) list += (n ? ", %r1" : "%r1") + std::to_string(n);
      std::string stores;
      for (size_t n = 0; n < count; ++n)
        stores += "st.global.u32 [%rd13+" + std::to_string(128 * n) + "], %r1" + std::to_string(n) + ";\n";
      run(lanes +
              "shl.b32 %r4, %r1, 4; mov.u32 %r5, smem; add.u32 %r6, %r5, %r4; cvt.u64.u32 %rd14, %r4; add.s64 %rd15, "
              "%rd0, %rd14; add.s64 %rd13, %rd1, %rd10;\n"
              "ld.global.nc.v4.u32 {%r20, %r21, %r22, %r23}, [%rd15]; st.shared.v4.u32 [%r6], {%r20, %r21, %r22, "
              "%r23}; bar.sync 0;\n"
              "ldmatrix.sync.aligned.m8n8.x" +
              std::to_string(count) + trans + ".shared.b16 {" + list + "}, [%r6];\n" + stores,
          buffers);
      uint16_t got[4][32][2];
      std::memcpy(got, buffers[1].data(), 512);
      for (size_t n = 0; n < count; ++n) {
        for (size_t lane = 0; lane < 32; ++lane) {
          for (size_t k = 0; k < 2; ++k) {
            const size_t row = trans.empty() ? lane / 4 : 2 * (lane % 4) + k,
                         column = trans.empty() ? 2 * (lane % 4) + k : lane / 4;
            EXPECT_EQ(got[n][lane][k], 1000 + 64 * n + 8 * row + column) << "x" << count << trans;
          }
        }
      }
    }
  }
}

// Two groups of each size; the second copy asks for fewer bytes than it fills.
void Instructions::copies() {
  for (const std::string cache : {"ca", "cg"}) {
    for (const std::string hint : {"", ".L2::64B", ".L2::128B", ".L2::256B"}) {
      for (const int bytes : {4, 8, 16}) {
        if (cache == "cg" && bytes != 16) continue;
        const std::string name = "cp.async." + cache + ".shared.global" + hint + " [%r2", size = std::to_string(bytes);
        std::vector<Words> buffers = {{0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0x4444444444444444},
                                      Words(128)};
        run("mov.u32 %r1, %tid.x; shl.b32 %r3, %r1, 5; mov.u32 %r4, smem; add.u32 %r2, %r3, %r4; mov.u32 %r5, 4;\n" +
                name + "], [%rd0], " + size + ";\n" + "cp.async.commit_group;\n" + name + "+16], [%rd0+16], " + size +
                ", %r5;\ncp.async.commit_group;\ncp.async.wait_group 1;\nld.shared.u32 %r6, [%r2+" +
                std::to_string(bytes - 4) +
                "];\ncp.async.wait_all;\nld.shared.u32 %r7, [%r2+16]; ld.shared.u32 %r8, [%r2+" +
                std::to_string(12 + bytes) +
                "];\ncvt.u64.u32 %rd10, %r3; shr.u64 %rd10, %rd10, 1; add.s64 %rd11, %rd1, %rd10; st.global.v4.u32 "
                "[%rd11], {%r6, %r7, %r8, %r1};",
            buffers);
        uint32_t got[4];
        std::memcpy(got, &buffers[1][10], 16);
        EXPECT_EQ(got[0], bytes == 16 ? 0x22222222 : 0x11111111);
        EXPECT_EQ(got[1], 0x33333333u);
        EXPECT_EQ(got[2], bytes == 4 ? 0x33333333u : 0u);
        EXPECT_EQ(got[3], 5u);
      }
    }
  }
}

// Generic addresses of each space lead where they should; a parameter through a pointer that lanes chose.
void Instructions::addresses() {
  std::vector<Words> buffers = {{11, 22}, Words(8)};
  run(".local .align 8 .b8 depot[16]; mov.u64 %rd10, smem; cvta.shared.u64 %rd11, %rd10; mov.u32 %r3, %tid.x;\n"
      "setp.eq.u32 %p1, %r3, 5; @%p1 st.u32 [%rd11+4], 7; bar.warp.sync -1; ld.shared.u32 %r1, [smem+4];\n"
      "cvta.to.shared.u64 %rd12, %rd11; ld.shared.u32 %r2, [%rd12+4]; mov.u64 %rd13, depot; cvta.local.u64 %rd14, "
      "%rd13;\n"
      "st.local.u32 [%rd13+8], %r3; ld.u32 %r4, [%rd14+8]; cvta.to.local.u64 %rd15, %rd14; ld.local.s32 %rd16, "
      "[%rd15+8];\n"
      "mov.b64 %rd17, p0; mov.b64 %rd18, p1; selp.b64 %rd19, %rd17, %rd18, %p1; ld.param.u64 %rd20, [%rd19];\n"
      "cvta.param.u64 %rd21, %rd17; ld.u64 %rd22, [%rd21]; cvta.to.param.u64 %rd21, %rd21; ld.param.u64 %rd22, "
      "[%rd21];\n"
      "cvta.to.global.u64 %rd23, %rd22; cvta.global.u64 %rd24, %rd23; ld.u64 %rd25, [%rd24]; sub.s64 %rd26, %rd20, "
      "%rd22;\n"
      "@%p1 st.global.v2.u32 [%rd1], {%r1, %r2}; @%p1 st.global.v2.u32 [%rd1+8], {%r3, %r4};\n"
      "@%p1 st.global.u64 [%rd1+16], %rd16; @%p1 st.global.v2.u64 [%rd1+32], {%rd25, %rd26};\n"
      "bar.sync 1, 32; bar.arrive 2, 32; barrier.sync 3; barrier.sync 4, 32; barrier.sync.aligned 5; "
      "barrier.sync.aligned 6, 32;",
      buffers);
  EXPECT_EQ(buffers[1], (Words{uint64_t{7} << 32 | 7, uint64_t{5} << 32 | 5, 5, 0, 11, 0, 0, 0}));
}

// `updates` of the word by lanes 0..31 in any order, and what is there afterwards.
void Instructions::atomics() {
  const auto one = [](const std::string& operation, const std::string& type, const std::string& operand,
                      uint64_t before, uint64_t after) {
    const std::string value = type[1] == '6' ? "%rd10" : "%r1";
    for (const std::string space : {"global", "shared"}) {
      const std::string address = space == "global" ? "[%rd0]" : "[smem]", old = type[1] == '6' ? "%rd11" : "%r2";
      for (const std::string verb : {"atom.", "red."}) {
        if (verb == "red." && (operation == "exch" || operation == "cas")) continue;
        std::vector<Words> buffers = {{before}};
        run("mov.u32 %r1, %tid.x; cvt.u64.u32 %rd10, %r1; cvt.rn.f32.u32 %f1, %r1; ld.global.u64 %rd12, [%rd0]; "
            "setp.eq.u32 %p1, %r1, 0;\n"
            "@%p1 st.shared.u64 [smem], %rd12; bar.sync 0;\n" +
                verb + space + "." + operation + "." + type + (verb == "atom." ? " " + old + "," : "") + " " + address +
                ", " + operand + ";\nbar.sync 0; @!%p1 ret; " +
                (space == "shared" ? "ld.shared.u64 %rd13, [smem]; st.global.u64 [%rd0], %rd13;" : ""),
            buffers);
        EXPECT_EQ(buffers[0][0], after) << verb << operation << "." << type << " " << space;
      }
    }
  };
  one("add", "u32", "%r1", 5, 501);
  one("add", "s32", "-2", 5, 0xffffffff - 58);
  one("add", "u64", "%rd10", uint64_t{1} << 32, (uint64_t{1} << 32) + 496);
  one("add", "f32", "%f1", f(0.5f), f(496.5f));
  one("min", "s32", "-3", 5, 0xfffffffd);
  one("max", "u32", "%r1", 5, 31);
  one("max", "s64", "%rd10", 5, 31);
  one("and", "b32", "%r1", 0xff, 0);
  one("or", "b32", "%r1", 0x80, 0x9f);
  one("xor", "b32", "%r1", 0x80, 0x80);
  one("or", "b64", "%rd10", uint64_t{1} << 40, (uint64_t{1} << 40) + 31);
  one("exch", "b32", "77", 5, 77);
  one("cas", "b32", "5, 99", 5, 99);
  one("cas", "b32", "6, 99", 5, 5);
}

TEST_F(Instructions, GiveTheirDocumentedResults) {
  for (const Row& r : kIntegerRows) row(r);
  for (const Row& r : kFloatRows) row(r);
  for (const Row& r : kConvertRows) row(r);
  for (const std::string flush : {"", ".ftz"}) {
    for (const Row& r : kSingleRows) {
      std::string statement = r.statement;
      row({statement.replace(statement.find(".f32"), 0, flush).c_str(), r.a, r.b, r.c, r.result});
    }
  }
  compares();
  shuffles();
  members();
  matrices();
  loads_of_matrices();
  copies();
  addresses();
  atomics();
  tested().insert("trap");  // ptx_faults_test
  if (!std::is_same_v<TestedKernel, OneKernel>) return;
  for (const std::string& name : table_names()) {
    EXPECT_TRUE(tested().count(name) || is_of_sm90(name)) << name << " has no test";  // ptx_warpgroup_test
  }
}

// Lanes whose guard does not hold keep what they had; both ways of a branch meet again.
TEST_F(Instructions, RunInTheLanesThatTheirGuardsSay) {
  std::vector<Words> buffers = {Words(32)};
  run("mov.u32 %r1, %tid.x; mov.u32 %r2, 1000; setp.lt.u32 %p1, %r1, 7; @%p1 mov.u32 %r2, 1; setp.gt.u32 %p2, %r1, "
      "20;\n"
      "@%p2 bra FAR; add.u32 %r2, %r2, 1; bra MEET; FAR: add.u32 %r2, %r2, 2;\n"
      "MEET: shfl.sync.idx.b32 %r3, %r2, 31, 31, -1; mov.b64 %rd10, {%r2, %r3}; mul.wide.u32 %rd11, %r1, 8; add.s64 "
      "%rd12, %rd0, %rd11;\n"
      "st.global.u64 [%rd12], %rd10;",
      buffers);
  for (size_t lane = 0; lane < 32; ++lane) {
    const uint64_t own = lane < 7 ? 2 : lane > 20 ? 1002 : 1001;
    EXPECT_EQ(buffers[0][lane], uint64_t{1002} << 32 | own) << lane;
  }
}

// Each lane goes round as often as its number says.
TEST_F(Instructions, LoopUntilTheLastLaneIsDone) {
  std::vector<Words> buffers = {Words(64)};
  run("mov.u32 %r1, %tid.x; mov.u32 %r2, 0; mov.u32 %r3, 0;\nLOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE; add.u32 "
      "%r3, %r3, %r2;\n"
      "add.u32 %r2, %r2, 1; bra.uni LOOP;\nDONE: mul.wide.u32 %rd10, %r1, 8; add.s64 %rd11, %rd0, %rd10; "
      "st.global.v2.u32 [%rd11], {%r3, %r2};",
      buffers, {{1, 1, 1}, {64, 1, 1}, 0});
  for (size_t n = 0; n < 64; ++n) EXPECT_EQ(buffers[0][n], uint64_t{n} << 32 | n * (n - (n > 0)) / 2) << n;
}

// Threads of a block in x, y and z; blocks of a grid.
TEST_F(Instructions, KnowWhereTheyRun) {
  std::vector<Words> buffers = {Words(2 * 3 * 2 * 24)};
  run("mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y; "
      "mov.u32 %r6, %ntid.z;\n"
      "mov.u32 %r7, %ctaid.x; mov.u32 %r8, %ctaid.y; mov.u32 %r9, %ctaid.z; mov.u32 %r10, %nctaid.x; mov.u32 %r11, "
      "%nctaid.y; mov.u32 %r12, %nctaid.z;\n"
      "mad.lo.u32 %r13, %r3, %r5, %r2; mad.lo.u32 %r13, %r13, %r4, %r1; mad.lo.u32 %r14, %r9, %r11, %r8; mad.lo.u32 "
      "%r14, %r14, %r10, %r7;\n"
      "mul.lo.u32 %r15, %r4, %r5; mul.lo.u32 %r15, %r15, %r6; mad.lo.u32 %r16, %r14, %r15, %r13; mul.wide.u32 %rd10, "
      "%r16, 8; add.s64 %rd11, %rd0, %rd10;\n"
      "mov.u32 %r17, %warpid; st.global.v2.u32 [%rd11], {%r16, %r12};",
      buffers, {{2, 3, 2}, {4, 3, 2}, 0});
  for (size_t n = 0; n < buffers[0].size(); ++n) EXPECT_EQ(buffers[0][n], uint64_t{2} << 32 | n) << n;
}

// c and 16 products that are the same number: what an H100 makes of them, see sim/tensor_sums.h.
TEST_F(Instructions, CutOffWhatTensorCoresHaveNoBitsFor) {
  if (!is_hopper()) GTEST_SKIP() << "other GPUs keep other bits";
  const struct {
    float c;
    uint32_t a, b;  // of float16
    float sum;
  } cases[] = {
      {1, 0x0c00, 0x0800, 1 + 0x1p-21f},                    // 2^-12 2^-13 is kept
      {1, 0x0c00, 0x0a00, 1 + 0x1p-21f},                    // half as much again is not
      {1, 0x0800, 0x0b00, 1},                               // 1.75 2^-26 is lost, 16 times
      {-1, 0x0c00, 0x8a00, -1 - 0x1p-21f},                  // towards 0
      {2 - 0x1p-23f, 0x0c00, 0x0800, 2 + 0x1p-22f},         // and so is the sum, of 2 + 1.5 2^-22
      {-2 + 0x1p-23f, 0x8c00, 0x0800, -2 - 0x1p-22f},       //
      {0x1p-20f, 0x3c00, 0x0001, 0x1p-20f + 0x1p-20f},      // 2^-24, of the exponent -14 as all subnormals
      {0x1p-24f, 0x7bff, 0x7bff, 16 * 65504.0f * 65504.0f}  // 22 bits
  };
  for (const auto& [c, a, b, sum] : cases) {
    std::vector<Words> buffers = {{f(c), uint64_t{a << 16 | a}, uint64_t{b << 16 | b}}, Words(64)};
    run("ld.global.f32 %f1, [%rd0]; ld.global.u32 %r1, [%rd0+8]; ld.global.u32 %r2, [%rd0+16];\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5}, {%r1, %r1, %r1, %r1}, {%r2, %r2}, "
        "{%f1, %f1, %f1, %f1};\nmov.u32 %r3, %tid.x; mul.wide.u32 %rd10, %r3, 16; add.s64 %rd11, %rd1, %rd10; "
        "st.global.v4.f32 [%rd11], {%f2, %f3, %f4, %f5};",
        buffers);
    for (const uint64_t two : buffers[1]) EXPECT_EQ(two, f(sum) << 32 | f(sum)) << c << " " << a << " " << b;
  }
}

TEST_F(Instructions, ReadVariablesThatHoldSomething) {
  std::vector<Words> buffers = {Words(1)};
  run(".global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8}; mov.u64 %rd10, table; ld.global.nc.u32 %r1, "
      "[%rd10+4]; mov.u32 %r2, 0; st.global.v2.u32 [%rd0], {%r1, %r2};",
      buffers, {{1, 1, 1}, {1, 1, 1}, 0});
  EXPECT_EQ(buffers[0][0], 0x08070605u);
}

}  // namespace
}  // namespace cuda_sim
