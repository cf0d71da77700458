#include "testing/layout.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace polyhead::testing {
namespace {

// The dims of a tensor from the outermost to the innermost in memory.
std::vector<int> memory_order(Layout layout, int ndim, Random& random) {
  if (layout == Layout::kStrided && ndim >= 3) layout = random.chance(0.5) ? Layout::kBhsd : Layout::kBshd;
  if (ndim == 4) {
    switch (layout) {
      case Layout::kBhsd: return {0, 2, 1, 3};
      case Layout::kSbhd: return {1, 0, 2, 3};
      case Layout::kTransposed: return {0, 2, 3, 1};
      default: return {0, 1, 2, 3};
    }
  }
  if (ndim == 3) {
    switch (layout) {
      case Layout::kBhsd:
      case Layout::kSbhd: return {1, 0, 2};
      case Layout::kTransposed: return {1, 2, 0};
      default: return {0, 1, 2};
    }
  }
  if (ndim == 2 && layout == Layout::kTransposed) return {1, 0};
  std::vector<int> order;
  for (int n = 0; n < ndim; ++n) order.push_back(n);
  return order;
}

// Whether all elements along dim n are the same.
bool repeats(const Array& a, size_t n) {
  const size_t element = dtype_size_bytes(a.dtype);
  size_t inner = element;
  for (size_t d = n + 1; d < a.dims.size(); ++d) inner *= static_cast<size_t>(a.dims[d]);
  const size_t outer = inner * static_cast<size_t>(a.dims[n]);
  for (size_t first = 0; first < a.bytes.size(); first += outer) {
    for (size_t at = first + inner; at < first + outer; at += inner) {
      if (std::memcmp(a.bytes.data() + first, a.bytes.data() + at, inner) != 0) return false;
    }
  }
  return true;
}

void set_junk(Tensor& t, OperandRole role) {
  constexpr int64_t kJunkStrides[] = {0, 99990001, 7, 3331333, 1};
  for (int n = 0; n < t.ndim; ++n) {
    if (t.dims[n] == 1) t.strides[n] = role == OperandRole::kInput && n % 2 == 1 ? -kJunkStrides[n] : kJunkStrides[n];
  }
}

}  // namespace

void set_strides(Tensor& t, Layout layout, OperandRole role, const Array* values, Random& random) {
  const bool gaps = layout == Layout::kStrided;
  int64_t stride = layout == Layout::kPadded || (layout == Layout::kTransposed && t.ndim == 1) ? 2 : 1;
  const std::vector<int> order = memory_order(layout, t.ndim, random);
  if (gaps) stride = random.integer(1, 3);
  for (size_t n = order.size(); n-- > 0;) {
    const int dim = order[n];
    const bool repeated =
        layout == Layout::kExpanded && values && t.dims[dim] > 1 && repeats(*values, static_cast<size_t>(dim));
    t.strides[dim] = repeated ? 0 : stride;
    if (!repeated) stride *= std::max<int64_t>(t.dims[dim], 1);
    if (layout == Layout::kPadded) stride += 3;
    if (gaps) stride += random.below(5);
    if (layout == Layout::kQkv && t.ndim >= 3 && dim == t.ndim - 2) stride *= 3;  // heads of q, k and v in one row
    const bool backwards = (layout == Layout::kNegative && role != OperandRole::kOutput) ||
                           (gaps && role == OperandRole::kInput && random.chance(0.25));
    if (backwards) t.strides[dim] = -t.strides[dim];
  }
  if (layout == Layout::kJunk) set_junk(t, role);
}

bool side_by_side(const AttentionDesc& desc) {
  const bool one_dtype = key_dtype(desc) == desc.dtype && value_dtype(desc) == desc.dtype;
  return desc.seqlen_q == desc.seqlen_k && desc.page_size == 0 && one_dtype;
}

void split_row(const Tensor& row, Tensor (&parts)[3]) {
  int64_t first = 0;
  for (Tensor& part : parts) {
    const int rows = part.ndim - 3;
    part.data = static_cast<uint8_t*>(row.data) + first * static_cast<int64_t>(dtype_size_bytes(row.dtype));
    part.strides[rows + 2] = 1;
    part.strides[rows + 1] = part.dims[rows + 2];
    for (int d = 0; d <= rows; ++d) part.strides[d] = row.strides[d];
    first += part.dims[rows + 1] * part.dims[rows + 2];
  }
}

}  // namespace polyhead::testing
