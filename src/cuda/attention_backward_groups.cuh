// Backward of elements that tensor cores multiply, on 9.0: the two passes of attention_backward.cuh by
// warpgroups (warpgroup.cuh), kGroups of which compute, each with 64 rows of its own, and one more copies the others, 64 at a
// time, to where those find them.
//   pass over queries   S = Q K^T     dP = dO V^T      dQ += dS K                  P = exp(S - L)   dS = P (dP - delta)
//   pass over keys      S^T = K Q^T   dP^T = V dO^T    dV += P^T dO   dK += dS^T Q
// What sums multiply is in registers, as the products before left it: fragments C of two matrices are those of A.
#pragma once

#include "cuda/attention_backward_stages.cuh"
#include "cuda/gradient_rows.cuh"
#include "cuda/products.cuh"
#include "cuda/softmax.cuh"

namespace polyhead::cuda {

template <class T, int kD, bool kKeys, bool kOptions, int kGroups>
class GroupsBackward : BackwardGroupsBlock<T, kD, kKeys, kOptions, kGroups> {
  using Base = BackwardGroupsBlock<T, kD, kKeys, kOptions, kGroups>;
  using Base::p, Base::shared, Base::lane, Base::tiles, Base::stages, Base::place_of, Base::columns_of, Base::is_cut,
      Base::kStages;
  using Memory = typename Base::Memory;
  static constexpr int kTerms = 16, kBlocks = kGroupRows / 8, kSums = kKeys ? 2 : 1;
  using Factors = unsigned[kGroupRows / kTerms][4];

 public:
  __device__ GroupsBackward(const BackwardProblem& problem, Memory& memory, int group_of_block)
      : Base(problem, memory),
        warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32),
        group(group_of_block),
        scale_log2(problem.scale * kLog2E) {}

  __device__ void run() {
    find_seen();
    for (int n = 0; n < stages; ++n) {
      shared.full[n % kStages].wait(n / kStages);
      const bool now = sees(n);
      if (shared.not_finite[n % kStages] == n + 1) {
        step_carefully(n, now);
      } else if (now) {
        step(n);
      }
      shared.free[n % kStages].arrive(lane);
    }
    store();
  }

 private:
  // Of a lane's rows, among the group's and the block's.
  __device__ int row_of_group(int r) const { return warp * 16 + lane / 4 + 8 * r; }
  __device__ int local_row(int r) const { return group * kGroupRows + row_of_group(r); }
  __device__ int64_t row_index(int r) const { return shared.rows.first + local_row(r); }
  __device__ Range range_of(int64_t row) const { return shared.others.range_of(shared.band, row); }

  // The others, as the first of them in a tile counts them, that a row sees.
  __device__ int2 seen_by(int64_t row) const {
    const Range range = range_of(row);
    const auto from_begin = [&](int64_t x) {
      const int64_t n = x - shared.others.begin;
      return n < 0 ? 0 : n < INT32_MAX ? static_cast<int>(n) : INT32_MAX;
    };
    return {from_begin(range.first), from_begin(range.last)};
  }

  // Which others this group's rows see; L and delta of a lane's rows, where these are queries.
  __device__ void find_seen() {
    const int of_group = static_cast<int>(threadIdx.x) % kGroupThreads, row = group * kGroupRows + of_group;
    if (of_group < kGroupRows) shared.seen[row] = seen_by(shared.rows.first + row);
    wait_for_group(kFirstGroupBarrier + group, kGroupThreads);
    const int64_t first = shared.rows.first + group * kGroupRows, num_own = shared.others.num_own(shared.band);
    const int64_t behind = first + kGroupRows, last = (behind < num_own ? behind : num_own) - 1;
    if (first <= last) {
      first_seen = shared.seen[group * kGroupRows].x / kGroupRows;
      const int end = shared.seen[static_cast<int>(last - shared.rows.first)].y;
      last_seen = end / kGroupRows + (end % kGroupRows != 0 ? 1 : 0);
    }
    for (int r = 0; r < 2 && !kKeys; ++r) {
      const bool there = row_index(r) < num_own;
      const int64_t i = shared.band.first_q + row_index(r);
      L[r] = there ? (kOptions ? 1 : kLog2E) * statistic(p.logsumexp, shared.rows.b, shared.rows.h, i) : 0;
      delta[r] = there ? statistic(p.delta, shared.rows.b, shared.rows.h, i) : 0;
    }
  }
  __device__ bool sees(int n) const {
    const int tile = place_of(n).tile;
    return first_seen <= tile && tile < last_seen;
  }

