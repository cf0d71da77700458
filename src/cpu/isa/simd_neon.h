// Advanced SIMD of Armv8.0, which every 64-bit Arm CPU has: 4 lanes. See simd.h for what each word means.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#define POLYHEAD_HAS_FMA_LANE 1

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kLanes = 4;
constexpr int kRegisters = 32;
using F = float32x4_t;
using I = int32x4_t;
using M = uint32x4_t;  // all bits of a lane set, or none

inline M as_bits(F x) { return vreinterpretq_u32_f32(x); }
inline F as_float(M x) { return vreinterpretq_f32_u32(x); }

inline void keep_in_register(F& x) { asm volatile("" : "+w"(x)); }
inline F load(const float* p) {  // unaligned, and of any type
  F x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
inline F broadcast(float x) { return vdupq_n_f32(x); }
inline F load_first(const float* p, int n) {
  if (n == kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store_first(float* p, F x, int n) {
  if (n == kLanes) return store(p, x);
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F fms(F a, F b, F c) { return vfmaq_f32(vnegq_f32(c), a, b); }
template <int kLane>
inline F fma_lane(F a, F b, F c) {
  return vfmaq_laneq_f32(c, a, b, kLane);
}
inline F select(M m, F a, F b) { return vbslq_f32(m, a, b); }
inline F divide(F x, F divisor, F reciprocal) {
  const F quotient = vmulq_f32(x, reciprocal);
  const F error = vfmsq_f32(x, quotient, divisor);  // NaN where the quotient is inf
  return select(vceqq_f32(error, error), fma(error, reciprocal, quotient), quotient);
}
inline F maximum(F a, F b) { return select(vcgtq_f32(a, b), a, b); }
inline F round_to_even(F x) { return vrndnq_f32(x); }
inline F absolute(F x) { return vabsq_f32(x); }

inline M less(F a, F b) { return vcltq_f32(a, b); }
inline M equal(F a, F b) { return vceqq_f32(a, b); }
inline M outside(F x, float limit) { return vornq_u32(vcltzq_f32(x), vcleq_f32(x, vdupq_n_f32(limit))); }
inline M both(M a, M b) { return vandq_u32(a, b); }
inline M either(M a, M b) { return vorrq_u32(a, b); }
inline M negate(M a) { return vmvnq_u32(a); }
inline bool any(M m) { return vmaxvq_u32(m) != 0; }

inline I broadcast_int(int32_t x) { return vdupq_n_s32(x); }
inline I iota() { return I{0, 1, 2, 3}; }
inline M lane_bits() { return M{1, 2, 4, 8}; }
inline uint32_t bits(M m) { return vaddvq_u32(vandq_u32(m, lane_bits())); }
inline M mask_from_bits(uint32_t b) { return vtstq_u32(vdupq_n_u32(b), lane_bits()); }
inline I load_int(const int32_t* p) { return vld1q_s32(p); }
inline I add_int(I a, I b) { return vaddq_s32(a, b); }
inline I xor_int(I a, I b) { return veorq_s32(a, b); }
inline I and_int(I a, I b) { return vandq_s32(a, b); }
template <int kBits>
inline I shift_right(I a) {
  return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), kBits));
}
inline M less_int(I a, I b) { return vcltq_s32(a, b); }
inline F to_float(I a) { return vcvtq_f32_s32(a); }
inline void multiply_wide(I a, I b, I& high, I& low) {
  const M x = vreinterpretq_u32_s32(a), y = vreinterpretq_u32_s32(b);
  const I first = vreinterpretq_s32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(y)));
  const I last = vreinterpretq_s32_u64(vmull_high_u32(x, y));
  low = vuzp1q_s32(first, last);
  high = vuzp2q_s32(first, last);
}

