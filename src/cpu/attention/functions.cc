// The table of one instruction set.
#include "cpu/attention/functions.h"

#include "cpu/isa/simd.h"

namespace polyhead::cpu::POLYHEAD_ISA {

const IsaFunctions kFunctions = {forward_scratch_bytes, forward_tiles,       decode_scratch_bytes,
                                 decode_partial_bytes,  decode_chunk,        decode_merge,
                                 tiny_scratch_bytes,    tiny_heads,          backward_scratch_bytes,
                                 backward_sum_floats,   backward_head,       backward_keys,
                                 backward_queries,      score_scratch_bytes, add_score_gradients,
                                 store_score_gradients, add_captures,        tiny_backward_scratch_bytes,
                                 tiny_backward_heads,   store_mean,          kLanes};

}  // namespace polyhead::cpu::POLYHEAD_ISA
