// What was made for the shapes that came last: making it costs more than finding it.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "polyhead/status.h"

namespace polyhead::onnxruntime {

// At most 64 of them, the last one that was used in front. Any thread.
template <class T>
class Recent {
 public:
  // The one of which `fits` is true, or else what make() makes, a Result<T>.
  template <class Fits, class Make>
  Result<T> get(const Fits& fits, const Make& make) {
    constexpr size_t kMost = 64;
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(all_.begin(), all_.end(), fits);
    if (found != all_.end()) {
      std::rotate(all_.begin(), found, found + 1);
      return all_.front();
    }
    Result<T> made = make();
    if (!made.ok()) return made;
    if (all_.size() == kMost) all_.pop_back();
    all_.insert(all_.begin(), *made);
    return made;
  }

  // The same where one may be missing: T(), of pointers.
  template <class Fits>
  T find(const Fits& fits) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(all_.begin(), all_.end(), fits);
    if (found == all_.end()) return T();
    std::rotate(all_.begin(), found, found + 1);
    return all_.front();
  }

 private:
  std::mutex mutex_;
  std::vector<T> all_;
};

}  // namespace polyhead::onnxruntime