inline F scale_by_power(F x, F n, F y) {
  // Two factors, so that every n from -126 to 254 gives a finite power. n is an integer, or NaN, or -inf.
  const M tiny = less(y, broadcast(-126.0f));
  const I e = vcvtq_s32_f32(vminnmq_f32(vmaxnmq_f32(n, broadcast(-126.0f)), broadcast(254.0f)));
  const I half = vshrq_n_s32(e, 1), bias = broadcast_int(127);
  const F a = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
  const F b = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(e, half), bias), 23));
  return as_float(vbicq_u32(as_bits(vmulq_f32(vmulq_f32(x, a), b)), tiny));
}
inline F scale_by_small_power(F x, F n, F y) {
  const I e = vcvtq_s32_f32(vminnmq_f32(n, broadcast(128.0f)));  // NaN -> 128; of tiny ones anything
  const F power = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, broadcast_int(127)), 23));
  return as_float(vbicq_u32(as_bits(vmulq_f32(x, power)), less(y, broadcast(-126.0f))));
}
inline F mantissa(F x) {
  return as_float(vorrq_u32(vandq_u32(as_bits(x), vdupq_n_u32(0x007fffff)), vdupq_n_u32(0x3f800000)));
}
inline F exponent(F x) {
  const M e = vandq_u32(vshrq_n_u32(as_bits(x), 23), vdupq_n_u32(255));
  return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(e), vdupq_n_s32(127)));
}

inline uint16x4_t load_u16(const uint16_t* p) {
  uint16x4_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline uint16x4_t load_u16_first(const uint16_t* p, int n) {
  uint16_t lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load_u16(lanes);
}
inline F from_bf16(uint16x4_t x) { return as_float(vshll_n_u16(x, 16)); }
inline F from_f16(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
inline F load_bf16(const uint16_t* p) { return from_bf16(load_u16(p)); }
inline F load_f16(const uint16_t* p) { return from_f16(load_u16(p)); }
inline F load_bf16_first(const uint16_t* p, int n) { return from_bf16(load_u16_first(p, n)); }
inline F load_f16_first(const uint16_t* p, int n) { return from_f16(load_u16_first(p, n)); }
inline F load_int8(const int8_t* p) {
  int8_t bytes[8] = {};
  __builtin_memcpy(bytes, p, kLanes);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vld1_s8(bytes)))));
}
inline F load_bool(const uint8_t* p) {  // 0 where the byte is 0, else 1
  uint8_t bytes[8] = {};
  __builtin_memcpy(bytes, p, kLanes);
  const M x = vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(bytes))));
  return as_float(vandq_u32(vtstq_u32(x, x), as_bits(broadcast(1.0f))));
}
inline uint64_t nonzero_bytes(const uint8_t* p) {
  const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint64_t bits = 0;
  for (int n = 0; n < 4; ++n) {
    const uint8x16_t bytes = vld1q_u8(p + 16 * n), own = vandq_u8(vtstq_u8(bytes, bytes), bit);
    const uint32_t low = vaddv_u8(vget_low_u8(own)), high = vaddv_u8(vget_high_u8(own));
    bits |= uint64_t{low | high << 8} << (16 * n);
  }
  return bits;
}
inline void store_bf16(uint16_t* p, F x) {
  const M word = as_bits(x);
  const M lsb = vandq_u32(vshrq_n_u32(word, 16), vdupq_n_u32(1));
  const M rounded = vaddq_u32(word, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
  const M quiet = vorrq_u32(word, vdupq_n_u32(0x400000));
  const uint16x4_t half = vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
  __builtin_memcpy(p, &half, sizeof half);
}
inline void store_f16(uint16_t* p, F x) {
  const float16x4_t half = vcvt_f16_f32(x);
  __builtin_memcpy(p, &half, sizeof half);
}

inline void transpose(F (&r)[kLanes]) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])),
                    b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3])),
                    d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
  r[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
  r[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
  r[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
  r[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}

inline F load_quads(const float* const (&p)[kLanes / 4]) { return load(p[0]); }
inline void store_quads(float* const (&p)[kLanes / 4], F x) { store(p[0], x); }
inline void transpose_quads(F (&r)[4]) { transpose(r); }
inline F sums(F (&r)[kLanes]) { return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3])); }
inline float lane_sum(F x) {
  const float32x2_t half = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(vpadd_f32(half, half), 0);
}
inline float largest_lane(F x) { return vmaxvq_f32(x); }

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
