#include "cpu/attention/tiny_tasks.h"

#include <algorithm>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

// Heads of a task: 128, or fewer, in whole vectors, until every thread has two tasks. They change no bit.
int64_t task_heads(int64_t num_heads, int num_threads) {
  constexpr int64_t kMost = 128, kVector = 16;
  return std::clamp(num_heads / (2 * int64_t{num_threads}) / kVector * kVector, kVector, kMost);
}

bool tiny(int64_t size) { return size > 0 && size <= kTinySize; }

}  // namespace

bool tiny_takes(const AttentionDesc& desc) {
  const bool sizes = tiny(desc.seqlen_q) && tiny(desc.seqlen_k) && tiny(desc.head_dim) && tiny(desc.head_dim_v);
  // All heads see the same keys, and that is all there is to the scores.
  return sizes && !desc.packed && !desc.has_seqlens_q && !desc.has_seqlens_k && !desc.has_query_offsets &&
         !desc.attn_mask.given && !desc.attn_bias.given && desc.alibi_slopes_ndim == 0 && desc.dropout_p == 0 &&
         desc.sink_keys == 0 && desc.program == nullptr && desc.normalizer == Normalizer::kSoftmax &&
         key_dtype(desc) == desc.dtype && value_dtype(desc) == desc.dtype;
}

MemorySize tiny_workspace_bytes(const IsaFunctions& functions, int num_threads) {
  return MemorySize(functions.tiny_scratch_bytes()) * num_threads;
}

void tiny_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                  const Sequences& sequences, const Run& run) {
  const int64_t num_heads = desc.batch * desc.num_heads;
  if (num_heads == 0) return;
  const Problem p = problem(desc, args);
  const Sequence& s = sequences[0];
  const bool mean = desc.return_weights == ReturnWeights::kMean;
  const int64_t heads = mean ? desc.num_heads : task_heads(num_heads, run.num_threads);
  run_tasks(run, pieces(num_heads, heads), [&](int64_t index, int lane) {
    const int64_t first = index * heads;
    functions.tiny_heads(
        p, s, first, std::min(first + heads, num_heads), mean,
        static_cast<char*>(args.workspace) + functions.tiny_scratch_bytes() * static_cast<size_t>(lane));
  });
}

MemorySize tiny_backward_workspace_bytes(const IsaFunctions& functions, int num_threads) {
  return MemorySize(functions.tiny_backward_scratch_bytes()) * num_threads;
}

void tiny_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                   const Sequences& sequences, const Run& run) {
  const int64_t num_heads = desc.batch * desc.num_heads_kv;
  if (num_heads == 0 || !asks_for_products(args)) return;
  const BackwardProblem p = backward_problem(desc, args);
  const Sequence& s = sequences[0];
  char* workspace = static_cast<char*>(args.forward.workspace);
  const int64_t heads = task_heads(num_heads, run.num_threads);
  run_tasks(run, pieces(num_heads, heads), [&](int64_t index, int lane) {
    const int64_t first = index * heads;
    functions.tiny_backward_heads(p, s, first, std::min(first + heads, num_heads),
                                  workspace + functions.tiny_backward_scratch_bytes() * static_cast<size_t>(lane));
  });
}

}  // namespace polyhead::cpu
