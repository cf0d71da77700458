// The threads of calls on arrays of NumPy and of DLPack. Those of torch run on torch's own.
#pragma once

#include <cstdint>

#include "polyhead/executor.h"

namespace polyhead::python {

// What set_num_threads() chose; null: nothing yet, so the library's default pool.
Executor* chosen_executor();

int num_threads();

// 1 to 1024, or an exception with a sentence. For the calls that begin from now on, of every thread.
void set_num_threads(int64_t count);

}  // namespace polyhead::python
