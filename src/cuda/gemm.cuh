// C = finish(A B), with the words of sm_80: mma.sync, ldmatrix, cp.async.
//   A [m, k]  B [k, n]  C [m, n]
// A block of four warps computes kM x kN of C, a warp a quarter of it: 64 x 64 where there is enough to do, since what a
// warp reads from shared memory for a product is its rows and columns. Terms go through shared memory 64 bytes at a time,
// two such stages ahead. An element's terms are added in their order, whatever the tile: its bits depend on its row and
// column alone.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/panel.cuh"

namespace polyhead::cuda {

constexpr int kStages = 3;

template <class T, int kM, int kN, bool kTermsInsideA, bool kTermsInsideB>
struct GemmMemory {
  struct Stage {
    Panel<T, kM, kTermsInsideA> A;
    Panel<T, kN, kTermsInsideB> B;
  };
  static constexpr int kSumColumns = kN + 8;  // pairs of four rows lie in different banks
  union {
    Stage stages[kStages];
    float sums[kM / 2][kSumColumns];  // behind them: of half of the warps
  };
};

// A warp's sums, [kM / 2, kN / 2] of C, on tensor cores: mma.cuh says which are a lane's.
template <class T, int kM, int kN, bool kTermsInsideA, bool kTermsInsideB>
class WarpSums {
 public:
  __device__ void multiply(Panel<T, kM, kTermsInsideA>& A, Panel<T, kN, kTermsInsideB>& B, int warp, int lane) {
    const int row = warp / 2 * (kM / 2), column = warp % 2 * (kN / 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        const int line = row + i * 16;
        if constexpr (kTermsInsideA) {
          load_matrices(a[i], A.piece(line + lane % 16, 2 * k + lane / 16));
        } else {
          load_matrices_transposed(a[i], A.piece(k * 16 + lane / 16 * 8 + lane % 8, line / 8 + lane / 8 % 2));
        }
      }
#pragma unroll
      for (int n = 0; n < kColumnBlocks; n += 2) {
        const int line = column + n * 8;
        unsigned b[4];
        if constexpr (kTermsInsideB) {
          load_matrices(b, B.piece(line + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        } else {
          load_matrices_transposed(b, B.piece(k * 16 + lane % 16, line / 8 + lane / 16));
        }
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
          multiply_add<T>(C[i][n], a[i], b[0], b[1]);
          multiply_add<T>(C[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // To rows of kStride floats, of which the first is this warp's.
  template <int kStride>
  __device__ void put(float (*sums)[kStride], int warp, int lane) const {
    const int column = warp % 2 * (kN / 2) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          auto* to = reinterpret_cast<float2*>(&sums[i * 16 + r * 8 + lane / 4][column + n * 8]);
          *to = {C[i][n][2 * r], C[i][n][2 * r + 1]};
        }
      }
    }
  }

 private:
  static constexpr int kRowBlocks = kM / 32, kColumnBlocks = kN / 16;
  float C[kRowBlocks][kColumnBlocks][4] = {};
};

// The same in float32 with FFMA: lanes are 8 x 4, and a lane reads four terms of a line, or four lines of a term, at once.
template <int kM, int kN, bool kTermsInsideA, bool kTermsInsideB>
class WarpSums<Float32, kM, kN, kTermsInsideA, kTermsInsideB> {
 public:
  __device__ void multiply(Panel<Float32, kM, kTermsInsideA>& A, Panel<Float32, kN, kTermsInsideB>& B, int warp,
                           int lane) {
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      float a[kRows][4], b[kColumns][4];
      load<kRows, 8>(a, A, warp / 2 * (kM / 2), lane / 4, k);
      load<kColumns, 4>(b, B, warp % 2 * (kN / 2), lane % 4, k);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) C[i][j] = fmaf(a[i][t], b[j][t], C[i][j]);
        }
      }
    }
  }

