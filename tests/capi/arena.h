// Memory for hostile calls: one guarded buffer per operand, whose every byte outside the outputs must survive a call.
#pragma once

#include <polyhead/polyhead.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "testing/guard.h"

namespace polyhead::testing {

// Bytes [begin, end) that a view touches; wide enough that no hostile stride overflows it.
struct Reach {
  __int128 begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

inline int64_t element_bytes(int32_t dtype) {
  constexpr int64_t kBytes[] = {4, 2, 2, 8, 1, 4, 8, 1, 1, 1, 1};
  return dtype >= 0 && dtype <= POLYHEAD_INT4X2 ? kBytes[dtype] : 8;
}

inline Reach reach(const polyhead_tensor& t) {
  __int128 first = 0, last = 0;
  if (t.ndim < 1 || t.ndim > POLYHEAD_MAX_DIMS) return {};
  for (int i = 0; i < t.ndim; ++i) {
    if (t.dims[i] <= 0) return {};
    const __int128 step = static_cast<__int128>(t.dims[i] - 1) * t.strides[i];
    (step < 0 ? first : last) += step;
  }
  const __int128 data = reinterpret_cast<uintptr_t>(t.data), size = element_bytes(t.dtype);
  return {data + first * size, data + (last + 1) * size};
}

class Arena {
 public:
  static constexpr size_t kBufferBytes = 40 * 1024;

  explicit Arena(size_t num_buffers, uint64_t seed) {
    for (size_t n = 0; n < num_buffers; ++n) {
      buffers_.emplace_back(kBufferBytes, Guard::kEnd, uint8_t{0});
      for (size_t i = 0; i < kBufferBytes; ++i) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        buffers_[n].data()[i] = static_cast<uint8_t>(seed >> 56);
      }
      pristine_.emplace_back(buffers_[n].data(), buffers_[n].data() + kBufferBytes);
    }
  }

  // `bytes` bytes of buffer n that lie against the guard behind it or in front of it.
  uint8_t* place(size_t n, int64_t bytes, bool at_end) const {
    return buffers_[n].data() + (at_end ? kBufferBytes - static_cast<size_t>(bytes) : 0);
  }

  // Takes what the caller has written into buffer n as its right contents.
  void accept(size_t n) { std::memcpy(pristine_[n].data(), buffers_[n].data(), kBufferBytes); }

  bool contains(const Reach& r) const {
    for (const GuardedBytes& buffer : buffers_) {
      const __int128 begin = reinterpret_cast<uintptr_t>(buffer.data());
      if (r.begin >= begin && r.end <= begin + static_cast<__int128>(kBufferBytes)) return true;
    }
    return false;
  }

  // Bytes that changed outside `writable`. Restores all.
  int64_t count_damage(const std::vector<Reach>& writable) {
    int64_t damage = 0;
    for (size_t n = 0; n < buffers_.size(); ++n) {
      uint8_t* data = buffers_[n].data();
      if (std::memcmp(data, pristine_[n].data(), kBufferBytes) == 0) continue;
      for (size_t i = 0; i < kBufferBytes; ++i) {
        const __int128 at = reinterpret_cast<uintptr_t>(data + i);
        bool allowed = data[i] == pristine_[n][i];
        for (const Reach& r : writable) allowed = allowed || (at >= r.begin && at < r.end);
        damage += !allowed;
      }
      std::memcpy(data, pristine_[n].data(), kBufferBytes);
    }
    return damage;
  }

 private:
  std::vector<GuardedBytes> buffers_;
  std::vector<std::vector<uint8_t>> pristine_;
};

}  // namespace polyhead::testing
