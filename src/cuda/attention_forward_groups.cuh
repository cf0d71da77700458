// Forward of many queries on 9.0: FlashAttention-2 (attention_forward.cuh) by warpgroups
// (warpgroup.cuh), kGroups of which compute, each with
//   Q_i [64, D]  K_j, V_j [kKeys, D]  S, P [64, kKeys]  O [64, D]  m, l, L [64]
// and one more copies K and V to where those find them (FlashAttention-3, arXiv:2407.08608, algorithms 1 and 2). S of tile j and
// P V of tile j - 1 are computed at once, and the weights of j are made of S while P V goes on.
#pragma once

#include "cuda/attention_forward_wide.cuh"
#include "cuda/score.cuh"
#include "cuda/warpgroup.cuh"

namespace polyhead::cuda {

// Of a tile: as many as there are registers for, beside O, and of float16 the rest of P.
template <class T, int kD, bool kOptions>
constexpr int kKeysOfGroups = kD == 64 && !T::kRestOfWeights && !kOptions ? 128 : 64;

template <class T, int kD, bool kOptions, int kGroups>
struct GroupsMemory {
  static constexpr int kRows = kGroups * kGroupRows, kKeys = kKeysOfGroups<T, kD, kOptions>,
                       kStages = kKeys > 64 ? 3 : 4;

  // K of a tile, and V of that before it.
  struct Stage {
    Panels<T, kD, kKeys> K, V;
  };
  Panels<T, kD, kRows> Q;
  Stage stages[kStages];
  alignas(1024) T ones[8 * 64];  // eight rows of terms 1: their products with weights are sums of these
  Phases full[kStages], free[kStages];
  Kept kept[kOptions ? kGroups : 1];  // by dropout, of the tile that each weighs
  int not_finite[kStages];  // the last stage there whose V had an infinity or a NaN that some row must not see
  WideBlock block;
  Keys of_group[kGroups];      // that some query of each sees
  Keys of_row[kRows];          // that each sees
  KeyPlaces<kKeys, 2> places;  // those in pages: for who copies
};

// What those who compute and those who copy know.
template <class T, int kD, bool kOptions, int kGroups>
class GroupsBlock {
 protected:
  using Memory = GroupsMemory<T, kD, kOptions, kGroups>;
  static constexpr int kKeys = Memory::kKeys, kStages = Memory::kStages;

  __device__ GroupsBlock(const Problem& problem, Memory& memory)
      : p(problem), shared(memory), lane(static_cast<int>(threadIdx.x) % 32) {
    const WideBlock& block = shared.block;
    begin = block.of_some.first / kKeys * kKeys;
    tiles = begin < block.of_some.last ? (block.of_some.last - begin + kKeys - 1) / kKeys : 0;
  }

  __device__ bool in_pages() const { return p.pages.table != nullptr; }
  __device__ int key_of(int t) const { return begin + t * kKeys; }

  // Whether some row of the block does not see some key of the tile, as far as is known before.
  __device__ bool is_cut(int t) const {
    if (kOptions && p.hides_pairs) return true;
    const Keys of_all = shared.block.of_all;
    return key_of(t) < of_all.first || key_of(t) + kKeys > of_all.last;
  }

  const Problem& p;
  Memory& shared;
  int lane, begin, tiles;
};

// Copies stage t, K_t and V_t-1, while those before it are computed with; of stage 0 Q, too.
template <class T, int kD, bool kOptions, int kGroups>
class GroupsCopies : GroupsBlock<T, kD, kOptions, kGroups> {
  using Base = GroupsBlock<T, kD, kOptions, kGroups>;
  using Base::p, Base::shared, Base::lane, Base::tiles, Base::key_of, Base::in_pages, Base::is_cut, Base::kKeys,
      Base::kStages;
  static constexpr int kPiece = 16 / sizeof(T), kPieces = kD / kPiece, kStep = kGroupThreads / kPieces;
  static constexpr int kInFlight = kStages - 2;  // stages

 public:
  __device__ GroupsCopies(const Problem& problem, typename Base::Memory& memory)
      : Base(problem, memory), thread(static_cast<int>(threadIdx.x) % kGroupThreads) {}

  __device__ void run() {
    if (tiles == 0) return;  // nobody waits for Q, where rows of O are on their way out
    const WideBlock& block = shared.block;
    load_rows_apart(shared.Q, p.query, p.head_dim, block.first_query(p), block.band.queries - block.own.first,
                    OneGroup());
    for (int t = 0; t <= tiles + kInFlight; ++t) {
      if (t <= tiles) {
        if (t >= kStages) shared.free[t % kStages].wait(t / kStages - 1);
        if (in_pages()) find_places(t);
        load(false, t);
        load(true, t - 1);
      }
      if (t >= kInFlight) finish(t - kInFlight, t);
    }
  }

