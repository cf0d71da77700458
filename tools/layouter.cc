#include "layouter.h"

#include <algorithm>
#include <string>

namespace polyhead::tools {

Status too_large(double size_bytes) {
  return {StatusCode::kOutOfMemory, "not enough memory: this problem needs " +
                                        std::to_string(static_cast<int64_t>(size_bytes / 0x1p20)) +
                                        " MiB for one tensor; choose smaller sizes"};
}

Status Layouter::add(DType dtype, std::initializer_list<int64_t> dims, std::initializer_list<int> order, Tensor& tensor,
                     bool forwards) {
  tensor = {};
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  const bool gaps = layout_ == Layout::kStrided;
  double extent = 1;
  int64_t step = gaps ? 1 + gaps_.below(3) : 1;
  for (const int* d = order.end(); d != order.begin();) {
    const int dim = *--d;
    tensor.strides[dim] = step;
    extent += static_cast<double>(step) * static_cast<double>(std::max<int64_t>(tensor.dims[dim] - 1, 0));
    if (extent > 0x1p46) return too_large(extent * static_cast<double>(dtype_size_bytes(dtype)));
    step = step * std::max<int64_t>(tensor.dims[dim], 1) + (gaps ? gaps_.below(5) : 0);
  }
  const int64_t lead = gaps ? gaps_.below(4) : 0;
  const size_t size_bytes = (static_cast<size_t>(extent) + static_cast<size_t>(lead)) * dtype_size_bytes(dtype);
  if (Status s = allocate(size_bytes, tensor); !s.ok()) return s;
  tensor.data = static_cast<std::byte*>(tensor.data) + lead * static_cast<int64_t>(dtype_size_bytes(dtype));
  if (gaps && !forwards) reverse_some(tensor);
  return {};
}

Status Layouter::add(DType dtype, std::initializer_list<int64_t> dims, Tensor& tensor) {
  static constexpr std::initializer_list<int> kOrders[] = {{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}};
  return add(dtype, dims, kOrders[dims.size() - 1], tensor);
}

Status Layouter::add_heads(const AttentionDesc& desc, int64_t seqlen, int64_t heads, int64_t dim, Tensor& tensor,
                           bool forwards) {
  const bool heads_first = layout_ == Layout::kBhsd || (layout_ == Layout::kStrided && gaps_.below(2) == 1);
  if (desc.packed) {
    if (heads_first) return add(desc.dtype, {seqlen, heads, dim}, {1, 0, 2}, tensor, forwards);
    return add(desc.dtype, {seqlen, heads, dim}, {0, 1, 2}, tensor, forwards);
  }
  const std::initializer_list<int64_t> dims = {desc.batch, seqlen, heads, dim};
  if (heads_first) return add(desc.dtype, dims, {0, 2, 1, 3}, tensor, forwards);
  if (layout_ == Layout::kSbhd) return add(desc.dtype, dims, {1, 0, 2, 3}, tensor, forwards);
  return add(desc.dtype, dims, {0, 1, 2, 3}, tensor, forwards);
}

Status Layouter::add_statistics(const AttentionDesc& desc, DType dtype, Tensor& tensor, bool forwards) {
  if (desc.packed) return add(dtype, {desc.num_heads, desc.seqlen_q}, {0, 1}, tensor, forwards);
  return add(dtype, {desc.batch, desc.num_heads, desc.seqlen_q}, {0, 1, 2}, tensor, forwards);
}

Status Layouter::add_qkv(const AttentionDesc& desc, Tensor& query, Tensor& key, Tensor& value) {
  if (desc.seqlen_q != desc.seqlen_k) {
    return {StatusCode::kInvalidArgument, "--layout qkv with seqlen_q " + std::to_string(desc.seqlen_q) +
                                              " and seqlen_k " + std::to_string(desc.seqlen_k) +
                                              ": both must be equal, as one row holds a token's query, key and value"};
  }
  const int64_t q = desc.num_heads * desc.head_dim, k = desc.num_heads_kv * desc.head_dim;
  const int64_t row = q + k + desc.num_heads_kv * desc.head_dim_v;
  Tensor all;
  const int64_t batch = desc.packed ? 1 : desc.batch;
  if (Status s = add(desc.dtype, {batch, desc.seqlen_q, row}, all); !s.ok()) return s;
  const auto part = [&](int64_t first, int64_t heads, int64_t dim, Tensor& tensor) {
    auto* data = static_cast<std::byte*>(all.data) + first * static_cast<int64_t>(dtype_size_bytes(desc.dtype));
    tensor = desc.packed ? Tensor(data, desc.dtype, {desc.seqlen_q, heads, dim})
                         : Tensor(data, desc.dtype, {batch, desc.seqlen_q, heads, dim});
    tensor.strides[tensor.ndim - 3] = row;
    if (!desc.packed) tensor.strides[0] = row * std::max<int64_t>(desc.seqlen_q, 1);
  };
  part(0, desc.num_heads, desc.head_dim, query);
  part(q, desc.num_heads_kv, desc.head_dim, key);
  part(q + k, desc.num_heads_kv, desc.head_dim_v, value);
  return {};
}

Status Layouter::allocate(size_t size_bytes, Tensor& tensor) {
  buffers_.push_back(new_buffer(size_bytes));
  if (buffers_.back() == nullptr) return too_large(static_cast<double>(size_bytes));
  tensor.data = buffers_.back().get();
  return {};
}

void Layouter::reverse_some(Tensor& tensor) {
  const auto size_bytes = static_cast<int64_t>(dtype_size_bytes(tensor.dtype));
  for (int d = 0; d < tensor.ndim; ++d) {
    if (gaps_.below(4) != 0 || tensor.dims[d] < 2) continue;
    tensor.data = static_cast<std::byte*>(tensor.data) + tensor.strides[d] * (tensor.dims[d] - 1) * size_bytes;
    tensor.strides[d] = -tensor.strides[d];
  }
}

void fill_normal(const Tensor& tensor, uint64_t seed, Stream stream) {
  Random random(seed, stream);
  fill(tensor, [&] { return random.normal(); });
}

}  // namespace polyhead::tools
