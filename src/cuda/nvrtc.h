// NVRTC, the compiler of CUDA for programs that are known when they run: it is opened when it is first needed, and the
// library needs nothing of it to be there.
#pragma once

#include <span>
#include <string>

#include "polyhead/status.h"

namespace polyhead::cuda {

// A file that others include by name.
struct Source {
  const char* name;
  const char* text;
};

// "" where it can be used, else one clause.
std::string why_no_compiler();

// The machine's code of a source with one kernel, `kernel`, for compute capability `capability` (80, 90, ...).
Result<std::string> compile(const std::string& source, std::span<const Source> includes, int capability);

}  // namespace polyhead::cuda
