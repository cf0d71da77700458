// What a block of attention_backward_groups.cuh has in shared memory, and the warpgroup that copies the others' tiles there.
#pragma once

#include "cuda/score.cuh"
#include "cuda/tiles_of_others.cuh"
#include "cuda/warpgroup.cuh"

namespace polyhead::cuda {

template <class T, int kD, bool kKeys, bool kOptions, int kGroups>
struct BackwardGroupsMemory {
  static constexpr int kRows = kGroups * kGroupRows, kStages = kKeys || kGroups < 3 ? 4 : 3;

  Panels<T, kD, kRows> own[2];                               // Q and dO, or K and V
  Panels<T, kD, kGroupRows> stages[kStages][2];              // of the others
  float L[kStages][kGroupRows], delta[kStages][kGroupRows];  // of the others, where they are queries
  Phases full[kStages], free[kStages];
  Kept kept[kOptions ? kGroups : 1];  // by dropout, of the tile that each weighs
  int not_finite[kStages];            // 1 + the last stage there with an infinity or a NaN that some row must not see
  int2 seen[kRows];  // of the others, from the first one in a tile on, that each own row sees: from x to y, exclusive
  OwnRows rows;
  Band band;
  TilesOfOthers<kKeys, kRows, kGroupRows> others;
};

// What those who compute and those who copy know. Stage n is tile n of the others, head by head.
template <class T, int kD, bool kKeys, bool kOptions, int kGroups>
class BackwardGroupsBlock {
 protected:
  using Memory = BackwardGroupsMemory<T, kD, kKeys, kOptions, kGroups>;
  static constexpr int kStages = Memory::kStages;

  __device__ BackwardGroupsBlock(const BackwardProblem& problem, Memory& memory)
      : p(problem),
        shared(memory),
        lane(static_cast<int>(threadIdx.x) % 32),
        tiles(memory.others.tiles),
        stages(memory.others.tiles * memory.others.heads) {}

  __device__ PlaceOfTile place_of(int n) const {
    if (!kKeys) return {0, n};
    return {n / tiles, n % tiles};
  }
  __device__ int columns_of(int matrix) const { return matrix == 0 ? p.head_dim : p.head_dim_v; }
  // Whether some own row does not see some of stage n, as far as is known before.
  __device__ bool is_cut(int n) const { return (kOptions && p.hides_pairs) || shared.others.cut(place_of(n)); }

  const BackwardProblem& p;
  Memory& shared;
  int lane, tiles, stages;
};

template <class T, int kD, bool kKeys, bool kOptions, int kGroups>
class BackwardGroupsCopies : BackwardGroupsBlock<T, kD, kKeys, kOptions, kGroups> {
  using Base = BackwardGroupsBlock<T, kD, kKeys, kOptions, kGroups>;
  using Base::p, Base::shared, Base::lane, Base::stages, Base::place_of, Base::columns_of, Base::is_cut, Base::kStages;
  static constexpr int kInFlight = kStages - 2;  // stages

 public:
  __device__ BackwardGroupsCopies(const BackwardProblem& problem, typename Base::Memory& memory)
      : Base(problem, memory) {}

  __device__ void run() {
    if (stages > 0) load_own();
    for (int n = 0; n < stages + kInFlight; ++n) {
      if (n < stages) {
        if (n >= kStages) shared.free[n % kStages].wait(n / kStages - 1);
        load(n);
      }
      if (n >= kInFlight && stages > 0) finish(n - kInFlight, n);
    }
  }

 private:
  __device__ void load_own() {
    const Band& band = shared.band;
    const OwnRows& own = shared.rows;
    const int64_t row = (kKeys ? band.first_k : band.first_q) + own.first,
                  end = (kKeys ? band.keys : band.queries) - own.first;
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const Rows& from = kKeys ? (n == 0 ? p.key : p.value) : (n == 0 ? p.query : p.grad_out);
      load_rows_apart(shared.own[n], from, columns_of(n), own.b * from.batch + own.h * from.head + row * from.row, end,
                      OneGroup());
    }
  }

  // As two groups of copies.
  __device__ void load(int n) {
    const PlaceOfTile place = place_of(n);
    const auto& others = shared.others;
    const int64_t row = int64_t{place.tile} * kGroupRows, end = others.rows - row;
    if constexpr (kKeys) {
      const int x = OneGroup::number() % kGroupRows;
      const bool of_L = OneGroup::number() < kGroupRows;
      const Statistic& of = of_L ? p.logsumexp : p.delta;
      const int64_t at = (of_L ? others.first_L : others.first_delta) + place.head * of.head + (row + x) * of.row;
      copy_float((of_L ? shared.L : shared.delta)[n % kStages] + x, of.data + (x < end ? at : 0), x < end);
    }
#pragma unroll 1
    for (int m = 0; m < 2; ++m) {
      const Rows& from = others.matrix(p, m);
      load_rows_apart(shared.stages[n % kStages][m], from, columns_of(m),
                      others.first_element[m] + place.head * from.head + row * from.row, end, OneGroup());
    }
  }

  // Stage n is there, when those to `last` have been begun.
  __device__ void finish(int n, int last) {
    if (last < stages) {
      wait_for_copies_before<2 * kInFlight>();
    } else {
      wait_for_copies();
    }
    if (is_cut(n) && has_not_finite(n)) atomicMax(&shared.not_finite[n % kStages], n + 1);
    show_to_products();
    shared.full[n % kStages].arrive(lane);
  }

  // Whether this thread has copied an infinity or a NaN that sums would multiply by the 0 of a row which must not see it.
  __device__ bool has_not_finite(int n) {
    constexpr int kPieces = kD / (16 / sizeof(T)), kStep = kGroupThreads / kPieces;
    unsigned bad = 0;
    for (int m = 0; m < (kKeys ? 2 : 1); ++m) {
      for (int row = OneGroup::number() / kPieces; row < kGroupRows; row += kStep) {
        const uint4 words =
            *reinterpret_cast<uint4*>(shared.stages[n % kStages][m].piece(row, OneGroup::number() % kPieces));
        bad |= not_finite<T>(words.x) | not_finite<T>(words.y) | not_finite<T>(words.z) | not_finite<T>(words.w);
      }
    }
    return bad != 0;
  }
};

}  // namespace polyhead::cuda
