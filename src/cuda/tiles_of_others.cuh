// The rows that a block of a pass of backward meets, in tiles of kTile of them: keys for its own queries, or queries, of
// each head that reads them, for its own keys.
#pragma once

#include "cuda/band.cuh"

namespace polyhead::cuda {

// A tile of the others. The pass over queries has but one head of them.
struct PlaceOfTile {
  int head = 0, tile = 0;
};

// From the first row that some own row sees, down to a tile's edge.
template <bool kKeys, int kOwn, int kTile>
struct TilesOfOthers {
  int tiles, heads;              // of each head; how many heads read the own keys, of queries 1
  int first_seen, last_seen;     // the tiles, exclusive, that all own rows see whole
  int64_t rows;                  // of a head, from that first one on
  int64_t first_element[2];      // where it begins in the first head, in both matrices
  int64_t first_L, first_delta;  // likewise, of queries
  int64_t begin;                 // its index in the sequence

  __device__ TilesOfOthers(const BackwardProblem& p, const OwnRows& own, const Band& band) {
    const int64_t limit = num_own(band), behind_own = own.first + kOwn,
                  end_own = behind_own < limit ? behind_own : limit;
    const Range of_first = range_of(band, own.first), of_last = range_of(band, end_own - 1);
    const int64_t end = own.first < end_own ? of_last.last : 0;
    const int group = static_cast<int>(p.heads) / static_cast<int>(p.heads_kv),
              head = kKeys ? own.h * group : own.h / group;
    begin = of_first.first / kTile * kTile;
    const int64_t first = (kKeys ? band.first_q : band.first_k) + begin;
    tiles = begin < end ? static_cast<int>((end - begin + kTile - 1) / kTile) : 0;
    heads = !kKeys ? 1 : begin < end ? group : 0;
    const int64_t seen = of_last.first - begin, seen_end = of_first.last - begin;
    first_seen = seen < 0 ? 0 : static_cast<int>((seen + kTile - 1) / kTile);
    last_seen = seen_end < 0 ? 0 : static_cast<int>(seen_end / kTile);
    rows = (kKeys ? band.queries : band.keys) - begin;
    const auto element_of = [&](const auto& x) { return own.b * x.batch + head * x.head + first * x.row; };
    for (int n = 0; n < 2; ++n) first_element[n] = element_of(matrix(p, n));
    first_L = element_of(p.logsumexp), first_delta = element_of(p.delta);
  }

  __device__ static const Rows& matrix(const BackwardProblem& p, int n) {
    if (kKeys) return n == 0 ? p.query : p.grad_out;
    return n == 0 ? p.key : p.value;
  }
  __device__ static int64_t num_own(const Band& band) { return kKeys ? band.keys : band.queries; }
  // Of the others that an own row sees.
  __device__ static Range range_of(const Band& band, int64_t row) {
    return kKeys ? band.queries_of(row) : band.keys_of(row);
  }

  __device__ bool hold(const PlaceOfTile& place) const { return kKeys ? place.head < heads : place.tile < tiles; }
  __device__ PlaceOfTile behind(const PlaceOfTile& place) const {
    if (!kKeys || place.tile + 1 < tiles) return {place.head, place.tile + 1};
    return {place.head + 1, 0};
  }
  __device__ int64_t first_of(const PlaceOfTile& place) const { return begin + int64_t{place.tile} * kTile; }
  // Whether some own row does not see some of the tile.
  __device__ bool cut(const PlaceOfTile& place) const { return place.tile < first_seen || place.tile >= last_seen; }
};

}  // namespace polyhead::cuda
