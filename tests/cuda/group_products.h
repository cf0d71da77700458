// Products of a warpgroup (wgmma) as kernels of one block: their operands in shared memory, in each layout that a descriptor can
// tell, or in registers.
#pragma once

#include <cstdint>
#include <string>

namespace cuda_sim {

constexpr int kGroupRows = 64, kGroupDepth = 32;  // two products along k

// A matrix of `rows` (of A, or columns of B) times kGroupDepth in shared memory. The swizzle's pattern has 8 rows of `width`
// pieces of 16 bytes: along k, or, transposed, along the other dimension.
struct GroupLayout {
  int rows = 0, width = 8;
  bool transposed = false;

  int pattern() const { return 128 * width; }
  int patterns_of_rows() const { return transposed ? (rows / 8 + width - 1) / width : rows / 8; }
  int patterns_of_k() const { return transposed ? kGroupDepth / 8 : (kGroupDepth / 8 + width - 1) / width; }
  int bytes() const { return patterns_of_rows() * patterns_of_k() * pattern(); }

  // Before the swizzle.
  int place(int row, int k) const {
    const int along = transposed ? row : k, line = transposed ? k : row;
    const int which = transposed ? along / (8 * width) * patterns_of_k() + line / 8
                                 : along / (8 * width) * patterns_of_rows() + line / 8;
    return which * pattern() + line % 8 * 16 * width + along % (8 * width) * 2;
  }
  int swizzled(int row, int k) const { return place(row, k) ^ (place(row, k) >> 3 & (width - 1) << 4); }

  // Bytes from 8 rows to the next ones, and from 8 elements of k (or, with a swizzle, what its pattern has of the rows).
  uint64_t descriptor() const {
    const int of_rows = place(8, 0), of_k = place(0, 8), of_patterns = place(8 * width, 0);
    int leading = 0, stride = of_rows;
    if (width == 1) leading = of_k;
    if (width > 1 && transposed) leading = of_patterns, stride = of_k;
    const uint64_t mode = width == 8 ? 1 : width == 4 ? 2 : width == 2 ? 3 : 0;
    return mode << 62 | uint64_t(stride / 16) << 32 | uint64_t(leading / 16) << 16;
  }
};

struct GroupProduct {
  std::string type = "bf16";
  int columns = 64;
  bool in_registers = false;  // A
  GroupLayout a{kGroupRows}, b{64};
  bool adds = true;  // what the registers of D hold
  int scale_a = 1, scale_b = 1;

  std::string name() const {
    const auto layout = [](const GroupLayout& l) { return std::to_string(l.width) + (l.transposed ? "t" : ""); };
    return "n" + std::to_string(columns) + " " + type + " a " + (in_registers ? "in registers" : layout(a)) + " b " +
           layout(b);
  }
};

inline std::string list(const std::string& name, int count) {
  std::string all;
  for (int n = 0; n < count; ++n) all += (n ? ", " : "{") + name + std::to_string(n);
  return all + "}";
}

// %rd0: A, and B behind it, as they lie in shared memory; %rd1: D as the threads hold it; %rd2: A as they do: [step, thread,
// word].
inline std::string body_of(const GroupProduct& p) {
  const int bytes = p.a.bytes() + p.b.bytes();
  const std::string sums = list("%d", p.columns / 2), size = std::to_string(bytes);
  std::string body =
      ".shared .align 1024 .b8 tiles[" + size + "]; .reg .f32 %d<128>; .reg .b32 %a<8>; .reg .pred %adds;\n" +
      "mov.u32 %r1, %tid.x; mov.u32 %r2, tiles; shl.b32 %r3, %r1, 4;\n" + "LOOP: setp.ge.u32 %p1, %r3, " + size +
      "; @%p1 bra DONE; cvt.u64.u32 %rd10, %r3; add.s64 %rd11, %rd0, "
      "%rd10; ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd11];\n"
      "add.u32 %r4, %r2, %r3; st.shared.v4.u32 [%r4], {%r10, %r11, %r12, %r13}; add.u32 %r3, %r3, 2048; bra "
      "LOOP;\nDONE: fence.proxy.async.shared::cta; bar.sync 0;\n"
      "shr.u32 %r5, %r2, 4; cvt.u64.u32 %rd12, %r5; mul.wide.u32 %rd13, %r1, 16; add.s64 %rd14, %rd2, %rd13;\n";
  if (p.in_registers) {
    body += "ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%rd14]; ld.global.v4.u32 {%a4, %a5, %a6, %a7}, [%rd14+2048];\n";
  }
  body += "mul.wide.u32 %rd15, %r1, " + std::to_string(2 * p.columns) + "; add.s64 %rd16, %rd1, %rd15;\n";
  for (int n = 0; p.adds && n < p.columns / 2; ++n) {
    body += "ld.global.f32 %d" + std::to_string(n) + ", [%rd16+" + std::to_string(4 * n) + "];\n";
  }
  body += "wgmma.fence.sync.aligned;\n";
  for (int step = 0; step < kGroupDepth / 16; ++step) {
    const auto descriptor = [&](const std::string& name, const GroupLayout& layout, int begin) {
      body += "add.s64 " + name + ", %rd12, " + std::to_string((begin + layout.place(0, 16 * step)) / 16) +
              "; or.b64 " + name + ", " + name + ", " + std::to_string(static_cast<int64_t>(layout.descriptor())) +
              ";\n";
    };
    descriptor("%rd20", p.a, 0);
    descriptor("%rd21", p.b, p.a.bytes());
    body += "setp.ne.b32 %adds, " + std::to_string(p.adds || step > 0) + ", 0;\n" +
            "wgmma.mma_async.sync.aligned.m64n" + std::to_string(p.columns) + "k16.f32." + p.type + "." + p.type + " " +
            sums + ", ";
    body += p.in_registers ? "{%a" + std::to_string(4 * step) + ", %a" + std::to_string(4 * step + 1) + ", %a" +
                                 std::to_string(4 * step + 2) + ", %a" + std::to_string(4 * step + 3) + "}"
                           : "%rd20";
    body += ", %rd21, %adds, " + std::to_string(p.scale_a) + ", " + std::to_string(p.scale_b);
    if (!p.in_registers) body += ", " + std::to_string(p.a.transposed);
    body += ", " + std::to_string(p.b.transposed) + ";\n";
  }
  body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
  for (int n = 0; n < p.columns / 2; ++n) {
    body += "st.global.f32 [%rd16+" + std::to_string(4 * n) + "], %d" + std::to_string(n) + ";\n";
  }
  return body;
}

}  // namespace cuda_sim
