// A boolean mask, as a bit for each score; and a bias that is added to the scores, as a number for each, -inf where a mask
// beside it hides.
#pragma once

#include "cpu/attention/score/bit_square.h"
#include "cpu/attention/score/option.h"
#include "cpu/isa/rows_ahead.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

inline Broadcast at_head(const Broadcast& x, int64_t b, int64_t h) {
  Broadcast head = x;
  if (x.data == nullptr) return head;
  head.data = static_cast<const char*>(x.data) + (b * x.stride_b + h * x.stride_h) * element_bytes(x.dtype);
  return head;
}

struct MaskAndBias : Option {
  Broadcast mask, bias;    // data moved to the head; the mask's to where key 0 would be
  int64_t first_mask_key;  // the mask tells of the keys from here on; those before it shows

  struct View {
    const float* tile = nullptr;      // [key][query]; null: nothing is added
    bool one_row = false;             // of all queries: [key]
    bool tile_hides = false;          // -inf may be among its numbers
    const uint64_t* shown = nullptr;  // [key], a bit for each query; null: all, up to what the tile hides
  };
  struct Memory {
    float* tile;
    uint64_t shown[kBlock];
  };

  static constexpr bool kHides = true;

  MaskAndBias(const Problem& problem, const Sequence& s, int64_t b, int64_t h)
      : mask(at_head(problem.mask, b, h)),
        bias(at_head(problem.bias, b, h)),
        first_mask_key(problem.mask_keys < 0 ? 0 : s.len_k - problem.mask_keys) {
    if (mask.data != nullptr) mask.data = static_cast<const uint8_t*>(mask.data) - first_mask_key * mask.stride_k;
  }

  bool on() const { return mask.data != nullptr || bias.data != nullptr; }
  bool may_hide() const { return on(); }
  bool same_for_heads() const { return mask.stride_h == 0 && bias.stride_h == 0; }
  bool same_for_queries() const { return mask.stride_q == 0 && bias.stride_q == 0; }

  void add_ahead(RowsAhead& ahead, const Queries& queries, const KeyRange& keys) const {
    add_rows_ahead(ahead, bias, queries, keys);
    add_rows_ahead(ahead, mask, queries, {keys.begin < first_mask_key ? first_mask_key : keys.begin, keys.end});
  }

  static int64_t memory_floats(const Asked& asked) { return asked.additive ? kTileFloats : 0; }
  void take_memory(Memory& own, float*& memory, bool) const {
    own.tile = bias.data != nullptr ? take(memory, kTileFloats) : nullptr;
  }

  bool look(View& view, Memory& own, const Queries& queries, Keys& keys) const {
    if (!on()) return true;
    if (bias.data == nullptr) return look_at_mask(view, own, queries, keys);
    const bool before_mask = keys.first + keys.begin < first_mask_key;
    const Found found = before_mask ? found_before_mask(own.tile, queries, keys) : fill(own.tile, queries, keys);
    if (found.visible == 0) return false;
    if (found.changed == 0) return true;
    view.tile = own.tile;
    view.tile_hides = found.hides;
    view.one_row = same_for_queries();
    return !view.one_row || narrow(keys, [&](int k) { return own.tile[k] != -kInfinity; });
  }
  bool hides(const View& view) const { return view.tile_hides || view.shown != nullptr; }

  M sees(M seen, const auto& at, const View& view) const {
    if (hides_by_bits(at, view)) return both(seen, shown(at, view));
    if (!adds(at, view)) return seen;
    return both(seen, negate(equal(added(at, view), broadcast(-kInfinity))));
  }

  F score(F s, const auto& at, const View& view, Kept&) const {
    if (hides_by_bits(at, view)) return select(shown(at, view), s, broadcast(-kInfinity));
    if (!adds(at, view)) return s;
    return plus(s, added(at, view));
  }

