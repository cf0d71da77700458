// Storing new keys and values in a cache, as a step of a layer: its arguments are the layer's (arguments.h).
#pragma once

#include "layer/module.h"

namespace polyhead {

// What a list cannot tell about a call with desc.cache. A block's query may be its key and value too.
Status check_call_on_cache(const LayerDesc& desc, bool is_block, Pass pass, const Call& call);

// Slots and positions are data: on the host they are looked at in every call, and read into the workspace, which has been
// checked, as have lengths. An error names the argument.
Status check_appends(const StepList& list, const Call& call);

Status append(const AppendStep& step, const Machine& machine, const Call& call);

}  // namespace polyhead
