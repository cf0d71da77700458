// wgmma: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions". g = lane / 4, t = lane % 4.
//
// D [64, N] = A [64, 16] B [16, N] (+ D): the w-th of four warps has rows 16 w .. 16 w + 15 of A and of D. Its registers of
// D are those of N / 8 mma.sync m16n8k16 side by side; of A, if it is in registers, those of one.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fragments.h"
#include "opcodes.h"
#include "shared_memory.h"
#include "tensor_sums.h"
#include "warp.h"

namespace cuda_sim {
namespace {

constexpr int kRows = 64, kDepth = 16;

// A matrix in shared memory as a descriptor tells it: in pieces of 16 bytes, eight elements along k, or along the other
// dimension (then it is transposed). A line of the swizzle's pattern has `width` pieces; the pattern has 8 lines, and begins
// where its size says.
struct Matrix {
  uint64_t descriptor = 0;
  bool transposed = false;
  uint64_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
           stride = (descriptor >> 32 & 0x3fff) << 4;  // bytes
  uint64_t width = uint64_t{0x2481} >> (descriptor >> 62) * 4 & 15;

  // Of the n-th piece of a line.
  uint64_t address(uint64_t line, uint64_t n) const {
    uint64_t at = start + line % 8 * 16 * width;
    if (width == 1) {
      at += transposed ? n * stride + line / 8 * leading : n * leading + line / 8 * stride;
    } else {
      at += n % width * 16 + n / width * leading + line / 8 * stride;
    }
    return at ^ (at >> 3 & (width - 1) << 4);
  }

  // What is wrong with it, for so many rows (of A, or columns of B); "": nothing.
  std::string wrong(uint64_t rows) const {
    constexpr uint64_t kUnused = 0x3ff1c000c000c000;
    const uint64_t line = 16 * width, pattern = 8 * line;
    if (descriptor & kUnused) return "has bits that mean nothing";
    if (descriptor >> 49 & 7) return "has a base offset, which is not modelled";
    if (width == 1) return "";
    if (start % pattern >= line)
      return "begins at " + std::to_string(start) + ", in the middle of its swizzle's pattern";
    if (!transposed && start % line + 32 > line) return "begins at " + std::to_string(start) + ", and leaves its lines";
    const uint64_t past = transposed ? start % line / 16 + rows / 8 : 0;
    const bool has_stride = transposed || rows > 8, has_leading = past > width;
    if (start % line != 0 && has_leading) return "leaves its lines";
    if (has_stride && stride % pattern != 0) return "has a stride of " + std::to_string(stride) + ", misaligned";
    if (has_leading && leading % pattern != 0)
      return "has a leading stride of " + std::to_string(leading) + ", misaligned";
    return "";
  }
};

// put(row, k, element) for so many rows.
template <class T, class Put>
void read(Warp& w, const Instruction& i, const Matrix& matrix, uint32_t product, int rows, const Put& put) {
  const int lines = matrix.transposed ? kDepth : rows, pieces = (matrix.transposed ? rows : kDepth) / 8;
  for (int line = 0; line < lines; ++line) {
    for (int n = 0; n < pieces; ++n) {
      const uint64_t address = matrix.address(static_cast<uint64_t>(line), static_cast<uint64_t>(n));
      T eight[8];
      std::memcpy(eight, w.shared.reach_for_product(w, i, address, product), 16);
      for (int e = 0; e < 8; ++e) {
        const int inner = 8 * n + e;
        matrix.transposed ? put(inner, line, to_float(eight[e])) : put(line, inner, to_float(eight[e]));
      }
    }
  }
}

// Operands that all lanes must agree on.
template <class T>
T uniform(Warp& w, const Instruction& i, int n, const char* what) {
  const T value = w.get<T>(i.args[n], 0);
  for (int lane = 1; lane < kLanes; ++lane) {
    if (w.get<T>(i.args[n], lane) != value) w.fault(i, std::string("lanes differ in ") + what, lane);
  }
  return value;
}

int sign(Warp& w, const Instruction& i, int n) {
  const int value = w.get<int>(i.args[n], 0);
  if (std::abs(value) != 1) w.fault(i, "a scale of " + std::to_string(value) + ", 1 or -1 is one");
  return value;
}

bool bit(Warp& w, const Instruction& i, int n) {
  const int value = w.get<int>(i.args[n], 0);
  if (value != 0 && value != 1) w.fault(i, "transposed by " + std::to_string(value) + ", 0 or 1 says whether");
  return value == 1;
}

// Of operand n.
Matrix matrix_of(Warp& w, const Instruction& i, int n, bool transposed, int rows, const std::string& name) {
  const Matrix matrix{uniform<uint64_t>(w, i, n, ("the descriptor of " + name).c_str()), transposed};
  const std::string wrong = matrix.wrong(static_cast<uint64_t>(rows));
  if (!wrong.empty()) w.fault(i, "the descriptor of " + name + " " + wrong);
  return matrix;
}

template <class T>
void registers_of_a(Warp& w, const Instruction& i, float (&a)[16][kDepth]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 8; ++n) {
      const int row = lane / 4 + n / 2 % 2 * 8, k = n / 4 * 8 + lane % 4 * 2 + n % 2;
      a[row][k] = element<T>(w.get<uint32_t>(i.args[n / 2], lane), n % 2);
    }
  }
}

