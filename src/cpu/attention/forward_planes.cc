// Forward of float32 and float16 in registers of 16 x 16 words, as planes of bfloat16 (cpu/isa/planes.h). A file of its own: beside
// it the compiler made functions of what is inline in the code of bfloat16, which lost 4 % (Xeon, family 6 model 167).
#include "cpu/isa/simd.h"

#ifdef POLYHEAD_HAS_TMM
#include "cpu/attention/forward.h"

namespace polyhead::cpu::POLYHEAD_ISA {

size_t planes_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive) {
  return scratch_bytes_of(head_dim, head_dim_v, tiles, additive, Float32Planes::kPlanes);
}

void planes_tiles(const Problem& problem, const ForwardTask& task, void* scratch) {
  const TmmInUse tmm;
  forward_task<Float32Planes>(problem, task, scratch);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
#endif
