// Backward of float32 without options, of 128 columns at most, with FFMA: the two passes of attention_backward.cuh.
// What FFMA multiplies has to be read from shared memory by each lane, so a lane has 8 x 8 of every product: 16 words for 64 products.
// Therefore two warps, a pair, share the rows of a block, and pairs do different things. With 64 x 64 pairs of rows, or 32 own keys x
// 128 queries, whose sums of 128 columns are as many as a lane has registers for,
//   scores, 16 columns at a time     one pair makes S and then P, the other dP and, told P, dS
//   pass over queries                dQ: of 64 columns each pair has all keys, of 128 columns each has half of these
//   pass over keys                   one pair sums dV, the other dK
// What a pair reads comes in chunks of its own: one is on its way while the other is used. Of columns two of a row lie side by side, so
// that four words are of two rows.
//   lane's own rows          4 o .. 4 o + 3 and as many from the middle of the block's on
//   others, and columns      4 t .. 4 t + 3 and as many from the middle of the warp's on
#pragma once

#include "cuda/gradient_rows.cuh"
#include "cuda/lines.cuh"
#include "cuda/tiles_of_others.cuh"

namespace polyhead::cuda {

template <int kD, bool kKeys>
struct Float32BackwardMemory {
  static constexpr int kOwn = kKeys ? wide_backward_keys(kD) : kBlockRows;
  static constexpr int kOthers = kBlockRows * kBlockRows / kOwn;
  static constexpr int kColumns = kOthers;       // that a pair sums
  static constexpr int kRows = 2048 / kColumns;  // of others, in a chunk of them

  union Chunk {
    struct {
      Terms<kOwn> own;
      Terms<kOthers> others;
    } terms;
    float rows[kRows][kColumns];
  };
  struct Loop {
    Chunk chunks[2][2];  // of both pairs
    // P, where values' gradients are summed, and then dS. Four own rows of other x lie at piece ^ (2 (x / 4 % 4)).
    float pairs[kKeys ? 2 : 1][kOthers][kOwn];
  };
  union alignas(16) {
    Loop loop;
    float sums[2][kOwn][kColumns + 4];
  };
  alignas(16) float statistics[2][kKeys ? kOthers : kOwn];  // L and delta, of the queries
  int2 seen[kOwn];                                          // of the others, from the first that some own row sees on
  int found[2][2];  // by a warp: an infinity or a NaN that some row must not see
  // Of the block, not held in registers
  OwnRows own;
  Band band;
  TilesOfOthers<kKeys, kOwn, kOthers> others;
  Lines own_lines[2], other_lines[2];
  int whole[2];  // columns, if both matrices of a pair are copied in pieces, and no own row lacks
};

template <int kD, bool kKeys>
class Float32Backward {
  using Memory = Float32BackwardMemory<kD, kKeys>;
  using Chunk = typename Memory::Chunk;
  static constexpr int kOwn = Memory::kOwn, kOthers = Memory::kOthers;
  static constexpr int kRows = Memory::kRows, kColumns = Memory::kColumns;
  static constexpr int kOfLane = 8, kSpan = kOthers / 2;  // others, or columns, of a warp
  static constexpr int kOfPair = 64;                      // threads
  static constexpr bool kHalves = !kKeys && kD == 64;     // of the keys, for a pair each
  static constexpr int kSummed = kHalves ? kOthers / 2 : kOthers;
  static_assert(kSpan == kColumns / 2 && kOwn * kSpan == 32 * kOfLane * kOfLane);

 public:
  __device__ Float32Backward(const BackwardProblem& problem, Memory& memory) : p(problem), shared(memory) {}

  __device__ void run() {
    prepare();
    PlaceOfTile here;
    if (shared.others.hold(here)) load_columns(here, 0);
    while (shared.others.hold(here)) {
      products(here);
      weights(here);
      here = add_sums(here);
    }
    store();
  }

