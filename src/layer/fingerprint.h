// A number that tells descs apart: which layer or block has filled a reserve, which one weights were packed for.
#pragma once

#include <bit>
#include <cstdint>

#include "polyhead/attention.h"

namespace polyhead {

// FNV-1a over the fields of a desc.
class Fingerprint {
 public:
  uint64_t value() const { return value_; }
  void add(uint64_t bits) {
    for (int shift = 0; shift < 64; shift += 8) value_ = (value_ ^ (bits >> shift & 0xff)) * 0x100000001b3;
  }
  void add(int64_t number) { add(static_cast<uint64_t>(number)); }
  void add(bool flag) { add(uint64_t{flag}); }
  void add(double number) { add(std::bit_cast<uint64_t>(number)); }
  void add(const BroadcastOperand& operand) {
    add(operand.given);
    add(static_cast<int64_t>(operand.dtype));
    for (const int64_t dim : operand.dims) add(dim);
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace polyhead
