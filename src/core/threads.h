// Many tasks on few threads, with scratch memory for each.
#pragma once

#include <cstdint>

#include "polyhead/executor.h"

namespace polyhead {

// What a kernel runs on. The number of threads is the one that memory was sized for: what the executor says by now does
// not matter.
struct Run {
  Executor* executor = nullptr;
  int num_threads = 1;
  void* stream = nullptr;  // of a GPU

  Run() = default;
  Run(Executor& all) : Run(&all, all.num_threads()) {}  // NOLINT: implicit on purpose
  Run(Executor* threads, int count, void* queue = nullptr) : executor(threads), num_threads(count), stream(queue) {}
};

// Calls task(context, i, lane) exactly once for every i in [0, num_tasks): at most run.num_threads at once, each of them
// in a lane of its own, which tells what scratch memory it may use. Tasks start in the order of their index, so that a
// queue sorted longest first ends evenly. With one lane, all run here, in order.
void run_tasks(const Run& run, int64_t num_tasks, void (*task)(void* context, int64_t index, int lane), void* context);

// The same for a callable task(int64_t index, int lane).
template <class Task>
void run_tasks(const Run& run, int64_t num_tasks, const Task& task) {
  run_tasks(
      run, num_tasks, [](void* context, int64_t index, int lane) { (*static_cast<const Task*>(context))(index, lane); },
      const_cast<Task*>(&task));
}

// What POLYHEAD_THREADS means: its value if it is a number from 1 to kMaxThreads, else `available`.
constexpr int kMaxThreads = 1024;  // not inline: a GNU unique symbol would keep dlclose from unloading the library
int parse_num_threads(const char* text, int available);

}  // namespace polyhead
