// What products of tensor cores are made of, whoever holds their parts.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Of numbers that are not 0, subnormal ones too: tensor_sums.h.
template <class T>
constexpr int least_exponent() {
  return std::is_same_v<T, Float16> ? -14 : -126;
}

}  // namespace cuda_sim
