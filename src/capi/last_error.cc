#include "capi/last_error.h"

#include <algorithm>
#include <cstring>

namespace polyhead::capi {
namespace {

// A plain array: needs no allocation to report that memory ran out, and nothing to destroy when its thread ends.
thread_local char last_error[2048];

}  // namespace

polyhead_status fail(StatusCode code, std::string_view message) noexcept {
  constexpr std::string_view kCut = "...";
  constexpr size_t kRoom = sizeof last_error - 1;
  // A caller may pass the last error itself back in, as the name of a kernel that then stands in the new sentence.
  const size_t length = std::min(message.size(), kRoom);
  std::memmove(last_error, message.data(), length);
  if (message.size() > kRoom) std::memcpy(last_error + kRoom - kCut.size(), kCut.data(), kCut.size());
  last_error[length] = '\0';
  return static_cast<polyhead_status>(code);
}

}  // namespace polyhead::capi

using polyhead::StatusCode;

static_assert(POLYHEAD_OK == static_cast<int>(StatusCode::kOk));
static_assert(POLYHEAD_INVALID_ARGUMENT == static_cast<int>(StatusCode::kInvalidArgument));
static_assert(POLYHEAD_UNSUPPORTED == static_cast<int>(StatusCode::kUnsupported));
static_assert(POLYHEAD_OUT_OF_MEMORY == static_cast<int>(StatusCode::kOutOfMemory));
static_assert(POLYHEAD_INTERNAL == static_cast<int>(StatusCode::kInternal));

extern "C" const char* polyhead_last_error(void) { return polyhead::capi::last_error; }

extern "C" const char* polyhead_status_name(int status) {
  switch (status) {
    case POLYHEAD_OK: return "ok";
    case POLYHEAD_INVALID_ARGUMENT: return "invalid argument";
    case POLYHEAD_UNSUPPORTED: return "unsupported";
    case POLYHEAD_OUT_OF_MEMORY: return "out of memory";
    case POLYHEAD_INTERNAL: return "internal";
  }
  return "unknown";
}
