// Where the work of a call runs: our own pool by default, or the host's.
#pragma once

#include <optional>

#include "polyhead/api.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// Runs independent pieces of work. Implement this to lend polyhead a host's own threads (torch's, ONNX Runtime's,
/// XLA's), so that cores are never oversubscribed. Results do not depend on the number of threads.
class POLYHEAD_API Executor {
 public:
  virtual ~Executor() = default;

  /// How many calls of `body` may usefully run at once; at least 1. It is asked when a plan is made and may change
  /// afterwards: a plan keeps the number for which its workspace is sized, and its calls cut their work by that.
  virtual int num_threads() const = 0;

  /// Calls body(context, i) exactly once for every i in [0, count), in any order and on any threads, the caller's
  /// included, and returns when all have ended. `count` is at most what num_threads() was when the plan was made, which
  /// may be more than there are now: then some run one after the other. Must be callable from several threads at once
  /// and from inside `body`.
  virtual void parallel_for(int count, void (*body)(void* context, int index), void* context) = 0;
};

/// The library's own pool, shared by the process: POLYHEAD_THREADS threads (default: the CPUs this process may run on, or
/// its container's quota of them, rounded up, if that is less).
/// Threads start at the first call that uses them, sleep when idle, and start anew in a forked child. A child that `body`
/// itself forks keeps its thread alone: what other threads were computing of that call is never finished there. On the
/// caller's thread parallel_for returns all the same; a thread of the pool's ends, and the child with it, with status 0.
POLYHEAD_API Executor& default_executor();

/// Where a plan or a call computes. What is left out in a call is as the plan says.
struct Where {
  std::optional<Device> device = {};  ///< of the tensors and the workspace. Default: the plan's; of a plan: the CPU
  Executor* executor = nullptr;       ///< the threads; must outlive their use. Default: the plan's; of a plan: ours
  void* stream = nullptr;             ///< of a GPU: the queue that the work is put on. The CPU has none
};

/// A pool of `num_threads` (at least 1; 1 runs everything on the calling thread). The caller deletes it, after the
/// plans that use it. Null if memory runs out.
POLYHEAD_API Executor* new_thread_pool(int num_threads);

}  // namespace polyhead