 private:
  // The places of keys of tile t, beside those of tile t - 1.
  __device__ void find_places(int t) {
    wait_for_group(kCopiesBarrier, kGroupThreads);
    if (t < tiles) shared.places.find_of(thread, p.pages, shared.block.own.b, key_of(t), shared.block.band.keys);
    wait_for_group(kCopiesBarrier, kGroupThreads);
  }

  // K or V of tile t, if there is one, as one group of copies.
  __device__ void load(bool value, int t) {
    if (t < 0 || t >= tiles) {
      commit_copies();
      return;
    }
    auto& stage = shared.stages[(value ? t + 1 : t) % kStages];
    auto& tile = value ? stage.V : stage.K;
    const Rows& rows = value ? p.value : p.key;
    const WideBlock& block = shared.block;
    const int columns = value ? p.head_dim_v : p.head_dim, j = key_of(t);
    const int keys = static_cast<int>(block.band.keys) - j;
    if (in_pages()) {
      load_rows(
          tile, rows, columns,
          [&](int n) { return n < keys ? row_at(rows, block.h_kv, shared.places.of(j + n)) : kNoRow; }, OneGroup());
    } else {
      load_rows_apart(tile, rows, columns, block.first_element[value] + static_cast<int64_t>(j) * rows.row, keys,
                      OneGroup());
    }
  }

  // Stage t is there, when stages to `last` have been begun.
  __device__ void finish(int t, int last) {
    if (last <= tiles) {
      wait_for_copies_before<2 * kInFlight>();
    } else {
      wait_for_copies();
    }
    if (t > 0 && is_cut(t - 1)) clear_not_finite(t);
    show_to_products();
    shared.full[t % kStages].arrive(lane);
  }

  // Turns what is not finite in what this thread copied of V_t-1 into zeros.
  __device__ void clear_not_finite(int t) {
    auto& tile = shared.stages[t % kStages].V;
    for (int row = thread / kPieces; row < kKeys; row += kStep) {
      auto* at = reinterpret_cast<uint4*>(tile.piece(row, thread % kPieces));
      uint4 words = *at;
      const uint4 bad = {cuda::not_finite<T>(words.x), cuda::not_finite<T>(words.y), cuda::not_finite<T>(words.z),
                         cuda::not_finite<T>(words.w)};
      if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
      atomicMax(&shared.not_finite[t % kStages], t);
      *at = {words.x & ~bad.x, words.y & ~bad.y, words.z & ~bad.z, words.w & ~bad.w};
    }
  }

  int thread;
};

template <class T, int kD, bool kOptions, int kGroups>
class GroupsForward : GroupsBlock<T, kD, kOptions, kGroups> {
  using Base = GroupsBlock<T, kD, kOptions, kGroups>;
  using Base::p, Base::shared, Base::lane, Base::begin, Base::tiles, Base::key_of, Base::in_pages, Base::is_cut,
      Base::kKeys, Base::kStages;
  static constexpr int kBlocks = kKeys / 8, kTerms = 16;

 public:
  __device__ GroupsForward(const Problem& problem, typename Base::Memory& memory, int group_of_block)
      : Base(problem, memory), warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32), group(group_of_block) {}

  // Stage t has K_t and V_t-1; this group's rows see tiles from `first` to `last`, exclusive.
  __device__ void run() {
    const Keys seen = shared.of_group[group];
    const bool sees = !seen.empty() && seen.last > begin;
    const int first = sees ? (seen.first > begin ? seen.first - begin : 0) / kKeys : -2;
    const int last = sees ? (seen.last - begin + kKeys - 1) / kKeys : -2;
    for (int t = 0; t <= tiles && tiles > 0; ++t) {
      const bool before = first < t && t <= last, now = first <= t && t < last;
      shared.full[t % kStages].wait(t / kStages);
      if (before && shared.not_finite[t % kStages] == t) add_not_finite_values(key_of(t - 1));
      if (before && now) {
        step(t);
      } else if (now) {
        begin_rows(t);
      } else if (before) {
        multiply(shared.stages[t % kStages].V);
        wait_for_products_before<0>();
      }
      shared.free[t % kStages].arrive(lane);
    }
    finish();
  }

