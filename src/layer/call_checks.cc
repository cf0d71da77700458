#include "layer/call_checks.h"

#include <cmath>

#include "core/layout.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

bool same_dims(const OperandShape& a, const OperandShape& b) {
  if (a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i) {
    if (a.dims[i].size != b.dims[i].size) return false;
  }
  return true;
}

// Whether it is an earlier gradient too: inputs that are one tensor may have one gradient.
bool is_earlier(const StepList& list, const Call& call, const Expected& e) {
  for (const Expected& earlier : list.expected) {
    if (&earlier == &e) return false;
    if (!earlier.may_be_shared || !same_dims(earlier.shape, e.shape)) continue;
    if (same_view(call.tensors[e.argument], call.tensors[earlier.argument])) return true;
  }
  return false;
}

Status check_tensors(Operands& operands, const StepList& list, const Call& call) {
  for (const Expected& e : list.expected) {
    const Tensor& t = call.tensors[e.argument];
    switch (e.kind) {
      case Expected::Kind::kRefused:
        if (t.given()) return invalid(sentence(e.name, " is given, but ", e.refusal));
        continue;
      case Expected::Kind::kUnlessPrepacked:
        if (call.prepacked_weights != nullptr) continue;
        break;
      case Expected::Kind::kOptional:
        if (!t.given() || (e.may_be_shared && is_earlier(list, call, e))) continue;
        break;
      case Expected::Kind::kRequired: break;
    }
    OperandShape shape = e.shape;
    if (e.rows_of >= 0) shape.dims[0].size = call.tensors[e.rows_of].dims[0];
    if (Status status = operands.add(e.role, e.name, t, shape); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Expected expect(int argument, const char* name, const OperandShape& shape) {
  Expected e;
  e.argument = argument;
  e.name = name;
  e.shape = shape;
  if (shape.ndim == 0) e.kind = Expected::Kind::kRefused;
  return e;
}

Expected refuse(int argument, const char* name) { return expect(argument, name, {}); }

void expect_norm(const NormDesc& desc, Role role, int first_argument, int64_t size, DType dtype, StepList* list) {
  const bool gradient = role == Role::kOutput, normed = desc.kind != NormKind::kNone;
  const struct {
    const char* name;
    bool asked;
  } vectors[] = {{gradient ? "grad_norm.gamma" : "norm.gamma", normed && desc.gamma},
                 {gradient ? "grad_norm.beta" : "norm.beta", normed && desc.beta}};
  for (const auto& vector : vectors) {
    const OperandShape shape = vector.asked ? OperandShape(dtype, {{"size", size}}) : OperandShape();
    Expected& e = list->expected.emplace_back(expect(first_argument++, vector.name, shape));
    e.role = role;
    e.shape.takes = OperandShape::Takes::kDtypeOrFloat32;
    if (gradient && vector.asked) e.kind = Expected::Kind::kOptional;
  }
}

Status check_call(const Module& module, const StepList& list, uint64_t stage_before, const Call& call) {
  const bool backward = stage_before != 0;
  if (backward && call.reserve == nullptr) return invalid("reserve is null: backward needs what forward wrote there");
  Operands operands(*module.where.device);
  Tensor prepacked_view, reserve_view;
  const bool has_prepacked = call.prepacked_weights != nullptr && !backward;
  Status status;
  if (has_prepacked) {
    status = operands.add_memory(Role::kInput, "prepacked_weights", call.prepacked_weights,
                                 call.prepacked_weights_bytes, module.prepacked.bytes, &prepacked_view);
  }
  if (status.ok()) status = check_tensors(operands, list, call);
  if (status.ok() && call.reserve != nullptr) {
    status = operands.add_memory(Role::kOutput, "reserve", call.reserve, call.reserve_bytes, module.reserve_bytes,
                                 &reserve_view);
  }
  const size_t workspace_bytes = backward ? module.backward_workspace_bytes : module.workspace_bytes;
  if (status.ok()) status = operands.check_workspace(call.workspace, call.workspace_bytes, workspace_bytes);
  if (status.ok() && !module.on_host()) {
    status = check_place(*module.linear, operands, call.workspace, workspace_bytes, module.machine(call.where).run);
  }
  if (status.ok() && has_prepacked) {
    status = check_prepacked(*module.linear, module.prepacked, "prepacked_weights", "prepack_weights",
                             call.prepacked_weights);
  }
  if (!status.ok() || call.reserve == nullptr) return status;
  if (!backward || !module.on_host()) return check_dropouts(call.dropouts);
  return check_reserve(call.reserve, module.fingerprint, stage_before, call.dropouts, module.name);
}

Status check_pack(const Module& module, const void* prepacked, size_t bytes, const Call& call) {
  Operands operands(*module.where.device);
  Tensor view;
  Status status = check_tensors(operands, module.pack, call);
  if (status.ok()) {
    status = operands.add_memory(Role::kOutput, "prepacked_weights", prepacked, bytes, module.prepacked.bytes, &view);
  }
  if (!status.ok()) return status;
  return check_place(*module.linear, operands, nullptr, 0, module.machine(call.where).run);
}

Status check_norm_desc(const NormDesc& desc) {
  const auto kind = static_cast<int32_t>(desc.kind);
  if (kind < 0 || kind > 2) {
    return invalid(sentence("norm.kind is ", kind, ", must be 0 (none), 1 (layer norm) or 2 (RMS norm)"));
  }
  if (desc.kind != NormKind::kNone && !(desc.eps > 0 && std::isfinite(desc.eps))) {
    return invalid(sentence("norm.eps is ", desc.eps, ", must be a positive finite number"));
  }
  return {};
}

Status check_not_negative(std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    if (size.value < 0) return invalid(sentence(size.name, " is ", size.value, ", must not be negative"));
  }
  return {};
}

Status check_probability(const char* name, double p) {
  if (p >= 0 && p <= 1) return {};
  return invalid(sentence(name, " is ", p, ", must be 0 to 1"));
}

}  // namespace polyhead
