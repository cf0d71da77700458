// Integers of programs, of 32 or 64 bits: they wrap around, and every operation has a result. No library code: kernels
// compiled for one instruction set include this too, and those of GPUs.
#pragma once

#include <cstdint>

namespace polyhead::program {

template <class Int>
struct UnsignedOf;
template <>
struct UnsignedOf<int32_t> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<int64_t> {
  using type = uint64_t;
};
template <class Int>
using Unsigned = typename UnsignedOf<Int>::type;

template <class Int>
static constexpr Int add(Int a, Int b) {
  return static_cast<Int>(static_cast<Unsigned<Int>>(a) + static_cast<Unsigned<Int>>(b));
}
template <class Int>
static constexpr Int subtract(Int a, Int b) {
  return static_cast<Int>(static_cast<Unsigned<Int>>(a) - static_cast<Unsigned<Int>>(b));
}
template <class Int>
static constexpr Int multiply(Int a, Int b) {
  return static_cast<Int>(static_cast<Unsigned<Int>>(a) * static_cast<Unsigned<Int>>(b));
}

// Rounded down; by 0: 0.
template <class Int>
static constexpr Int floor_div(Int a, Int b) {
  if (b == 0) return 0;
  if (b == -1) return subtract<Int>(0, a);
  return static_cast<Int>(a / b - (a % b != 0 && (a < 0) != (b < 0)));
}
template <class Int>
static constexpr Int floor_mod(Int a, Int b) {
  return b == 0 ? 0 : subtract(a, multiply(floor_div(a, b), b));
}

// By 0 to 63; of 32 bits, values that fit 32 bits in 64.
template <class Int>
static constexpr int shift_of(Int by) {
  return by < 0 ? 0 : by > 63 ? 63 : static_cast<int>(by);
}
template <class Int>
static constexpr Int shift_left(Int a, Int by) {
  return static_cast<Int>(static_cast<uint64_t>(static_cast<int64_t>(a)) << shift_of(by));
}
template <class Int>
static constexpr Int shift_right(Int a, Int by) {
  return static_cast<Int>(static_cast<int64_t>(a) >> shift_of(by));
}

// Towards 0; NaN gives 0, what lies beyond gives the ends.
template <class Int>
static constexpr Int to_int(float x) {
  constexpr float kEnd = sizeof(Int) == 4 ? 0x1p31f : 0x1p63f;
  constexpr Unsigned<Int> kMost = static_cast<Unsigned<Int>>(~Unsigned<Int>{0}) >> 1;
  if (x != x) return 0;
  if (x >= kEnd) return static_cast<Int>(kMost);
  return x < -kEnd ? static_cast<Int>(kMost + 1) : static_cast<Int>(x);
}

}  // namespace polyhead::program
