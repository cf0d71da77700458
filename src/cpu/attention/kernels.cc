// The CPU kernels: which desc each takes, and by which path.
#include "cpu/attention/kernels.h"

#include <algorithm>

#include "cpu/attention/backward_tasks.h"
#include "cpu/attention/decode_tasks.h"
#include "cpu/attention/functions.h"
#include "cpu/attention/score_gradient_tasks.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/tiny_tasks.h"
#include "cpu/attention/weights_tasks.h"
#include "cpu/isa/isa.h"

namespace polyhead {
namespace cpu {
namespace {

// Whether what is returned beside O and L comes from the general path.
bool returns_more(const AttentionDesc& desc) {
  const bool tiny = tiny_takes(desc) && desc.num_heads > 0;  // a mean over no heads is not its business
  return desc.return_column_sums || (desc.return_weights != ReturnWeights::kNone && !tiny);
}

template <const IsaFunctions& functions>
size_t workspace_bytes(const AttentionDesc& desc, int num_threads) {
  const size_t more = returns_more(desc) ? weights_workspace_bytes(functions, desc, num_threads) : 0;
  if (tiny_takes(desc)) return std::max(more, tiny_workspace_bytes(functions, num_threads));
  if (decode_takes(desc)) return std::max(more, decode_workspace_bytes(functions, desc, num_threads));
  return returns_more(desc) ? more : tiles_workspace_bytes(functions, desc, num_threads);
}

template <const IsaFunctions& functions>
void forward(const AttentionDesc& desc, const ForwardArgs& args, Executor& executor) {
  // Where O and L come from another path, they are written over: what else is returned changes no bit.
  if (returns_more(desc)) weights_forward(functions, desc, args, executor);
  if (tiny_takes(desc)) return tiny_forward(functions, desc, args, executor);
  if (decode_takes(desc)) return decode_forward(functions, desc, args, executor);
  if (!returns_more(desc)) tiles_forward(functions, desc, args, executor);
}

template <const IsaFunctions& functions>
size_t backward_workspace_bytes(const AttentionDesc& desc, int num_threads) {
  if (tiny_takes(desc)) return tiny_backward_workspace_bytes(functions, num_threads);
  return std::max(gradients_workspace_bytes(functions, desc, num_threads),
                  score_gradients_workspace_bytes(functions, desc, num_threads));
}

template <const IsaFunctions& functions>
void backward(const AttentionDesc& desc, const BackwardArgs& args, Executor& executor) {
  if (tiny_takes(desc)) return tiny_backward(functions, desc, args, executor);
  gradients_backward(functions, desc, args, executor);
  score_gradients_backward(functions, desc, args, executor);
}

std::string why_not(const AttentionDesc& desc, bool has_isa, const char* missing) {
  if (!has_isa) return std::string("this CPU has no ") + missing;
  if (desc.dtype == DType::kFloat64) return "dtype is float64, takes float32, bfloat16 or float16";
  return "";
}

}  // namespace
}  // namespace cpu

constexpr Kernel kCpuGeneric = {"cpu_generic",
                                [](const AttentionDesc& desc) { return cpu::why_not(desc, true, ""); },
                                cpu::workspace_bytes<cpu::generic::kFunctions>,
                                cpu::backward_workspace_bytes<cpu::generic::kFunctions>,
                                cpu::forward<cpu::generic::kFunctions>,
                                cpu::backward<cpu::generic::kFunctions>};
#if defined(__x86_64__)
constexpr Kernel kCpuAvx2 = {
    "cpu_avx2",
    [](const AttentionDesc& desc) { return cpu::why_not(desc, cpu::isa().avx2, "AVX2 with FMA and F16C"); },
    cpu::workspace_bytes<cpu::avx2::kFunctions>,
    cpu::backward_workspace_bytes<cpu::avx2::kFunctions>,
    cpu::forward<cpu::avx2::kFunctions>,
    cpu::backward<cpu::avx2::kFunctions>};
constexpr Kernel kCpuAvx512 = {
    "cpu_avx512",
    [](const AttentionDesc& desc) { return cpu::why_not(desc, cpu::isa().avx512, "AVX-512 (F, BW, DQ, VL)"); },
    cpu::workspace_bytes<cpu::avx512::kFunctions>,
    cpu::backward_workspace_bytes<cpu::avx512::kFunctions>,
    cpu::forward<cpu::avx512::kFunctions>,
    cpu::backward<cpu::avx512::kFunctions>};
constexpr Kernel kCpuAvx512Bf16 = {
    "cpu_avx512bf16",
    [](const AttentionDesc& desc) { return cpu::why_not(desc, cpu::isa().avx512bf16, "AVX512_BF16"); },
    cpu::workspace_bytes<cpu::avx512bf16::kFunctions>,
    cpu::backward_workspace_bytes<cpu::avx512bf16::kFunctions>,
    cpu::forward<cpu::avx512bf16::kFunctions>,
    cpu::backward<cpu::avx512bf16::kFunctions>};
#endif

}  // namespace polyhead
