// The product of two matrices, for what a model has beside its layers: a head over the vocabulary, an adapter; and what is
// done to its result at once.
//   C = norm(activation(A B + bias) + residual)        A [m, k]   B [k, n]   bias [n]   residual [m, n]   C [m, n]
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

enum class NormKind : int32_t {
  kNone = 0,
  kLayerNorm = 1,  ///< (x - mean) / sqrt(variance + eps) * gamma + beta
  kRmsNorm = 2,    ///< x / sqrt(mean of x^2 + eps) * gamma + beta
};

enum class ActivationKind : int32_t {
  kNone = 0,
  kRelu = 1,
  kGelu = 2,      ///< x * (1 + erf(x / sqrt(2))) / 2
  kGeluTanh = 3,  ///< x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
  kSilu = 4,      ///< x / (1 + exp(-x))
};

struct MatrixProductDesc {
  int64_t m = 0;  ///< rows of A and C
  int64_t n = 0;  ///< columns of B and C
  int64_t k = 0;  ///< what is summed over; 0: C is the bias, or 0
  bool bias = false;
  ActivationKind activation = ActivationKind::kNone;
  bool residual = false;            ///< a matrix of C's dims is added
  NormKind norm = NormKind::kNone;  ///< of each row
  double norm_eps = 1e-5;           ///< positive
  /// B comes as prepack() wrote it, for one that many calls read. The bits of a row do not depend on the other rows then,
  /// nor on m.
  bool prepacked = false;
  DType dtype = DType::kFloat32;  ///< of all tensors: float32, bfloat16, float16 (sums in float32), float64
};

/// C and sum must overlap neither themselves nor an input.
struct MatrixProductArgs {
  Tensor a = {};         ///< [m, k], any strides
  Tensor b = {};         ///< [k, n], any strides; not given with desc.prepacked
  Tensor bias = {};      ///< [n], if desc.bias
  Tensor residual = {};  ///< [m, n], if desc.residual
  Tensor gamma = {};     ///< [n], optional with a norm, as is beta: 1 and 0
  Tensor beta = {};
  Tensor c = {};                    ///< [m, n]
  Tensor sum = {};                  ///< [m, n], optional with a norm: written, what the norm is of
  bool accumulate = false;          ///< true: add to what C holds; not with a norm
  const void* prepacked = nullptr;  ///< with desc.prepacked: what prepack() wrote
  size_t prepacked_bytes = 0;
  void* workspace = nullptr;  ///< at least MatrixProduct::workspace_bytes(), aligned to 64 bytes
  size_t workspace_bytes = 0;
  Where where = {};  ///< as in ForwardArgs: left out, as planned
};

struct MatrixProductState;  // src/linear/matrix_product.cc

/// Immutable: may run on many threads at once, each call with its own tensors and workspace. Running it allocates
/// nothing; its bits do not depend on the number of threads.
class POLYHEAD_API MatrixProduct {
 public:
  const MatrixProductDesc& desc() const;
  const char* kernel_name() const;
  size_t workspace_bytes() const;

  /// B as a product reads it, in memory of prepacked_bytes() aligned to 64. Products that agree in n, k, dtype and kernel may
  /// share it.
  size_t prepacked_bytes() const;
  /// On a GPU nobody checks that it was filled for such a product.
  Status prepack(const Tensor& b, void* prepacked, size_t bytes, const Where& where = {}) const;

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