 private:
  // What follows from it is computed anew each time: registers that kept it would be too many.
  __device__ static int thread() {
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));
    return thread;
  }
  __device__ static int thread_of_pair() { return thread() & 63; }
  __device__ static int side() { return thread() >> 6; }  // of the pair: 0 makes P
  // A quarter of a warp has two o and four t, for which nothing that it reads or writes is in one bank.
  __device__ static int first_own() {
    const int x = thread();
    return kOwn == 64 ? x & 28 : (x & 4) + (x >> 1 & 8);
  }
  __device__ static int first_place() {
    const int x = thread(), t = kOwn == 64 ? x & 3 : (x & 3) + (x >> 1 & 4);
    return (x >> 5 & 1) * kSpan + 4 * t;
  }
  // Row r of a lane; its other n, or column n.
  __device__ static int own_row(int r) { return first_own() + (r < 4 ? r : kOwn / 2 - 4 + r); }
  __device__ static int place(int n) { return first_place() + (n < 4 ? n : kSpan / 2 - 4 + n); }

  // What lies in shared memory but chunks.
  __device__ void prepare() {
    const OwnRows own(p, kKeys, kOwn);
    const Band band(p, own.b);
    const TilesOfOthers<kKeys, kOwn, kOthers> others(p, own, band);
    const int x = thread_of_pair();
    if (threadIdx.x == 0) {
      shared.own = own;
      shared.band = band;
      shared.others = others;
      for (int n = 0; n < 2; ++n) {
        const Rows& rows = kKeys ? (n == 0 ? p.key : p.value) : (n == 0 ? p.query : p.grad_out);
        const int64_t first = (kKeys ? band.first_k : band.first_q) + own.first;
        const int columns = n == 0 ? p.head_dim : p.head_dim_v;
        const int64_t first_element = own.b * rows.batch + own.h * rows.head + first * rows.row;
        shared.own_lines[n] = Lines(rows, first_element, columns, others.num_own(band) - own.first);
        shared.other_lines[n] = Lines(others.matrix(p, n), others.first_element[n], columns, others.rows);
        shared.whole[n] =
            shared.own_lines[n].count >= kOwn && shared.own_lines[n].whole > 0 ? shared.other_lines[n].whole : 0;
      }
    }
    if (side() == 0 && x < kOwn) {
      const Range range = others.range_of(band, own.first + x);
      const auto bounded = [&](int64_t at) {
        const int64_t end = int64_t{others.tiles} * kOthers;
        return static_cast<int>(at < others.begin ? 0 : at - others.begin < end ? at - others.begin : end);
      };
      shared.seen[x] = {bounded(range.first), bounded(range.last)};
    }
    if (!kKeys) {
      const int64_t i = own.first + x;
      const bool there = i < band.queries;
      const auto of_row = [&](const Statistic& of) {
        return there ? statistic(of, own.b, own.h, band.first_q + i) : 0;
      };
      shared.statistics[side()][x] = side() == 0 ? of_row(p.logsumexp) : of_row(p.delta);
    }
    __syncthreads();
  }

  __device__ void wait_for_pair() const { asm volatile("bar.sync %0, 64;" ::"r"(1 + side()) : "memory"); }
  // The next chunk has arrived, and nobody reads the last one.
  __device__ Chunk& next_chunk() {
    stage ^= 1;
    wait_for_copies();
    wait_for_pair();
    return shared.loop.chunks[side()][stage];
  }
  __device__ Chunk& free_chunk() { return shared.loop.chunks[side()][stage ^ 1]; }

  // Columns of chunk n of both matrices are on their way.
  __device__ void load_columns(const PlaceOfTile& here, int n) {
    auto& to = free_chunk().terms;
    const Lines &own = shared.own_lines[side()], &others = shared.other_lines[side()];
    const PieceOfTerms piece(thread_of_pair());
    const int row = here.tile * kOthers;
    const bool columns_whole = (n + 1) * kTerms <= shared.whole[side()];
    if (columns_whole & (static_cast<unsigned>(row + kOthers) <= others.count)) {
      copy_terms<kOwn>(to.own, own.begin, own.row_bytes, 0, n * kTerms, piece);
      copy_terms<kOthers>(to.others, further(others.begin, others.head_bytes, here.head), others.row_bytes, row,
                          n * kTerms, piece);
    } else {
      load_terms<kOwn>(to.own, own, 0, 0, n * kTerms, piece);
      load_terms<kOthers>(to.others, others, here.head, row, n * kTerms, piece);
    }
    if (kKeys && n == 0) load_statistics(here);
    commit_copies();
  }

  // L or delta of the queries of a tile, for the pair that reads it.
  __device__ void load_statistics(const PlaceOfTile& here) {
    const Statistic of = side() == 0 ? p.logsumexp : p.delta;
    const int64_t row = int64_t{here.tile} * kOthers, left = shared.others.rows - row;
    const int64_t begin = (side() == 0 ? shared.others.first_L : shared.others.first_delta) + here.head * of.head;
    for (int x = thread_of_pair(); x < kOthers; x += kOfPair) {
      const float* const from = of.data + (x < left ? begin + (row + x) * of.row : 0);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(&shared.statistics[side()][x])),
                   "l"(from), "r"(x < left ? 4 : 0)
                   : "memory");
    }
  }

  // C = Q K^T or dO V^T, or transposed. Behind their columns come the rows that are summed.
  __device__ void products(const PlaceOfTile& here) {
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
#pragma unroll
      for (int r = 0; r < kOfLane; ++r) C[n][r] = 0;
    }
    int n = 0;
    bool more;
    do {
      Chunk& chunk = next_chunk();
      more = ++n * kTerms < shared.own_lines[side()].columns;
      more ? load_columns(here, n) : load_rows(here, 0);
      multiply_terms(chunk);
    } while (more);
  }

  __device__ static float4 load_four(unsigned address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
  }

  __device__ static void store_four(unsigned address, const float4& x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
  }

  // More columns in a round of the loop would leave no registers.
  __device__ void multiply_terms(Chunk& chunk) {
    unsigned own = shared_address(&chunk.terms.own[0][first_own()]),
             others = shared_address(&chunk.terms.others[0][first_place()]);
    const unsigned end = own + sizeof(chunk.terms.own);
#pragma unroll 1
    for (; own != end;) {
      const float4 rows[4] = {load_four(own), load_four(own + 16), load_four(own + kOwn / 2 * 8),
                              load_four(own + kOwn / 2 * 8 + 16)};
#pragma unroll
      for (int n = 0; n < kOfLane; n += 2) {
        const float4 x = load_four(others + (n < 4 ? n : kSpan / 2 - 4 + n) * 8);
#pragma unroll
        for (int r = 0; r < kOfLane; r += 2) {
          const float4 two = rows[r / 2];
          C[n][r] = fmaf(two.y, x.y, fmaf(two.x, x.x, C[n][r]));
          C[n][r + 1] = fmaf(two.w, x.y, fmaf(two.z, x.x, C[n][r + 1]));
          C[n + 1][r] = fmaf(two.y, x.w, fmaf(two.x, x.z, C[n + 1][r]));
          C[n + 1][r + 1] = fmaf(two.w, x.w, fmaf(two.z, x.z, C[n + 1][r + 1]));
        }
      }
      own += sizeof(chunk.terms.own[0]), others += sizeof(chunk.terms.others[0]);
    }
  }

  // P and dS to shared memory.
  __device__ void weights(const PlaceOfTile& here) {
    const bool cut = shared.others.cut(here);
    __syncthreads();  // those of the last tile have been used
    if (side() == 0) {
      make_weights();
      if (cut) hide(here);
      put_pairs(0);
    }
    __syncthreads();
    if (side() == 1) {
      make_gradients();
      if (cut) hide(here);
      put_pairs(kKeys);
    }
    if constexpr (!kKeys) __syncthreads();
  }

  // L or delta of the queries of a lane: of its others, or of its own rows.
  __device__ void get_statistics(float (&x)[kOfLane]) const {
    const float* const from = shared.statistics[side()] + (kKeys ? first_place() : first_own());
    const float4 low = *reinterpret_cast<const float4*>(from),
                 high = *reinterpret_cast<const float4*>(from + (kKeys ? kSpan : kOwn) / 2);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }

  // C <- P = 2^(log2 e (scale C - L)), whose factors are two numbers each. The second is as positive or negative as the first:
  // infinities stay what they are. ex2.approx cuts off half an ulp on average, which would be the same in all weights: 0.72 of
  // 2^-24, in powers of two as much more.
  __device__ void make_weights() {
    constexpr float kRestOfLog2E = 1.92596303e-8f, kCutOff = 0.72f * 0x1p-24f * kLog2E;
    const float factor = p.scale * kLog2E * (1 - 0x1p-22f),
                rest = fmaf(p.scale, kRestOfLog2E, fmaf(p.scale, kLog2E, -factor));
    float L[kOfLane];
    get_statistics(L);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const float power = L[i] * kLog2E, rest_of_power = fmaf(L[i], kRestOfLog2E, fmaf(L[i], kLog2E, -power)) - kCutOff;
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        float& weight = kKeys ? C[i][j] : C[j][i];
        weight = exp2_approx(fmaf(weight, factor, -power) + fmaf(weight, rest, -rest_of_power));
      }
    }
  }

  // C <- dS = P (C - delta)
  __device__ void make_gradients() {
    float delta[kOfLane];
    get_statistics(delta);
    float* const P_of[2] = {first_pairs(0, 0), first_pairs(0, 4)};
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
#pragma unroll
      for (int r = 0; r < kOfLane; r += 4) {
        const float4 P = four(P_of[r / 4], n);
        const auto delta_of = [&](int e) { return delta[kKeys ? n : r + e]; };
        C[n][r] = P.x * (C[n][r] - delta_of(0)), C[n][r + 1] = P.y * (C[n][r + 1] - delta_of(1));
        C[n][r + 2] = P.z * (C[n][r + 2] - delta_of(2)), C[n][r + 3] = P.w * (C[n][r + 3] - delta_of(3));
      }
    }
  }

  // C = 0 at pairs that are not seen.
  __device__ void hide(const PlaceOfTile& here) {
    const int first = here.tile * kOthers + first_place();
    const int2* const seen = &shared.seen[first_own()];
#pragma unroll
    for (int r = 0; r < kOfLane; ++r) {
      const int2 of_row = seen[r < 4 ? r : kOwn / 2 - 4 + r];
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) {
        if (!holds(of_row, first + (n < 4 ? n : kSpan / 2 - 4 + n))) C[n][r] = 0;
      }
    }
  }
  __device__ static bool holds(const int2& seen, int other) { return seen.x <= other && other < seen.y; }

  // Of a lane's rows r to r + 3, r is 0 or 4, with its first other. Its others lie kOwn apart.
  __device__ float* first_pairs(int matrix, int r) {
    const int piece = ((first_own() >> 2) + (r == 0 ? 0 : kOwn / 8)) ^ (thread() & 3) * 2;
    return &shared.loop.pairs[matrix][first_place()][4 * piece];
  }
  __device__ static float4& four(float* pairs, int n) {
    return *reinterpret_cast<float4*>(pairs + (n < 4 ? n : kSpan / 2 - 4 + n) * kOwn);
  }
  __device__ void put_pairs(int matrix) {
    float *low = first_pairs(matrix, 0), *high = first_pairs(matrix, 4);
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      four(low, n) = {C[n][0], C[n][1], C[n][2], C[n][3]};
      four(high, n) = {C[n][4], C[n][5], C[n][6], C[n][7]};
    }
  }

  // What the pair sums: so many columns of others in the tile from one of them on, in chunks.
  __device__ static int matrix_of(int side) { return kKeys ? 1 - side : 0; }
  __device__ int first_column() const { return !kKeys && !kHalves ? side() * kColumns : 0; }
  __device__ int first_summed() const { return kHalves ? side() * kSummed : 0; }

  // Rows of chunk n are on their way.
  __device__ void load_rows(const PlaceOfTile& here, int n) {
    cuda::load_rows(free_chunk().rows, shared.other_lines[matrix_of(side())], here.head,
                    here.tile * kOthers + first_summed() + n * kRows, first_column(), thread_of_pair());
    commit_copies();
  }

  // sums += pairs times the rows of the others. Returns the next tile, which is on its way.
  __device__ PlaceOfTile add_sums(const PlaceOfTile& here) {
    const PlaceOfTile next = shared.others.behind(here);
    const bool cut = shared.others.cut(here);
#pragma unroll 1
    for (int n = 1; n <= kSummed / kRows; ++n) {
      Chunk& chunk = next_chunk();
      if (n < kSummed / kRows) {
        load_rows(here, n);
      } else if (shared.others.hold(next)) {
        load_columns(next, 0);
      }
      const int first = first_summed() + (n - 1) * kRows;
      const bool careful = cut && clear_not_finite(chunk);
      multiply_rows(chunk, first);
      if (careful) add_not_finite(here, first);
    }
    return next;
  }

  __device__ void multiply_rows(Chunk& chunk, int first) {
    const unsigned pairs = shared_address(shared.loop.pairs[kKeys ? side() : 0][first]);
    unsigned others = pairs, rows = shared_address(&chunk.rows[0][first_place()]);
#pragma unroll 2
    for (int x = 0; x < kRows; x += 4) {
      const int piece = first_own() >> 2 ^ (x >> 1 & 7);
      const unsigned low = others + piece * 16, high = kOwn == 64 ? low + 128 : others + (piece ^ 4) * 16;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 p0 = load_four(low + k * kOwn * 4), p1 = load_four(high + k * kOwn * 4),
                     x0 = load_four(rows + k * kColumns * 4), x1 = load_four(rows + k * kColumns * 4 + kSpan * 2);
        const float own[kOfLane] = {p0.x, p0.y, p0.z, p0.w, p1.x, p1.y, p1.z, p1.w};
        const float columns[kOfLane] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
        for (int r = 0; r < kOfLane; ++r) {
#pragma unroll
          for (int c = 0; c < kOfLane; ++c) sums[r][c] = fmaf(own[r], columns[c], sums[r][c]);
        }
      }
      others += 4 * kOwn * 4, rows += 4 * kColumns * 4;
    }
  }

  // Turns what is not finite into zeros, and tells whether there was any.
  __device__ bool clear_not_finite(Chunk& chunk) {
    bool found = false;
    for (int n = thread_of_pair(); n < kRows * kColumns; n += kOfPair) {
      float& x = chunk.rows[n / kColumns][n % kColumns];
      if (x - x == 0) continue;
      found = true;
      x = 0;
    }
    found = __any_sync(kAllLanes, found);
    if (threadIdx.x % 32 == 0) shared.found[side()][threadIdx.x / 32 % 2] = found;
    wait_for_pair();
    return shared.found[side()][0] + shared.found[side()][1] > 0;
  }

  // What infinities and NaNs of others from `first` on add to the rows that see them: of grad_out what P makes of them, of a
  // query or key a NaN, since the score is none.
  __device__ void add_not_finite(const PlaceOfTile& here, int first) {
    const Lines& lines = shared.other_lines[matrix_of(side())];
#pragma unroll 1
    for (int x = first; x < first + kRows; ++x) {
      const int other = here.tile * kOthers + x;
      if (static_cast<unsigned>(other) >= lines.count) break;
      const int64_t row = lines.first_of(here.head, other);
      unsigned seen = 0, above = 0;
      for (int r = 0; r < kOfLane; ++r) {
        const int own = own_row(r);
        seen |= holds(shared.seen[own], other) ? 1u << r : 0;
        const float weight = shared.loop.pairs[0][x][(own / 4 ^ x / 4 % 4 * 2) * 4 + own % 4];
        above |= kKeys && side() == 0 && weight > 0 ? 1u << r : 0;
      }
#pragma unroll
      for (int c = 0; c < kOfLane; ++c) {
        const int column = first_column() + place(c);
        const float v = lines.number(true, row, column);
        if (v - v == 0) continue;
#pragma unroll
        for (int r = 0; r < kOfLane; ++r) {
          if (seen >> r & 1) sums[r][c] += above >> r & 1 ? v : NAN;
        }
      }
    }
  }

  // kAdds: to what is there.
  template <bool kAdds>
  __device__ void put_sums() {
    float* const first = &shared.sums[kHalves ? 0 : side()][first_own()][first_place()];
#pragma unroll
    for (int r = 0; r < kOfLane; ++r) {
#pragma unroll
      for (int c = 0; c < kOfLane; c += 4) {
        float* const at = first + (r < 4 ? r : kOwn / 2 - 4 + r) * (kColumns + 4) + (c == 0 ? 0 : kSpan / 2);
        float4 four = {sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3]};
        if constexpr (kAdds) {
          const float4 other = *reinterpret_cast<const float4*>(at);
          four = {other.x + four.x, other.y + four.y, other.z + four.z, other.w + four.w};
        }
        store_four(shared_address(at), four);
      }
    }
  }

  // By way of shared memory, in which halves of the keys meet.
  __device__ void store() {
    __syncthreads();
    if (!kHalves || side() == 0) put_sums<false>();
    __syncthreads();
    if constexpr (kHalves) {
      if (side() == 1) put_sums<true>();
      __syncthreads();
    }
    const OwnRows& own = shared.own;
    const GradientRows to = gradient_rows<kKeys>(p, shared.band, own.b, own.h, kKeys && side() == 0);
    if (to.rows.data == nullptr) return;
    const int first = kHalves ? static_cast<int>(threadIdx.x) : thread_of_pair();
#pragma unroll 1
    for (int n = first; n < kOwn * kColumns; n += kHalves ? kThreads : kOfPair) {
      const int row = n / kColumns, column = n % kColumns;
      const int2 seen = shared.seen[row];
      to.store(shared.sums[kHalves ? 0 : side()][row][column], own.first + row, seen.x >= seen.y,
               first_column() + column);
    }
  }

  const BackwardProblem& p;
  Memory& shared;
  int stage = 1;
  float C[kOfLane][kOfLane];  // [other][own row]
  float sums[kOfLane][kOfLane] = {};
};

}  // namespace polyhead::cuda
