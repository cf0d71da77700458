// The example's own loops on the threads that polyhead has already.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "polyhead/executor.h"

namespace polyhead::demo {

/// Calls body(i) once for every i in [0, count). Which thread takes which i is open: no i may depend on another.
template <class Body>
void for_each(int64_t count, const Body& body) {
  struct Work {
    const Body& body;
    int64_t count;
    std::atomic<int64_t> next{0};
  } work{body, count};
  Executor& executor = default_executor();
  const auto threads = static_cast<int>(std::min<int64_t>(executor.num_threads(), count));
  executor.parallel_for(
      threads,
      [](void* context, int) {
        auto& shared = *static_cast<Work*>(context);
        for (int64_t i = shared.next++; i < shared.count; i = shared.next++) shared.body(i);
      },
      &work);
}

/// Calls body(begin, end) for pieces of [0, count), all of `piece` but the last.
template <class Body>
void for_each_piece(int64_t count, int64_t piece, const Body& body) {
  for_each((count + piece - 1) / piece, [&](int64_t i) { body(i * piece, std::min((i + 1) * piece, count)); });
}

}  // namespace polyhead::demo
