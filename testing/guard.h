// Tensors between pages that nobody may touch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "testing/array.h"
#include "testing/layout.h"

namespace polyhead::testing {

enum class Guard {
  kEnd,    // the last byte lies against the page behind
  kStart,  // the first byte lies against the page in front
  kNone,   // no such pages: aligned to 64 bytes, for what is timed
};

// Bytes between two PROT_NONE pages: one step too far is a fault. What the machine cannot give ends the
// process: input_bytes() tells before.
class GuardedBytes {
 public:
  GuardedBytes(size_t num_bytes, Guard guard, uint8_t fill);
  GuardedBytes(GuardedBytes&& other) noexcept;
  GuardedBytes& operator=(GuardedBytes&&) = delete;
  ~GuardedBytes();

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* map_ = nullptr;
  size_t map_bytes_ = 0;
  uint8_t* heap_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// An array laid out in guarded memory. Gaps between the elements hold NaN on inputs, canaries on outputs.
class Placed {
 public:
  // An operand that holds `array`; not given if that is not.
  static Placed input(const Array& array, Layout layout, Guard guard, uint64_t gaps_seed = 1);
  // An operand of that type and those dims. Its elements start as NaN with all bits set.
  static Placed output(DType dtype, const std::vector<int64_t>& dims, Layout layout, Guard guard,
                       OperandRole role = OperandRole::kOutput, uint64_t gaps_seed = 1);
  // An operand that is added to: an output that starts as `array`.
  static Placed accumulator(const Array& array, Layout layout, Guard guard, OperandRole role = OperandRole::kOutput,
                            uint64_t gaps_seed = 1);

  const Tensor& tensor() const { return tensor_; }

  // Whether the bytes are those that input() wrote.
  bool unchanged() const;

  // The elements. What is wrong, if any was not written or a gap was, is appended to *faults.
  Array result(const char* name, std::vector<std::string>* faults) const;

 private:
  Placed(const Tensor& tensor, GuardedBytes bytes) : tensor_(tensor), bytes_(std::move(bytes)) {}
  static Placed place(Tensor tensor, Guard guard, uint8_t fill);
  void fill(const Array& array);
  void set_elements(uint8_t byte) const;  // all of them, not what lies between

  Tensor tensor_;
  GuardedBytes bytes_;
  std::vector<uint8_t> before_;
};

// What crashed: printed by a handler of SIGSEGV, SIGBUS and SIGFPE that the first call installs.
void set_running(const std::string& what);

}  // namespace polyhead::testing
