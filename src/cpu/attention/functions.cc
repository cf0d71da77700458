// The table of one instruction set.
#include "cpu/attention/functions.h"

#include "cpu/isa/tile.h"

#ifdef POLYHEAD_ISA_OF_ROWS
// Few queries are left to the set whose vectors these are, and tiny heads and gradients of float32.
namespace polyhead::cpu::POLYHEAD_ISA_OF_ROWS {
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
}  // namespace polyhead::cpu::POLYHEAD_ISA_OF_ROWS
#else
#define POLYHEAD_ISA_OF_ROWS POLYHEAD_ISA
#endif

namespace polyhead::cpu::POLYHEAD_ISA {

#ifdef POLYHEAD_HAS_TMM
#define UNLESS_TMM(function) nullptr
#else
#define UNLESS_TMM(function) function
#endif

const IsaFunctions kFunctions = {kForwardTiles,
                                 forward_scratch_bytes,
                                 forward_tiles,
                                 POLYHEAD_ISA_OF_ROWS::decode_scratch_bytes,
                                 POLYHEAD_ISA_OF_ROWS::decode_partial_bytes,
                                 POLYHEAD_ISA_OF_ROWS::decode_chunk,
                                 POLYHEAD_ISA_OF_ROWS::decode_merge,
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

#ifdef POLYHEAD_HAS_TMM
const IsaFunctions kFloat32Functions = {kForwardTiles,
                                        planes_scratch_bytes,
                                        planes_tiles,
                                        POLYHEAD_ISA_OF_ROWS::decode_scratch_bytes,
                                        POLYHEAD_ISA_OF_ROWS::decode_partial_bytes,
                                        POLYHEAD_ISA_OF_ROWS::decode_chunk,
                                        POLYHEAD_ISA_OF_ROWS::decode_merge,
                                        POLYHEAD_ISA_OF_ROWS::tiny_scratch_bytes,
                                        POLYHEAD_ISA_OF_ROWS::tiny_heads,
                                        POLYHEAD_ISA_OF_ROWS::backward_scratch_bytes,
                                        POLYHEAD_ISA_OF_ROWS::backward_sum_floats,
                                        POLYHEAD_ISA_OF_ROWS::backward_head,
                                        POLYHEAD_ISA_OF_ROWS::backward_keys,
                                        POLYHEAD_ISA_OF_ROWS::backward_queries,
                                        POLYHEAD_ISA_OF_ROWS::score_scratch_bytes,
                                        POLYHEAD_ISA_OF_ROWS::add_score_gradients,
                                        POLYHEAD_ISA_OF_ROWS::store_score_gradients,
                                        POLYHEAD_ISA_OF_ROWS::tiny_backward_scratch_bytes,
                                        POLYHEAD_ISA_OF_ROWS::tiny_backward_heads,
                                        store_mean,
                                        kLanes};
#endif

}  // namespace polyhead::cpu::POLYHEAD_ISA