 private:
  __device__ bool drops() const { return kOptions && p.dropout.on; }
  // Of a lane's rows, among the group's and the block's.
  __device__ int row_of_group(int r) const { return warp * 16 + lane / 4 + 8 * r; }
  __device__ int local_row(int r) const { return group * kGroupRows + row_of_group(r); }

  // The weights of the first tile that this group's rows see.
  __device__ void begin_rows(int t) {
    scores(t);
    if (drops()) draw(t);
    wait_for_products_before<0>();
    weights(t);
    if constexpr (kOptions) rescale();
    round();
  }

  // O += P V of tile t - 1; S, P <- those of tile t
  __device__ void step(int t) {
    scores(t);
    multiply(shared.stages[t % kStages].V);
    if (drops()) draw(t);
    wait_for_products_before<1>();
    weights(t);
    wait_for_products_before<0>();
    rescale();
    round();
  }

  // S = Q K^T, begun
  __device__ void scores(int t) {
    const uint64_t rows = factor_of(shared.Q, group * kGroupRows), keys = factor_of(shared.stages[t % kStages].K);
    begin_products();
#pragma unroll
    for (int k = 0; k < kD / kTerms; ++k) {
      multiply_rows_async<T>(S, further(rows, kBytesToColumns<Base::Memory::kRows>(k)),
                             further(keys, kBytesToColumns<kKeys>(k)), k > 0);
    }
    commit_products();
  }

