#include "polyhead/matrix_product.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#include "contract/linear.h"
#include "contract/operands.h"
#include "contract/where.h"
#include "core/sentence.h"
#include "linear/prepacked.h"
#include "linear/product.h"

namespace polyhead {

struct MatrixProductState {
  MatrixProductDesc desc;
  linear::GemmDesc gemm;
  const linear::Kernel* linear = nullptr;
  Where where;
  int num_threads = 1;
  size_t workspace_bytes = 0;
  PrepackedLayout prepacked;
};

namespace {

Status check_desc(const MatrixProductDesc& d) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"m", d.m}, {"n", d.n}, {"k", d.k}};
  for (const auto& size : sizes) {
    if (size.value < 0) return invalid(sentence(size.name, " is ", size.value, ", must not be negative"));
  }
  if (d.dtype != DType::kFloat32 && d.dtype != DType::kBFloat16 && d.dtype != DType::kFloat16 &&
      d.dtype != DType::kFloat64) {
    return invalid(sentence("dtype is ", dtype_name(d.dtype), ", takes float32, bfloat16, float16 or float64"));
  }
  if (Status status = check_activation(d.activation); !status.ok()) return status;
  const auto norm = static_cast<int32_t>(d.norm);
  if (norm < 0 || norm > 2) return invalid(sentence("norm is ", norm, ", must be a NormKind: 0 to 2"));
  if (d.norm != NormKind::kNone && !(d.norm_eps > 0 && std::isfinite(d.norm_eps)))
    return invalid(sentence("norm_eps is ", d.norm_eps, ", must be positive and finite"));
  // Packing rounds rows and columns up to tiles: with room for that, no size of the workspace overflows.
  constexpr int64_t kLargestTile = 256;
  const auto element = static_cast<int64_t>(dtype_size_bytes(d.dtype)) * kLargestTile;
  const std::pair<int64_t, int64_t> matrices[] = {{d.m, d.k}, {d.k, d.n}, {d.m, d.n}};
  for (const auto& [rows, columns] : matrices) {
    int64_t bytes = 0;
    if (__builtin_mul_overflow(rows, columns, &bytes) || __builtin_mul_overflow(bytes, element, &bytes)) {
      return invalid(sentence("a matrix of ", rows, " x ", columns, " passes the address space"));
    }
  }
  return {};
}

}  // namespace

const MatrixProductDesc& MatrixProduct::desc() const { return state_->desc; }
const char* MatrixProduct::kernel_name() const { return state_->linear->name; }
size_t MatrixProduct::workspace_bytes() const { return state_->workspace_bytes; }
size_t MatrixProduct::prepacked_bytes() const { return state_->prepacked.bytes; }

