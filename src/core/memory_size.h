// Sizes and offsets that become memory: sums and products that cannot wrap.
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace polyhead {

// A number of bytes or elements: exact as long as it fits in the address space, "too large" beyond. What is computed from
// a size that is too large is too large as well (times 0 it is 0), so one look at the end is enough.
class MemorySize {
 public:
  constexpr MemorySize() = default;
  template <std::integral Integer>
  constexpr MemorySize(Integer n)  // NOLINT: implicit on purpose
      : n_(n<0 || static_cast<uint64_t>(n)> kMost ? kTooLarge : static_cast<uint64_t>(n)) {}

  static constexpr MemorySize too_large() { return kTooLarge; }

  constexpr bool fits() const { return n_ != kTooLarge; }
  // Above PTRDIFF_MAX, which no memory has, if it does not fit.
  constexpr size_t value() const { return static_cast<size_t>(n_); }

  friend constexpr MemorySize operator+(MemorySize a, MemorySize b) {
    uint64_t sum = 0;
    return __builtin_add_overflow(a.n_, b.n_, &sum) ? kTooLarge : sum;
  }
  friend constexpr MemorySize operator*(MemorySize a, MemorySize b) {
    uint64_t product = 0;
    return __builtin_mul_overflow(a.n_, b.n_, &product) ? kTooLarge : product;
  }
  constexpr MemorySize& operator+=(MemorySize other) { return *this = *this + other; }
  friend constexpr auto operator<=>(MemorySize, MemorySize) = default;

  constexpr MemorySize rounded_up(uint64_t step) const { return MemorySize(n_ + (step - 1)).n_ / step * step; }

 private:
  static constexpr uint64_t kMost = PTRDIFF_MAX, kTooLarge = kMost + 1;
  uint64_t n_ = 0;
};

// How many pieces of `size` cover n of anything.
constexpr int64_t pieces(int64_t n, int64_t size) { return n / size + (n % size != 0); }

// Hands out parts of a block of memory, each aligned to 64 bytes.
class MemoryMap {
 public:
  // The offset of an array of that many elements.
  size_t take(std::initializer_list<int64_t> sizes, size_t element_bytes) {
    MemorySize bytes = element_bytes;
    for (const int64_t size : sizes) bytes = bytes * size;
    return take_bytes(bytes);
  }
  size_t take_bytes(MemorySize bytes) {
    const size_t offset = bytes_.value();
    bytes_ += bytes.rounded_up(64);
    return offset;
  }

  size_t bytes() const { return bytes_.value(); }
  bool fits() const { return bytes_.fits(); }  // in the address space

 private:
  MemorySize bytes_;
};

}  // namespace polyhead
