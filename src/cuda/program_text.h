// A program as source of the device, in the place of program.cuh.
#pragma once

#include <cstdint>
#include <string>

#include "polyhead/attention.h"

namespace polyhead::cuda {

// What the text depends on besides the program, of a desc that has one: its captures' dtypes and which are empty, and whether
// integers need 64 bits.
uint64_t text_variant(const AttentionDesc& desc);

std::string program_text(const AttentionDesc& desc);

}  // namespace polyhead::cuda
