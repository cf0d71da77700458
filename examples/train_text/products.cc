#include "products.h"

#include <utility>

namespace polyhead::demo {

Tensor matrix(const float* data, int64_t num_rows, int64_t num_columns, int64_t row_stride) {
  Tensor t(data, DType::kFloat32, {num_rows, num_columns});
  t.strides[0] = row_stride;
  return t;
}

Tensor matrix(const float* data, int64_t num_rows, int64_t num_columns) {
  return matrix(data, num_rows, num_columns, num_columns);
}

Tensor transposed(Tensor matrix) {
  std::swap(matrix.dims[0], matrix.dims[1]);
  std::swap(matrix.strides[0], matrix.strides[1]);
  return matrix;
}

Result<MatrixProduct> product_of(const ProductSizes& sizes, Executor& executor) {
  MatrixProductDesc desc;
  desc.m = sizes.m, desc.n = sizes.n, desc.k = sizes.k, desc.bias = sizes.bias;
  PlanOptions options;
  options.where.executor = &executor;
  return matrix_product(desc, options);
}

Status multiply(const MatrixProduct& product, const Factors& factors, std::byte* workspace) {
  MatrixProductArgs args;
  args.a = factors.a;
  args.b = factors.b;
  args.bias = factors.bias;
  args.c = factors.c;
  args.accumulate = factors.accumulate;
  args.workspace = workspace;
  args.workspace_bytes = product.workspace_bytes();
  return product.forward(args);
}

}  // namespace polyhead::demo