  // S or dP of stage n, or S^T or dP^T, begun
  __device__ void product(float (&C)[kBlocks][4], int n, int matrix) {
    const uint64_t own = factor_of(shared.own[matrix], group * kGroupRows),
                   others = factor_of(shared.stages[n % kStages][matrix]);
#pragma unroll
    for (int k = 0; k < kD / kTerms; ++k) {
      multiply_rows_async<T>(C, further(own, kBytesToColumns<Memory::kRows>(k)),
                             further(others, kBytesToColumns<kGroupRows>(k)), k > 0);
    }
    commit_products();
  }

  // sums += factors times the others of a matrix, begun. Of float16 factors are two numbers.
  __device__ void multiply(float (&to)[kD / 8][4], const Factors (&x)[2], int n, int matrix) {
    const uint64_t others = factor_of(shared.stages[n % kStages][matrix]);
#pragma unroll
    for (int k = 0; k < kGroupRows / kTerms; ++k) {
      const uint64_t sixteen = further(others, k * kTerms * 128);
      multiply_weights_async<T>(to, x[0][k], sixteen);
      if constexpr (T::kRestOfWeights) multiply_weights_async<T>(to, x[1][k], sixteen);
    }
  }

  // Weights and their gradients as they are rounded, and of float16 what that left.
  struct BothFactors {
    Factors P[2], dS[2];
  };
  __device__ void make_factors(BothFactors& to, int n) {
    begin_products();
    product(S, n, 0);
    product(dP, n, 1);
    if constexpr (kOptions) {
      if (p.dropout.on) draw(n);
      wait_for_products_before<0>();
      by_options(n);
    } else {
      wait_for_products_before<1>();  // of S
      weights(n);
      wait_for_products_before<0>();
      gradients(n);
    }
    if constexpr (kKeys) round(S, to.P[0], to.P[1]);
    round(dP, to.dS[0], to.dS[1]);
  }

  __device__ void sum(const BothFactors& factors, int n) {
    begin_products();
    if constexpr (kKeys) multiply(sums[1], factors.P, n, 1);
    multiply(sums[0], factors.dS, n, 0);
    commit_products();
    wait_for_products_before<0>();
  }

  __device__ void step(int n) {
    BothFactors factors;
    make_factors(factors, n);
    sum(factors, n);
  }

  // Of others with infinities or NaNs, which are zeros for their sums, and are added to the rows that see them. Groups that see
  // none of them take part.
  __device__ void step_carefully(int n, bool sees_some) {
    BothFactors factors = {};
    unsigned positive = 0;
    shown = 0;
    if (sees_some) {
      make_factors(factors, n);
#pragma unroll
      for (int e = 0; e < 4 * kBlocks && kKeys; ++e) positive |= S[e / 4][e % 4] > 0 ? 1u << e : 0;
    }
    clear_others(n);
    sum(factors, n);
    if constexpr (kKeys) add_not_finite(sums[1], n, 1, positive);
    add_not_finite(sums[0], n, 0, 0);
  }

