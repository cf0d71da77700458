#include "testing/formats.h"

#include <algorithm>
#include <cmath>

namespace polyhead::testing {
namespace {

// The largest number of a format.
double most(DType format) {
  switch (format) {
    case DType::kInt8: return 127;
    case DType::kFloat8E4M3: return 448;
    case DType::kFloat8E5M2: return 57344;
    default: return 7;
  }
}

// A byte of an 8-bit float, taken apart.
double float8_value(int bits, int fraction, int bias, bool has_inf) {
  const int exponent = (bits & 0x7f) >> fraction, rest = bits & ((1 << fraction) - 1);
  if (has_inf ? exponent == 31 : (bits & 0x7f) == 0x7f) return has_inf && rest == 0 ? HUGE_VAL : NAN;
  const double magnitude = exponent == 0 ? std::ldexp(rest, 1 - bias - fraction)
                                         : std::ldexp(rest + (1 << fraction), exponent - bias - fraction);
  return bits & 0x80 ? -magnitude : magnitude;
}

double number_of(DType format, int bits) {
  switch (format) {
    case DType::kInt8: return static_cast<int8_t>(bits);
    case DType::kFloat8E4M3: return float8_value(bits, 3, 7, false);
    default: return float8_value(bits, 2, 15, true);
  }
}

// The bits of the number nearest to x, which is no larger than the format's largest; of two, the even one.
int bits_of(DType format, double x) {
  if (format == DType::kInt8 || format == DType::kInt4x2) {
    return static_cast<int>(std::clamp(std::nearbyint(x), -most(format), most(format)));
  }
  int below = 0, above = 0x7b;  // whose magnitudes are on either side of |x|; 0x7b is e5m2's largest
  if (format == DType::kFloat8E4M3) above = 0x7e;
  while (above - below > 1) {
    const int middle = (below + above) / 2;
    (number_of(format, middle) <= std::fabs(x) ? below : above) = middle;
  }
  const double down = std::fabs(x) - number_of(format, below), up = number_of(format, above) - std::fabs(x);
  const int bits = up < down || (up == down && above % 2 == 0) ? above : below;
  return std::signbit(x) ? bits | 0x80 : bits;
}

}  // namespace

Stored stored(const Array& x, DType format, int64_t group) {
  const bool pairs = format == DType::kInt4x2;
  const int64_t dim = x.dims.back(), width = group == 0 ? dim : group, groups = group == 0 ? 1 : dim / group;
  const int64_t rows = x.size() == 0 ? 0 : x.size() / dim;
  Stored s;
  std::vector<int64_t> dims = x.dims;
  dims.back() = pairs ? dim / 2 : dim;
  s.numbers = Array(format, dims);
  dims.back() = groups;
  s.scales = Array(pairs ? DType::kFloat16 : DType::kFloat32, dims);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      double largest = 0;
      for (int64_t i = 0; i < width; ++i) {
        const double number = std::fabs(x.at(row * dim + g * width + i));
        largest = number <= largest ? largest : number < HUGE_VAL ? number : NAN;
        if (std::isnan(largest)) break;
      }
      s.scales.set(row * groups + g, largest / most(format));
      const double scale = s.scales.at(row * groups + g);
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = row * dim + g * width + i;
        const bool number = scale > 0 && scale < HUGE_VAL;
        const int bits = number ? bits_of(format, static_cast<float>(x.at(at)) / static_cast<float>(scale)) : 0;
        uint8_t& byte = s.numbers.bytes[static_cast<size_t>(pairs ? at / 2 : at)];
        byte = static_cast<uint8_t>(!pairs ? bits : at % 2 == 0 ? bits & 15 : byte | bits << 4);
      }
    }
  }
  return s;
}

template <class T>
std::vector<T> stored_numbers(const Array& stored, const Array& scales) {
  if (!scales.given()) return numbers<T>(stored);
  const bool pairs = stored.dtype == DType::kInt4x2;
  std::vector<T> x(stored.bytes.size() * (pairs ? 2 : 1));
  const size_t width = x.size() / static_cast<size_t>(std::max<int64_t>(scales.size(), 1));
  for (size_t n = 0; n < x.size(); ++n) {
    const int byte = stored.bytes[pairs ? n / 2 : n];
    const int half = n % 2 == 0 ? byte & 15 : byte >> 4;
    const double number = pairs ? (half < 8 ? half : half - 16) : number_of(stored.dtype, byte);
    x[n] = static_cast<T>(number) * static_cast<T>(scales.at(static_cast<int64_t>(n / width)));
  }
  return x;
}

template std::vector<double> stored_numbers<double>(const Array&, const Array&);
template std::vector<float> stored_numbers<float>(const Array&, const Array&);

}  // namespace polyhead::testing
