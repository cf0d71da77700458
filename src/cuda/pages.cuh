// Where keys lie that are in pages. What the table says is not trusted: a page that does not exist holds no keys.
#pragma once

#include "cuda/problem.h"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

// A page and a row of it. page < 0: none.
struct KeyPlace {
  int page, within;
};

// Of key j of sequence b.
__device__ inline KeyPlace place_of_key(const Pages& pages, int64_t b, int64_t j) {
  const int64_t entry = j / pages.page_size, at = b * pages.batch + entry * pages.entry;
  const int64_t page =
      pages.wide ? static_cast<const int64_t*>(pages.table)[at] : static_cast<const int32_t*>(pages.table)[at];
  const bool there = 0 <= page && page < pages.num_pages;
  return {there ? static_cast<int>(page) : -1, static_cast<int>(j - entry * pages.page_size)};
}

// Where the row of a head begins that lies there.
__device__ inline int64_t row_at(const Rows& rows, int64_t head, KeyPlace place) {
  return place.page < 0 ? kNoRow : head * rows.head + place.page * rows.batch + place.within * rows.row;
}

// Of tiles of keys, one after the other: that in use and those that follow.
template <int kRows = kTileRows, int kTiles = 2>
class KeyPlaces {
 public:
  // Of the tile at key j of sequence b, as far as there are `keys`. Barriers between this, its readers, and that of the tile
  // which takes its place.
  __device__ void find(const Pages& pages, int64_t b, int64_t j, int64_t keys) {
    find_of(static_cast<int>(threadIdx.x), pages, b, j, keys);
  }
  // The same by threads that count themselves otherwise.
  __device__ void find_of(int row, const Pages& pages, int64_t b, int64_t j, int64_t keys) {
    if (row < kRows && j + row < keys) places_[j / kRows % kTiles][row] = place_of_key(pages, b, j + row);
  }

  __device__ KeyPlace of(int64_t j) const { return places_[j / kRows % kTiles][j % kRows]; }

 private:
  KeyPlace places_[kTiles][kRows];
};

}  // namespace polyhead::cuda
