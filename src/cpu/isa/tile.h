// The one microkernel, and the tile of queries it works on.
//
// A tile is kTile queries, one to a lane, kVecs vectors wide: S^T [keys][kTile], P^T [keys][kTile], O^T [dv][kTile].
// Queries along the lanes mean that softmax never sums across lanes, that K and V are read as scalars from where they
// lie, and that only Q is transposed. Measured on Zen 5 (2026-11-21, D = 64): 4 x 4 vectors 97 % of the FMA peak in both
// products, 8 x 2 96 %, 12 x 1 84 %.
#pragma once

#include "cpu/isa/operand.h"
#include "cpu/isa/simd.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kTile = kTileQueries;
constexpr int kVecs = kTile / kLanes;
constexpr int kMicroVecs = kRegisters == 32 ? 4 : 2;  // vectors of a microkernel
constexpr int kMicroRows = 4;

// Rows of a microkernel of `vecs` vectors: as many as make most_sums, because few sums do not hide the multiplier's latency,
// and each load serves more of them. Of AVX2's 16 registers 12 are sums (Xeon, against 8: forward 3 % faster, backward 2).
// Without FMA, at 4 lanes, 16 sums were faster than 8 too (1x16x384x64 on Zen 5: 33 against 22 GFLOP/s).
constexpr int kMostSums = kLanes == 8 ? 12 : 16;
constexpr int micro_rows(int vecs, int most_sums) {
  return 8 * vecs <= most_sums ? 8 : 6 * vecs <= most_sums ? 6 : kMicroRows;
}

// Sums of forward's microkernels. 24 take fewer loads a multiply-add, which pays where the other thread of a core takes half
// of what it can issue (Xeon, forward 1 to 3 % faster); backward's are kMostSums (2 % faster there). Of registers tmm, the vectors of
// scores that are taken at a time, in rows that divide a unit.
#ifdef POLYHEAD_HAS_TMM
constexpr int kForwardSums = 8;
#else
constexpr int kForwardSums = kLanes == 16 ? 24 : kMostSums;
#endif

// Calls work.template operator()<rows>(at) for [begin, end) in microkernels of micro_rows(kVecs_, kSums) rows, of which six do
// not divide sixteen: 6 + 6 + 4. Returned: where fewer than kMicroRows are left.
template <int kVecs_, int kSums, class Work>
inline __attribute__((always_inline)) int64_t for_each_micro(int64_t begin, int64_t end, const Work& work) {
  constexpr int kRows = micro_rows(kVecs_, kSums);
  int64_t at = begin;
  if constexpr (kRows == 6) {
    for (; at + 16 <= end; at += 16) {
      work.template operator()<6>(at);
      work.template operator()<6>(at + 6);
      work.template operator()<4>(at + 12);
    }
  } else {
    for (; at + kRows <= end; at += kRows) work.template operator()<kRows>(at);
  }
  if constexpr (kRows != kMicroRows) {
    for (; at + kMicroRows <= end; at += kMicroRows) work.template operator()<kMicroRows>(at);
  }
  return at;
}

// The same, then what is left by two rows and one.
template <int kVecs_, int kSums, class Work>
inline __attribute__((always_inline)) void for_all_micro(int64_t begin, int64_t end, const Work& work) {
  int64_t at = for_each_micro<kVecs_, kSums>(begin, end, work);
  if (at + 2 <= end) {
    work.template operator()<2>(at);
    at += 2;
  }
  if (at < end) work.template operator()<1>(at);
}

// A word is 32 bits: one float, or two neighbouring bfloat16 along the summed axis, which lie as their array does.
typedef float Word __attribute__((aligned(2), may_alias));
constexpr int64_t kWordBytes = 4;

