// Forward for one instruction set.
#include "cpu/attention/forward.h"

namespace polyhead::cpu::POLYHEAD_ISA {

size_t forward_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive) {
  return scratch_bytes_of(head_dim, head_dim_v, tiles, additive, 1);
}

void forward_tiles(const Problem& problem, const ForwardTask& task, void* scratch) {
  const bool pairs =
      problem.dtype == DType::kBFloat16 && problem.key.scales == nullptr && problem.value.scales == nullptr;
  with_words(pairs, [&]<class Mac>() { forward_task<Mac>(problem, task, scratch); });
}

void store_mean(const Problem& problem, int64_t b, int64_t first_query, int64_t num_queries, const float* mean) {
  const int64_t row = b * problem.weights_stride_b + first_query * problem.weights_stride_q;
  store_probabilities(problem, row, mean, problem.seqlen_k, 0, static_cast<int>(num_queries),
                      1 / static_cast<float>(problem.num_heads));
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
