// Plans, remembered by what they compute: making one costs more than a small call.
#pragma once

#include <memory>
#include <string_view>

#include "polyhead/attention.h"

namespace polyhead::python {

// plan(desc, {kernel, where}), out of at most 256 remembered ones; all are forgotten when there would be more. The stream
// is each call's own: no plan is made for one. Any thread.
Result<std::shared_ptr<const Plan>> cached_plan(const AttentionDesc& desc, std::string_view kernel, const Where& where);

}  // namespace polyhead::python
