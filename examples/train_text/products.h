// Products of matrices, as the head, the decoder and unfused attention call them: views of rows in somebody's array.
#pragma once

#include <cstddef>
#include <cstdint>

#include "polyhead/executor.h"
#include "polyhead/matrix_product.h"

namespace polyhead::demo {

/// [num_rows, num_columns], rows `row_stride` apart.
Tensor matrix(const float* data, int64_t num_rows, int64_t num_columns, int64_t row_stride);
Tensor matrix(const float* data, int64_t num_rows, int64_t num_columns);  // without gaps
Tensor transposed(Tensor matrix);

/// C [m, n], summed over k.
struct ProductSizes {
  int64_t m, n, k;
  bool bias = false;
};
Result<MatrixProduct> product_of(const ProductSizes& sizes, Executor& executor = default_executor());

/// C = A B + bias, added to C if `accumulate`.
struct Factors {
  Tensor a, b, c;
  Tensor bias = {};
  bool accumulate = false;
};

/// `workspace`: at least product.workspace_bytes().
Status multiply(const MatrixProduct& product, const Factors& factors, std::byte* workspace);

}  // namespace polyhead::demo
