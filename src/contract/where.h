// Where a plan, a product or a block runs, and where a call of it may: one check for all.
#pragma once

#include "contract/linear.h"
#include "contract/operands.h"
#include "core/threads.h"
#include "polyhead/executor.h"
#include "polyhead/status.h"

namespace polyhead {

// Whether a call may say `call` to what was made for `planned`.
Status check_where(const Where& planned, const Where& call);

// What `asked` means: what it leaves out is the CPU, and our own threads.
Result<Where> planned_where(const Where& asked);

Run run_at(const Where& planned, const Where& call, int num_threads);

// Whether a device's kernel may touch the operands of a call, once each has been checked by itself, and its workspace.
Status check_place(const linear::Kernel& kernel, const Operands& operands, const void* workspace,
                   size_t workspace_bytes, const Run& run);

}  // namespace polyhead
