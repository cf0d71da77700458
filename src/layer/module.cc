#include "layer/module.h"

#include <algorithm>
#include <new>

#include "contract/sequences.h"
#include "core/sentence.h"
#include "layer/append_steps.h"
#include "layer/arguments.h"
#include "layer/attention_steps.h"
#include "layer/call_checks.h"

namespace polyhead {
namespace {

// What must have been done with the reserve before.
uint64_t stage_before(Pass pass) {
  if (!is_backward(pass)) return 0;
  return pass == Pass::kBackward ? ReserveHeader::kForwardDone : ReserveHeader::kBackwardDataDone;
}

// Lengths are data: they are looked at in every call. A device bounds them where they are used.
Status check_lengths(const Module& module, const Call& call) {
  const AttentionDesc& asked = module.asked;
  if (!module.on_host()) return {};
  if (asked.batch == 0 || (!asked.has_seqlens_q && !asked.has_seqlens_k)) return {};
  for (int64_t n = 0; n < module.beams; ++n) {
    if (Status status = check_sequences(asked, sequence_args(call, n)); !status.ok()) return status;
  }
  return {};
}

}  // namespace

void expect_parameters(const Module& module, ParameterUse use, StepList* list) {
  const bool gradients = use == ParameterUse::kGradients, matrices = use == ParameterUse::kMatrices;
  for (size_t i = 0; i < (matrices ? module.num_matrices : module.parameters.size()); ++i) {
    const Parameter& p = module.parameters[i];
    const int argument = (gradients ? kArgGradWeights : kArgWeights) + static_cast<int>(i);
    Expected& e = list->expected.emplace_back(expect(argument, gradients ? p.grad_name : p.name, p.shape));
    e.refusal = module.without;
    if (gradients) e.role = Role::kOutput;
    if (e.kind == Expected::Kind::kRefused) continue;
    if (use == ParameterUse::kForward && i < module.num_matrices) e.kind = Expected::Kind::kUnlessPrepacked;
    if (gradients) e.kind = Expected::Kind::kOptional;
  }
}

Status set_where(const Where& asked, Module* module) {
  const Result<Where> where = planned_where(asked);
  if (!where.ok()) return where.status();
  module->where = *where;
  module->num_threads = std::max(1, where->executor->num_threads());
  return {};
}

Status make_lists(Module& module, std::span<const Pass> passes) {
  std::vector<MatrixSize> matrices(module.num_matrices);
  for (size_t i = 0; i < matrices.size(); ++i) {
    const OperandShape& shape = module.parameters[i].shape;
    if (shape.ndim > 0) matrices[i] = {shape.dims[0].size, shape.dims[1].size};
  }
  bool fits = lay_out_prepacked(*module.linear, module.dtype, matrices, &module.prepacked);
  for (const Pass pass : passes) {
    if (!fits) break;
    Memory workspace(Place::Room::kWorkspace), reserve(Place::Room::kReserve);
    StepList& list = module.lists[static_cast<int>(pass)];
    reserve.map.take_bytes(sizeof(ReserveHeader));
    module.emit(pass, workspace, reserve, &list);
    fits = reserve.map.fits() && finish(module.machine(), workspace, &list, pass == Pass::kOneStep);
    // A caller may give one and the same workspace to all passes of a direction.
    size_t& most = is_backward(pass) ? module.backward_workspace_bytes : module.workspace_bytes;
    most = std::max(most, workspace.map.bytes());
    if (has_reserve(pass)) module.reserve_bytes = std::max(module.reserve_bytes, reserve.map.bytes());
  }
  if (!fits) return invalid(sentence("the ", module.name, " is too large: its memory passes the address space"));
  expect_parameters(module, ParameterUse::kMatrices, &module.pack);
  return {};
}

Status compute(const Module& module, Pass pass, const Call& call) try {
  const StepList& list = module.steps(pass);
  if (Status status = check_where(module.where, call.where); !status.ok()) return status;
  Status status = module.check(pass, call);
  if (status.ok()) status = check_call(module, list, stage_before(pass), call);
  if (status.ok()) status = check_lengths(module, call);
  if (status.ok()) status = check_program(module.asked, list, call, module.on_host() ? module.beams : 0);
  // What it leaves in the workspace stands until the steps. A device looks itself.
  if (status.ok() && module.on_host()) status = check_appends(list, call);
  if (!status.ok()) return status;
  if (pass == Pass::kTraining && module.on_host()) begin_reserve(call.reserve, module.fingerprint, call.dropouts);
  status = run(module.machine(call.where), list, call);
  const bool goes_on =
      pass == Pass::kBackward && module.on_host() && !module.steps(Pass::kBackwardWeights).expected.empty();
  if (status.ok() && goes_on) set_stage(call.reserve, ReserveHeader::kBackwardDataDone);
  return status;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status forward(const Module& module, const Call& call) {
  const Pass without_reserve = call.step >= 0 ? Pass::kOneStep : Pass::kInference;
  return compute(module, call.reserve != nullptr ? Pass::kTraining : without_reserve, call);
}

Status prepack_weights(const Module& module, const Call& call, void* prepacked, size_t bytes) try {
  Status status = check_where(module.where, call.where);
  if (status.ok()) status = check_pack(module, prepacked, bytes, call);
  if (!status.ok()) return status;
  linear::Matrix matrices[PrepackedLayout::kMaxMatrices];
  for (size_t i = 0; i < module.num_matrices; ++i) matrices[i] = weight_matrix(call.tensors[kArgWeights + i]);
  return write_prepacked(*module.linear, module.prepacked, {matrices, module.num_matrices}, prepacked,
                         module.machine(call.where).run);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
