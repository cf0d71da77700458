// A program where one query stands for many, as a step of decoding does.
#pragma once

#include "polyhead/program.h"

namespace polyhead {

// The program whose query 0 is query number `first[]` of the given one, and whose offsets are those of the place where it
// stands: a tensor of one int64 that it captures behind the others. The given one, where it reads neither query nor offset;
// an error, where it captures as many tensors as a program may.
Result<SharedProgram> from_first_query(const SharedProgram& program);

}  // namespace polyhead
