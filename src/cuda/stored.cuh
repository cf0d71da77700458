// Keys and values that are stored as they come or in formats with scales, read as float32: number times scale.
#pragma once

#include <cmath>

#include "cuda/tile.cuh"

namespace polyhead::cuda {

// Number `column` of a row of a format that has scales, before its scale.
__device__ inline float decoded(const unsigned char* row, Number number, int column, int64_t stride) {
  if (number == Number::kInt4x2) {
    const signed char pair = static_cast<signed char>(row[column / 2 * stride]);
    return static_cast<float>(column % 2 == 1 ? pair >> 4 : static_cast<signed char>(pair << 4) >> 4);
  }
  const unsigned bits = row[column * stride];
  if (number == Number::kInt8) return static_cast<float>(static_cast<signed char>(bits));
  if (number == Number::kFloat8E5M2) return to_float(Float16{static_cast<uint16_t>(bits << 8)});
  if ((bits & 0x7f) == 0x7f) return NAN;
  return 256 * to_float(Float16{static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7)});  // bias 15 -> 7
}

// A row of keys or values: of a sequence of the batch, or of a page. outer < 0: it is not there.
struct StoredPlace {
  int64_t outer, inner;
};
__device__ inline bool is_there(const StoredPlace& place) { return place.outer >= 0; }

// A head of keys or values.
struct StoredHead {
  const StoredRows& stored;
  int64_t head;

  __device__ int64_t begin(const Rows& rows, const StoredPlace& place) const {
    return head * rows.head + place.outer * rows.batch + place.inner * rows.row;
  }
  // Of group n of a row's numbers.
  __device__ float scale(const StoredPlace& place, int n) const {
    const Rows& scales = stored.scales;
    if (scales.data == nullptr) return 1;
    return load_number(scales.data, scales.number, begin(scales, place) + n * scales.column);
  }
  // Number `column` of a row, before its scale.
  __device__ float number(const StoredPlace& place, int column) const {
    const Rows& rows = stored.rows;
    const int64_t first = begin(rows, place);
    if (stored.scales.data == nullptr) return load_number(rows.data, rows.number, first + column * rows.column);
    return decoded(static_cast<const unsigned char*>(rows.data) + first, rows.number, column, rows.column);
  }
};

template <class T>
__device__ inline float number_at(const StoredHead& of, const StoredPlace& place, int column) {
  return of.number(place, column) * of.scale(place, column / of.stored.group);
}

// Row n of the tile from place_at(n) of `of`, zeros where nothing is, from column `from` on, and from column `columns` on.
// Numbers of a piece share a scale: groups have a multiple of 16 of them, or all.
template <int kD, class PlaceAt>
__device__ void load_stored_rows(Tile<Float32, kD>& tile, const StoredHead& of, int from, int columns,
                                 const PlaceAt& place_at) {
  constexpr int kPiece = Tile<Float32, kD>::kPiece, kPieces = kD / kPiece, kStep = kThreads / kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces;
  const int column = from + c * kPiece, group = column / of.stored.group;
#pragma unroll 4
  for (int row = first; row < kTileRows; row += kStep) {
    const StoredPlace place = place_at(row);
    const bool there = is_there(place) && column < columns;
    const float scale = there ? of.scale(place, group) : 0;
    const auto number = [&](int i) { return there && column + i < columns ? of.number(place, column + i) * scale : 0; };
    *reinterpret_cast<float4*>(tile.piece(row, c)) = {number(0), number(1), number(2), number(3)};
  }
}

}  // namespace polyhead::cuda