// How two words multiply into a sum. kRounded: numbers are rounded to bfloat16 before.
struct Float32 {
  static constexpr int kElements = 1, kPlanes = 1;
  static constexpr bool kRounded = false;
  static inline F step(F acc, F a, F b) { return fma(a, b, acc); }
};
#ifdef POLYHEAD_HAS_BF16_DOT
struct BFloat16Pair {
  static constexpr int kElements = 2, kPlanes = 1;
  static constexpr bool kRounded = true;
  static inline F step(F acc, F a, F b) { return dot_bf16(acc, a, b); }
};
#endif
#ifdef POLYHEAD_HAS_TMM
// float32 as three planes of such pairs (planes.h).
struct Float32Planes {
  static constexpr int kElements = 2, kPlanes = 3;
  static constexpr bool kRounded = false;
};
#endif

// A task's work in the words that its operands are multiplied in: calls work.template operator()<Mac>(), of pairs where they
// are bfloat16 and the set multiplies pairs. Kernels of a set with registers tmm refuse all else, but planes_tiles, which does without this.
template <class Work>
inline void with_words(bool bf16, const Work& work) {
#ifdef POLYHEAD_HAS_TMM
  (void)bf16;
  const TmmInUse tmm;
  work.template operator()<BFloat16Pair>();
#else
#ifdef POLYHEAD_HAS_BF16_DOT
  if (bf16) return work.template operator()<BFloat16Pair>();
#endif
  (void)bf16;
  work.template operator()<Float32>();
#endif
}

// Steps in which a tile and a block of keys are cut into parts: whole registers tmm, or what the microkernel takes.
#ifdef POLYHEAD_HAS_TMM
constexpr bool kTmm = true;
constexpr int kMostPlanes = Float32Planes::kPlanes;
constexpr int kGroup = 32;  // keys that share a range of vectors, where not every query sees all
constexpr int kPartKeys = 32, kPartVecs = 32 / kLanes;
constexpr int kDimStep = 32, kQueryStep = 32;  // of sums over dims, and over queries
constexpr int kKeyColumns = 32;                // of sums over queries, side by side
constexpr int kForwardTiles = 12;              // tiles of a task in forward: V is transposed for each task anew
#else
constexpr bool kTmm = false;
constexpr int kMostPlanes = 2;  // a float takes as much as two bfloat16
constexpr int kGroup = kLanes;
constexpr int kPartKeys = kMicroRows, kPartVecs = 1;
constexpr int kDimStep = 1, kQueryStep = 1;
constexpr int kForwardTiles = 8;
constexpr int kKeyVecs = kLanes == 8 ? 2 : 4, kKeyColumns = kKeyVecs * kLanes;
#endif
constexpr int kPartLanes = kPartVecs * kLanes;

template <class T>
inline void swap(T*& a, T*& b) {
  T* const c = a;
  a = b;
  b = c;
}

constexpr int64_t whole(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Where the parts of so many keys of a block end: microkernels take any number, registers tmm whole ones.
constexpr int end_of_parts(int num_keys) { return kTmm ? static_cast<int>(whole(num_keys, kPartKeys)) : num_keys; }

#ifdef POLYHEAD_HAS_FMA_LANE
template <int kVecs_>
inline __attribute__((always_inline)) void load_vectors(F (&x)[kVecs_], const float* p) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) x[v] = load(p + v * kLanes);
}

template <int kLane, int kVecs_>
inline __attribute__((always_inline)) void add_lane(F (&acc)[kVecs_], const F (&a)[kVecs_], F b) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) acc[v] = fma_lane<kLane>(a[v], b, acc[v]);
}

template <int kLane, int kRows, int kVecs_>
inline __attribute__((always_inline)) void add_unit(F (&acc)[kRows][kVecs_], const float* a, const F (&b)[kRows]) {
  F a_u[kVecs_];
  load_vectors(a_u, a);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) add_lane<kLane>(acc[r], a_u, b[r]);
}