  // Each way has its loop, without a question in it.
  template <int kRows, int kVecs_>
  __attribute__((always_inline)) void apply(F (&s)[kRows][kVecs_], float scale, const View& view, int key,
                                            int lane) const {
    if (view.shown != nullptr) {
      for_each_product_of(
          s, scale, [&](F x, int r, int v) __attribute__((always_inline)) {
            return select(shown(TilePlace{0, 0, key + r, lane + v * kLanes}, view), x, broadcast(-kInfinity));
          });
    } else if (view.tile == nullptr) {
      for_each_product_of(
          s, scale, [&](F x, int, int) __attribute__((always_inline)) { return x; });
    } else if (!view.one_row && !view.tile_hides) {
      for_each_product_of(
          s, scale, [&](F x, int r, int v) __attribute__((always_inline)) {
            return x + load(view.tile + (key + r) * kTile + lane + v * kLanes);
          });
    } else if (view.one_row) {
      for_each_product_of(
          s, scale, [&](F x, int r, int) __attribute__((always_inline)) {
            return plus(x, broadcast(view.tile[key + r]));
          });
    } else {
      for_each_product_of(
          s, scale, [&](F x, int r, int v) __attribute__((always_inline)) {
            return plus(x, load(view.tile + (key + r) * kTile + lane + v * kLanes));
          });
    }
  }

 private:
  static constexpr int kSquares = kBlock / kBits;

  static bool hides_by_bits(const TilePlace&, const View& view) { return view.shown != nullptr; }
  static bool hides_by_bits(const auto&, const View&) { return false; }
  static M shown(const TilePlace& at, const View& view) {
    return mask_from_bits(static_cast<uint32_t>(view.shown[at.key] >> at.lane));
  }
  static M shown(const auto&, const View&) { return mask_from_bits(~0u); }

  static F plus(F s, F add) { return select(equal(add, broadcast(-kInfinity)), add, s + add); }
  bool adds(const TilePlace&, const View& view) const { return view.tile != nullptr; }
  bool adds(const RowPlace&, const View&) const { return on(); }
  bool adds(const HeadsPlace&, const View&) const { return false; }  // tiny_takes refuses them
  F added(const TilePlace& at, const View& view) const {
    return view.one_row ? broadcast(view.tile[at.key]) : load(view.tile + at.key * kTile + at.lane);
  }
  F added(const RowPlace& at, const View&) const {
    const int64_t key = at.first_key + at.key;
    return key < first_mask_key ? row_before_mask(at.query, key, at.n) : row(at.query, key, at.n);
  }
  F added(const HeadsPlace&, const View&) const { return broadcast(0.0f); }

  static void add_rows_ahead(RowsAhead& ahead, const Broadcast& x, const Queries& queries, const KeyRange& keys) {
    if (x.data == nullptr || keys.begin >= keys.end) return;
    const Rows rows{static_cast<const char*>(x.data), x.dtype, x.stride_q * element_bytes(x.dtype), x.stride_k};
    ahead.add(rows.from(queries.first, keys.begin), 0, x.stride_q == 0 ? 1 : queries.count, keys.end - keys.begin);
  }

  F bias_row(int64_t i, int64_t key, int n) const {
    if (bias.data == nullptr) return broadcast(0.0f);
    return load_elements(bias.data, bias.dtype, i * bias.stride_q + key * bias.stride_k, bias.stride_k, n);
  }

  // Of n keys for query i, of all of which the mask tells.
  F row(int64_t i, int64_t key, int n) const {
    const F x = bias_row(i, key, n);
    if (mask.data == nullptr) return x;
    const uint8_t* shown = static_cast<const uint8_t*>(mask.data) + i * mask.stride_q + key * mask.stride_k;
    F keep;
    if (n == kLanes && mask.stride_k == 1) {
      keep = load_bool(shown);
    } else {
      uint8_t buffer[kLanes] = {};
      for (int k = 0; k < n; ++k) buffer[k] = shown[k * mask.stride_k];
      keep = load_bool(buffer);
    }
    return select(equal(keep, broadcast(0.0f)), broadcast(-kInfinity), x);
  }

