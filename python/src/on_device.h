// The calling thread's current CUDA device, for a while.
#pragma once

#include "polyhead/cuda.h"

namespace polyhead::python {

class OnDevice {
 public:
  explicit OnDevice(int device) : before_(set_cuda_device(device)), device_(device) {}
  ~OnDevice() {
    if (before_.ok() && *before_ != device_) static_cast<void>(set_cuda_device(*before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // Why `device` is not the current one. A build without CUDA kernels says so when a plan is made, not here.
  Status status() const { return before_.status().code() == StatusCode::kUnsupported ? Status() : before_.status(); }

 private:
  const Result<int> before_;
  const int device_;
};

}  // namespace polyhead::python
