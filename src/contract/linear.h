// What the layer and its blocks compute besides attention, on matrices that somebody else owns: products with an
// epilogue, the epilogue alone, and norms; forward and backward; and what decoding asks of a device. A Kernel is one way to
// do it, named as the attention kernel beside it. src/linear/kernel_list.cc lists all; src/reference is the definition.
//
// Types: a call's matrices are float32, bfloat16 or float16, and sums are float32; or all are float64 (the reference
// alone). Vectors over columns (bias, gamma, beta and their gradients) are [1, N] matrices of float32 or the call's
// type. Results are rounded once, when they are written.
//
// Sizes, strides and pointers are the caller's to check: sizes agree, no index leaves its buffer, outputs overlap
// neither themselves nor (but where it says so) anything else. Strides may be anything on inputs, 0 and negative too.
// Sizes of 0 are legal. Nothing is allocated while a kernel runs. Bits depend on neither threads nor strides, and those
// of a row not on the other rows; `split_k` excepted, which takes the sizes into account.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "contract/decoding.h"
#include "core/memory_size.h"
#include "core/threads.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::linear {

// The rows or the columns of a matrix: index i counts through up to three dims, outermost first, each with its stride
// in elements. So [batch, time] in either order in memory, or [heads, head_dim], is one axis: nothing need be copied.
struct Axis {
  int64_t sizes[3] = {1, 1, 1};
  int64_t strides[3] = {0, 0, 0};

  int64_t size() const { return sizes[0] * sizes[1] * sizes[2]; }
  int64_t offset(int64_t i) const {  // of index i from index 0, in elements
    const int64_t inner = sizes[2], middle = sizes[1];
    if (middle == 1 && sizes[0] == 1) return i * strides[2];
    return i / inner / middle * strides[0] + i / inner % middle * strides[1] + i % inner * strides[2];
  }
};

// The same axis: dims of size 1 go (one of one index steps by 1), and a dim whose steps lead on from the end of the next one
// is joined with it.
Axis collapsed(const Axis& axis);

inline Axis axis(int64_t size, int64_t stride) { return {{1, 1, size}, {0, 0, stride}}; }
inline Axis axis(int64_t outer, int64_t outer_stride, int64_t inner, int64_t inner_stride) {
  return {{1, outer, inner}, {0, outer_stride, inner_stride}};
}

struct Matrix {
  void* data = nullptr;  // element [0, 0]; null: not given (or empty). Inputs are never written through it
  DType dtype = DType::kFloat32;
  Axis rows, columns;

  bool given() const { return data != nullptr; }
  Matrix transposed() const { return {data, dtype, columns, rows}; }
};

// Row-major, without gaps.
inline Matrix matrix(const void* data, DType dtype, int64_t rows, int64_t columns) {
  return {const_cast<void*>(data), dtype, axis(rows, columns), axis(columns, 1)};
}

enum class Activation {
  kNone,
  kRelu,      // max(x, 0); derivative 0 at 0
  kGelu,      // x * (1 + erf(x / sqrt(2))) / 2                                      (torch's default)
  kGeluTanh,  // x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
  kSilu,      // x / (1 + exp(-x))
};

// Element (r, n) of a matrix is kept, and scaled by 1 / (1 - p), as element (b, h, i, j = n) of dropout_mask(p, seed,
// offset, [sizes[0], sizes[1], sizes[2], N]), sizes being those of the output's row axis (without output, of x's) and
// (b, h, i) the place of r in it: counter words (b * sizes[1] + h, i, n / 8, offset). Rows [batch, 1, time] so have the
// mask of [batch, 1, time, N], in whatever order they lie in memory. Attention counts the same way: every place of a
// model that drops needs an offset (or seed) of its own.
struct MatrixDropout {
  double p = 0;  // 0: no dropout
  uint64_t seed = 0;
  uint32_t offset = 0;
};

