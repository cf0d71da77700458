// Whose a reserve is.
#pragma once

#include <bit>
#include <cstdint>

#include "polyhead/attention.h"

namespace polyhead {

// A number that tells descs apart: FNV-1a over their fields. A reserve carries that of the layer or block that filled it.
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
