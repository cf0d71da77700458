// What the test and its kernel know of each other.
#pragma once

#include "contract/score_option.h"
#include "cpu/attention/functions.h"

namespace polyhead {

extern const ScoreOption kEvenBlocks;

namespace cpu::with_option {
extern const IsaFunctions kFunctions;
}

}  // namespace polyhead
