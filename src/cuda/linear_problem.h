// What the kernels of products, epilogues and norms are told (contract/linear.h): plain data, for the host's compiler and
// nvcc.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace polyhead::cuda {

// A linear::Axis whose dims of size 1 are gone and where those that continue each other are one.
struct Steps {
  int64_t strides[3] = {};         // in elements, outermost first
  unsigned middle = 1, inner = 1;  // sizes of the inner dims
  bool plain = true;               // there is one dim
};

// A linear::Matrix. No data: not given.
struct View {
  void* data = nullptr;
  Number number = Number::kFloat32;
  Steps rows, columns;
  bool in_pieces = false;  // eight columns from a multiple of 8 on lie side by side, aligned to 16 bytes

  constexpr bool given() const { return data != nullptr; }
};

enum class Activated { kNone, kRelu, kGelu, kGeluTanh, kSilu };  // as linear::Activation

// linear::Epilogue, and where its result goes.
struct Finish {
  View bias, pre_activation, residual;
  Activated activation = Activated::kNone;
  bool gradient = false;
  uint32_t dropout_threshold = 0, dropout_offset = 0;  // no dropout: 0
  unsigned dropout_rows = 1;  // of the innermost dim: row r has counters r / dropout_rows and r % dropout_rows
  uint64_t dropout_seed = 0;
  float dropout_factor = 1;  // of what is kept
  View out;
  bool accumulate = false;  // add to `out`
};

// A, or B transposed: [lines, terms].
struct Factor {
  const void* data = nullptr;
  Steps lines, terms;
  bool terms_inside = true;  // neighbours along the terms lie side by side, or nothing does; else those along the lines
  bool in_pieces = false;    // 16 bytes of them, from a multiple of 16 bytes on, are aligned
};

constexpr int kFewRows = 16, kFewColumns = 32;  // that a block of few_rows.cuh has

// out[m, n] = finish(A[m, k] B[k, n]). Slices of the terms that share a tile leave sums in `partial` instead.
struct GemmProblem {
  Number number = Number::kBFloat16;  // of A and B
  Factor a, b;
  int m = 0, n = 0, k = 0;
  unsigned row_tiles = 0, column_tiles = 0;
  int num_slices = 1, slice_terms = 0;  // of each but the last
  float* partial = nullptr;             // [num_slices, m, n]; null: there is one slice
  Finish finish;
};

// out[m, n] = finish(x), and column sums of what was not rounded yet.
struct PointwiseProblem {
  View x;
  int num_terms = 1;  // x is the sum of so many matrices of floats
  int64_t term = 0;   // from one to the next
  int m = 0, n = 0;
  int rows_of_block = 0;
  Finish finish;             // `out` may not be given
  float* partial = nullptr;  // [blocks of rows, stride]: their column sums; null: not wanted
  int64_t stride = 0;
};

// out[0, n] (+)= sum of `count` rows of floats.
struct MergeProblem {
  const float* partial = nullptr;
  int count = 0, n = 0;
  int64_t stride = 0;
  View out;
  bool accumulate = false;
};

// What norms of rows read and write, as linear::NormForwardArgs and NormBackwardArgs say.
struct NormProblem {
  bool centred = true;  // LayerNorm; else RMSNorm
  float eps = 0;
  int m = 0, n = 0;
  View x, residual, gamma;
  float *mean = nullptr, *rstd = nullptr;  // read by backward
  View beta, sum, y;                       // of forward
  View grad_y, grad_x;                     // of backward
  bool accumulate = false;                 // add to grad_x
  // Sums over rows for the gradients of gamma and beta: [blocks of rows, 2, stride]
  float* partial = nullptr;
  int64_t stride = 0;
  int rows_of_block = 0;
};

// y[m, n] (+)= sum over heads of x, of which x has the first.
struct HeadsProblem {
  View x, y;
  int m = 0, n = 0, heads = 0;
  int64_t head = 0;  // from one to the next, in elements
  bool accumulate = false;
};

// y[m, n] = x, or 0 in time steps that no length reaches. y's rows lie one after the other.
struct CopyProblem {
  View x, y;
  int m = 0, n = 0;
  unsigned beams = 1, steps = 1;  // of rows [batch, beam, time]
  struct Lengths {
    const void* data = nullptr;
    int64_t batch = 0, beam = 0;
    bool wide = false;  // int64
  } lengths[2];
};

}  // namespace polyhead::cuda
