// The one place where the library prints: a line for each plan on stderr, where POLYHEAD_VERBOSE asks for it.
#pragma once

#include <string>

namespace polyhead {

// POLYHEAD_VERBOSE as it was when first asked for: set, and neither empty nor "0".
bool is_verbose();

// In one write, so that lines of several threads stay whole.
void print_line(std::string line);

}  // namespace polyhead