  template <int kStride>
  __device__ void put(float (*sums)[kStride], int warp, int lane) const {
    const int column = warp % 2 * (kN / 2);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        sums[line_of<8>(kTermsInsideA, lane / 4, i)][column + line_of<4>(kTermsInsideB, lane % 4, j)] = C[i][j];
      }
    }
  }

 private:
  static constexpr int kRows = kM / 16, kColumns = kN / 8;  // of a lane

  // The n-th line of lane `of` among kLanes.
  template <int kLanes>
  __device__ static int line_of(bool terms_inside, int of, int n) {
    return terms_inside ? of + kLanes * n : 4 * (of + kLanes * (n / 4)) + n % 4;
  }

  // Terms 4 k to 4 k + 3 of a lane's lines, of which the warp's begin at `first`.
  template <int kOfLane, int kLanes, int kLines, bool kInside>
  __device__ static void load(float (&x)[kOfLane][4], Panel<Float32, kLines, kInside>& panel, int first, int of,
                              int k) {
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      if constexpr (kInside) {
        const float4 terms = panel.four(first + line_of<kLanes>(true, of, n), k);
        x[n][0] = terms.x, x[n][1] = terms.y, x[n][2] = terms.z, x[n][3] = terms.w;
      } else {  // four lines of term n % 4
        const int begin = n / 4 * 4;
        const float4 lines = panel.four(4 * k + n % 4, first / 4 + of + kLanes * (n / 4));
        x[begin][n % 4] = lines.x, x[begin + 1][n % 4] = lines.y;
        x[begin + 2][n % 4] = lines.z, x[begin + 3][n % 4] = lines.w;
      }
    }
  }

  float C[kRows][kColumns] = {};
};

// Which tile a block does. Eight rows of tiles together, column by column: what blocks that run at once read fits in the
// L2 cache.
struct GemmTilePlace {
  int row, column;

  __device__ explicit GemmTilePlace(const GemmProblem& p) {
    constexpr unsigned kBand = 8;
    const unsigned of_band = kBand * p.column_tiles, band = blockIdx.x / of_band, n = blockIdx.x % of_band;
    const unsigned left = p.row_tiles - band * kBand, height = left < kBand ? left : kBand;
    row = static_cast<int>(band * kBand + n % height);
    column = static_cast<int>(n / height);
  }
};

template <class T, int kM, int kN, bool kTermsInsideA, bool kTermsInsideB>
class Gemm {
 public:
  using Memory = GemmMemory<T, kM, kN, kTermsInsideA, kTermsInsideB>;

  __device__ Gemm(const GemmProblem& problem, Memory& memory)
      : p(problem),
        shared(memory),
        tile(problem),
        A(p.a, tile.row * kM, p.m),
        B(p.b, tile.column * kN, p.n),
        slice(static_cast<int>(blockIdx.y)),
        term(slice * p.slice_terms),
        end_term(slice + 1 < p.num_slices ? term + p.slice_terms : p.k),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32) {}

  __device__ void run() {
    for (int stage = 0; stage + 1 < kStages; ++stage) load(stage);
    int stage = 0;
    for (int done = term; done < end_term; done += kTerms) {
      wait_for_copies_before<kStages - 2>();
      __syncthreads();  // the stage is there, and the one before it is free
      load((stage + kStages - 1) % kStages, done + (kStages - 1) * kTerms);
      sums.multiply(shared.stages[stage].A, shared.stages[stage].B, warp, lane);
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    wait_for_copies();
    for (int half = 0; half < 2; ++half) {
      __syncthreads();  // nobody reads what lies there any more
      if (warp / 2 == half) sums.put(shared.sums, warp, lane);
      __syncthreads();
      write(half);
    }
  }

 private:
  static constexpr int kTerms = Panel<T, kM, true>::kTerms;

  __device__ void load(int stage) { load(stage, term + stage * kTerms); }
  __device__ void load(int stage, int from) {
    if (from < end_term) {
      A.load(shared.stages[stage].A, from, end_term);
      B.load(shared.stages[stage].B, from, end_term);
    }
    commit_copies();
  }

  __device__ void write(int half) {
    constexpr int kGroups = kN / kEight;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < kM / 2 * kGroups; n += kThreads) {
      const int r = n / kGroups, i = tile.row * kM + half * (kM / 2) + r;
      const int j = tile.column * kN + n % kGroups * kEight;
      if (i >= p.m || j >= p.n) continue;
      const auto* four = reinterpret_cast<const float4*>(&shared.sums[r][n % kGroups * kEight]);
      const float4 low = four[0], high = four[1];
      Eight x = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const int count = count_from(j, p.n);
      p.partial == nullptr ? finish(x, p.finish, i, j, count) : keep(x, i, j, count);
    }
  }

  // A slice's sums.
  __device__ void keep(const Eight& x, int i, int j, int count) {
    float* const to = p.partial + (int64_t{slice} * p.m + i) * p.n + j;
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      if (e < count) to[e] = x[e];
    }
  }

  const GemmProblem& p;
  Memory& shared;
  GemmTilePlace tile;
  PanelSource<T, kM, kTermsInsideA> A;
  PanelSource<T, kN, kTermsInsideB> B;
  WarpSums<T, kM, kN, kTermsInsideA, kTermsInsideB> sums;
  int slice, term, end_term;
  int lane, warp;
};

}  // namespace polyhead::cuda
