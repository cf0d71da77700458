// A boolean mask, and a bias that is added to the scores, as one number for each score: -inf where the mask hides.
#pragma once

#include "cpu/attention/score/option.h"
#include "cpu/isa/rows.h"

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
    const float* tile = nullptr;  // [key][query]; null: nothing is hidden and nothing added
    bool one_row = false;         // of all queries: [key]
  };
  struct Memory {
    float* tile;
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
  void take_memory(Memory& own, float*& memory, bool) const { own.tile = on() ? take(memory, kTileFloats) : nullptr; }

  bool look(View& view, Memory& own, const Queries& queries, const Keys& keys) const {
    if (!on()) return true;
    Found found;
    if (keys.first + keys.begin < first_mask_key) {
      found = found_before_mask(own.tile, queries, keys);
    } else if (!found_by_bytes(found, queries, keys)) {
      found = fill(own.tile, queries, keys);
    }
    if (found.visible == 0) return false;
    if (found.changed == 0) return true;
    view.tile = own.tile;
    view.one_row = same_for_queries();
    return true;
  }
  bool hides(const View& view) const { return view.tile != nullptr; }

  M sees(M seen, const auto& at, const View& view) const {
    if (!adds(at, view)) return seen;
    return both(seen, negate(equal(added(at, view), broadcast(-kInfinity))));
  }

  F score(F s, const auto& at, const View& view, Kept&) const {
    if (!adds(at, view)) return s;
    return plus(s, added(at, view));
  }

  // The same, where view.tile is there.
  F add(F s, const View& view, int key, int lane) const { return plus(s, added(TilePlace{0, 0, key, lane}, view)); }

 private:
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

  // Bits of the lanes that are not -inf, and not 0.
  struct Found {
    uint32_t visible = 0, changed = 0;
    void add(F x, int n) {
      const uint32_t first = n == 32 ? ~0u : (1u << n) - 1;
      visible |= ~bits(equal(x, broadcast(-kInfinity))) & first;
      changed |= ~bits(equal(x, broadcast(0.0f))) & first;
    }
  };

  // Masks often show or hide whole blocks: of a mask alone, its bytes tell so before anything is transposed. False: it
  // shows some keys and hides others, or there is more to it than a mask.
  bool found_by_bytes(Found& found, const Queries& queries, const Keys& keys) const {
    if (bias.data != nullptr || mask.stride_k != 1) return false;
    const int count = mask.stride_q == 0 ? 1 : queries.count;
    bool shows = false, hides = false;
    for (int q = 0; q < count; ++q) {
      const uint8_t* shown = static_cast<const uint8_t*>(mask.data) + (queries.first + q) * mask.stride_q + keys.first;
      uint8_t any = 0, every = 1;
      for (int k = keys.begin; k < keys.end; ++k) {
        any |= shown[k] != 0;
        every &= shown[k] != 0;
      }
      shows |= any != 0;
      hides |= every == 0;
      if (shows && hides) return false;
    }
    found.visible = shows;
    found.changed = hides;
    return true;
  }

  // Of a block whose first key stands before the mask.
  Found found_before_mask(float* tile, const Queries& queries, const Keys& keys) const {
    Keys before = keys, told = keys;
    const int64_t begin = first_mask_key - keys.first;
    before.end = told.begin = begin < keys.end ? static_cast<int>(begin) : keys.end;
    Found found;
    if (before.end == keys.end && bias.data == nullptr) {
      found.visible = 1;
      return found;
    }
    MaskAndBias bias_alone = *this;
    bias_alone.mask.data = nullptr;
    found = bias_alone.fill(tile, queries, before);
    const Found rest = fill(tile, queries, told);
    found.visible |= rest.visible;
    found.changed |= rest.changed;
    return found;
  }

  // Scores of kLanes keys for as many queries, transposed into a tile: row_of(r) is of query r. Whether all of them are -inf, and
  // whether all are 0, is added to what is known.
  template <class RowOf>
  static void fill_square(float* tile, M& all_hidden, M& all_zero, const RowOf& row_of) {
    F square[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      square[r] = row_of(r);
      all_hidden = both(all_hidden, equal(square[r], broadcast(-kInfinity)));
      all_zero = both(all_zero, equal(square[r], broadcast(0.0f)));
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(tile + i * kTile, square[i]);
  }

  // Queries [first, first + kLanes) and whole vectors of keys; how many keys that are.
  int fill_squares(float* tile, Found& found, int64_t first, const Keys& keys) const {
    const int end = keys.begin + (keys.end - keys.begin) / kLanes * kLanes;
    M all_hidden = mask_from_bits(~0u), all_zero = all_hidden;
    const int64_t key = keys.first;
    const bool has_mask = mask.data != nullptr, has_bias = bias.data != nullptr;
    if (!has_mask && has_bias && bias.dtype == DType::kFloat32 && bias.stride_k == 1) {
      const float* rows = static_cast<const float*>(bias.data) + first * bias.stride_q + key;
      for (int k = keys.begin; k < end; k += kLanes) {
        fill_square(tile + k * kTile, all_hidden, all_zero, [&](int r) { return load(rows + r * bias.stride_q + k); });
      }
    } else if (!has_bias && has_mask && mask.stride_k == 1) {
      const uint8_t* rows = static_cast<const uint8_t*>(mask.data) + first * mask.stride_q + key;
      for (int k = keys.begin; k < end; k += kLanes) {
        fill_square(tile + k * kTile, all_hidden, all_zero, [&](int r) {
          const F keep = load_bool(rows + r * mask.stride_q + k);
          return select(equal(keep, broadcast(0.0f)), broadcast(-kInfinity), broadcast(0.0f));
        });
      }
    } else {
      for (int k = keys.begin; k < end; k += kLanes) {
        fill_square(tile + k * kTile, all_hidden, all_zero, [&](int r) { return row(first + r, key + k, kLanes); });
      }
    }
    if (end == keys.begin) return 0;
    found.visible |= bits(negate(all_hidden));
    found.changed |= bits(negate(all_zero));
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