  // f(b, e, its query's number) of each element of S or dP. The number is one of the others', or of this lane's own rows.
  template <class F>
  __device__ void for_each_pair(const float (&of_others)[kGroupRows], const float (&of_own)[2], const F& f) const {
    const float* of_lane = of_others + lane % 4 * 2;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float2 of_pair = kKeys ? *reinterpret_cast<const float2*>(of_lane + 8 * b) : float2{};
#pragma unroll
      for (int e = 0; e < 4; ++e) f(b, e, !kKeys ? of_own[e / 2] : e % 2 == 0 ? of_pair.x : of_pair.y);
    }
  }

  // S <- P, 0 at pairs that are not seen
  __device__ void weights(int n) {
    for_each_pair(shared.L[n % kStages], L, [&](int b, int e, float of_query) {
      S[b][e] = exp2_approx(fmaf(S[b][e], scale_log2, -(kKeys ? kLog2E * of_query : of_query)));
    });
    if (is_cut(n)) hide(S, n);
  }

  // dP <- dS, 0 at pairs that are not seen
  __device__ void gradients(int n) {
    for_each_pair(shared.delta[n % kStages], delta,
                  [&](int b, int e, float of_query) { dP[b][e] = S[b][e] * (dP[b][e] - of_query); });
    if (is_cut(n)) hide(dP, n);
  }

  // S <- dropout(P), dP <- dS, of the scores that options make; 0 at pairs that are not seen
  __device__ void by_options(int n) {
    const int own[2] = {row_of_group(0), row_of_group(1)}, other = lane % 4 * 2;
    for_each_pair(shared.delta[n % kStages], delta, [&](int b, int e, float of_query) {  // dS of a weight of 1
      const float factor = !p.dropout.on ? 1 : kept & bit_of_pair(b, e) ? p.dropout.factor : 0;
      S[b][e] *= p.scale;
      dP[b][e] = factor * dP[b][e] - of_query;
    });
    const int of_lane = place_of(n).tile * kGroupRows + other;
    shown = 0;
    for (int r = 0; r < 2; ++r) {
      const int2 seen = shared.seen[local_row(r)];
      shown |= (pairs_below<kBlocks>(seen.y - of_lane) & ~pairs_below<kBlocks>(seen.x - of_lane)) << 2 * r;
    }
    shown = score_of(n).template apply<T, kKeys>(S, own, other, shown,
                                                 [&](int b, int e, float derivative) { dP[b][e] *= derivative; });
    for_each_pair(shared.L[n % kStages], L, [&](int b, int e, float of_query) {
      const bool visible = shown & bit_of_pair(b, e);
      const float weight = exp2_approx((S[b][e] - of_query) * kLog2E);  // of a bias of -1e9 in all of a row, too
      dP[b][e] = visible ? weight * dP[b][e] : 0;
      const float factor = !p.dropout.on ? 1 : kept & bit_of_pair(b, e) ? p.dropout.factor : 0;
      S[b][e] = visible ? weight * factor : 0;  // a NaN that is dropped is one
    });
  }

  // Of stage n: the head and the first of its queries and keys.
  __device__ int head_of(int n) const {
    return kKeys ? shared.rows.h * static_cast<int>(p.heads / p.heads_kv) + place_of(n).head : shared.rows.h;
  }
  __device__ int64_t first_of(int n, bool keys) const {
    return keys == kKeys ? shared.rows.first + group * kGroupRows : shared.others.first_of(place_of(n));
  }
  __device__ Score score_of(int n) const {
    return {p, shared.band, shared.rows.b, head_of(n), first_of(n, false), first_of(n, true)};
  }

  // Which weights of stage n are kept.
  __device__ void draw(int n) {
    Kept& bits = shared.kept[group];
    bits.fill(p.dropout, shared.rows.b, head_of(n), first_of(n, false), first_of(n, true), kKeys, warp);
    const int own[2] = {row_of_group(0), row_of_group(1)};
    kept = bits.template pairs<kKeys, kBlocks>(own, lane % 4 * 2);
  }

  __device__ void hide(float (&C)[kBlocks][4], int n) const {
    const int of_lane = place_of(n).tile * kGroupRows + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 seen = shared.seen[local_row(r)];
      const int first = seen.x - of_lane, last = seen.y - of_lane;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * b + e < first || 8 * b + e >= last) C[b][2 * r + e] = 0;
        }
      }
    }
  }

  __device__ static void round(const float (&C)[kBlocks][4], Factors& whole, Factors& rest) {
#pragma unroll
    for (int k = 0; k < kGroupRows / kTerms; ++k) round_weights<T>(C, k, whole[k], rest[k]);
  }

  // By all who compute, when their products of stage n have been made.
  __device__ void clear_others(int n) {
    constexpr int kComputing = kGroups * kGroupThreads;
    wait_for_group(kComputingBarrier, kComputing);
#pragma unroll 1
    for (int m = 0; m < (kKeys ? 2 : 1); ++m) {
      auto& tile = shared.stages[n % kStages][m];
#pragma unroll 1
      for (int at = static_cast<int>(threadIdx.x); at < kGroupRows * kD / (16 / static_cast<int>(sizeof(T)));
           at += kComputing) {
        auto* piece = const_cast<uint4*>(&tile.any_piece(at));
        const uint4 words = *piece;
        *piece = {words.x & ~not_finite<T>(words.x), words.y & ~not_finite<T>(words.y),
                  words.z & ~not_finite<T>(words.z), words.w & ~not_finite<T>(words.w)};
      }
    }
    show_to_products();
    wait_for_group(kComputingBarrier, kComputing);
  }

  // What infinities and NaNs add to the rows that see them: of grad_out what P makes of them, of a query or key a NaN, since
  // the score is none. `positive`: which of this lane's weights are, bit 4 b + e.
  __device__ void add_not_finite(float (&to)[kD / 8][4], int n, int matrix, unsigned positive) {
    const PlaceOfTile here = place_of(n);
    const Rows& rows = shared.others.matrix(p, matrix);
    const int64_t first = int64_t{here.tile} * kGroupRows;
    const int64_t begin = shared.others.first_element[matrix] + here.head * rows.head + first * rows.row;
#pragma unroll 1
    for (int x = 0; x < kGroupRows; ++x) {
      const int from = (lane & ~3) + x % 8 / 2, bit = x / 8 * 4 + x % 2;
      const unsigned of_other = __shfl_sync(kAllLanes, positive, from) >> bit;
      const unsigned shown_to = kOptions ? __shfl_sync(kAllLanes, shown, from) >> bit : 0;
      const auto sees_it = [&](int r) {
        if constexpr (kOptions) return (shown_to >> 2 * r & 1) != 0;
        const int2 range = shared.seen[local_row(r)];
        return range.x <= first + x && first + x < range.y;
      };
      const bool seen[2] = {sees_it(0), sees_it(1)};
      if (!seen[0] && !seen[1]) continue;
#pragma unroll 1
      for (int of_lane = lane % 4 * 2; of_lane < kD; of_lane += 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = of_lane + e % 2;
          const float v =
              column < columns_of(matrix) ? element<T>(rows, begin + x * rows.row + column * rows.column) : 0;
          const bool weighted = matrix == 1 && (of_other >> e / 2 * 2 & 1) != 0;
          if (v - v != 0 && seen[e / 2]) to[0][e] += weighted ? v : NAN;
        }
        rotate(to);
      }
    }
  }

  __device__ void store() {
    if (stages > 0) wait_for_group(kFirstGroupBarrier + group, kGroupThreads);  // nobody reads the group's own rows
    const auto is_unseen = [&](int r) {
      const int2 seen = shared.seen[local_row(r)];
      return seen.x >= seen.y;
    };
    const bool unseen[2] = {is_unseen(0), is_unseen(1)};
#pragma unroll
    for (int m = 0; m < kSums; ++m) {
      const GradientRows to = gradient_rows<kKeys>(p, shared.band, shared.rows.b, shared.rows.h, m == 1);
      if (to.rows.data == nullptr) continue;
      if (to.rows.in_pieces && to.rows.number != Number::kFloat32 && !p.accumulate) {
        store_pieces(to, sums[m], unseen, shared.own[m]);
      } else {
        const int64_t of_rows[2] = {row_index(0), row_index(1)};
        to.store(sums[m], of_rows, unseen, 0, lane);
      }
    }
  }

  // By way of where the rows lay that are not needed any more, 16 bytes at a time.
  __device__ void store_pieces(const GradientRows& to, const float (&sum)[kD / 8][4], const bool (&unseen)[2],
                               Panels<T, kD, Memory::kRows>& tile) {
    constexpr int kPiece = 16 / sizeof(T), kPieces = kD / kPiece;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        const float low = unseen[r] ? 0 : to.factor * sum[n][2 * r] + 0.f,
                    high = unseen[r] ? 0 : to.factor * sum[n][2 * r + 1] + 0.f;
        reinterpret_cast<unsigned*>(tile.piece(local_row(r), n))[lane % 4] = packed<T>(low, high);
      }
    }
    __syncwarp();
