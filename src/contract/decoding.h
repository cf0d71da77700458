// What decoding asks of a device besides attention and products. On the CPU the host does it, which may look at numbers
// there: the cache in src/cache, and stand_at_step().
#pragma once

#include <cstdint>

#include "core/threads.h"
#include "polyhead/attention.h"
#include "polyhead/cache.h"

namespace polyhead {

// The largest number of a dtype that has scales.
constexpr float largest_stored(DType dtype) {
  switch (dtype) {
    case DType::kInt8: return 127;
    case DType::kFloat8E4M3: return 448;
    case DType::kFloat8E5M2: return 57344;
    default: return 7;  // kInt4x2
  }
}

// New tokens on their way into a cache, and their queries (KvCache::append): turned by their positions, multiplied by the
// Hadamard matrix, rounded, stored.
struct AppendArgs {
  KvTensors pool;
  Tensor key, value;                // [batch, time, G, D] and [batch, time, G, Dv]; not given: nothing is stored
  Tensor slots;                     // [batch, time], int32 or int64; what is no slot of the cache is nowhere
  Tensor query, query_out;          // [batch, time, H, D]; not given: there is none
  Tensor positions = {}, cos = {};  // [batch, time] rows of cos, the nearest one counts; not given: nothing turns
  Tensor sin = {};
  Tensor lengths = {};  // [batch]: tokens behind them are not stored and do not turn; not given: there is none
};

// Whole tokens of a cache from some slots to others (KvCache::copy): what is no slot, or goes to none, stays.
struct CopyTokensArgs {
  KvTensors pool;
  Tensor from, to;  // [n], int32 or int64
};

// Tokens of a cache, as numbers (KvCache::read): those of what is no slot are 0.
struct ReadTokensArgs {
  KvTensors pool;
  Tensor slots;       // [n], int32 or int64
  Tensor key, value;  // [n, G, D] and [n, G, Dv]; one may not be given
};

// Of one step of decoding: query number `step` of each sequence alone.
struct StepArgs {
  Tensor seqlens_q, seqlens_k, query_offsets;  // [batch], those that the desc of all steps has
  int64_t step = 0;
  bool joins = false;     // the step has a key of its own, behind which none are
  int64_t* to = nullptr;  // [2 * batch + 1]: the numbers of keys that the queries may see, their offsets, and `step`
};

// `asked`: of all time steps. What lies on the host has been checked.
void stand_at_step(const AttentionDesc& asked, const StepArgs& args);

}  // namespace polyhead
