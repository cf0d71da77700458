// Matrices of tokens, and the products of projections on them.
#pragma once

#include "contract/linear.h"
#include "contract/operands.h"
#include "polyhead/matrix_product.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

// The tokens of a sequence tensor, [batch, beam, time, vector] or [batch, beam, time, heads, dim], as rows.
linear::Matrix token_matrix(const Tensor& t);

// A weight [in, out], or a bias [out] as one row; not given: no matrix.
linear::Matrix weight_matrix(const Tensor& t);

// A matrix as linear::Kernel::pack() wrote it.
struct PrepackedMatrix {
  const void* data = nullptr;  // null: not prepacked
  const void* end = nullptr;   // where one whose columns follow begins; null: none does
};

// y = x w + bias: one projection, or neighbours side by side. Backward is told in the same words: gradients of x, w, bias
// and y in their places.
struct Product {
  linear::Matrix x;                // [tokens, in]
  linear::Matrix w;                // [in, out]
  linear::Matrix bias;             // [1, out], or not given
  linear::Matrix y;                // [tokens, out]
  unsigned parts = 0;              // bit i: it stands for the i-th of those that may be joined
  PrepackedMatrix prepacked = {};  // w, where it is prepacked
};

// Appends `next` to `first` if both have one x and lie side by side in all else: columns behind columns.
bool join(Product& first, const Product& next);

// Up to three products of query, key and value in that order, joined where they can be.
class Products {
 public:
  void add(const Product& product) {
    if (count_ == 0 || !join(products_[count_ - 1], product)) products_[count_++] = product;
  }
  Product* begin() { return products_; }
  Product* end() { return products_ + count_; }

 private:
  Product products_[3];
  int count_ = 0;
};

// The sizes and the type of a product, as its matrices have them.
linear::GemmDesc gemm_desc(const linear::GemmArgs& args, bool split_k);

// args.c = epilogue(args.a args.b), args.b prepacked if args.prepacked is given, of the sizes and the type that the matrices have.
Status multiply(const linear::Kernel& kernel, const linear::GemmArgs& args, bool split_k, const Run& run);

// Names the argument `activation`.
Status check_activation(ActivationKind activation);

// As kernels have it; of kNone nobody asks.
linear::Norm norm_of(NormKind kind);

bool same_matrix(const linear::Matrix& a, const linear::Matrix& b);

}  // namespace polyhead
