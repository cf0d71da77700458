// Between which bounds the values of a program lie, for whole ranges of queries and keys: what tells that a block is
// hidden or seen throughout, that integers fit 32 bits, that an index stays within its tensor. Never too narrow.
#pragma once

#include <cstdint>

#include "program/call.h"
#include "program/schedule.h"

namespace polyhead::program {

// All bounds are themselves within. A bool is an int from 0 to 1.
struct Interval {
  int64_t low, high;
  double least, most;  // of a float
  bool may_be_nan;
};

// What each capture of ints holds: call->ints and call->rises. Its captures have been set; of those without data the dtype
// tells.
void find_ranges(const Program& program, Call* call);

// The intervals of the instructions of a pass, each at its number.
void find_intervals(const Code& code, const Pass& pass, const Call& call, const Region& region, Interval* intervals);

// Whether all integers of the program fit 32 bits there, those between too.
bool fits_int32(const Code& code, const Call& call, const Region& region);

}  // namespace polyhead::program
