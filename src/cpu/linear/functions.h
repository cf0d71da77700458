// What one instruction set offers for products, epilogues and norms: a table of functions over plain data, as
// functions.h is for attention. The *_tasks.cc that cut a call into tasks alone call them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "contract/linear.h"
#include "cpu/isa/list.h"
#include "cpu/isa/operand.h"
#ifdef POLYHEAD_ISA
#include "cpu/isa/simd.h"
#endif

namespace polyhead::cpu {

using linear::Axis;
using linear::Matrix;

// Of index i from index 0, in elements. Axis's own function could be emitted outside the ISA's namespace.
static inline int64_t offset_of(const Axis& axis, int64_t i) {
  if (axis.sizes[1] == 1 && axis.sizes[0] == 1) return i * axis.strides[2];
  const int64_t outer = i / axis.sizes[2];
  return outer / axis.sizes[1] * axis.strides[0] + outer % axis.sizes[1] * axis.strides[1] +
         i % axis.sizes[2] * axis.strides[2];
}

// One dim, without gaps.
static inline bool contiguous(const Axis& axis) {
  return axis.sizes[0] == 1 && axis.sizes[1] == 1 && axis.strides[2] == 1;
}

// linear::Epilogue with what can be known before the first element. Axes are collapsed: dims that continue each other
// are one.
struct EpilogueWork {
  Matrix bias, pre_activation, residual;  // data is null where not given
  linear::Activation activation = linear::Activation::kNone;
  bool gradient = false;
  Dropout dropout;
  int64_t dropout_rows = 1;  // of the innermost dim: element (r, n) has counters (r / dropout_rows, r % dropout_rows)
  bool changes_more_than_bias = false;

  bool changes() const { return bias.data != nullptr || changes_more_than_bias; }  // anything at all
};

// C[M, N] = epilogue(A[M, K] B[K, N]) with collapsed axes.
//
// B is used packed: words [K] of `panel_columns` columns side by side, one panel after the other. A word is one float,
// or two neighbouring bfloat16 along K. Sums over K run in chunks of chunk_words words, which are then added in order.
struct GemmWork {
  DType dtype = DType::kFloat32;  // of A and B
  Matrix a, b, c;
  bool accumulate = false;
  EpilogueWork epilogue;
  int64_t n = 0, k = 0;
};

// Rows and columns of C and the terms of K (all but the last slice of whole chunks) that a task computes.
struct GemmTask {
  int64_t first_row = 0, num_rows = 0;
  int64_t first_column = 0, num_columns = 0;  // from a panel's first column on
  int64_t first_k = 0, num_k = 0;
  const float* packed = nullptr;  // the whole of B; null: the task packs what it needs itself
  float* partial = nullptr;       // of a slice of K, [panel][M][panel_columns]: sums are written here, no epilogue
  int64_t panel_stride = 0;       // of `partial`
};

struct PointwiseWork {
  Matrix x, y;
  bool accumulate = false;
  EpilogueWork epilogue;
  int64_t n = 0;
};

struct LinearFunctions {
  bool tmm;  // multiplies bfloat16 alone, in registers of 16 x 16 words

  int panel_columns, tile_rows;       // of a microkernel
  int (*word_elements)(DType dtype);  // 1 or 2
  int64_t chunk_words;                // of K
  int64_t unpacked_rows;              // of A at most that are one part where B is not packed before
  int64_t part_rows, part_columns;    // of one thread's work at most

  // Terms [first_k, first_k + num_k) and panels [first_panel, end_panel) of B: word w of panel p goes to
  // packed + (p - first_panel) * panel_stride + w * panel_columns. first_k is a whole word.
  void (*pack_panels)(const Matrix& b, int64_t n, int64_t first_k, int64_t num_k, int64_t first_panel,
                      int64_t end_panel, float* packed, int64_t panel_stride);

  // Scratch of gemm_part for tasks of so many rows and columns, in bytes, a multiple of 64.
  size_t (*part_scratch_bytes)(int64_t num_rows, int64_t num_columns, int64_t k, bool packs);
  void (*gemm_part)(const GemmWork& work, const GemmTask& task, void* scratch);

  // Rows [first, end) of C from the partial sums of `num_slices` slices, which lie `slice_stride` floats apart.
  void (*gemm_merge)(const GemmWork& work, int64_t first, int64_t end, float* partial, int64_t panel_stride,
                     int64_t num_slices, int64_t slice_stride);

  // Rows [first, end); with `sums` [n], what is written is summed there.
  void (*pointwise_rows)(const PointwiseWork& work, int64_t first, int64_t end, float* sums);

  // out[n] (+)= the sum of `count` vectors of n floats that lie `stride` apart, in order.
  void (*merge_sums)(const Matrix& out, bool accumulate, int64_t n, const float* partial, int64_t count,
                     int64_t stride);

  void (*norm_forward_rows)(const linear::NormForwardArgs& args, int64_t n, int64_t first, int64_t end);
  // With `sums` [2][sums_stride], the rows' share of grad_gamma and grad_beta is written there.
  void (*norm_backward_rows)(const linear::NormBackwardArgs& args, int64_t n, int64_t first, int64_t end, float* sums,
                             int64_t sums_stride);
};

#ifdef POLYHEAD_ISA
namespace POLYHEAD_ISA {
int word_elements(DType dtype);
void pack_panels(const Matrix& b, int64_t n, int64_t first_k, int64_t num_k, int64_t first_panel, int64_t end_panel,
                 float* packed, int64_t panel_stride);
size_t part_scratch_bytes(int64_t num_rows, int64_t num_columns, int64_t k, bool packs);
void gemm_part(const GemmWork& work, const GemmTask& task, void* scratch);
void gemm_merge(const GemmWork& work, int64_t first, int64_t end, float* partial, int64_t panel_stride,
                int64_t num_slices, int64_t slice_stride);
}  // namespace POLYHEAD_ISA

// Epilogues and norms: the set's own, or those of the set whose vectors it has.
#ifndef POLYHEAD_ISA_OF_ROWS
#define POLYHEAD_ISA_OF_ROWS POLYHEAD_ISA
#endif
namespace POLYHEAD_ISA_OF_ROWS {
void pointwise_rows(const PointwiseWork& work, int64_t first, int64_t end, float* sums);
void merge_sums(const Matrix& out, bool accumulate, int64_t n, const float* partial, int64_t count, int64_t stride);
void norm_forward_rows(const linear::NormForwardArgs& args, int64_t n, int64_t first, int64_t end);
void norm_backward_rows(const linear::NormBackwardArgs& args, int64_t n, int64_t first, int64_t end, float* sums,
                        int64_t sums_stride);
}  // namespace POLYHEAD_ISA_OF_ROWS
#endif

#define DECLARE(name, features)                  \
  namespace name {                               \
  extern const LinearFunctions kLinearFunctions; \
  }
POLYHEAD_ISAS(DECLARE)
#undef DECLARE

}  // namespace polyhead::cpu
