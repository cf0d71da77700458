// Whether a GPU's result is one that the PTX ISA allows beside another.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "statement.h"

namespace cuda_sim {

inline bool has(const std::string& statement, const char* part) { return statement.find(part) != std::string::npos; }

struct Float {
  bool nan = false;
  double value = 0;
};

inline Float as_float(uint64_t bits, const std::string& type) {
  if (type == "f64") return {std::isnan(std::bit_cast<double>(bits)), std::bit_cast<double>(bits)};
  const auto narrow = static_cast<uint32_t>(bits);
  if (type == "bf16") return as_float(uint64_t{narrow & 0xffff} << 16, "f32");
  if (type != "f16") return {std::isnan(std::bit_cast<float>(narrow)), std::bit_cast<float>(narrow)};
  const int exponent = static_cast<int>(narrow >> 10 & 31), fraction = static_cast<int>(narrow & 0x3ff);
  const double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                           : exponent == 31 ? HUGE_VAL
                                            : std::ldexp(1024 + fraction, exponent - 25);
  return {exponent == 31 && fraction != 0, (narrow >> 15 & 1) != 0 ? -magnitude : magnitude};
}

// What the ISA allows an approximation: a multiple of the result's magnitude, and an error of its own.
inline double allowed(const std::string& statement, double value) {
  if (has(statement, "tanh.approx")) return std::ldexp(std::abs(value), -9);
  if (has(statement, "sin.approx") || has(statement, "cos.approx")) return 0x1p-18;
  if (has(statement, "lg2.approx")) return std::max(0x1p-20, std::ldexp(std::abs(value), -20));
  const bool approximate = has(statement, "approx") || has(statement, "div.full");
  return approximate ? std::max(0x1p-126, std::ldexp(std::abs(value), -20)) : 0;
}

inline bool agree(const std::string& statement, uint64_t a, uint64_t b) {
  if (a == b) return true;
  std::string type = types_of(statement).front();
  if (type == "f16x2" || type == "bf16x2") {
    type.resize(type.size() - 2);
    const std::string half = statement.substr(0, statement.find('.')) + "." + type + " d";
    return agree(half, a & 0xffff, b & 0xffff) && agree(half, a >> 16, b >> 16);
  }
  if (type[0] != 'f' && type[0] != 'b' && type[0] != 't') return false;
  if (type == "b16" || type == "b32" || type == "b64") return false;
  const Float x = as_float(a, type), y = as_float(b, type);
  if (x.nan || y.nan) return x.nan == y.nan;
  if (std::isinf(x.value) || std::isinf(y.value)) return x.value == y.value;
  return std::abs(x.value - y.value) <= allowed(statement, x.value);
}

}  // namespace cuda_sim
