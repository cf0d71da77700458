// What products of tensor cores are made of, whoever holds their parts.
//
// Products are exact in float32, sums go in the order of k: a GPU's own order and rounding are not documented.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace cuda_sim {

using polyhead::BFloat16;
using polyhead::Float16;

struct Tf32 {  // the low 13 bits are not looked at
  uint32_t bits;
};

inline float to_float(Tf32 x) {
  const uint32_t bits = x.bits & ~0x1fffu;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Element n of a lane's word, as a float.
template <class T>
float element(uint32_t word, int n) {
  if constexpr (sizeof(T) == 4)
    return to_float(T{word});
  else
    return to_float(T{static_cast<uint16_t>(word >> (16 * n))});
}

// c += a b
template <int kK>
void add_product(const float (&a)[16][kK], const float (&b)[kK][8], float (&c)[16][8]) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kK; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
}

}  // namespace cuda_sim
