// cvt: PTX ISA 9.0, "Data Movement and Conversion Instructions: cvt".
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "opcodes.h"
#include "warp.h"

namespace cuda_sim {
namespace {

using polyhead::BFloat16;
using polyhead::Float16;

// Narrow integers extend to 32 bits, by the destination's sign, as registers hold them.
template <class D, class S>
void integer(Warp& w, const Instruction& i, uint32_t mask) {
  using Register = std::conditional_t<sizeof(D) == 8, D, std::conditional_t<sizeof(D) == 2, uint16_t, D>>;
  map_lanes<Register, S>(w, i, mask, [](S a) { return static_cast<Register>(static_cast<D>(a)); });
}

// The same of a register of 64 bits, of which S is the lower part.
template <class D, class S>
void integer_of_wide(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<D, uint64_t>(w, i, mask, [](uint64_t a) { return static_cast<D>(static_cast<S>(a)); });
}

template <class D, class S>
void to_floating(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<D, S>(w, i, mask, [](S a) { return static_cast<D>(a); });
}

template <class T>
T rounded_to_integer(char rounding, T a) {
  return rounding == 'n'   ? std::nearbyint(a)
         : rounding == 'z' ? std::trunc(a)
         : rounding == 'm' ? std::floor(a)
                           : std::ceil(a);
}

// To the nearest number that D has; NaN is 0, or the top bit where either type has 64 bits.
template <class D, class S, char kRounding>
void to_integer(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<D, S>(w, i, mask, [](S a) {
    using Limits = std::numeric_limits<D>;
    constexpr bool kWide = sizeof(D) == 8 || sizeof(S) == 8;
    if (a != a) return static_cast<D>(uint64_t{kWide} << (8 * sizeof(D) - 1));
    const double x = rounded_to_integer(kRounding, static_cast<double>(a));
    if (x <= static_cast<double>(Limits::min())) return Limits::min();
    return x >= static_cast<double>(Limits::max()) ? Limits::max() : static_cast<D>(x);
  });
}

template <char kRounding>
void to_integral(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<float, float>(w, i, mask, [](float a) { return rounded_to_integer(kRounding, a); });
}

// To [0, 1]; NaN is 0.
void saturate(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<float, float>(w, i, mask, [](float a) { return a > 0 ? std::fmin(a, 1.0f) : 0.0f; });
}

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, Float16>) return polyhead::to_float16(x);
  if constexpr (std::is_same_v<T, BFloat16>) return polyhead::to_bfloat16(x);
}

template <class T>
void to_half(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, float>(w, i, mask, [](float a) { return rounded<T>(a); });
}

template <class T>
void to_halves(Warp& w, const Instruction& i, uint32_t mask) {  // the first operand is the upper half
  map_lanes<uint32_t, float, float>(
      w, i, mask, [](float a, float b) { return uint32_t{rounded<T>(a).bits} << 16 | rounded<T>(b).bits; });
}

template <class T>
void from_half(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<float, T>(w, i, mask, [](T a) { return to_float(a); });
}

// To the nearest of 10 mantissa bits, ties away from zero; the other bits are 0.
void to_tf32(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, uint32_t>(
      w, i, mask, [](uint32_t a) { return (a & 0x7f800000) == 0x7f800000 ? a : (a + 0x1000) & ~0x1fffu; });
}

template <bool kSigned, int kBits>
using Integer = std::conditional_t<
    kBits == 8, std::conditional_t<kSigned, int8_t, uint8_t>,
    std::conditional_t<kBits == 16, std::conditional_t<kSigned, int16_t, uint16_t>,
                       std::conditional_t<kBits == 32, std::conditional_t<kSigned, int32_t, uint32_t>,
                                          std::conditional_t<kSigned, int64_t, uint64_t>>>>;

template <class T>
std::string name_of() {
  return (std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "s" : "u") + std::to_string(8 * sizeof(T));
}

