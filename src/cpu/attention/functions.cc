// The table of one instruction set.
#include "cpu/attention/functions.h"

#include "cpu/isa/tile.h"

namespace polyhead::cpu::POLYHEAD_ISA {

#ifdef POLYHEAD_HAS_TMM
#define UNLESS_TMM(function) nullptr
#else
#define UNLESS_TMM(function) function
#endif

const IsaFunctions kFunctions = {kTmm,
                                 kForwardTiles,
                                 forward_scratch_bytes,
                                 forward_tiles,
                                 UNLESS_TMM(decode_scratch_bytes),
                                 UNLESS_TMM(decode_partial_bytes),
                                 UNLESS_TMM(decode_chunk),
                                 UNLESS_TMM(decode_merge),
                                 UNLESS_TMM(tiny_scratch_bytes),
                                 UNLESS_TMM(tiny_heads),
                                 backward_scratch_bytes,
                                 backward_sum_floats,
                                 backward_head,
                                 backward_keys,
                                 backward_queries,
                                 score_scratch_bytes,
                                 add_score_gradients,
                                 store_score_gradients,
                                 UNLESS_TMM(tiny_backward_scratch_bytes),
                                 UNLESS_TMM(tiny_backward_heads),
                                 store_mean,
                                 kLanes};

}  // namespace polyhead::cpu::POLYHEAD_ISA
