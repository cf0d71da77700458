#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "attention/checks.h"
#include "attention/unchecked.h"
#include "attention/words.h"
#include "contract/kernel.h"
#include "contract/sequences.h"
#include "contract/where.h"
#include "core/sentence.h"
#include "core/verbose.h"

namespace polyhead {
namespace {

// Whether a call needs no kernel: no query sees a key, or a sink, and the host reaches what is to be written.
bool host_fills(const AttentionDesc& desc, const Where& where) {
  const bool sinks_seen = desc.has_sink_logits && desc.batch > 0 && desc.num_heads > 0 && desc.seqlen_q > 0;
  return nothing_visible(desc) && !sinks_seen && *where.device == Device::kCpu;
}

// Writes `bits`, one element, to every place of a view that has some.
template <class Bits>
void fill(const Tensor& t, Bits bits) {
  int64_t index[Tensor::kMaxDims] = {};
  int64_t at = 0;
  int dim = 0;
  do {
    static_cast<Bits*>(t.data)[at] = bits;
    for (dim = t.ndim - 1; dim >= 0; --dim) {
      if (++index[dim] < t.dims[dim]) {
        at += t.strides[dim];
        break;
      }
      at -= (t.dims[dim] - 1) * t.strides[dim];
      index[dim] = 0;
    }
  } while (dim >= 0);
}

void fill_number(const Tensor& t, double number) {
  if (t.num_elements() == 0) return;
  switch (t.dtype) {
    case DType::kFloat64: fill(t, number); break;
    case DType::kFloat32: fill(t, static_cast<float>(number)); break;
    default: fill(t, uint16_t{0}); break;  // bfloat16 and float16 outputs are filled with zeros only
  }
}

// The answer where no query sees a key, because some size is 0.
Status forward_of_nothing(const AttentionDesc& desc, std::span<const PlannedOperand> operands,
                          const ForwardArgs& args) {
  if (Status status = check_sequences(desc, args); !status.ok()) return status;
  for (const auto& [row, shape] : operands) {
    if (row.forward != Use::kOutput && row.forward != Use::kOptionalOutput) continue;
    fill_number(row.of(args), row.in_forward == &ForwardArgs::logsumexp ? -INFINITY : 0);
  }
  return {};
}

// No pair, so every gradient is 0.
Status backward_of_nothing(const AttentionDesc& desc, std::span<const PlannedOperand> operands,
                           const BackwardArgs& args) {
  if (Status status = check_sequences(desc, args.forward); !status.ok()) return status;
  if (args.accumulate) return {};
  for (const auto& [row, shape] : operands) {
    if (row.backward == Use::kGradient) fill_number(row.of(args), 0);
  }
  return {};
}

Status workspace_too_large(const char* direction, const char* kernel, const AttentionDesc& desc, int num_threads) {
  return invalid(sentence("the ", direction, " workspace of ", kernel,
                          " is too large, it passes the address space: batch ", desc.batch, ", seqlen_q ",
                          desc.seqlen_q, ", seqlen_k ", desc.seqlen_k, ", num_heads ", desc.num_heads,
                          ", num_heads_kv ", desc.num_heads_kv, ", head_dim ", desc.head_dim, ", head_dim_v ",
                          desc.head_dim_v, ", on ", num_threads, " threads"));
}

}  // namespace

const char* Plan::kernel_name() const { return kernel_->name; }

Status Plan::forward(const ForwardArgs& args) const try {
  if (Status status = check_where(where_, args.where); !status.ok()) return status;
  if (Status status = check_forward_args(desc_, *operands_, args, workspace_bytes_, *where_.device); !status.ok()) {
    return status;
  }
  return forward_unchecked(*this, args);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status Plan::backward(const BackwardArgs& args) const try {
  if (Status status = check_where(where_, args.forward.where); !status.ok()) return status;
  if (Status status = check_backward_args(desc_, *operands_, args, backward_workspace_bytes_, *where_.device);
      !status.ok()) {
    return status;
  }
  return backward_unchecked(*this, args);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status forward_unchecked(const Plan& plan, const ForwardArgs& args) try {
  if (!host_fills(plan.desc_, plan.where_)) {
    return plan.kernel_->forward(plan.desc_, args, run_at(plan.where_, args.where, plan.num_threads_));
  }
  return forward_of_nothing(plan.desc_, *plan.operands_, args);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status backward_unchecked(const Plan& plan, const BackwardArgs& args) try {
  if (!host_fills(plan.desc_, plan.where_)) {
    return plan.kernel_->backward(plan.desc_, args, run_at(plan.where_, args.forward.where, plan.num_threads_));
  }
  return backward_of_nothing(plan.desc_, *plan.operands_, args);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<Plan> make_plan(const AttentionDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  Plan made(desc);
  made.operands_ = std::make_shared<const std::vector<PlannedOperand>>(planned_operands(desc));
  const Result<Where> where = planned_where(options.where);
  if (!where.ok()) return where.status();
  made.where_ = *where;
  const Result<const Kernel*> kernel = choose_kernel(desc, options.kernel, *made.where_.device);
  if (!kernel.ok()) return kernel.status();
  made.kernel_ = *kernel;
  made.num_threads_ = std::max(1, made.where_.executor->num_threads());
  if (host_fills(desc, made.where_)) return made;
  if (made.kernel_->prepare != nullptr) {
    if (Status status = made.kernel_->prepare(desc); !status.ok()) return status;
  }
  const MemorySize forward_bytes = made.kernel_->workspace_bytes(desc, made.num_threads_);
  const MemorySize backward_bytes = made.kernel_->backward_workspace_bytes(desc, made.num_threads_);
  if (!forward_bytes.fits()) return workspace_too_large("forward", made.kernel_->name, desc, made.num_threads_);
  if (!backward_bytes.fits()) return workspace_too_large("backward", made.kernel_->name, desc, made.num_threads_);
  made.workspace_bytes_ = forward_bytes.value();
  made.backward_workspace_bytes_ = backward_bytes.value();
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<Plan> plan(const AttentionDesc& desc, const PlanOptions& options) try {
  Result<Plan> made = make_plan(desc, options);
  if (is_verbose() && made.ok()) {
    print_line(sentence("polyhead bench ", sizes_in_words(desc), options_in_words(desc), program_in_words(desc),
                        run_in_words(made->kernel_name(), *planned_where(options.where))));
  }
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