// Part of contract, where a multiply-add takes a lane of what one load brought: kLanes rows at once, or (kAlong) kLanes
// units. Returns how many units it did; the rest are left to the loop over single scalars. The order of sums is the same.
template <bool kAlong, int kRows, int kVecs_>
inline __attribute__((always_inline)) int64_t contract_by_lanes(F (&acc)[kRows][kVecs_], const float* a,
                                                                ptrdiff_t a_stride, const Word* b, ptrdiff_t b_stride,
                                                                int64_t units) {
  int64_t u = 0;
  if constexpr (kAlong) {
    for (; u + kLanes <= units; u += kLanes) {
      F b_u[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) b_u[r] = load(b + r * b_stride + u);
      add_unit<0>(acc, a + u * a_stride, b_u);
      add_unit<1>(acc, a + (u + 1) * a_stride, b_u);
      add_unit<2>(acc, a + (u + 2) * a_stride, b_u);
      add_unit<3>(acc, a + (u + 3) * a_stride, b_u);
    }
  } else if constexpr (kRows % kLanes == 0) {
    for (; u < units; ++u) {
      F a_u[kVecs_];
      load_vectors(a_u, a + u * a_stride);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r += kLanes) {
        const F b_u = load(b + u * b_stride + r);
        add_lane<0>(acc[r], a_u, b_u);
        add_lane<1>(acc[r + 1], a_u, b_u);
        add_lane<2>(acc[r + 2], a_u, b_u);
        add_lane<3>(acc[r + 3], a_u, b_u);
      }
    }
  }
  return u;
}
#endif

// Where vector v of contract's first operand lies.
inline const float* vector_at(const float* a, int v) { return a + v * kLanes; }

// Lines of memory that a product asks for on its way, one every kUnitsOfLine units at most: a core has some 16 of them
// outstanding, and what follows a longer burst waits for it (Xeon, [32, 12, 128, 64]: 15 % of forward).
constexpr int64_t kUnitsOfLine = 2;
struct Lines {
  const char* const* begin = nullptr;
  const char* const* end = nullptr;

  void ask() const {
    for (const char* const* line = begin; line < end; ++line) __builtin_prefetch(*line, 0, 2);
  }
};

// Where they come from (rows_ahead.h).
class RowsAhead;
struct Asking {
  RowsAhead* ahead = nullptr;  // null: nothing is asked for

  Lines lines(int64_t units) const;
  void ask(int64_t units) const;
};

// One unit of contract.
template <class Mac, bool kAlong, class Vectors, int kRows, int kVecs_>
inline __attribute__((always_inline)) void add_unit_of(F (&acc)[kRows][kVecs_], const Vectors& a, const Word* b,
                                                       ptrdiff_t b_stride) {
  F a_u[kVecs_];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs_; ++v) a_u[v] = load(vector_at(a, v));
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const F b_r = broadcast(kAlong ? b[r * b_stride] : b[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) acc[r][v] = Mac::step(acc[r][v], a_u[v], b_r);
  }
}

// acc[r] += sum over u in [0, units) of a[u] * b(r, u), a[u] being kVecs_ vectors at a + u * a_stride (vector_at tells where).
// b(r, u) lies at b + r * b_stride + u (kAlong: rows are long, as keys), or at b + u * b_stride + r (as values). `lines` are
// asked for meanwhile.
template <class Mac, bool kAlong, class Vectors, int kRows, int kVecs_>
inline __attribute__((always_inline)) void contract(F (&acc)[kRows][kVecs_], Vectors a, ptrdiff_t a_stride,
                                                    const Word* b, ptrdiff_t b_stride, int64_t units,
                                                    const Lines& lines = {}) {
  const ptrdiff_t b_step = kAlong ? 1 : b_stride;
#ifdef POLYHEAD_HAS_FMA_LANE
  lines.ask();
  const int64_t asking = 0, done = contract_by_lanes<kAlong>(acc, a, a_stride, b, b_stride, units);
  a = a + done * a_stride, b += done * b_step, units -= done;
#else
  const int64_t asking = kUnitsOfLine * (lines.end - lines.begin);
#endif
#pragma GCC unroll 2
  for (int64_t u = 0; u < asking; ++u) {
    // Again with each unit: in a loop over lines GCC keeps sums in memory.
    __builtin_prefetch(lines.begin[u / kUnitsOfLine], 0, 2);
    add_unit_of<Mac, kAlong>(acc, a + u * a_stride, b + u * b_step, b_stride);
  }
#pragma GCC unroll 2
  for (int64_t u = asking; u < units; ++u) {
    add_unit_of<Mac, kAlong>(acc, a + u * a_stride, b + u * b_step, b_stride);
  }
}

