// Where an operator computes: on the CPU, or on a CUDA device and torch's current stream there.
#pragma once

#include <cstdint>
#include <optional>

#include "on_device.h"
#include "polyhead/attention.h"
#include "stable_tensor.h"
#include "workspace.h"

namespace polyhead::torch_ops {

// Of one call, as long as that is made. On a CUDA device it is the thread's current one meanwhile.
class CallPlace {
 public:
  // As `query` lies. Throws what bad_value and failure throw.
  explicit CallPlace(const StableTensor& query);
  ~CallPlace();
  CallPlace(const CallPlace&) = delete;
  CallPlace& operator=(const CallPlace&) = delete;

  Device device() const { return device_; }
  int32_t index() const { return index_; }  // of the device; of the CPU 0
  int32_t torch_type() const;               // torch's number of the kind of device
  Where where() const;

  // Of the call that this thread makes; null: none, or one that knows the CPU alone.
  static const CallPlace* current();

  // Compute, in a workspace of the device's.
  void forward(const Plan& plan, ForwardArgs& args) const;
  void backward(const Plan& plan, BackwardArgs& args) const;

  // check(run(workspace)), in one of `bytes`.
  template <class Run>
  void run_in_workspace(size_t bytes, const Run& run) const {
    if (device_ == Device::kCpu) return check(python::in_scratch(bytes, run));
    void* memory = nullptr;
    const StableTensor workspace = new_workspace(bytes, &memory);
    check(run(memory));
  }

 private:
  // Of torch's allocator, which hands it out again in the order of the stream.
  static StableTensor new_workspace(size_t bytes, void** memory);

  Device device_ = Device::kCpu;
  int32_t index_ = 0;
  void* stream_ = nullptr;
  std::optional<python::OnDevice> on_device_;
  const CallPlace* before_ = nullptr;
};

}  // namespace polyhead::torch_ops
