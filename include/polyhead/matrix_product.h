// The product of two matrices, for what a model has beside its layers: a head over the vocabulary, an adapter.
//   C = A B + bias        A [m, k]   B [k, n]   bias [n]   C [m, n]
// Each is a view with strides of its own, so one kind of call serves a projection y = x W forward and backward:
//   forward               A = x, B = W
//   gradient of x         A = grad_y, B = W with its dims swapped
//   gradient of W         A = x with its dims swapped, B = grad_y
//
//   MatrixProductDesc desc;
//   desc.m = 128, desc.k = 512, desc.n = 64;
//   Result<MatrixProduct> product = matrix_product(desc);
//   MatrixProductArgs args;
//   args.a = Tensor(x, DType::kFloat32, {128, 512});
//   args.b = Tensor(w, DType::kFloat32, {512, 64});
//   args.c = Tensor(y, DType::kFloat32, {128, 64});
//   args.workspace = ..., args.workspace_bytes = product->workspace_bytes();
//   Status status = product->forward(args);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "polyhead/api.h"
#include "polyhead/attention.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

struct MatrixProductDesc {
  int64_t m = 0;  ///< rows of A and C
  int64_t n = 0;  ///< columns of B and C
  int64_t k = 0;  ///< what is summed over; 0: C is the bias, or 0
  bool bias = false;
  DType dtype = DType::kFloat32;  ///< of all tensors: float32, bfloat16, float16 (sums in float32), float64
};

/// C must overlap neither itself nor an input.
struct MatrixProductArgs {
  Tensor a = {};              ///< [m, k], any strides
  Tensor b = {};              ///< [k, n], any strides
  Tensor bias = {};           ///< [n], if desc.bias
  Tensor c = {};              ///< [m, n]
  bool accumulate = false;    ///< true: add to what C holds
  void* workspace = nullptr;  ///< at least MatrixProduct::workspace_bytes(), aligned to 64 bytes
  size_t workspace_bytes = 0;
};

struct MatrixProductState;  // src/linear/matrix_product.cc

/// Immutable: may run on many threads at once, each call with its own tensors and workspace. Running it allocates
/// nothing; its bits do not depend on the number of threads.
class POLYHEAD_API MatrixProduct {
 public:
  const MatrixProductDesc& desc() const;
  const char* kernel_name() const;
  size_t workspace_bytes() const;

  /// Checks `args` against the desc, then computes. On an error C has not been touched.
  Status forward(const MatrixProductArgs& args) const;

 private:
  friend Result<MatrixProduct> matrix_product(const MatrixProductDesc&, const PlanOptions&);
  MatrixProduct() = default;
  std::shared_ptr<const MatrixProductState> state_;
};

/// Checks `desc` (the error names the field) and picks a kernel, as plan() does.
POLYHEAD_API Result<MatrixProduct> matrix_product(const MatrixProductDesc& desc, const PlanOptions& options = {});

}  // namespace polyhead