#pragma unroll 4
    for (int n = lane; n < 16 * kPieces; n += 32) {
      const int row = group * kGroupRows + warp * 16 + n / kPieces, c = n % kPieces;
      const int64_t index = shared.rows.first + row;
      if (index >= to.end || c * kPiece >= to.columns) continue;
      auto* at = static_cast<T*>(to.rows.data) + to.b * to.rows.batch + to.h * to.rows.head +
                 (to.first + index) * to.rows.row + c * kPiece;
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(tile.piece(row, c));
    }
  }

  int warp, group;
  float scale_log2;  // for powers of 2 instead of e, as L is
  int first_seen = 0, last_seen = 0;
  float L[2], delta[2];
  unsigned shown = 0, kept = 0;                   // with options, of the pairs of the last stage
  float S[kBlocks][4] = {}, dP[kBlocks][4] = {};  // then P and dS
  float sums[kSums][kD / 8][4] = {};
};

template <class T, int kD, bool kKeys, bool kOptions, int kGroups>
__device__ void backward_by_groups(const BackwardProblem& p,
                                   BackwardGroupsMemory<T, kD, kKeys, kOptions, kGroups>& shared) {
  using Memory = BackwardGroupsMemory<T, kD, kKeys, kOptions, kGroups>;
  constexpr int kRegistersOfCopies = kGroups > 2 ? 32 : 40, kRegistersOfProducts = kGroups > 2 ? 160 : 232;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    shared.rows = OwnRows(p, kKeys, Memory::kRows);
    shared.band = Band(p, shared.rows.b);
    shared.others = TilesOfOthers<kKeys, Memory::kRows, kGroupRows>(p, shared.rows, shared.band);
    for (int n = 0; n < Memory::kStages; ++n) {
      shared.full[n].init(kGroupThreads / 32);
      shared.free[n].init(kGroups * kGroupThreads / 32);
      shared.not_finite[n] = 0;
    }
  }
  __syncthreads();
  const int group = __shfl_sync(kAllLanes, thread / kGroupThreads, 0);
  if (group == kGroups) {
    take_registers_from_group<kRegistersOfCopies>();
    BackwardGroupsCopies<T, kD, kKeys, kOptions, kGroups>(p, shared).run();
  } else {
    give_registers_to_group<kRegistersOfProducts>();
    GroupsBackward<T, kD, kKeys, kOptions, kGroups>(p, shared, group).run();
  }
}

}  // namespace polyhead::cuda