// What happens to an element x of a product (or of a given matrix) before it is written, in this order:
//
//   x += bias[n]
//   forward:  pre_activation = x (if given), x = activation(x), x = dropout(x), x += residual
//   gradient: x = dropout(x) (same mask), x *= activation'(pre_activation), x += residual
//
// `gradient` turns the gradient of what the forward wrote into that of its pre-activation. Without activation it needs
// no pre_activation. The residual may be the output itself (the same elements).
struct Epilogue {
  Matrix bias;  // [1, N]
  Activation activation = Activation::kNone;
  bool gradient = false;
  Matrix pre_activation;  // [M, N]: an output of forward (optional), an input of gradient
  MatrixDropout dropout;
  Matrix residual;  // [M, N]
};

// C[M, N] = epilogue(A[M, K] B[K, N]), or added to C.
//
// All that a layer needs, with weights W[in, out] and Y = X W, is this with transposed views:
//   forward           A = X,                      B = W,
//   backward_data     A = grad_Y,                 B = W.transposed(),
//   backward_weights  A = X.transposed(),         B = grad_Y,  K = number of tokens, split_k
struct GemmDesc {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kFloat32;  // of A and B; C may be of another
  bool prepacked = false;         // B comes as pack() wrote it
  bool split_k = false;           // where M and N are small, K may be cut into slices that threads share; and C may be
                                  // computed as its transpose
};

struct GemmArgs {
  Matrix a;                         // [M, K]
  Matrix b;                         // [K, N], unless prepacked
  const void* prepacked = nullptr;  // B, with desc.prepacked
  Matrix c;                         // [M, N]
  bool accumulate = false;          // add to C (the epilogue, residual included, comes first)
  Epilogue epilogue;
  void* workspace = nullptr;  // of gemm_workspace_bytes, aligned to 64
};

// y = epilogue(x), and the sums over its rows: the passes that stand beside a product, and the gradients of biases.
struct PointwiseArgs {
  Matrix x;                 // [M, N]
  Matrix y;                 // [M, N]; may be x itself; not given: the sums alone
  bool accumulate = false;  // add to y
  Epilogue epilogue;
  Matrix sums;                   // [1, N] = sum over rows of epilogue(x), before it is rounded to y; optional
  bool accumulate_sums = false;  // add to `sums`
  void* workspace = nullptr;     // of sums_workspace_bytes, aligned to 64; only with sums
};

// Of what Kernel::pack() writes: raised when any kernel's layout changes.
inline constexpr uint64_t kPackedVersion = 1;

enum class Norm {
  kLayerNorm,  // y = (x - mean) * rstd * gamma + beta,  mean over N, rstd = 1 / sqrt(mean of (x - mean)^2 + eps)
  kRmsNorm,    // y = x * rstd * gamma + beta,           rstd = 1 / sqrt(mean of x^2 + eps)
};

struct NormForwardArgs {
  Norm norm = Norm::kLayerNorm;
  double eps = 1e-5;
  Matrix x;            // [M, N]
  Matrix residual;     // [M, N], optional: what is normalised is x + residual, rounded to x's type,
  Matrix sum;          // [M, N], optional: and written here for backward; may be x or residual itself
  Matrix gamma, beta;  // [1, N], each optional (1 and 0)
  Matrix y;            // [M, N]; may be x itself
  // Optional, [M] one after the other: float32, or float64 where x is. RMSNorm has no mean.
  void *mean = nullptr, *rstd = nullptr;
};

struct NormBackwardArgs {
  Norm norm = Norm::kLayerNorm;
  Matrix x;                                     // [M, N], what was normalised (`sum`, if there was a residual)
  Matrix gamma;                                 // [1, N], as in forward
  const void *mean = nullptr, *rstd = nullptr;  // as forward wrote them
  Matrix grad_y;                                // [M, N]
  Matrix residual;                     // [M, N], optional: added to grad_x, the gradient that comes past the norm
  Matrix grad_x;                       // [M, N], optional; may be grad_y or residual itself
  bool accumulate_x = false;           // add to grad_x
  Matrix grad_gamma, grad_beta;        // [1, N], each optional
  bool accumulate_parameters = false;  // add to grad_gamma and grad_beta
  void* workspace = nullptr;           // of sums_workspace_bytes, aligned to 64
};

