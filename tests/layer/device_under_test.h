// Where the layers under test compute: on the CPU, unless a program of tests is linked with what lends their memory to
// another device (device_of_test.cc, tests/cuda/layer_on_device.cc).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "polyhead/attention.h"
#include "polyhead/tensor.h"
#include "testing/call.h"

namespace polyhead::testing {

// The memory of some calls. Nobody but the device looks at it from lend() to finish().
class Loan {
 public:
  virtual ~Loan() = default;

  // The tensor is the device's from here on. `written`: it holds something.
  virtual void lend(Tensor& t, bool written) = 0;
  // Likewise memory; where it lies now.
  virtual void* lend(void* memory, size_t bytes, bool written) = 0;
  // Likewise memory aligned to 64 bytes that holds nothing, and whose contents are of no use afterwards.
  virtual void* lend_scratch(void* memory, size_t bytes) = 0;
  // Waits for the calls and gives all back. What went wrong, or "".
  virtual std::string finish() = 0;
};

struct DeviceUnderTest {
  Device device = Device::kCpu;
  const char* kernel = "";  // whose calls compute there
  void* (*stream)() = nullptr;
  std::unique_ptr<Loan> (*loan)() = nullptr;
};
inline constinit DeviceUnderTest device_under_test;

class NoLoan : public Loan {
 public:
  void lend(Tensor&, bool) override {}
  void* lend(void* memory, size_t, bool) override { return memory; }
  void* lend_scratch(void* memory, size_t) override { return memory; }
  std::string finish() override { return ""; }
};

inline bool on_device(std::string_view kernel) {
  return device_under_test.loan != nullptr && kernel == device_under_test.kernel;
}
inline std::unique_ptr<Loan> new_loan(std::string_view kernel) {
  return on_device(kernel) ? device_under_test.loan() : std::make_unique<NoLoan>();
}
inline PlanOptions options_of(std::string_view kernel, int threads) {
  PlanOptions options;
  options.kernel = kernel;
  options.where.executor = &executor(threads);
  if (!on_device(kernel)) return options;
  options.where.device = device_under_test.device;
  options.where.stream = device_under_test.stream();
  return options;
}

}  // namespace polyhead::testing