  // O += P V, begun
  __device__ void multiply(Panels<T, kD, kKeys>& V) {
    const uint64_t values = factor_of(V), ones = factor_at(shared_address(shared.ones), 0);
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / kTerms; ++k) {
      const uint64_t sixteen = further(values, k * kTerms * 128);
      multiply_weights_async<T>(O, P[k], sixteen);
      if constexpr (T::kRestOfWeights) {
        multiply_weights_async<T>(O, rest[k], sixteen);
      } else if constexpr (!kOptions) {
        multiply_weights_async<T>(sums, P[k], ones);
      }
    }
    commit_products();
  }

  // S <- weights of tile t, l <- their sums
  __device__ void weights(int t) {
    if constexpr (kOptions) {
      apply_options(t);
      softmax_of_products<T>(S, rows[0], rows[1], alpha, 1);
      return;
    }
    const bool above_zero = p.scale > 0;
    if (!above_zero) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[n][e] = rounded_product(S[n][e], p.scale);
      }
    }
    if (is_cut(t)) hide(key_of(t));
    softmax_of_products<T>(S, rows[0], rows[1], alpha, above_zero ? p.scale : 1);
  }

  // S = what options make of the scores of tile t, -inf where a key is hidden
  __device__ void apply_options(int t) {
    const int64_t first = shared.block.own.first + group * kGroupRows;
    const Score score(p, shared.block.band, shared.block.own.b, shared.block.own.h, first, key_of(t));
    const int own[2] = {row_of_group(0), row_of_group(1)}, other = lane % 4 * 2;
    for_each_pair<kBlocks>([&](int n, int e) { S[n][e] = rounded_product(S[n][e], p.scale); });
    const bool cut = is_cut(t);
    shown = ~0u;
    if (cut) shown = pairs_seen(0, key_of(t) + other) | pairs_seen(1, key_of(t) + other) << 2;
    shown = score.template apply<T, false>(S, own, other, shown, [](int, int, float) {});
    for (int r = 0; r < 2; ++r) some_shown |= shown & pairs_of_row(r);
    if (!cut) return;
    for_each_pair<kBlocks>([&](int n, int e) {
      if (!(shown & bit_of_pair(n, e))) S[n][e] = -INFINITY;
    });
  }
  __device__ unsigned pairs_seen(int r, int first_key) const {
    const Keys seen = shared.of_row[local_row(r)];
    return pairs_below<kBlocks>(seen.last - first_key) & ~pairs_below<kBlocks>(seen.first - first_key);
  }

  // Which weights of tile t are kept.
  __device__ void draw(int t) {
    Kept& bits = shared.kept[group];
    const int64_t first = shared.block.own.first + group * kGroupRows;
    bits.fill(p.dropout, shared.block.own.b, shared.block.own.h, first, key_of(t), false, warp);
    const int own[2] = {row_of_group(0), row_of_group(1)};
    kept = bits.template pairs<false, kBlocks>(own, lane % 4 * 2);
  }

  // O and what else is summed <- theirs times exp(m_old - m)
  __device__ void rescale() {
    if constexpr (kOptions) {
      for (int r = 0; r < 2; ++r) rows[r].l_rounded = rounded_product(rows[r].l_rounded, alpha[r]);
    }
    if (!__any_sync(kAllLanes, alpha[0] != 1 || alpha[1] != 1)) return;
    multiply_rows_of(O, alpha);
    if constexpr (!kOptions) multiply_rows_of(sums, alpha);
  }

  // P <- weights as they multiply V
  __device__ void round() {
#pragma unroll
    for (int k = 0; k < kKeys / kTerms; ++k) {
      if constexpr (!kOptions) {
        round_weights<T>(S, k, P[k], rest[k]);
      } else {
        round_weights<T>(S, k, rows[0], rows[1], P[k], rest[k]);
        if (drops()) drop(k);
      }
    }
  }
  __device__ void drop(int k) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const unsigned keys = kept >> (8 * k + a / 2 * 4 + a % 2 * 2);
      const unsigned halves = (keys & 1 ? 0xffffu : 0) | (keys & 2 ? 0xffff0000u : 0);
      P[k][a] &= halves;
      if constexpr (T::kRestOfWeights) rest[k][a] &= halves;
    }
  }

  // S = -inf at the keys that a row does not see
  __device__ void hide(int j) {
    const int of_lane = j + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Keys seen = shared.of_row[local_row(r)];
      const int first = seen.first - of_lane, last = seen.last - of_lane;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + e < first || 8 * n + e >= last) S[n][2 * r + e] = -INFINITY;
        }
      }
    }
  }

  // Where value j of the sequence begins, which is below its length; or its page does not exist.
  __device__ int64_t value_at(int j) const {
    const WideBlock& block = shared.block;
    return in_pages() ? row_at(p.value, block.h_kv, place_of_key(p.pages, block.own.b, j))
                      : block.first_element[1] + static_cast<int64_t>(j) * p.value.row;
  }

  // O += P V with the infinities and NaNs of V, which are not in shared memory.
  __device__ void add_not_finite_values(int j) {
    const auto add = [&](const auto& sees) {
      add_not_finite<T, false>(
          O, S, p.value, shared.block.band.keys - j, 0, p.head_dim_v, lane, [&](int key) { return value_at(j + key); },
          sees);
    };
    if constexpr (kOptions) {
      for_each_pair<kBlocks>([&](int n, int e) {
        if (drops() && !(kept & bit_of_pair(n, e))) S[n][e] = 0;
      });
      const RowBits seen = RowBits::of<kBlocks>(lane, [&](int n, int e) { return (shown & bit_of_pair(n, e)) != 0; });
      add([&](int r, int key) { return seen.hold(r, key); });
    } else {
      const Keys seen[2] = {shared.of_row[local_row(0)], shared.of_row[local_row(1)]};
      add([&](int r, int key) { return seen[r].hold(j + key); });
    }
  }

  // O / l and L = m + log l
  __device__ void finish() {
    const Band& band = shared.block.band;
    const int b = shared.block.own.b, h = shared.block.own.h;
    const bool in_pieces = p.out.in_pieces && p.out.number != Number::kFloat32;
    if (in_pieces) wait_for_group(kFirstGroupBarrier + group, kGroupThreads);  // nobody reads Q
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t i = shared.block.own.first + local_row(r);
      RowSums of_row;
      of_row.m = rows[r].m * (p.scale > 0 && !kOptions ? p.scale : 1);
      of_row.l = sum_of_row(rows[r].l);
      of_row.l_rounded = kOptions            ? sum_of_row(rows[r].l_rounded)
                         : T::kRestOfWeights ? of_row.l  // P and rest are all of it
                                             : sums[0][2 * r];
      const bool some = kOptions && sum_of_row((some_shown & pairs_of_row(r)) != 0 ? 1 : 0) > 0;
      if (i >= band.rows_q) continue;
      const Keys seen = shared.of_row[local_row(r)];
      const bool is_seen = kOptions ? some : !seen.empty();
      of_row.state = i >= band.queries ? RowSums::kPadding : is_seen ? RowSums::kSeen : RowSums::kUnseen;
      const FinishedRow<kOptions> finished(p, h, of_row);
      const float factor = finished.factor_of_out(), unseen = kOptions ? finished.out(0) : 0;
      const int64_t row = band.first_q + i;
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) O[n][e] = of_row.seen() ? factor * O[n][e] : unseen;
      }
      if (p.logsumexp.data != nullptr && lane % 4 == 0) statistic(p.logsumexp, b, h, row) = finished.logsumexp();
    }
    in_pieces ? store_rows() : store_elements();
  }

  __device__ int64_t row_of_out(int64_t row) const {
    return shared.block.own.b * p.out.batch + shared.block.own.h * p.out.head + row * p.out.row;
  }

  // The warp's rows of O, an element at a time.
  __device__ void store_elements() {
    const Band& band = shared.block.band;
#pragma unroll 1
    for (int column = lane % 4 * 2; column < p.head_dim_v; column += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t i = shared.block.own.first + local_row(e / 2);
        if (i >= band.rows_q || column + e % 2 >= p.head_dim_v) continue;
        store_sum<T>(p.out, row_of_out(band.first_q + i) + (column + e % 2) * p.out.column, O[0][e]);
      }
      rotate(O);
    }
  }

  // The same by way of where its rows of Q lay.
  __device__ void store_rows() {
    constexpr int kPiece = 16 / sizeof(T), kPieces = kD / kPiece;
    const Band& band = shared.block.band;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        auto* piece = reinterpret_cast<unsigned*>(shared.Q.piece(local_row(r), n));
        piece[lane % 4] = packed<T>(O[n][2 * r], O[n][2 * r + 1]);
      }
    }
    __syncwarp();
