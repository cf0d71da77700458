#include "linear/product.h"

#include <algorithm>

#include "core/sentence.h"

namespace polyhead {
namespace {

using linear::Axis;
using linear::Matrix;

// Dims [first, end) of a tensor, at most three. Those of size 1 may have any stride, which nobody may step by.
Axis axis_of(const Tensor& t, int first, int end) {
  Axis axis;
  for (int i = first, at = 3 - (end - first); i < end; ++i, ++at) {
    axis.sizes[at] = t.dims[i];
    axis.strides[at] = t.dims[i] > 1 ? t.strides[i] : 0;
  }
  return axis;
}

// Heads side by side are one dim.
Axis columns_of(const Tensor& t) {
  const int dim = t.ndim - 1;
  if (t.ndim == 4) return axis_of(t, dim, t.ndim);
  const Axis apart = axis_of(t, dim - 1, t.ndim);
  const int64_t heads = t.dims[dim - 1], size = t.dims[dim];
  if (heads == 1) return linear::axis(size, apart.strides[2]);
  const int64_t step = size > 1 ? apart.strides[2] : 1;
  if (size == 1) return linear::axis(heads, apart.strides[1]);
  return apart.strides[1] == size * step ? linear::axis(heads * size, step) : apart;
}

bool same_axis(const Axis& a, const Axis& b) {
  return std::equal(a.sizes, a.sizes + 3, b.sizes) && std::equal(a.strides, a.strides + 3, b.strides);
}

// Whether b's columns are those that follow a's. Then a gets them.
bool follows(const Matrix& a, const Matrix& b) {
  const Axis &first = a.columns, &next = b.columns;
  const bool plain = first.sizes[0] == 1 && first.sizes[1] == 1 && next.sizes[0] == 1 && next.sizes[1] == 1;
  if (!plain || first.size() == 0 || next.size() == 0 || a.dtype != b.dtype || !same_axis(a.rows, b.rows)) return false;
  const int64_t stride = first.size() > 1 ? first.strides[2] : next.size() > 1 ? next.strides[2] : 1;
  if ((first.size() > 1 && first.strides[2] != stride) || (next.size() > 1 && next.strides[2] != stride)) return false;
  const auto step = stride * static_cast<int64_t>(dtype_size_bytes(a.dtype));
  const auto distance = reinterpret_cast<intptr_t>(b.data) - reinterpret_cast<intptr_t>(a.data);
  return stride > 0 && distance == first.size() * step;
}

void extend(Matrix& a, const Matrix& b) {
  const Axis &first = a.columns, &next = b.columns;
  const int64_t stride = first.size() > 1 ? first.strides[2] : next.size() > 1 ? next.strides[2] : 1;
  a.columns = linear::axis(first.size() + next.size(), stride);
}

}  // namespace

Matrix token_matrix(const Tensor& t) {
  if (!t.given() || t.num_elements() == 0) {
    Matrix empty;
    empty.dtype = t.dtype;
    if (t.given()) {
      const bool none = t.dims[0] == 0 || t.dims[1] == 0 || t.dims[2] == 0;  // however large the others are
      empty.rows = none ? linear::axis(0, 0) : Axis{{t.dims[0], t.dims[1], t.dims[2]}, {}};
      empty.columns = linear::axis(t.ndim == 5 ? t.dims[3] * t.dims[4] : t.dims[3], 0);
    }
    return empty;
  }
  return {t.data, t.dtype, axis_of(t, 0, 3), columns_of(t)};
}

Matrix weight_matrix(const Tensor& t) {
  if (!t.given()) return {};
  void* const data = t.num_elements() == 0 ? nullptr : t.data;
  return {data, t.dtype, t.ndim == 2 ? axis_of(t, 0, 1) : linear::axis(1, 0), axis_of(t, t.ndim - 1, t.ndim)};
}

bool same_matrix(const Matrix& a, const Matrix& b) {
  return a.given() && a.data == b.data && a.dtype == b.dtype && same_axis(a.rows, b.rows) &&
         same_axis(a.columns, b.columns);
}

bool join(Product& first, const Product& next) {
  if (!same_matrix(first.x, next.x) || first.bias.given() != next.bias.given()) return false;
  const bool biased = first.bias.given();
  // A product without y, w or bias has none of its neighbour's either.
  const auto both = [](const Matrix& a, const Matrix& b) { return !a.given() && !b.given(); };
  const bool weights = first.prepacked.data != nullptr ? first.prepacked.end == next.prepacked.data
                                                       : follows(first.w, next.w) || both(first.w, next.w);
  if (!follows(first.y, next.y) || !weights) return false;
  if (biased && !follows(first.bias, next.bias)) return false;
  first.parts |= next.parts;
  first.prepacked.end = next.prepacked.end;
  extend(first.y, next.y);
  if (first.w.given()) extend(first.w, next.w);
  if (biased) extend(first.bias, next.bias);
  return true;
}

linear::GemmDesc gemm_desc(const linear::GemmArgs& args, bool split_k) {
  linear::GemmDesc desc;
  desc.m = args.c.rows.size();
  desc.n = args.c.columns.size();
  desc.k = args.a.columns.size();
  desc.dtype = args.a.dtype;
  desc.prepacked = args.prepacked != nullptr;
  desc.split_k = split_k;
  return desc;
}

Status multiply(const linear::Kernel& kernel, const linear::GemmArgs& args, bool split_k, const Run& run) {
  return kernel.gemm(gemm_desc(args, split_k), args, run);
}

Status check_activation(ActivationKind activation) {
  const auto number = static_cast<int32_t>(activation);
  if (number >= 0 && number <= 4) return {};
  return invalid(sentence("activation is ", number, ", must be an ActivationKind: 0 to 4"));
}

linear::Norm norm_of(NormKind kind) {
  return kind == NormKind::kRmsNorm ? linear::Norm::kRmsNorm : linear::Norm::kLayerNorm;
}

}  // namespace polyhead
