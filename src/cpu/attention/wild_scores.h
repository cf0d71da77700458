// Scores of keys and queries that hold numbers which products of planes are not right for (cpu/isa/planes.h): of 2^60 and more,
// inf or NaN. Each row is looked at by itself, so that what is hidden changes no bit of the others.
#pragma once

#include "cpu/attention/view.h"
#include "cpu/isa/planes.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Of keys, of so many words each.
inline Wild wild_rows(const Words& rows, int num_rows, int64_t words) {
  Wild found;
  for (int r = 0; r < num_rows; ++r) {
    for (int64_t word = 0; word < words; word += kLanes) {
      const Word* const at = rows.data + in_registers<Float32Planes>(r, word, words);
      const F x = load(reinterpret_cast<const float*>(at));  // a copy, in floats
      if (!any(either(wild(even_bf16(x)), wild(odd_bf16(x))))) continue;
      found.any = true;
      found.rows[r / 64] |= uint64_t{1} << (r % 64);
    }
  }
  return found;
}

// Of queries [word][kTile].
inline Wild wild_lanes(const float* query, int num_queries, int64_t words) {
  Wild found;
  for (int lane = 0; lane < num_queries; lane += kLanes) {
    for (int64_t word = 0; word < words; ++word) {
      const F x = load(query + word * kTile + lane);
      found.rows[0] |= uint64_t{bits(either(wild(even_bf16(x)), wild(odd_bf16(x))))} << lane;
    }
  }
  found.any = found.rows[0] != 0;
  return found;
}

// Computes those among scores of kRows keys and kVecs_ vectors of queries anew, number by number.
template <int kRows, int kVecs_>
__attribute__((noinline)) void mend_scores(F (&s)[kRows][kVecs_], const float* query, const Wild& wild_queries,
                                           const Words& keys, const Wild& wild_keys, int64_t words, int key, int lane) {
  const ptrdiff_t query_plane = whole(words, kDimStep / 2) * kTile;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs_; ++v) {
      const int at = lane + v * kLanes;
      const uint32_t lanes = wild_keys.row(key + r) ? ~0u : static_cast<uint32_t>(wild_queries.rows[0] >> at);
      if ((lanes & ((uint64_t{1} << kLanes) - 1)) == 0) continue;
      F sum = broadcast(0.0f);
      for (int64_t word = 0; word < words; ++word) {
        const PlaneWords q = load_planes(query + word * kTile + at, query_plane);
        PlaneWords k;
        for (int p = 0; p < kPlanes; ++p) {
          k.plane[p] = broadcast(keys.data[in_registers<Float32Planes>(key + r, word, whole(words, kDimStep / 2), p)]);
        }
        sum = fma(odd_number(q), odd_number(k), fma(even_number(q), even_number(k), sum));
      }
      s[r][v] = select(mask_from_bits(lanes), sum, s[r][v]);
    }
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