#pragma unroll 4
    for (int n = lane; n < 16 * kPieces; n += 32) {
      const int row = group * kGroupRows + warp * 16 + n / kPieces, c = n % kPieces;
      const int64_t i = shared.block.own.first + row;
      if (i >= band.rows_q || c * kPiece >= p.head_dim_v) continue;
      auto* to = static_cast<T*>(p.out.data) + row_of_out(band.first_q + i) + c * kPiece;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(shared.Q.piece(row, c));
    }
  }

  int warp, group;
  SoftmaxRow rows[2];
  float alpha[2] = {1, 1};
  float S[kBlocks][4];  // then weights, and as they multiply V
  unsigned P[kKeys / kTerms][4], rest[kKeys / kTerms][4];
  float O[kD / 8][4] = {};
  float sums[1][4] = {};  // of P, eight times; with options they are in rows
  // With options, of the pairs of the last tile: which are seen and kept; and which were seen in some tile.
  unsigned shown = 0, kept = 0, some_shown = 0;
};

// What lies in shared memory but tiles. Returns whether the block owns rows.
template <class T, int kD, bool kOptions, int kGroups>
__device__ bool prepare_groups(const Problem& p, GroupsMemory<T, kD, kOptions, kGroups>& shared) {
  using Memory = GroupsMemory<T, kD, kOptions, kGroups>;
  const int thread = static_cast<int>(threadIdx.x), group = thread / kGroupThreads;
  const WideBlock block(p, Memory::kRows, Sequences::kLong);
  if (block.band.rows_q <= kBlockRows || block.own.first >= block.band.rows_q) return false;
  if (thread == 0) shared.block = block;
  if (thread < Memory::kStages) {
    shared.full[thread].init(kGroupThreads / 32);
    shared.free[thread].init(kGroups * kGroupThreads / 32);
    shared.not_finite[thread] = 0;
  }
  if (thread < 8 * 64) shared.ones[thread] = rounded<T>(1);
  if (thread < Memory::kRows) shared.of_row[thread] = {block.band, block.own.first + thread};
  if (thread % kGroupThreads == 0 && group < kGroups) {
    const Band& band = block.band;
    const int64_t first = block.own.first + group * kGroupRows, behind = first + kGroupRows;
    const int64_t last = (behind < band.queries ? behind : band.queries) - 1;
    Keys keys;
    if (first <= last) keys = {band.keys_of(first).first, band.keys_of(last).last, band.keys};
    shared.of_group[group] = keys;
  }
  show_to_products();
  __syncthreads();
  return true;
}

template <class T, int kD, bool kOptions, int kGroups>
__device__ void forward_by_groups(const Problem& p, GroupsMemory<T, kD, kOptions, kGroups>& shared) {
  constexpr int kRegistersOfCopies = kGroups > 2 ? 32 : 24, kRegistersOfProducts = kGroups > 2 ? 160 : 240;
  if (!prepare_groups(p, shared)) return;
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (group == kGroups) {
    take_registers_from_group<kRegistersOfCopies>();
    GroupsCopies<T, kD, kOptions, kGroups>(p, shared).run();
  } else {
    give_registers_to_group<kRegistersOfProducts>();
    GroupsForward<T, kD, kOptions, kGroups>(p, shared, group).run();
  }
}

}  // namespace polyhead::cuda