template <class D, class S>
std::string signature() {
  return std::string(sizeof(D) == 8 ? "l" : "w") + (sizeof(S) == 8 ? "=l" : "=w");
}

template <class D, class S>
void add_integer(OpcodeTable& t) {
  const std::string name = "cvt." + name_of<D>() + "." + name_of<S>();
  t[name] = {integer<D, S>, signature<D, S>()};
  if constexpr (sizeof(D) == 8 && sizeof(S) == 4) t[name + "/wide"] = {integer_of_wide<D, S>, signature<D, int64_t>()};
}

template <class D, class S>
void add_rounded_integer(OpcodeTable& t) {
  for (const char* flush : {"", ".ftz"}) {  // of integers: a subnormal rounds to 0 or to 1, which .ftz makes 0
    if (flush[0] && sizeof(S) == 8) continue;
    const std::string types = flush + ("." + name_of<D>()) + "." + name_of<S>();
    t["cvt.rni" + types] = {to_integer<D, S, 'n'>, signature<D, S>()};
    t["cvt.rzi" + types] = {to_integer<D, S, 'z'>, signature<D, S>()};
    if (flush[0]) continue;
    t["cvt.rmi" + types] = {to_integer<D, S, 'm'>, signature<D, S>()};
    t["cvt.rpi" + types] = {to_integer<D, S, 'p'>, signature<D, S>()};
  }
}

template <class S>
void add_source(OpcodeTable& t) {
  add_integer<int16_t, S>(t);
  add_integer<uint16_t, S>(t);
  add_integer<int32_t, S>(t);
  add_integer<uint32_t, S>(t);
  add_integer<int64_t, S>(t);
  add_integer<uint64_t, S>(t);
  t["cvt.rn.f32." + name_of<S>()] = {to_floating<float, S>, signature<float, S>()};
  t["cvt.rn.f64." + name_of<S>()] = {to_floating<double, S>, signature<double, S>()};
}

}  // namespace

void add_convert_opcodes(OpcodeTable& t) {
  add_source<Integer<true, 8>>(t);
  add_source<Integer<false, 8>>(t);
  add_source<Integer<true, 16>>(t);
  add_source<Integer<false, 16>>(t);
  add_source<Integer<true, 32>>(t);
  add_source<Integer<false, 32>>(t);
  add_source<Integer<true, 64>>(t);
  add_source<Integer<false, 64>>(t);
  add_rounded_integer<int32_t, float>(t);
  add_rounded_integer<uint32_t, float>(t);
  add_rounded_integer<int64_t, float>(t);
  add_rounded_integer<uint64_t, float>(t);
  add_rounded_integer<int32_t, double>(t);
  add_rounded_integer<int64_t, double>(t);
  t["cvt.rni.f32.f32"] = {to_integral<'n'>, "w=w"};
  t["cvt.rzi.f32.f32"] = {to_integral<'z'>, "w=w"};
  t["cvt.rmi.f32.f32"] = {to_integral<'m'>, "w=w"};
  t["cvt.rpi.f32.f32"] = {to_integral<'p'>, "w=w"};
  t["cvt.sat.f32.f32"] = {saturate, "w=w"};
  t["cvt.f64.f32"] = {to_floating<double, float>, "l=w"};
  t["cvt.rn.f32.f64"] = {to_floating<float, double>, "w=l"};
  t["cvt.rn.f16.f32"] = {to_half<Float16>, "w=w"};
  t["cvt.rn.bf16.f32"] = {to_half<BFloat16>, "w=w"};
  t["cvt.rn.f16x2.f32"] = {to_halves<Float16>, "w=ww"};
  t["cvt.rn.bf16x2.f32"] = {to_halves<BFloat16>, "w=ww"};
  t["cvt.f32.f16"] = {from_half<Float16>, "w=w"};
  t["cvt.f32.bf16"] = {from_half<BFloat16>, "w=w"};
  t["cvt.rna.tf32.f32"] = {to_tf32, "w=w"};
}

}  // namespace cuda_sim
