#include "layer/places.h"

namespace polyhead {
namespace {

// Moves the start by so many elements; a tensor without elements may have no start.
void advance(Tensor& t, int64_t elements) {
  if (t.num_elements() == 0) return;
  t.data = static_cast<char*>(t.data) + elements * static_cast<int64_t>(dtype_size_bytes(t.dtype));
}

Tensor same_for_heads(const Tensor& t, int64_t heads) {
  Tensor all = t;
  all.ndim = 5;
  all.dims[4] = t.dims[3];
  all.strides[4] = t.strides[3];
  all.dims[3] = heads;
  all.strides[3] = 0;
  return all;
}

Tensor split_heads(const Tensor& t, int64_t heads, int64_t dim) {
  Tensor apart = t;
  apart.ndim = 5;
  apart.dims[3] = heads;
  apart.dims[4] = dim;
  apart.strides[4] = t.dims[3] > 1 ? t.strides[3] : 1;  // of a dim of size 1 it may be any number
  apart.strides[3] = dim * apart.strides[4];
  return apart;
}

Tensor seen_as(Place::View view, const Tensor& t, const Place& place, int64_t step) {
  if (!t.given()) return t;
  switch (view) {
    case Place::View::kWhole: break;
    case Place::View::kSameForHeads: return same_for_heads(t, place.heads);
    case Place::View::kSplit: return split_heads(t, place.heads, place.dim);
    case Place::View::kOneStep: return step >= 0 ? index_of(t, 2, step) : t;
    case Place::View::kKept: {
      Tensor all = t;
      all.dims[3] = place.heads, all.strides[3] = 0;
      return all;
    }
  }
  return t;
}

}  // namespace

Place argument(int number) {
  Place place;
  place.room = Place::Room::kArgument;
  place.argument = static_cast<int8_t>(number);
  return place;
}

Place Memory::take(DType dtype, std::initializer_list<int64_t> dims) {
  Place place;
  place.room = room_;
  place.shape = Tensor(nullptr, dtype, dims);
  place.offset = map.take(dims, dtype_size_bytes(dtype));
  return place;
}

void Memory::take_side_by_side(DType dtype, std::initializer_list<int64_t> rows, std::span<const Columns> columns,
                               Place* const* places) {
  int64_t row = 0;
  for (const Columns& each : columns) row += each.heads * each.dim;
  const int64_t* const dims = rows.begin();  // [batch, beam, time]
  const Tensor all(nullptr, dtype, {dims[0], dims[1], dims[2], row});
  size_t offset = map.take({dims[0], dims[1], dims[2], row}, dtype_size_bytes(dtype));
  for (size_t i = 0; i < columns.size(); ++i) {
    const auto [heads, dim] = columns[i];
    Place& place = *places[i];
    place.room = room_;
    place.offset = offset;
    Tensor& t = place.shape = Tensor(nullptr, dtype, {dims[0], dims[1], dims[2], heads, dim});
    for (int n = 0; n < 3; ++n) t.strides[n] = all.strides[n];
    offset += static_cast<size_t>(heads * dim) * dtype_size_bytes(dtype);
  }
}

Tensor tensor_at(const Call& call, const Place& place) {
  if (place.unless >= 0 && call.tensors[place.unless].given()) {
    return seen_as(place.otherwise_view, call.tensors[place.otherwise], place, call.step);
  }
  if (place.wanted_by != 0 && !call.any_given(place.wanted_by)) return {};
  if (place.room == Place::Room::kNowhere) return {};
  if (place.room == Place::Room::kArgument) {
    return seen_as(place.view, call.tensors[place.argument], place, call.step);
  }
  Tensor t = place.shape;
  char* const start = place.room == Place::Room::kReserve ? call.reserve : call.workspace;
  if (start != nullptr) t.data = start + place.offset;
  return seen_as(place.view, t, place, call.step);
}

Tensor with_beam(const Tensor& t, int ndim) {
  if (t.ndim != ndim - 1 || t.ndim < 1) return t;
  Tensor all = t;
  all.ndim = ndim;
  for (int i = ndim - 1; i > 1; --i) all.dims[i] = t.dims[i - 1], all.strides[i] = t.strides[i - 1];
  all.dims[1] = 1;
  all.strides[1] = 0;
  return all;
}

Tensor beam_of(const Tensor& t, int64_t n) {
  if (!t.given()) return t;
  Tensor one = t;
  one.ndim = t.ndim - 1;
  for (int i = 1; i < one.ndim; ++i) one.dims[i] = t.dims[i + 1], one.strides[i] = t.strides[i + 1];
  if (t.dims[1] > 1 && t.num_elements() > 0) advance(one, n * t.strides[1]);
  return one;
}

Tensor index_of(const Tensor& t, int dim, int64_t i) {
  if (!t.given() || t.dims[dim] <= 1) return t;
  Tensor one = t;
  one.dims[dim] = 1;
  if (t.num_elements() > 0) advance(one, i * t.strides[dim]);
  return one;
}

}  // namespace polyhead
