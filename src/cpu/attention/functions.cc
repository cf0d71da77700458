// The table of one instruction set.
#include "cpu/attention/functions.h"

#include "cpu/isa/tile.h"

#ifdef POLYHEAD_ISA_OF_FEW
// Few queries and tiny heads are those of vectors, and gradients of float32.
namespace polyhead::cpu::POLYHEAD_ISA_OF_FEW {
decltype(POLYHEAD_ISA::decode_scratch_bytes) decode_scratch_bytes;
decltype(POLYHEAD_ISA::decode_partial_bytes) decode_partial_bytes;
decltype(POLYHEAD_ISA::decode_chunk) decode_chunk;
decltype(POLYHEAD_ISA::decode_merge) decode_merge;
decltype(POLYHEAD_ISA::tiny_scratch_bytes) tiny_scratch_bytes;
decltype(POLYHEAD_ISA::tiny_heads) tiny_heads;
decltype(POLYHEAD_ISA::tiny_backward_scratch_bytes) tiny_backward_scratch_bytes;
decltype(POLYHEAD_ISA::tiny_backward_heads) tiny_backward_heads;
decltype(POLYHEAD_ISA::backward_scratch_bytes) backward_scratch_bytes;
decltype(POLYHEAD_ISA::backward_sum_floats) backward_sum_floats;
decltype(POLYHEAD_ISA::backward_head) backward_head;
decltype(POLYHEAD_ISA::backward_keys) backward_keys;
decltype(POLYHEAD_ISA::backward_queries) backward_queries;
decltype(POLYHEAD_ISA::score_scratch_bytes) score_scratch_bytes;
decltype(POLYHEAD_ISA::add_score_gradients) add_score_gradients;
decltype(POLYHEAD_ISA::store_score_gradients) store_score_gradients;
}  // namespace polyhead::cpu::POLYHEAD_ISA_OF_FEW
#else
#define POLYHEAD_ISA_OF_FEW POLYHEAD_ISA
#endif

namespace polyhead::cpu::POLYHEAD_ISA {

// Forward by the functions forward_..., backward by those of `isa`.
#define FUNCTIONS(forward, isa)                                                                                        \
  {                                                                                                                    \
    kForwardTiles, forward##_scratch_bytes, forward##_tiles, POLYHEAD_ISA_OF_FEW::decode_scratch_bytes,                \
        POLYHEAD_ISA_OF_FEW::decode_partial_bytes, POLYHEAD_ISA_OF_FEW::decode_chunk,                                  \
        POLYHEAD_ISA_OF_FEW::decode_merge, POLYHEAD_ISA_OF_FEW::tiny_scratch_bytes, POLYHEAD_ISA_OF_FEW::tiny_heads,   \
        isa::backward_scratch_bytes, isa::backward_sum_floats, isa::backward_head, isa::backward_keys,                 \
        isa::backward_queries, isa::score_scratch_bytes, isa::add_score_gradients, isa::store_score_gradients,         \
        POLYHEAD_ISA_OF_FEW::tiny_backward_scratch_bytes, POLYHEAD_ISA_OF_FEW::tiny_backward_heads, store_mean, kLanes \
  }

const IsaFunctions kFunctions = FUNCTIONS(forward, POLYHEAD_ISA);
#ifdef POLYHEAD_HAS_TMM
const IsaFunctions kFloat32Functions = FUNCTIONS(planes, POLYHEAD_ISA_OF_FEW);
#endif

}  // namespace polyhead::cpu::POLYHEAD_ISA
