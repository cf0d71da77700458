#include <algorithm>
#include <new>

#include "attention/checks.h"
#include "attention/unchecked.h"
#include "contract/kernel.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

// sum over i in [0, rows) of the number of keys j in [0, keys) with j < i + first
double keys_before(double rows, double keys, double first) {
  const double none = std::clamp(-first, 0.0, rows);        // rows below this see none of them
  const double all = std::clamp(keys - first, none, rows);  // rows from this on see all of them
  return (all - none) * (first + (none + all - 1) / 2) + (rows - all) * keys;
}

// (query, key) pairs of one head that causal and window leave. Where lengths come with the call, sizes stand for them:
// packed sequences count as equally long; an unknown offset as Sk - Sq, as in decoding with a cache.
double visible_pairs(const AttentionDesc& desc) {
  const auto batch = static_cast<double>(desc.batch);
  auto rows = static_cast<double>(desc.seqlen_q), keys = static_cast<double>(desc.seqlen_k);
  if (desc.packed && batch > 0) {
    rows /= batch;
    if (desc.page_size == 0) keys /= batch;  // else they are each sequence's already
  }
  double offset = keys - rows;
  if (desc.query_offset) offset = static_cast<double>(*desc.query_offset);
  if (desc.align == Align::kTopLeft) offset = 0;
  double pairs = rows * keys;
  if (desc.causal || desc.window_right >= 0) {
    const double right = desc.causal ? 0 : static_cast<double>(desc.window_right);
    pairs = keys_before(rows, keys, offset + right + 1);
  }
  if (desc.window_left >= 0) {
    const double hidden = offset - static_cast<double>(desc.window_left);
    const double sinks = std::min(static_cast<double>(desc.sink_keys), keys);
    pairs -= keys_before(rows, keys, hidden) - keys_before(rows, sinks, hidden);
  }
  return batch * pairs;
}

// Why `kernel` does not compute it on `device`; "" if it can.
std::string reason_of(const Kernel& kernel, const AttentionDesc& desc, Device device) {
  std::string reason = kernel.why_not(desc);
  if (!reason.empty() || kernel.device == device) return reason;
  return sentence("computes on ", device_name(kernel.device), ", the call's tensors are on ", device_name(device));
}

}  // namespace

Explanation explain(const AttentionDesc& desc, const PlanOptions& options) try {
  Explanation explanation;
  const Result<Plan> planned = make_plan(desc, options);
  explanation.status = planned.status();
  if (planned.ok()) {
    explanation.kernel = planned->kernel_name();
    explanation.workspace_bytes = planned->workspace_bytes();
    explanation.backward_workspace_bytes = planned->backward_workspace_bytes();
  }
  if (!check_desc(desc).ok()) return explanation;
  explanation.measured = measured_order();
  const Device device = options.where.device.value_or(Device::kCpu);
  for (const Kernel* kernel : kernel_list()) {
    explanation.reasons.push_back({kernel->name, reason_of(*kernel, desc, device)});
  }
  const double pairs = visible_pairs(desc) * static_cast<double>(desc.num_heads);
  const auto dim = static_cast<double>(desc.head_dim), dim_v = static_cast<double>(desc.head_dim_v);
  explanation.flops = 2 * pairs * (dim + dim_v);
  explanation.backward_flops = 2 * pairs * (3 * dim + 2 * dim_v);
  return explanation;
} catch (const std::bad_alloc&) {
  Explanation explanation;
  explanation.status = out_of_memory();
  return explanation;
}

}  // namespace polyhead
