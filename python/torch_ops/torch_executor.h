// torch's own thread pool, so that torch.set_num_threads is obeyed and cores are not oversubscribed.
#pragma once

#include "polyhead/executor.h"

namespace polyhead::torch_ops {

// Runs on as many of torch's threads as torch would use now; lives as long as the process. Before torch 2.10, which
// does not lend its threads: polyhead's own pool.
Executor& current_executor();

}  // namespace polyhead::torch_ops
