// Programs, remembered by their text: a call that was made before parses nothing.
#pragma once

#include <memory>
#include <string_view>

#include "polyhead/program.h"

namespace polyhead::python {

// parse_program(text), out of at most 256 remembered ones; all are forgotten when there would be more. Any thread.
Result<std::shared_ptr<const SharedProgram>> cached_program(std::string_view text);

}  // namespace polyhead::python
