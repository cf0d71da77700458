// Scratch memory of calls from Python.
#pragma once

#include <cstddef>

#include "polyhead/status.h"

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

// run(memory), in `bytes` of such memory.
template <class Run>
Status in_scratch(size_t bytes, const Run& run) {
  const Scratch scratch(bytes);
  return scratch.status().ok() ? run(scratch.memory()) : scratch.status();
}

}  // namespace polyhead::python
