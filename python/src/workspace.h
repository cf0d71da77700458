// Scratch memory of calls from Python.
#pragma once

#include <cstddef>

#include "polyhead/attention.h"

namespace polyhead::python {

// `bytes` of memory, aligned to 64: this thread's own, which grows to what the largest call so far needed and is freed
// when the thread ends. Of more than 64 MiB: memory of its own, freed with it. One at a time on a thread.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const Status& status() const { return status_; }  // kOutOfMemory: there is none
  void* memory() const { return memory_; }

 private:
  Status status_;
  void* memory_ = nullptr;
  void* own_ = nullptr;
};

// plan.forward(args) and plan.backward(args) in such memory.
Status forward_with_workspace(const Plan& plan, ForwardArgs& args);
Status backward_with_workspace(const Plan& plan, BackwardArgs& args);

}  // namespace polyhead::python
