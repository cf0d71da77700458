// The kernel that one instruction set's functions make: which path of theirs computes what.
#pragma once

#include <algorithm>

#include "contract/kernel.h"
#include "contract/program_call.h"
#include "cpu/attention/attn_weights_tasks.h"
#include "cpu/attention/backward_tasks.h"
#include "cpu/attention/decode_tasks.h"
#include "cpu/attention/functions.h"
#include "cpu/attention/packed_tasks.h"
#include "cpu/attention/score_gradient_tasks.h"
#include "cpu/attention/sink_gradient_tasks.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/tiny_tasks.h"

namespace polyhead::cpu {

// What a set leaves to the others, as a clause; "": nothing. Of registers that hold 16 x 16 words, with bfloat16 or with float32
// and float16 in planes of bfloat16 (cpu/isa/planes.h).
inline std::string leaves_nothing(const AttentionDesc&) { return ""; }
std::string leaves_of_pairs(const AttentionDesc& desc);
std::string leaves_of_planes(const AttentionDesc& desc);

// Whether what is returned beside O and L comes from the general path.
inline bool returns_more(const AttentionDesc& desc) {
  const bool tiny = tiny_takes(desc) && desc.num_heads > 0;  // a mean over no heads is not its business
  return desc.return_column_sums || (desc.return_weights != ReturnWeights::kNone && !tiny);
}

template <const IsaFunctions& functions>
MemorySize scratch_bytes(const AttentionDesc& desc, int num_threads) {
  const MemorySize more = returns_more(desc) ? weights_workspace_bytes(functions, desc, num_threads) : MemorySize();
  if (tiny_takes(desc)) return std::max(more, tiny_workspace_bytes(functions, num_threads));
  if (decode_takes(desc)) return std::max(more, decode_workspace_bytes(functions, desc, num_threads));
  if (desc.packed) return packed_workspace_bytes(functions, desc, num_threads);
  return returns_more(desc) ? more : tiles_workspace_bytes(functions, desc, num_threads);
}

// A workspace holds the table of sequences, then what the path needs.
template <const IsaFunctions& functions>
MemorySize workspace_bytes(const AttentionDesc& desc, int num_threads) {
  return Sequences::table_bytes(desc) + scratch_bytes<functions>(desc, num_threads);
}

// Arguments whose sequences have been read into their workspace: windows and pages are those that were read, and the workspace
// begins behind them.
inline void stand_behind(const AttentionDesc& desc, const Sequences& sequences, ForwardArgs* args) {
  sequences.replace_arrays(args);
  args->workspace = static_cast<char*>(args->workspace) + Sequences::table_bytes(desc).value();
}

template <const IsaFunctions& functions>
void compute_forward(const AttentionDesc& desc, const ForwardArgs& args, const Sequences& sequences, const Run& run) {
  // Where O and L come from another path, they are written over: what else is returned changes no bit.
  if (returns_more(desc)) weights_forward(functions, desc, args, sequences, run);
  if (tiny_takes(desc)) {
    tiny_forward(functions, desc, args, sequences, run);
  } else if (decode_takes(desc)) {
    decode_forward(functions, desc, args, sequences, run);
  } else if (desc.packed) {
    packed_forward(functions, desc, args, sequences, run);
  } else if (!returns_more(desc)) {
    tiles_forward(functions, desc, args, sequences, run);
  }
}

// Arguments are 2 KB and more: a call of a few tokens would notice a copy that it does not need.
template <const IsaFunctions& functions>
Status forward(const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
  Sequences sequences;
  if (Status status = sequences.read(desc, args, args.workspace); !status.ok()) return status;
  if (Status status = check_program_indices(desc, args, sequences); !status.ok()) return status;
  if (Sequences::table_bytes(desc).value() == 0) {
    compute_forward<functions>(desc, args, sequences, run);
    return {};
  }
  ForwardArgs behind = args;
  stand_behind(desc, sequences, &behind);
  compute_forward<functions>(desc, behind, sequences, run);
  return {};
}

template <const IsaFunctions& functions>
MemorySize backward_scratch_bytes(const AttentionDesc& desc, int num_threads) {
  if (tiny_takes(desc)) return tiny_backward_workspace_bytes(functions, num_threads);
  return std::max(gradients_workspace_bytes(functions, desc, num_threads),
                  score_gradients_workspace_bytes(functions, desc, num_threads));
}

template <const IsaFunctions& functions>
MemorySize backward_workspace_bytes(const AttentionDesc& desc, int num_threads) {
  return Sequences::table_bytes(desc) + backward_scratch_bytes<functions>(desc, num_threads);
}

template <const IsaFunctions& functions>
void compute_backward(const AttentionDesc& desc, const BackwardArgs& args, const Sequences& sequences, const Run& run) {
  if (tiny_takes(desc)) {
    tiny_backward(functions, desc, args, sequences, run);
  } else {
    gradients_backward(functions, desc, args, sequences, run);
    score_gradients_backward(functions, desc, args, sequences, run);
  }
  if (args.grad_sink_logits.given()) sink_gradients_backward(desc, args, sequences, run);
}

template <const IsaFunctions& functions>
Status backward(const AttentionDesc& desc, const BackwardArgs& args, const Run& run) {
  Sequences sequences;
  if (Status status = sequences.read(desc, args.forward, args.forward.workspace); !status.ok()) return status;
  if (Status status = check_program_indices(desc, args.forward, sequences); !status.ok()) return status;
  if (Sequences::table_bytes(desc).value() == 0) {
    compute_backward<functions>(desc, args, sequences, run);
    return {};
  }
  BackwardArgs behind = args;
  stand_behind(desc, sequences, &behind.forward);
  compute_backward<functions>(desc, behind, sequences, run);
  return {};
}

// here: why the set cannot run on this machine, or "".
template <std::string (*here)(), std::string (*leaves)(const AttentionDesc&)>
std::string why_not(const AttentionDesc& desc) {
  if (std::string reason = here(); !reason.empty()) return reason;
  if (desc.dtype == DType::kFloat64) return "dtype is float64, takes float32, bfloat16 or float16";
  return leaves(desc);
}

template <std::string (*here)(), const IsaFunctions& functions, std::string (*leaves)(const AttentionDesc&)>
constexpr Kernel kernel_of(const char* name) {
  return {name,
          Device::kCpu,
          why_not<here, leaves>,
          workspace_bytes<functions>,
          backward_workspace_bytes<functions>,
          forward<functions>,
          backward<functions>};
}

}  // namespace polyhead::cpu