Result<MatrixProduct> matrix_product(const MatrixProductDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  const Result<Where> where = planned_where(options.where);
  if (!where.ok()) return where.status();
  const Result<const linear::Kernel*> kernel = linear::choose_kernel(desc.dtype, options.kernel, *where->device);
  if (!kernel.ok()) return kernel.status();
  auto state = std::make_shared<MatrixProductState>();
  state->desc = desc;
  state->linear = *kernel;
  state->where = *where;
  state->num_threads = std::max(1, where->executor->num_threads());
  state->gemm.m = desc.m, state->gemm.n = desc.n, state->gemm.k = desc.k;
  state->gemm.dtype = desc.dtype;
  state->gemm.prepacked = desc.prepacked;
  // Gradients of weights: few rows and columns, many tokens to sum over.
  state->gemm.split_k = !desc.prepacked;
  const MemorySize bytes = state->linear->gemm_workspace_bytes(state->gemm, state->num_threads);
  const MatrixSize matrix = {desc.k, desc.n};
  if (!bytes.fits() || !lay_out_prepacked(*state->linear, desc.dtype, {&matrix, 1}, &state->prepacked))
    return invalid(sentence("the product is too large: m ", desc.m, ", n ", desc.n, ", k ", desc.k));
  state->workspace_bytes = bytes.value();
  MatrixProduct made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status MatrixProduct::prepack(const Tensor& b, void* prepacked, size_t bytes, const Where& where) const try {
  const MatrixProductState& s = *state_;
  Operands operands(*s.where.device);
  Tensor view;
  Status status = check_where(s.where, where);
  if (status.ok()) status = operands.add(Role::kInput, "b", b, {s.desc.dtype, {{"k", s.desc.k}, {"n", s.desc.n}}});
  if (status.ok()) status = operands.add_memory(Role::kOutput, "prepacked", prepacked, bytes, s.prepacked.bytes, &view);
  const Run run = run_at(s.where, where, s.num_threads);
  if (status.ok()) status = check_place(*s.linear, operands, nullptr, 0, run);
  if (!status.ok()) return status;
  const linear::Matrix matrix = weight_matrix(b);
  return write_prepacked(*s.linear, s.prepacked, {&matrix, 1}, prepacked, run);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

namespace {

// Of the call's tensors; `prepacked` outlives `operands`.
Status check_args(const MatrixProductState& s, const MatrixProductArgs& args, Operands& operands, Tensor& prepacked) {
  const MatrixProductDesc& d = s.desc;
  const Dim m{"m", d.m}, n{"n", d.n}, k{"k", d.k};
  const bool normed = d.norm != NormKind::kNone;
  Status status = check_where(s.where, args.where);
  const auto add = [&](Role role, const char* name, const Tensor& t, bool asked, const OperandShape& shape) {
    if (status.ok()) status = asked ? operands.add(role, name, t, shape) : unasked(name, t);
  };
  add(Role::kInput, "a", args.a, true, {d.dtype, {m, k}});
  add(Role::kInput, "b", args.b, !d.prepacked, {d.dtype, {k, n}});
  if (status.ok() && d.prepacked) {
    status = operands.add_memory(Role::kInput, "prepacked", args.prepacked, args.prepacked_bytes, s.prepacked.bytes,
                                 &prepacked);
    if (status.ok()) status = check_prepacked(*s.linear, s.prepacked, "prepacked", "prepack", args.prepacked);
  }
  add(Role::kInput, "bias", args.bias, d.bias, {d.dtype, {n}});
  add(Role::kInput, "residual", args.residual, d.residual, {d.dtype, {m, n}});
  if (args.gamma.given()) add(Role::kInput, "gamma", args.gamma, normed, {d.dtype, {n}});
  if (args.beta.given()) add(Role::kInput, "beta", args.beta, normed, {d.dtype, {n}});
  add(Role::kOutput, "c", args.c, true, {d.dtype, {m, n}});
  if (args.sum.given()) add(Role::kOutput, "sum", args.sum, normed, {d.dtype, {m, n}});
  if (status.ok() && args.accumulate && normed)
    return invalid("accumulate is set, which a product with a norm does not take");
  return status.ok() ? operands.check_workspace(args.workspace, args.workspace_bytes, s.workspace_bytes) : status;
}

}  // namespace

Status MatrixProduct::forward(const MatrixProductArgs& args) const try {
  const MatrixProductState& s = *state_;
  const MatrixProductDesc& d = s.desc;
  Operands operands(*s.where.device);
  Tensor prepacked;
  const Run run = run_at(s.where, args.where, s.num_threads);
  Status status = check_args(s, args, operands, prepacked);
  if (status.ok()) status = check_place(*s.linear, operands, args.workspace, s.workspace_bytes, run);
  if (!status.ok() || d.m == 0 || d.n == 0) return status;
  const bool normed = d.norm != NormKind::kNone;
  linear::GemmArgs gemm;
  gemm.a = weight_matrix(args.a);
  gemm.b = weight_matrix(args.b);
  if (d.prepacked) gemm.prepacked = prepacked_matrix(s.prepacked, 0, args.prepacked).data;
  gemm.c = weight_matrix(args.sum.given() ? args.sum : args.c);
  gemm.accumulate = args.accumulate;
  gemm.epilogue.bias = weight_matrix(args.bias);
  gemm.epilogue.activation = static_cast<linear::Activation>(d.activation);
  gemm.epilogue.residual = weight_matrix(args.residual);
  gemm.workspace = args.workspace;
  status = s.linear->gemm(s.gemm, gemm, run);
  if (!status.ok() || !normed) return status;
  linear::NormForwardArgs norm;
  norm.norm = norm_of(d.norm);
  norm.eps = d.norm_eps;
  norm.x = gemm.c;
  norm.gamma = weight_matrix(args.gamma);
  norm.beta = weight_matrix(args.beta);
  norm.y = weight_matrix(args.c);
  return s.linear->norm_forward(norm, run);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
