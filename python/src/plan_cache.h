// Plans, remembered by what they compute: making one costs more than a small call.
#pragma once

#include <memory>
#include <string_view>

#include "polyhead/attention.h"

namespace polyhead::python {

// plan(desc, kernel) on `executor` (null: default_executor()), out of at most 256 remembered ones; all are forgotten when
// there would be more. Any thread.
Result<std::shared_ptr<const Plan>> cached_plan(const AttentionDesc& desc, std::string_view kernel,
                                                Executor* executor = nullptr);

}  // namespace polyhead::python
