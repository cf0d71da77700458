// The kernel that computes even_blocks.h, by tiles alone, and what the contract is told of the option: a desc names it, and
// a plan's calls give what it captures.
#include "score_option/kernel.h"

#include <algorithm>

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/backward_tasks.h"
#include "cpu/attention/score_gradient_tasks.h"
#include "cpu/attention/tiles.h"

namespace polyhead {

static constexpr Capture kCaptures[] = {
    {"parity_bias", [](const AttentionDesc& desc) {
       return OperandShape(DType::kFloat32, {{"num_heads", desc.num_heads}, {"parities", 2}});
     }}};
const ScoreOption kEvenBlocks = {"even_blocks", kCaptures};

namespace {

using cpu::with_option::kFunctions;

Status forward(const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
  Sequences sequences;
  if (Status status = sequences.read(desc, args, nullptr); !status.ok()) return status;
  cpu::tiles_forward(kFunctions, desc, args, sequences, run);
  return {};
}

Status backward(const AttentionDesc& desc, const BackwardArgs& args, const Run& run) {
  Sequences sequences;
  if (Status status = sequences.read(desc, args.forward, nullptr); !status.ok()) return status;
  cpu::gradients_backward(kFunctions, desc, args, sequences, run);
  cpu::score_gradients_backward(kFunctions, desc, args, sequences, run);
  return {};
}

}  // namespace

extern const Kernel kExtraKernel;
const Kernel kExtraKernel = {
    "even_blocks",
    Device::kCpu,
    [](const AttentionDesc& desc) {
      if (desc.dtype != DType::kFloat32) return std::string("dtype is not float32");
      return other_score_option(desc, &kEvenBlocks);
    },
    [](const AttentionDesc& desc, int threads) { return cpu::tiles_workspace_bytes(kFunctions, desc, threads); },
    [](const AttentionDesc& desc, int threads) {
      return std::max(cpu::gradients_workspace_bytes(kFunctions, desc, threads),
                      cpu::score_gradients_workspace_bytes(kFunctions, desc, threads));
    },
    forward,
    backward,
};

}  // namespace polyhead
