// Memory of a call's tensors on a device, as long as this lives: of the simulated one, to which it is lent (lent.cc), or of a
// real one, to which it is copied, and back at the end (copied.cc).
#pragma once

#include <deque>
#include <string>

#include "polyhead/tensor.h"

namespace polyhead {

class Lent {
 public:
  Lent() = default;
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent();

  // The tensor is the device's from here on. `written`: it holds something.
  void lend(Tensor& t, bool written);

  // Memory that holds nothing yet.
  void lend(void*& pointer, size_t bytes);

 private:
  // A part of a tensor: on the host, and on a device that has memory of its own.
  struct Part {
    void* host = nullptr;
    void* device = nullptr;
    size_t bytes = 0;
  };

  std::deque<Part> parts_;
  std::deque<void*> allocations_;
};

// What went wrong since this was last asked, in words.
std::string take_fault();

}  // namespace polyhead