// a-descriptor or four registers, b-descriptor, whether D is added, scales of A and B, whether A (if it has a descriptor)
// and B are transposed
template <class T, bool kInRegisters>
void multiply(Warp& w, const Instruction& i, uint32_t) {
  constexpr int kB = kInRegisters ? 4 : 1, kAdds = kB + 1, kScales = kB + 2, kTransposed = kB + 4;
  const int columns = 8 * i.variant;
  const Matrix b_matrix = matrix_of(w, i, kB, bit(w, i, kTransposed + !kInRegisters), columns, "B");
  const uint32_t adds = w.predicate(i, kAdds);
  if (adds != 0 && adds != kAllLanes) w.fault(i, "lanes differ in whether D is added");
  w.group.step(w, i, {kInRegisters ? 0 : w.get<uint64_t>(i.args[0], 0), b_matrix.descriptor, adds});
  const uint32_t product = w.products.begin(w, i, kInRegisters ? 4 : 0);
  float a[16][kDepth], b[32][kDepth][8];
  if constexpr (kInRegisters) {
    registers_of_a<T>(w, i, a);
  } else {
    const Matrix a_matrix = matrix_of(w, i, 0, bit(w, i, kTransposed), kRows, "A");
    const int first = w.index % 4 * 16;  // of its rows; PTX does not tell that no other warp reads them
    read<T>(w, i, a_matrix, product, kRows, [&](int row, int k, float value) {
      if (first <= row && row < first + 16) a[row - first][k] = value;
    });
  }
  const auto scale = static_cast<float>(sign(w, i, kScales) * sign(w, i, kScales + 1));
  for (auto& row : a) {
    for (float& value : row) value *= scale;
  }
  read<T>(w, i, b_matrix, product, columns,
          [&](int column, int k, float value) { b[column / 8][k][column % 8] = value; });
  for (int n = 0; n < i.variant; ++n) {
    const int16_t* sums = &i.sums[static_cast<size_t>(4 * n)];
    float c[16][8] = {};
    const auto each = [&](const auto& f) {
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int e = 0; e < 4; ++e) f(sums[e], lane, c[lane / 4 + 8 * (e / 2)][2 * (lane % 4) + e % 2]);
      }
    };
    if (adds) each([&](int slot, int lane, float& sum) { sum = w.get<float>(slot, lane); });
    add_products(a, b[n], c, 16, least_exponent<T>());
    each([&](int slot, int lane, float& sum) { w.put<float>(slot, lane, sum); });
  }
  for (const int slot : i.sums) {
    if (adds) w.check_written(i, slot, kAllLanes);
    w.set_written(slot, kAllLanes);
  }
}

void fence(Warp& w, const Instruction& i, uint32_t) {
  w.group.step(w, i, {});
  w.products.fence();
}

void commit(Warp& w, const Instruction& i, uint32_t) {
  w.group.step(w, i, {});
  w.products.commit();
}

void wait(Warp& w, const Instruction& i, uint32_t) {
  const uint32_t groups = w.get<uint32_t>(i.args[0], 0);
  w.group.step(w, i, {groups});
  w.shared.end_products(w.index, w.products.wait(static_cast<int>(groups)));
}

void fence_proxy(Warp& w, const Instruction&, uint32_t mask) { w.shared.fence(w.index, mask); }

// setmaxnreg: a count of registers. Whether a block has them is asked when it has ended (run.cc).
template <bool kMore>
void set_registers(Warp& w, const Instruction& i, uint32_t) {
  const uint32_t count = w.get<uint32_t>(i.args[0], 0);
  w.group.step(w, i, {count});
  if (count < 24 || count > 256 || count % 8 != 0) w.fault(i, std::to_string(count) + " registers a thread");
  const int before = std::exchange(w.registers, static_cast<int>(count));
  if (kMore ? w.registers < before : w.registers > before) {
    w.fault(i, std::to_string(count) + " registers a thread, it has " + std::to_string(before));
  }
  w.sets_registers = &i;
}

template <class T>
void add_wgmma(OpcodeTable& t, const std::string& type) {
  for (size_t eights = 1; eights <= 32; ++eights) {
    const std::string name =
        "wgmma.mma_async.sync.aligned.m64n" + std::to_string(8 * eights) + "k16.f32." + type + "." + type;
    const std::string sums(4 * eights, '+');
    Opcode shared{multiply<T, false>, "=" + sums + "llpwwww", Kind::kGroup};
    Opcode registers{multiply<T, true>, "=" + sums + "wwwwlpwww", Kind::kGroup};
    shared.variant = registers.variant = static_cast<uint8_t>(eights);
    t[name] = shared;
    t[name + "/" + std::to_string(4 * eights + 9)] = registers;
  }
}

}  // namespace

void add_group_opcodes(OpcodeTable& t) {
  add_wgmma<BFloat16>(t, "bf16");
  add_wgmma<Float16>(t, "f16");
  t["wgmma.fence.sync.aligned"] = {fence, "=", Kind::kGroup};
  t["wgmma.commit_group.sync.aligned"] = {commit, "=", Kind::kGroup};
  t["wgmma.wait_group.sync.aligned"] = {wait, "=w", Kind::kGroup};
  for (const char* which : {"fence.proxy.async", "fence.proxy.async.shared::cta"}) t[which] = {fence_proxy, "="};
  t["setmaxnreg.inc.sync.aligned.u32"] = {set_registers<true>, "=w", Kind::kGroup};
  t["setmaxnreg.dec.sync.aligned.u32"] = {set_registers<false>, "=w", Kind::kGroup};
}

}  // namespace cuda_sim