template <int kRows, int kVecs_>
inline __attribute__((always_inline)) void clear(F (&acc)[kRows][kVecs_]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) acc[r][v] = broadcast(0.0f);
  }
}

// Where the sums [d][kTile] of a product lie, begun at 0 if `fresh`; or a chunk's, which are added to `whole`, if that is
// given, instead of left.
struct TileSums {
  float* out;
  bool fresh = false;
  static constexpr float* whole = nullptr;
};
struct ChunkSums {
  float* out;
  bool fresh = false;
  float* whole = nullptr;
};

// O^T[d][lanes] += sum_u P^T[u][lanes] V[u][d] for kRows values of d, O^T[d][lanes] being `at` behind where sums lie.
template <class Mac, int kRows, int kVecs_, class Sums>
inline void accumulate_rows(const Sums& sums, int64_t at, const float* p, const Word* value, ptrdiff_t value_stride,
                            int64_t units, const Asking& asking) {
  const Lines lines = asking.lines(units);
  F acc[kRows][kVecs_];
  if (sums.fresh) {
    clear(acc);
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs_; ++v) acc[r][v] = load(sums.out + at + r * kTile + v * kLanes);
    }
  }
  contract<Mac, false>(acc, p, kTile, value, value_stride, units, lines);
  float* const to = (sums.whole != nullptr ? sums.whole : sums.out) + at;
  if (sums.whole != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs_; ++v) acc[r][v] = load(to + r * kTile + v * kLanes) + acc[r][v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) store(to + r * kTile + v * kLanes, acc[r][v]);
  }
}

// Words [unit][column] in panels of kPanel columns: word (u, d) lies at data + d / kPanel * panel_stride + u * stride +
// d % kPanel. Plain rows have panel_stride = kPanel. Of operands that were copied as registers (in_registers) the
// stride is that of 32 rows, step_words that of 16 words of these.
constexpr int kPanel = 16;

struct Words {
  const Word* data = nullptr;
  ptrdiff_t stride = 0;
  ptrdiff_t panel_stride = kPanel;
  ptrdiff_t step_words = 0;

  const Word* column(int64_t d) const { return data + d / kPanel * panel_stride + d % kPanel; }
};

// What one tile gives to sums over queries: weights [key][kTile elements, words along the queries], rows [columns / kKeyColumns]
// [word][kKeyColumns], which lies close in the L1 cache whatever the number of columns; of the words the range that each
// group of keys takes.
struct QueryTerms {
  const Word* weights;
  const float* rows;
  ptrdiff_t panel_stride;
  const int *begin, *end;  // [group]
};

// Whether some of the terms has words for a group of keys.
inline bool any_words(const QueryTerms* terms, int num_terms, int group) {
  bool any = false;
  for (int t = 0; t < num_terms; ++t) any = any || terms[t].begin[group] < terms[t].end[group];
  return any;
}

#ifndef POLYHEAD_HAS_TMM  // else tmm_products.h has what follows

// A product that waits for other work to be done beside: none does. Products ask for lines.
struct Later : Asking {
  void finish() {}
  bool reads(const Word*) const { return false; }
};

template <class Mac, int kSums, int kVecs_, class Sums>
inline void accumulate_vecs(const Asking& asking, const Sums& sums, int lane, const float* p, const Words& value,
                            int64_t units, int64_t dim) {
  const auto rows = [&]<int kRows>(int64_t d) {
    accumulate_rows<Mac, kRows, kVecs_>(sums, d * kTile + lane, p, value.column(d), value.stride, units, asking);
  };
  for_all_micro<kVecs_, kSums>(0, dim, rows);
}

