// mma.sync, ldmatrix and stmatrix: PTX ISA 9.0, "Warp Level Matrix Instructions". g = lane / 4, t = lane % 4.
//
// mma m16n8k16, half precision: A0..3 = (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), pairs along k; B0, B1 =
// rows 2t, 2t + 8 of k, pairs along k, column g; C = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). m16n8k8 has
// the first half of A and B. tf32 m16n8k8: A = (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); B = rows t, t + 4,
// column g; m16n8k4 the first half.
//
// How sums are rounded: tensor_sums.h.
#include <cstring>
#include <type_traits>

#include "fragments.h"
#include "opcodes.h"
#include "reach.h"
#include "tensor_sums.h"
#include "warp.h"

namespace cuda_sim {
namespace {

template <class T, int kK>
void mma(Warp& w, const Instruction& i, uint32_t) {
  constexpr int kPack = sizeof(T) == 2 ? 2 : 1, kHalf = 4 * kPack;  // columns of k that one register of all lanes holds
  constexpr int kHalves = kK / kHalf;
  float a[16][kK], b[kK][8], c[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t upper = w.get<uint32_t>(i.args[4 + 2 * half], lane),
                     lower = w.get<uint32_t>(i.args[5 + 2 * half], lane);
      const uint32_t column = w.get<uint32_t>(i.args[4 + 2 * kHalves + half], lane);
      for (int n = 0; n < kPack; ++n) {
        const int k = half * kHalf + t * kPack + n;
        a[g][k] = element<T>(upper, n);
        a[g + 8][k] = element<T>(lower, n);
        b[k][g] = element<T>(column, n);
      }
    }
    for (int n = 0; n < 4; ++n) c[g + 8 * (n / 2)][2 * t + n % 2] = w.get<float>(i.args[4 + 3 * kHalves + n], lane);
  }
  add_products(a, b, c, 16, least_exponent<T>());
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int n = 0; n < 4; ++n) w.put<float>(i.args[n], lane, c[g + 8 * (n / 2)][2 * t + n % 2]);
  }
}

// Lanes 8n .. 8n + 7 tell where the rows of matrix n lie, 16 bytes each. A lane gets elements 2t and 2t + 1 of row g;
// transposed, rows 2t and 2t + 1 of column g.
template <int kMatrices, bool kTransposed>
void load_matrix(Warp& w, const Instruction& i, uint32_t) {
  uint64_t addresses[kLanes] = {};
  uint16_t rows[8 * kMatrices][8];
  for (int n = 0; n < 8 * kMatrices; ++n) {
    addresses[n] = w.address(i, kMatrices, 0, n);
    std::memcpy(rows[n], reach(w, i, n, addresses[n], 16, Access::kRead), 16);
  }
  count_banks(w.launch.counters, addresses, kMatrices == 4 ? kAllLanes : (1u << (8 * kMatrices % 32)) - 1, 16);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int n = 0; n < kMatrices; ++n) {
      const uint16_t(*matrix)[8] = rows + 8 * n;
      const uint32_t low = kTransposed ? matrix[2 * t][g] : matrix[g][2 * t];
      const uint32_t high = kTransposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      w.put<uint32_t>(i.args[n], lane, high << 16 | low);
    }
  }
}

// The other way: lanes 8n .. 8n + 7 tell where the rows of matrix n go.
template <int kMatrices, bool kTransposed>
void store_matrix(Warp& w, const Instruction& i, uint32_t) {
  uint16_t rows[8 * kMatrices][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int n = 0; n < kMatrices; ++n) {
      uint16_t(*matrix)[8] = rows + 8 * n;
      const uint32_t word = w.get<uint32_t>(i.args[1 + n], lane);
      (kTransposed ? matrix[2 * t][g] : matrix[g][2 * t]) = static_cast<uint16_t>(word);
      (kTransposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1]) = static_cast<uint16_t>(word >> 16);
    }
  }
  uint64_t addresses[kLanes] = {};
  for (int n = 0; n < 8 * kMatrices; ++n) {
    addresses[n] = w.address(i, 0, 0, n);
    std::memcpy(reach(w, i, n, addresses[n], 16, Access::kWrite), rows[n], 16);
  }
  count_banks(w.launch.counters, addresses, kMatrices == 4 ? kAllLanes : (1u << (8 * kMatrices % 32)) - 1, 16);
}

template <class T, int kK>
void add_mma(OpcodeTable& t, const std::string& type) {
  const std::string name =
      "mma.sync.aligned.m16n8k" + std::to_string(kK) + ".row.col.f32." + type + "." + type + ".f32";
  const bool whole = kK * sizeof(T) == 32;
  t[name] = {mma<T, kK>, whole ? "wwww=wwwwwwwwww" : "wwww=wwwwwww", Kind::kAligned};
}

template <int kMatrices>
void add_matrix_moves(OpcodeTable& t) {
  const std::string count = std::to_string(kMatrices), words(kMatrices, 'w');
  for (const bool transposed : {false, true}) {
    Opcode load{transposed ? load_matrix<kMatrices, true> : load_matrix<kMatrices, false>, words + "=@",
                Kind::kAligned};
    Opcode store{transposed ? store_matrix<kMatrices, true> : store_matrix<kMatrices, false>, "=@" + words,
                 Kind::kAligned};
    load.space = store.space = Space::kShared;
    const std::string form = ".sync.aligned.m8n8.x" + count + (transposed ? ".trans" : "") + ".shared.b16";
    t["ldmatrix" + form] = load;
    t["stmatrix" + form] = store;
  }
}

}  // namespace

void add_tensor_opcodes(OpcodeTable& t) {
  add_mma<BFloat16, 16>(t, "bf16");
  add_mma<BFloat16, 8>(t, "bf16");
  add_mma<Float16, 16>(t, "f16");
  add_mma<Float16, 8>(t, "f16");
  add_mma<Tf32, 8>(t, "tf32");
  add_mma<Tf32, 4>(t, "tf32");
  add_matrix_moves<1>(t);
  add_matrix_moves<2>(t);
  add_matrix_moves<4>(t);
}

}  // namespace cuda_sim
