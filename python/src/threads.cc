#include "threads.h"

#include <atomic>
#include <map>
#include <mutex>
#include <new>

#include "arrays.h"

namespace polyhead::python {
namespace {

constexpr int kMostThreads = 1024;

std::atomic<Executor*> chosen = nullptr;

// A pool for each number that was asked for, never deleted: remembered plans and running calls use it. Its threads start
// at the first call that needs them, and sleep when idle.
Executor* pool_of(int count) {
  static std::mutex mutex;
  static auto* const pools = new std::map<int, Executor*>;
  const std::lock_guard lock(mutex);
  Executor*& pool = (*pools)[count];
  if (pool == nullptr) pool = new_thread_pool(count);
  return pool;
}

}  // namespace

Executor* chosen_executor() { return chosen.load(std::memory_order_relaxed); }

int num_threads() {
  Executor* const executor = chosen_executor();
  return (executor != nullptr ? *executor : default_executor()).num_threads();
}

void set_num_threads(int64_t count) {
  if (count < 1 || count > kMostThreads)
    bad_value("num_threads is %lld, must be 1 to %d", static_cast<long long>(count), kMostThreads);
  Executor* const pool =
      count == default_executor().num_threads() ? &default_executor() : pool_of(static_cast<int>(count));
  if (pool == nullptr) throw std::bad_alloc();
  chosen.store(pool, std::memory_order_relaxed);
}

}  // namespace polyhead::python