// sums += P^T V over the words [begin, end) of keys, for the vectors [v_begin, v_end) of the tile. Not inline: with and
// without a program it would stand in each kernel twice.
template <class Mac, int kSums, class Sums>
__attribute__((noinline)) void accumulate(Later& later, const Sums& sums, const float* p, const Words& value,
                                          int64_t begin, int64_t end, int64_t dim, int v_begin, int v_end) {
  Words from = value;
  from.data += begin * value.stride;
  const int64_t units = end - begin;
  for (int v = v_begin; v < v_end; v += kMicroVecs) {
    const int lane = v * kLanes;
    const float* p_v = p + begin * kTile + lane;
    switch (v_end - v < kMicroVecs ? v_end - v : kMicroVecs) {
      case 1: accumulate_vecs<Mac, kSums, 1>(later, sums, lane, p_v, from, units, dim); break;
      case 2: accumulate_vecs<Mac, kSums, 2>(later, sums, lane, p_v, from, units, dim); break;
      default:
        if constexpr (kMicroVecs == 4) {
          if (v_end - v == 3) {
            accumulate_vecs<Mac, kSums, 3>(later, sums, lane, p_v, from, units, dim);
          } else {
            accumulate_vecs<Mac, kSums, 4>(later, sums, lane, p_v, from, units, dim);
          }
        }
    }
  }
}

// Sums of a microkernel of add_keys, whose rows are keys of one group. 24 take 10 loads for as many multiply-adds, which some
// cores do not outrun (Xeon, family 6 model 106: backward 4 % faster than with 16 of two vectors).
constexpr int kKeySums = kLanes == 16 ? 24 : 4 * kKeyVecs;

template <class Mac, int kRows, int kVecs_>
inline void add_key_rows(const Asking& asking, float* out, ptrdiff_t out_stride, const QueryTerms* terms, int num_terms,
                         int group, int key, int64_t column) {
  F acc[kRows][kVecs_];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) acc[r][v] = load(out + r * out_stride + v * kLanes);
  }
  constexpr ptrdiff_t kWeightsStride = kTile / Mac::kElements;
  for (int t = 0; t < num_terms; ++t) {
    const QueryTerms& x = terms[t];
    const int64_t units = x.end[group] - x.begin[group];
    contract<Mac, true>(acc, x.rows + column / kKeyColumns * x.panel_stride + x.begin[group] * kKeyColumns, kKeyColumns,
                        x.weights + key * kWeightsStride + x.begin[group], kWeightsStride, units, asking.lines(units));
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs_; ++v) store(out + r * out_stride + v * kLanes, acc[r][v]);
  }
}

template <class Mac, int kVecs_>
void add_key_columns(const Asking& asking, float* out, ptrdiff_t out_stride, const QueryTerms* terms, int num_terms,
                     int num_keys, int64_t column) {
  for (int first = 0; first < num_keys; first += kGroup) {
    const int group = first / kGroup;
    if (!any_words(terms, num_terms, group)) continue;
    for_each_micro<kVecs_, kKeySums>(first, first + kGroup, [&]<int kRows>(int64_t key) {
      add_key_rows<Mac, kRows, kVecs_>(asking, out + key * out_stride + column, out_stride, terms, num_terms, group,
                                       static_cast<int>(key), column);
    });
  }
}

// out[key][column] += sum over the queries of weights[key][query] * rows[query][column], tile after tile; `columns` are
// whole vectors, num_keys whole groups of kLanes keys.
template <class Mac>
void add_keys(const Asking& asking, float* out, int64_t columns, const QueryTerms* terms, int num_terms, int num_keys) {
  for (int64_t column = 0; column < columns; column += kKeyColumns) {
    const int64_t vecs = (columns - column) / kLanes;
    switch (vecs < kKeyVecs ? vecs : kKeyVecs) {
      case 1: add_key_columns<Mac, 1>(asking, out, columns, terms, num_terms, num_keys, column); break;
      case 2: add_key_columns<Mac, 2>(asking, out, columns, terms, num_terms, num_keys, column); break;
      case 3:
        add_key_columns<Mac, kKeyVecs == 4 ? 3 : 1>(asking, out, columns, terms, num_terms, num_keys, column);
        break;
      default:
        add_key_columns<Mac, kKeyVecs == 4 ? 4 : 1>(asking, out, columns, terms, num_terms, num_keys, column);
        break;
    }
  }
}

#endif

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
