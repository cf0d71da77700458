// Which calls the operators computed: what polyhead.torch.report() tells.
#pragma once

#include <cstdint>

#include "polyhead/api.h"
#include "polyhead/attention.h"

namespace polyhead::torch_ops {

// The operators, in the order of _cpp.py.
enum class Counted : int32_t {
  kAttentionForward,
  kAttentionBackward,
  kAttentionBlockForward,
  kAttentionBlockBackward,
  kFeedForwardBlockForward,
  kFeedForwardBlockBackward,
};

// Read by polyhead/torch/_cpp.py, which declares it anew.
struct CallCount {
  int32_t op = 0;     // Counted
  int32_t dtype = 0;  // DType
  int32_t packed = 0;
  int32_t other = 0;  // 1: of any sizes, once there are too many to tell apart
  int64_t batch = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t num_heads = 0;
  int64_t num_heads_kv = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  const char* kernel = nullptr;  // for the life of the process
  int64_t count = 0;
};

// Counts a call that has computed, under these sizes and dtype. Any thread.
void count_call(Counted op, const AttentionDesc& sizes, const char* kernel);

}  // namespace polyhead::torch_ops

// Fills at most `capacity` of `counts` and returns how many there are; where all of them fit, `reset` begins anew.
extern "C" POLYHEAD_API int64_t polyhead_torch_call_counts(polyhead::torch_ops::CallCount* counts, int64_t capacity,
                                                           int32_t reset);
