#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/dtype.h"

namespace polyhead::testing {

uint64_t Random::bits() {  // splitmix64
  state_ += 0x9E3779B97F4A7C15;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

int64_t Random::integer(int64_t first, int64_t last) {
  return first + static_cast<int64_t>(bits() % static_cast<uint64_t>(last - first + 1));
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * 3.14159265358979323846 * uniform());
}

Array::Array(DType type, std::vector<int64_t> sizes) : dtype(type), dims(std::move(sizes)) {
  bytes.resize(static_cast<size_t>(size()) * dtype_size_bytes(dtype));
}

int64_t Array::size() const {
  int64_t count = given() ? 1 : 0;
  for (int64_t d : dims) count *= d;
  return count;
}

int64_t Array::index(const std::vector<int64_t>& at) const {
  int64_t n = 0;
  for (size_t d = 0; d < dims.size(); ++d) n = n * dims[d] + at[d];
  return n;
}

double Array::at(int64_t n) const {
  switch (dtype) {
    case DType::kBool: return bytes[static_cast<size_t>(n)];
    case DType::kInt32: return reinterpret_cast<const int32_t*>(bytes.data())[n];
    case DType::kInt64: return static_cast<double>(reinterpret_cast<const int64_t*>(bytes.data())[n]);
    default: return load_element(bytes.data(), dtype, n);
  }
}

void Array::set(int64_t n, double value) {
  switch (dtype) {
    case DType::kBool: bytes[static_cast<size_t>(n)] = value != 0; break;
    case DType::kInt32: reinterpret_cast<int32_t*>(bytes.data())[n] = static_cast<int32_t>(value); break;
    case DType::kInt64: reinterpret_cast<int64_t*>(bytes.data())[n] = static_cast<int64_t>(value); break;
    default: store_element(bytes.data(), dtype, n, value); break;
  }
}

Tensor view(const Array& array) {
  Tensor t;
  t.data = const_cast<uint8_t*>(array.bytes.data());
  t.dtype = array.dtype;
  t.ndim = static_cast<int32_t>(array.dims.size());
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.dims[i] = array.dims[static_cast<size_t>(i)];
    t.strides[i] = stride;
    stride *= std::max<int64_t>(t.dims[i], 1);
  }
  return t;
}

Problem problem_of(const char* name, DType dtype, int64_t batch, int64_t heads, int64_t q, int64_t k, int64_t dim) {
  Problem p;
  p.name = name;
  p.desc.dtype = dtype;
  p.desc.batch = batch;
  p.desc.num_heads = p.desc.num_heads_kv = heads;
  p.desc.seqlen_q = q;
  p.desc.seqlen_k = k;
  p.desc.head_dim = p.desc.head_dim_v = dim;
  return p;
}

const char* layout_name(Layout layout) {
  constexpr const char* kNames[] = {"bshd",   "bhsd", "sbhd",     "qkv",      "transposed",
                                    "padded", "junk", "negative", "expanded", "mixed"};
  return kNames[static_cast<int>(layout)];
}

Span span_of(const AttentionDesc& desc, const Inputs& in, int64_t b) {
  auto integer = [](const Array& a, int64_t n) { return static_cast<int64_t>(a.at(n)); };
  Span s;
  s.len_q = desc.seqlen_q;
  s.len_k = desc.seqlen_k;
  if (in.cu_seqlens_q.given()) {
    s.first_q = integer(in.cu_seqlens_q, b);
    s.len_q = integer(in.cu_seqlens_q, b + 1) - s.first_q;
    s.first_k = integer(in.cu_seqlens_k, b);
    s.len_k = integer(in.cu_seqlens_k, b + 1) - s.first_k;
  }
  if (in.seqlens_q.given()) s.len_q = integer(in.seqlens_q, b);
  if (in.seqlens_k.given()) s.len_k = integer(in.seqlens_k, b);
  if (desc.align == Align::kBottomRight) s.offset = s.len_k - s.len_q;
  if (desc.query_offset) s.offset = *desc.query_offset;
  if (in.query_offsets.given()) s.offset = integer(in.query_offsets, b);
  return s;
}

bool visible(const AttentionDesc& desc, const Inputs& in, const Span& s, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (i >= s.len_q || j >= s.len_k) return false;
  const __int128 distance = static_cast<__int128>(i) + s.offset - j;  // how far the key lies behind
  if (desc.causal && distance < 0) return false;
  if (desc.window_left >= 0 && distance > desc.window_left) return false;
  if (desc.window_right >= 0 && -distance > desc.window_right) return false;
  auto element = [&](const Array& a) {
    const int64_t at[4] = {b, h, i, j};
    int64_t index = 0;
    for (size_t n = 0; n < 4; ++n) index = index * a.dims[n] + (a.dims[n] == 1 ? 0 : at[n]);
    return a.at(index);
  };
  if (in.attn_mask.given() && element(in.attn_mask) == 0) return false;
  return !in.attn_bias.given() || element(in.attn_bias) != -HUGE_VAL;
}

Array rows(const Array& a, int64_t first, int64_t last) {
  if (!a.given()) return {};
  Array part;
  part.dtype = a.dtype;
  part.dims = a.dims;
  part.dims[0] = last - first;
  const int64_t row_bytes = a.dims[0] == 0 ? 0 : static_cast<int64_t>(a.bytes.size()) / a.dims[0];
  part.bytes.assign(a.bytes.begin() + first * row_bytes, a.bytes.begin() + last * row_bytes);
  return part;
}

namespace {

Array cu_seqlens_from_zero(const Array& a, int64_t first, int64_t last) {
  Array part = rows(a, first, last + 1);
  const double start = part.at(0);
  for (int64_t n = 0; n < part.size(); ++n) part.set(n, part.at(n) - start);
  return part;
}

}  // namespace

Slice slice_batch(const AttentionDesc& desc, const Inputs& in, int64_t first, int64_t last) {
  Slice s{desc, in};
  s.desc.batch = last - first;
  auto cut = [&](Array& a) { a = rows(a, first, last); };
  auto cut_operand = [&](Array& a, BroadcastOperand& told) {
    if (!a.given() || a.dims[0] == 1) return;
    cut(a);
    told.dims[0] = a.dims[0];
  };
  cut_operand(s.inputs.attn_mask, s.desc.attn_mask);
  cut_operand(s.inputs.attn_bias, s.desc.attn_bias);
  if (desc.alibi_slopes_ndim == 2) cut(s.inputs.alibi_slopes);
  cut(s.inputs.seqlens_q);
  cut(s.inputs.seqlens_k);
  cut(s.inputs.query_offsets);
  if (!desc.packed) {
    cut(s.inputs.query);
    cut(s.inputs.key);
    cut(s.inputs.value);
    return s;
  }
  const Span begin = span_of(desc, in, first), back = span_of(desc, in, last - 1);
  s.inputs.query = rows(in.query, begin.first_q, back.first_q + back.len_q);
  s.inputs.key = rows(in.key, begin.first_k, back.first_k + back.len_k);
  s.inputs.value = rows(in.value, begin.first_k, back.first_k + back.len_k);
  s.desc.seqlen_q = s.inputs.query.dims[0];
  s.desc.seqlen_k = s.inputs.key.dims[0];
  s.inputs.cu_seqlens_q = cu_seqlens_from_zero(in.cu_seqlens_q, first, last);
  s.inputs.cu_seqlens_k = cu_seqlens_from_zero(in.cu_seqlens_k, first, last);
  return s;
}

}  // namespace polyhead::testing