// y[M, N] = x, without what stands behind the end of each sequence: zeros from time step max(lengths) on, whatever x
// holds there.
struct CopyRowsArgs {
  Matrix x;  // [M, N], whose rows are [batch, beam, time]: rows.sizes tells
  Matrix y;  // [M, N] row-major without gaps, of x's type; it does not overlap x
  // [batch, beam], int32 or int64 on the kernel's device; one is given at least. A length beyond 0 .. time counts as
  // the nearer of the two.
  Tensor lengths[2];
};

// y[M, N] = sum over heads h of x[M, h * N + n]: of heads that all saw one vector. Rounded once.
struct SumHeadsArgs {
  Matrix x;  // [M, num_heads * N], whose heads are alike: the stride within a head is one number
  int64_t num_heads = 0;
  Matrix y;                 // [M, N], of x's type
  bool accumulate = false;  // add to y
};

// What a call reads or writes, by its name in sentences.
struct NamedMemory {
  const char* name;
  const void* data;
};

// The verbs that compute return an error alone if the device refuses the work; those of the CPU never do. Calls of a GPU's
// kernel put their work on run.stream and come back at once: nothing waits, and the host looks at nothing that lies on
// the device.
struct Kernel {
  const char* name;  // the attention kernel's
  Device device;     // where matrices, packed ones, lengths and workspace lie

  // Why this kernel cannot compute in `dtype` here, as one clause; "" if it can.
  std::string (*why_not)(DType dtype);

  // B in the kernel's own layout, for products that use it more than once. `packed` is aligned to 64.
  MemorySize (*packed_bytes)(int64_t k, int64_t n, DType dtype);
  Status (*pack)(const Matrix& b, void* packed, const Run& run);
  // Matrices packed one behind the other are one whose columns stand side by side, if all but the last have a multiple
  // of so many columns; 0: never.
  int64_t (*panel_columns)();

  MemorySize (*gemm_workspace_bytes)(const GemmDesc& desc, int num_threads);  // a multiple of 64
  Status (*gemm)(const GemmDesc& desc, const GemmArgs& args, const Run& run);

  // Of pointwise with sums and of norm_backward; a multiple of 64.
  MemorySize (*sums_workspace_bytes)(int64_t m, int64_t n, DType dtype);
  Status (*pointwise)(const PointwiseArgs& args, const Run& run);

  Status (*norm_forward)(const NormForwardArgs& args, const Run& run);
  Status (*norm_backward)(const NormBackwardArgs& args, const Run& run);

  Status (*copy_rows)(const CopyRowsArgs& args, const Run& run);
  Status (*sum_heads)(const SumHeadsArgs& args, const Run& run);
  Status (*clear)(void* data, size_t bytes, const Run& run);  // zeros

  // Null where the host's memory is the device's. Else, whether all of these lie on the calling thread's current device,
  // and run.stream, null being CUDA's own, is of that device: kernels would not ask.
  Status (*check_place)(std::span<const NamedMemory> memory, const Run& run) = nullptr;

  // Likewise null there: what decoding asks of a device (contract/decoding.h). Nobody has looked at numbers that lie there.
  Status (*append)(const KvCacheDesc& cache, const AppendArgs& args, const Run& run) = nullptr;
  Status (*stand_at_step)(const AttentionDesc& asked, const StepArgs& args, const Run& run) = nullptr;
  Status (*copy_tokens)(const KvCacheDesc& cache, const CopyTokensArgs& args, const Run& run) = nullptr;
  Status (*read_tokens)(const KvCacheDesc& cache, const ReadTokensArgs& args, const Run& run) = nullptr;
};

// Every kernel of this build, best first; the reference is last.
std::span<const Kernel* const> kernel_list();

// The kernel of that name (a Plan's kernel_name()); null if there is none.
const Kernel* find_kernel(std::string_view name);

// The kernel that `name` (empty: POLYHEAD_KERNEL, else the best of those on `device`) picks for `dtype`.
Result<const Kernel*> choose_kernel(DType dtype, std::string_view name, Device device);

}  // namespace polyhead::linear
