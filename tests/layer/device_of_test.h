// A device whose memory the host cannot touch: the reference's kernels, under the name cuda_of_test.
#pragma once

#include <string>

namespace polyhead::testing {

// Where a stream of this device is; any other is refused, as is memory that was not lent.
void* stream_of_test();

// Counts the verbs that were called since this was last asked.
int take_calls();

// The next verb of so many from here on fails: 0 the next. -1: none.
void fail_call(int index);

}  // namespace polyhead::testing