  // Of n keys for query i, the first of which stands before the mask.
  F row_before_mask(int64_t i, int64_t key, int n) const {
    alignas(F) float x[kLanes] = {};
    store_first(x, bias_row(i, key, n), n);
    const uint8_t* shown = static_cast<const uint8_t*>(mask.data) + i * mask.stride_q;
    for (int64_t k = first_mask_key - key; k < n; ++k) {
      if (shown[(key + k) * mask.stride_k] == 0) x[k] = -kInfinity;
    }
    return load(x);
  }

  // Bits of the lanes that are not -inf, and not 0; and whether some are -inf, or may be.
  struct Found {
    uint32_t visible = 0, changed = 0;
    bool hides = false;
    void add(F x, int n) {
      const uint32_t first = n == 32 ? ~0u : (1u << n) - 1;
      const uint32_t shown = ~bits(equal(x, broadcast(-kInfinity))) & first;
      visible |= shown;
      hides |= shown != first;
      changed |= ~bits(equal(x, broadcast(0.0f))) & first;
    }
  };

  // Of a mask alone. Masks often show or hide whole blocks, or keys behind one: then nothing is transposed, or nothing read.
  bool look_at_mask(View& view, Memory& own, const Queries& queries, Keys& keys) const {
    const int count = mask.stride_q == 0 ? 1 : queries.count;
    uint64_t rows[kSquares][kBits], seen[kSquares] = {}, hidden[kSquares] = {};  // the latter by and from some query
    for (int square = keys.begin / kBits; square * kBits < keys.end; ++square) {
      const int from = square * kBits, begin = keys.begin > from ? keys.begin - from : 0;
      const int end = keys.end - from < kBits ? keys.end - from : kBits;
      for (int q = 0; q < count; ++q) {
        rows[square][q] = mask_bits(queries.first + q, keys.first + from, begin, end);
        seen[square] |= rows[square][q];
        hidden[square] |= ~rows[square][q];
      }
    }
    if (!narrow(keys, [&](int k) { return (seen[k / kBits] >> (k % kBits) & 1) != 0; })) return false;
    for (int square = keys.begin / kBits; square * kBits < keys.end; ++square) {
      if ((hidden[square] & bits_between(keys.begin - square * kBits, keys.end - square * kBits)) != 0)
        view.shown = own.shown;
    }
    for (int square = keys.begin / kBits; view.shown != nullptr && square * kBits < keys.end; ++square) {
      uint64_t* const shown = own.shown + square * kBits;
      if (mask.stride_q == 0) {
        for (int k = 0; k < kBits; ++k) shown[k] = uint64_t{0} - (rows[square][0] >> k & 1);
      } else {
        for (int q = count; q < kBits; ++q) rows[square][q] = 0;
        transpose_bits(rows[square]);
        __builtin_memcpy(shown, rows[square], sizeof rows[square]);
      }
    }
    return true;
  }

  // Leaves out keys before the first and behind the last that some query sees. False: there is none.
  template <class Sees>
  static bool narrow(Keys& keys, const Sees& sees) {
    int first = keys.begin, behind = keys.end;
    while (first < behind && !sees(first)) ++first;
    if (first == behind) return false;
    while (!sees(behind - 1)) --behind;
    if (!keys.narrow || keys.begin % kNarrow != 0) return true;
    keys.begin = first / kNarrow * kNarrow;
    const int end = (behind + kNarrow - 1) / kNarrow * kNarrow;
    if (end < keys.end) keys.end = end;
    return true;
  }

  // Bit k: query i sees key + k, for k in [begin, end), of kBits at most; the others are 0.
  uint64_t mask_bits(int64_t i, int64_t key, int begin, int end) const {
    const int64_t before = first_mask_key - key;
    const int told = before <= begin ? begin : before < end ? static_cast<int>(before) : end;
    const uint64_t shows = bits_between(begin, told);
    if (told == end) return shows;
    const uint8_t* const bytes = static_cast<const uint8_t*>(mask.data) + i * mask.stride_q + key * mask.stride_k;
    if (told == 0 && end == kBits && mask.stride_k == 1) return nonzero_bytes(bytes);
    uint8_t buffer[kBits] = {};
    for (int k = told; k < end; ++k) buffer[k] = bytes[k * mask.stride_k];
    return shows | nonzero_bytes(buffer);
  }

