#include "program/call.h"

#include "program/interval.h"
#include "program/scalar.h"

namespace polyhead::program {

Seen seen(const Call& call, const Region& region) {
  if (call.code == nullptr || call.code->mask < 0) return Seen::kAll;
  Interval intervals[kMostInstructions];
  find_intervals(*call.code, call.code->for_mask, call, region, intervals);
  const Interval& mask = intervals[call.code->mask];
  return mask.high == 0 ? Seen::kNone : mask.low == 1 ? Seen::kAll : Seen::kSome;
}

bool shows(const Call& call, const Place& at) {
  if (call.code == nullptr || call.code->mask < 0) return true;
  Scalar values[kMostInstructions];
  evaluate(*call.code, call.code->for_mask, call.captures, at, values);
  return values[call.code->mask].integer != 0;
}

int64_t element(const Call& call, const Pass& pass, int gather, const Place& at) {
  Scalar values[kMostInstructions];
  evaluate_low(*call.code, pass, call.captures, at, values);
  return element(call.code->instructions[gather], call.captures, values);
}

}  // namespace polyhead::program
