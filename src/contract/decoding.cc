#include "contract/decoding.h"

#include <algorithm>

#include "contract/sequences.h"

namespace polyhead {

void stand_at_step(const AttentionDesc& asked, const StepArgs& args) {
  int64_t *const lengths = args.to, *const offsets = lengths + asked.batch;
  ForwardArgs numbers;
  numbers.seqlens_q = args.seqlens_q, numbers.seqlens_k = args.seqlens_k, numbers.query_offsets = args.query_offsets;
  for (int64_t b = 0; b < asked.batch; ++b) {
    const Sequence s = sequence(asked, numbers, b);
    const int64_t cached = args.joins ? args.step + 1 : s.len_k;
    lengths[b] = args.step < s.len_q ? std::min(s.len_k, cached) : 0;
    if (__builtin_add_overflow(s.offset, args.step, &offsets[b])) offsets[b] = INT64_MAX;
  }
  offsets[asked.batch] = args.step;
}

}  // namespace polyhead
