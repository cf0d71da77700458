#include "polyhead/matrix_product.h"

#include <new>
#include <utility>

#include "contract/linear.h"
#include "contract/operands.h"
#include "contract/where.h"
#include "core/sentence.h"
#include "linear/product.h"

namespace polyhead {

struct MatrixProductState {
  MatrixProductDesc desc;
  linear::GemmDesc gemm;
  const linear::Kernel* linear = nullptr;
  Run run;
  size_t workspace_bytes = 0;
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

Result<MatrixProduct> matrix_product(const MatrixProductDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  const Result<Where> where = planned_where(options.where);
  if (!where.ok()) return where.status();
  const Result<const linear::Kernel*> kernel = linear::choose_kernel(desc.dtype, options.kernel, *where->device);
  if (!kernel.ok()) return kernel.status();
  auto state = std::make_shared<MatrixProductState>();
  state->desc = desc;
  state->linear = *kernel;
  state->run = *where->executor;
  state->gemm.m = desc.m, state->gemm.n = desc.n, state->gemm.k = desc.k;
  state->gemm.dtype = desc.dtype;
  state->gemm.split_k = true;  // gradients of weights: few rows and columns, many tokens to sum over
  const MemorySize bytes = state->linear->gemm_workspace_bytes(state->gemm, state->run.num_threads);
  if (!bytes.fits()) return invalid(sentence("the product is too large: m ", desc.m, ", n ", desc.n, ", k ", desc.k));
  state->workspace_bytes = bytes.value();
  MatrixProduct made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status MatrixProduct::forward(const MatrixProductArgs& args) const try {
  const MatrixProductState& s = *state_;
  const MatrixProductDesc& d = s.desc;
  const Dim m{"m", d.m}, n{"n", d.n}, k{"k", d.k};
  Operands operands;
  Status status = operands.add(Role::kInput, "a", args.a, {d.dtype, {m, k}});
  if (status.ok()) status = operands.add(Role::kInput, "b", args.b, {d.dtype, {k, n}});
  if (status.ok()) {
    status = d.bias ? operands.add(Role::kInput, "bias", args.bias, {d.dtype, {n}}) : unasked("bias", args.bias);
  }
  if (status.ok()) status = operands.add(Role::kOutput, "c", args.c, {d.dtype, {m, n}});
  if (status.ok()) status = operands.check_workspace(args.workspace, args.workspace_bytes, s.workspace_bytes);
  if (!status.ok() || d.m == 0 || d.n == 0) return status;
  linear::GemmArgs gemm;
  gemm.a = weight_matrix(args.a);
  gemm.b = weight_matrix(args.b);
  gemm.c = weight_matrix(args.c);
  gemm.accumulate = args.accumulate;
  gemm.epilogue.bias = weight_matrix(args.bias);
  gemm.workspace = args.workspace;
  s.linear->gemm(s.gemm, gemm, s.run);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
