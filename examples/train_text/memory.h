// Memory that is taken once, before training.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "polyhead/status.h"
#include "tools/buffer.h"

namespace polyhead::demo {

/// Aligned to 64 bytes, or the sentence that there is not so much.
inline Result<tools::Buffer> allocate(size_t size_bytes) {
  tools::Buffer buffer = tools::new_buffer(size_bytes);
  if (buffer == nullptr) {
    return Status(StatusCode::kOutOfMemory, fmt::format("no memory for {} bytes", size_bytes));
  }
  return Result<tools::Buffer>(std::move(buffer));
}

}  // namespace polyhead::demo
