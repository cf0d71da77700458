// C = finish(A B) of few rows, as steps of decoding have them: what takes the time is reading B once, so a block has few
// columns and much of B in flight.
//   A [m, k], m <= kFewRows  B [k, n]  C [m, n]
// Four warps have eight columns each. Terms are multiplied and added as gemm.cuh does, panel by panel from the first to the
// last, so that a row has the same bits here and there.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/panel.cuh"

namespace polyhead::cuda {

constexpr int kFewStages = 8, kPanelsOfFewStages = 2;  // 28 KB of B are in flight for each block

template <class T, bool kTermsInsideB>
struct FewRowsMemory {
  struct Stage {
    Panel<T, kFewRows, true> A[kPanelsOfFewStages];
    Panel<T, kFewColumns, kTermsInsideB> B[kPanelsOfFewStages];
  };
  union {
    Stage stages[kFewStages];
    float sums[kFewRows][kFewColumns + 8];  // behind them; pairs of four rows lie in different banks
  };
};

// A warp's sums, [kFewRows, 8] of C, on tensor cores: mma.cuh says which are a lane's.
template <class T, bool kTermsInsideB>
class FewRowsSums {
 public:
  __device__ void multiply(Panel<T, kFewRows, true>& A, Panel<T, kFewColumns, kTermsInsideB>& B, int, int warp,
                           int lane) {
    unsigned b[4];  // eight terms each
    if constexpr (kTermsInsideB) {
      load_matrices(b, B.piece(warp * 8 + lane % 8, lane / 8));
    } else {
      load_matrices_transposed(b, B.piece(lane, warp));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      unsigned a[4];
      load_matrices(a, A.piece(lane % 16, 2 * k + lane / 16));
      multiply_add<T>(C, a, b[2 * k], b[2 * k + 1]);
    }
  }

  template <int kStride>
  __device__ void put(float (*sums)[kStride], int warp, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto* to = reinterpret_cast<float2*>(&sums[r * 8 + lane / 4][warp * 8 + lane % 4 * 2]);
      *to = {C[2 * r], C[2 * r + 1]};
    }
  }

 private:
  float C[4] = {};
};

// The same in float32 with FFMA: a lane has one column, and rows lane / 8, lane / 8 + 4 and so on, as far as there are some.
template <bool kTermsInsideB>
class FewRowsSums<Float32, kTermsInsideB> {
 public:
  __device__ void multiply(Panel<Float32, kFewRows, true>& A, Panel<Float32, kFewColumns, kTermsInsideB>& B, int rows,
                           int warp, int lane) {
    const int column = warp * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float b[4];
      if constexpr (kTermsInsideB) {
        const float4 terms = B.four(column, k);
        b[0] = terms.x, b[1] = terms.y, b[2] = terms.z, b[3] = terms.w;
      } else {
#pragma unroll
        for (int t = 0; t < 4; ++t) b[t] = to_float(B.piece(4 * k + t, column / 4)[column % 4]);
      }
#pragma unroll
      for (int i = 0; i < kFewRows / 4; ++i) {
        if (4 * i >= rows) break;
        const float4 a = A.four(lane / 8 + 4 * i, k);
        C[i] = fmaf(a.x, b[0], C[i]);
        C[i] = fmaf(a.y, b[1], C[i]);
        C[i] = fmaf(a.z, b[2], C[i]);
        C[i] = fmaf(a.w, b[3], C[i]);
      }
    }
  }

  template <int kStride>
  __device__ void put(float (*sums)[kStride], int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kFewRows / 4; ++i) sums[lane / 8 + 4 * i][warp * 8 + lane % 8] = C[i];
  }

 private:
  float C[kFewRows / 4] = {};
};

template <class T, bool kTermsInsideB>
class FewRowsProduct {
 public:
  using Memory = FewRowsMemory<T, kTermsInsideB>;

  __device__ FewRowsProduct(const GemmProblem& problem, Memory& memory)
      : p(problem),
        shared(memory),
        first_column(static_cast<int>(blockIdx.x) * kFewColumns),
        A(p.a, 0, p.m),
        B(p.b, first_column, p.n),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32) {}

  __device__ void run() {
    for (int stage = 0; stage + 1 < kFewStages; ++stage) load(stage, stage * kTermsOfStage);
    int stage = 0;
    for (int done = 0; done < p.k; done += kTermsOfStage) {
      wait_for_copies_before<kFewStages - 2>();
      __syncthreads();  // the stage is there, and the one before it is free
      load(stage > 0 ? stage - 1 : kFewStages - 1, done + (kFewStages - 1) * kTermsOfStage);
      typename Memory::Stage& of = shared.stages[stage];
#pragma unroll
      for (int n = 0; n < kPanelsOfFewStages; ++n) {
        if (done + n * kTerms < p.k) sums.multiply(of.A[n], of.B[n], p.m, warp, lane);
      }
      stage = stage + 1 < kFewStages ? stage + 1 : 0;
    }
    wait_for_copies();
    __syncthreads();  // nobody reads what lies there any more
    sums.put(shared.sums, warp, lane);
    __syncthreads();
    write();
  }

 private:
  static constexpr int kTerms = Panel<T, kFewRows, true>::kTerms, kTermsOfStage = kPanelsOfFewStages * kTerms;

  __device__ void load(int stage, int from) {
#pragma unroll
    for (int n = 0; n < kPanelsOfFewStages; ++n) {
      const int term = from + n * kTerms;
      if (term >= p.k) continue;
      A.load(shared.stages[stage].A[n], term, p.k);
      B.load(shared.stages[stage].B[n], term, p.k);
    }
    commit_copies();
  }

  __device__ void write() {
    constexpr int kGroups = kFewColumns / kEight;
    static_assert(kFewRows * kGroups <= kThreads);
    const int i = static_cast<int>(threadIdx.x) / kGroups, c = static_cast<int>(threadIdx.x) % kGroups * kEight;
    if (i >= p.m || first_column + c >= p.n) return;
    const auto* four = reinterpret_cast<const float4*>(&shared.sums[i][c]);
    const float4 low = four[0], high = four[1];
    Eight x = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    finish(x, p.finish, i, first_column + c, count_from(first_column + c, p.n));
  }

  const GemmProblem& p;
  Memory& shared;
  int first_column;
  PanelSource<T, kFewRows, true> A;
  PanelSource<T, kFewColumns, kTermsInsideB> B;
  FewRowsSums<T, kTermsInsideB> sums;
  int lane, warp;
};

}  // namespace polyhead::cuda
