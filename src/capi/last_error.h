// How a C++ outcome leaves through the C interface: a status, and a sentence kept for the calling thread.
#pragma once

#include <exception>
#include <new>
#include <string_view>

#include "polyhead/polyhead.h"
#include "polyhead/status.h"

namespace polyhead::capi {

// Keeps `message` as this thread's last error; cut to what the thread's buffer holds.
polyhead_status fail(StatusCode code, std::string_view message) noexcept;

inline polyhead_status outcome(const Status& status) noexcept {
  return status.ok() ? POLYHEAD_OK : fail(status.code(), status.message());
}

// Runs `body`, which returns a Status. Nothing that it throws gets out.
template <class Body>
polyhead_status guarded(Body&& body) noexcept {
  try {
    return outcome(body());
  } catch (const std::bad_alloc&) {
    return fail(StatusCode::kOutOfMemory, "memory ran out");
  } catch (const std::exception& e) {
    return fail(StatusCode::kInternal, e.what());
  } catch (...) {
    return fail(StatusCode::kInternal, "an exception of an unknown type came out of a callback");
  }
}

}  // namespace polyhead::capi
