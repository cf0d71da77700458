// Caches as a call finds them whose operands come from memory.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "polyhead/executor.h"
#include "polyhead/status.h"

namespace polyhead::tools {

class ColdCaches {
 public:
  // Takes twice the memory of all last-level caches that this process may use; 64 MiB where the system does not tell.
  static Result<ColdCaches> create();

  // Writes all of that memory, a part on each thread, so that the caches of each hold nothing else.
  void empty(Executor& executor);

  int64_t size_bytes() const { return size_bytes_; }

 private:
  Buffer memory_;
  int64_t size_bytes_ = 0;
  unsigned char value_ = 0;
};

}  // namespace polyhead::tools