  // Of a block whose first key stands before the mask.
  Found found_before_mask(float* tile, const Queries& queries, const Keys& keys) const {
    Keys before = keys, told = keys;
    const int64_t begin = first_mask_key - keys.first;
    before.end = told.begin = begin < keys.end ? static_cast<int>(begin) : keys.end;
    MaskAndBias bias_alone = *this;
    bias_alone.mask.data = nullptr;
    Found found = bias_alone.fill(tile, queries, before);
    const Found rest = fill(tile, queries, told);
    found.visible |= rest.visible;
    found.changed |= rest.changed;
    found.hides |= rest.hides;
    return found;
  }

  // What is known of a tile, as far as it is filled.
  struct Same {
    M hidden = mask_from_bits(~0u), zero = mask_from_bits(~0u);  // in each lane all numbers are -inf, or all 0
    // 0 as long as all are. Two, so that sums wait less for each other.
    F finite[2] = {broadcast(0.0f), broadcast(0.0f)};
    void add(F x) {
      hidden = both(hidden, equal(x, broadcast(-kInfinity)));
      zero = both(zero, equal(x, broadcast(0.0f)));
    }
  };

  // Scores of kLanes keys for as many queries, transposed into a tile: row_of(r) is of query r.
  template <class RowOf>
  __attribute__((always_inline)) static void fill_square(float* tile, Same& same, const RowOf& row_of) {
    F square[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      square[r] = row_of(r);
      same.finite[r % 2] = fma(square[r], broadcast(0.0f), same.finite[r % 2]);
    }
    if (any(either(same.hidden, same.zero))) {  // as a rule the first square has said no to both
      for (const F& x : square) same.add(x);
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(tile + i * kTile, square[i]);
  }

  // Queries [first, first + kLanes) and whole vectors of keys; how many keys that are.
  int fill_squares(float* tile, Found& found, int64_t first, const Keys& keys) const {
    const int end = keys.begin + (keys.end - keys.begin) / kLanes * kLanes;
    Same same;
    const int64_t key = keys.first;
    if (mask.data == nullptr && bias.dtype == DType::kFloat32 && bias.stride_k == 1) {
      const float* rows = static_cast<const float*>(bias.data) + first * bias.stride_q + key;
      for (int k = keys.begin; k < end; k += kLanes) {
        fill_square(tile + k * kTile, same, [&](int r) { return load(rows + r * bias.stride_q + k); });
      }
    } else {
      for (int k = keys.begin; k < end; k += kLanes) {
        fill_square(tile + k * kTile, same, [&](int r) { return row(first + r, key + k, kLanes); });
      }
    }
    if (end == keys.begin) return 0;
    found.visible |= bits(negate(same.hidden));
    found.changed |= bits(negate(same.zero));
    const F finite = same.finite[0] + same.finite[1];
    found.hides |= any(negate(equal(finite, finite)));
    return end - keys.begin;
  }

  // tile[key][query], or tile[key] where all queries share one row.
  Found fill(float* tile, const Queries& queries, const Keys& keys) const {
    Found found;
    if (same_for_queries()) {
      for (int k = keys.begin; k < keys.end; k += kLanes) {
        const int n = keys.end - k < kLanes ? keys.end - k : kLanes;
        const F x = row(queries.first, keys.first + k, n);
        found.add(x, n);
        store_first(tile + k, x, n);
      }
      return found;
    }
    for (int q = 0; q < queries.count; q += kLanes) {
      int k = keys.begin;
      if (q + kLanes <= queries.count) k += fill_squares(tile + q, found, queries.first + q, keys);
      for (; k < keys.end; k += kLanes) {
        const int n = keys.end - k < kLanes ? keys.end - k : kLanes;
        F block[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          if (q + r >= queries.count) {
            block[r] = broadcast(0.0f);
            continue;
          }
          block[r] = row(queries.first + q + r, keys.first + k, n);
          found.add(block[r], n);
        }
        transpose(block);
        for (int i = 0; i < n; ++i) store(tile + (k + i) * kTile + q, block[i]);
      }
    }
    return found;
  }
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
