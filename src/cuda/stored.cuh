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

// A head of a sequence's keys or values, whose rows are counted from the first one of the tensor on.
struct StoredHead {
  const StoredRows& stored;
  int64_t head;

  // Where row n begins.
  __device__ int64_t begin(const Rows& rows, int64_t n) const {
    return head * rows.head + n / stored.rows_of_batch * rows.batch + n % stored.rows_of_batch * rows.row;
  }
};

// Number `column` of row n.
template <class T>
__device__ inline float number_at(const StoredHead& of, int64_t n, int column) {
  const Rows &rows = of.stored.rows, &scales = of.stored.scales;
  const int64_t begin = of.begin(rows, n);
  if (scales.data == nullptr) return load_number(rows.data, rows.number, begin + column * rows.column);
  const float number = decoded(static_cast<const unsigned char*>(rows.data) + begin, rows.number, column, rows.column);
  return number *
         load_number(scales.data, scales.number, of.begin(scales, n) + column / of.stored.group * scales.column);
}

// Row n of the tile from row row_at(n) of `of`, zeros if that is kNoRow, from column `from` on, and from column `columns` on.
template <int kD, class RowAt>
__device__ void load_stored_rows(Tile<Float32, kD>& tile, const StoredHead& of, int from, int columns,
                                 const RowAt& row_at) {
  constexpr int kPiece = Tile<Float32, kD>::kPiece, kPieces = kD / kPiece, kStep = kThreads / kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces, c = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll 2
  for (int row = first; row < kTileRows; row += kStep) {
    const int64_t n = row_at(row);
    const auto number = [&](int i) {
      const int column = from + c * kPiece + i;
      return n != kNoRow && column < columns ? number_at<Float32>(of, n, column) : 0;
    };
    *reinterpret_cast<float4*>(tile.piece(row, c)) = {number(0), number(1), number(2), number(3)};
  }
}

}  // namespace polyhead::cuda
