#include "torch_executor.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "stable_abi.h"

namespace polyhead::torch_ops {
namespace {

class TorchExecutor : public Executor {
 public:
  explicit TorchExecutor(int num_threads) : num_threads_(num_threads) {}

  int num_threads() const override { return num_threads_; }

  void parallel_for(int count, void (*body)(void* context, int index), void* context) override {
    if (count == 1) return body(context, 0);
    Pieces pieces{body, context};
    const auto run = [](int64_t begin, int64_t end, void* self) {
      const auto* all = static_cast<const Pieces*>(self);
      for (int64_t i = begin; i < end; ++i) all->body(all->context, static_cast<int>(i));
    };
    torch_parallel_for(0, count, 1, run, &pieces);  // fails only if a body throws, and ours do not
  }

 private:
  struct Pieces {
    void (*body)(void* context, int index);
    void* context;
  };

  int num_threads_;
};

// One for each number of threads that was ever set: an executor's number is fixed.
Executor& executor_with(int num_threads) {
  static std::mutex mutex;
  static auto* const executors = new std::map<int, std::unique_ptr<TorchExecutor>>;  // outlives every thread
  const std::lock_guard lock(mutex);
  auto& executor = (*executors)[num_threads];
  if (!executor) executor = std::make_unique<TorchExecutor>(num_threads);
  return *executor;
}

}  // namespace

Executor& current_executor() {
  uint32_t num_threads = 0;
  if (torch_parallel_for == nullptr || torch_get_num_threads == nullptr || torch_get_num_threads(&num_threads) != 0) {
    return default_executor();
  }
  thread_local uint32_t last_num_threads = 0;
  thread_local Executor* last = nullptr;
  if (last == nullptr || num_threads != last_num_threads) {
    last = &executor_with(std::max(1, static_cast<int>(num_threads)));
    last_num_threads = num_threads;
  }
  return *last;
}

}  // namespace polyhead::torch_ops
