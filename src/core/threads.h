// Many tasks on few threads, with scratch memory for each.
#pragma once

#include <cstdint>

#include "polyhead/executor.h"

namespace polyhead {

// Calls task(context, i, lane) exactly once for every i in [0, num_tasks): at most executor.num_threads() at once, each
// of them in a lane of its own, which tells what scratch memory it may use. Tasks start in the order of their index, so
// that a queue sorted longest first ends evenly. With one lane, all run here, in order.
void run_tasks(Executor& executor, int64_t num_tasks, void (*task)(void* context, int64_t index, int lane),
               void* context);

// The same for a callable task(int64_t index, int lane).
template <class Task>
void run_tasks(Executor& executor, int64_t num_tasks, const Task& task) {
  run_tasks(
      executor, num_tasks,
      [](void* context, int64_t index, int lane) { (*static_cast<const Task*>(context))(index, lane); },
      const_cast<Task*>(&task));
}

// What POLYHEAD_THREADS means: its value if it is a number from 1 to kMaxThreads, else `available`.
constexpr int kMaxThreads = 1024;  // not inline: a GNU unique symbol would keep dlclose from unloading the library
int parse_num_threads(const char* text, int available);

}  // namespace polyhead
