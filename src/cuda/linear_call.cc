#include "cuda/linear_call.h"

#include <algorithm>

#include "core/philox.h"
#include "core/sentence.h"
#include "cuda/call.h"

namespace polyhead::cuda {
namespace {

using linear::Axis;
using linear::Matrix;

// Of one index: strides of 0, with which any piece of 16 bytes is aligned.
Steps steps_of(const Axis& axis) {
  const Axis joined = linear::collapsed(axis);
  Steps steps;
  if (joined.size() <= 1) return steps;
  std::copy_n(joined.strides, 3, steps.strides);
  steps.middle = static_cast<unsigned>(joined.sizes[1]);
  steps.inner = static_cast<unsigned>(joined.sizes[2]);
  steps.plain = joined.sizes[1] == 1;
  return steps;
}

// Whether `count` neighbours along `inside`, from a multiple of it on, lie side by side, and 16 bytes are aligned wherever
// both axes lead.
bool in_pieces(const Matrix& x, const Steps& inside, const Steps& across, int64_t count) {
  const int64_t piece = 16 / static_cast<int64_t>(dtype_size_bytes(x.dtype));
  const auto whole = [&](int64_t stride) { return stride % piece == 0; };
  const bool side_by_side = inside.strides[2] == 1 || (inside.plain && inside.inner == 1);
  const bool dims_whole =
      inside.plain || (inside.inner % count == 0 && whole(inside.strides[0]) && whole(inside.strides[1]));
  return side_by_side && dims_whole && std::all_of(across.strides, across.strides + 3, whole) &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

Status size_taken(const char* name, int64_t size) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (size <= kMost) return {};
  return {StatusCode::kUnsupported, sentence(name, " is ", size, ", cuda_sm80 takes 0 to 2^30")};
}

}  // namespace

Status check_sizes(int64_t m, int64_t n, int64_t k) {
  for (const auto& [name, size] : {std::pair("the number of rows", m), std::pair("the number of columns", n),
                                   std::pair("the number of terms", k)}) {
    if (Status status = size_taken(name, size); !status.ok()) return status;
  }
  return {};
}

cudaStream_t stream_of(const Run& run) { return static_cast<cudaStream_t>(run.stream); }

Status launched(cudaError_t error) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return {StatusCode::kInternal, sentence("CUDA refused to launch the kernel: ", cudaGetErrorString(error))};
}

Status check_grid(MemorySize blocks) {
  if (blocks <= MemorySize(INT32_MAX)) return {};
  return {StatusCode::kUnsupported, "the matrix needs more than 2^31 - 1 blocks of threads, which a grid cannot hold"};
}

View view_of(const Matrix& x) {
  View view;
  if (!x.given()) return view;
  view.data = x.data;
  view.number = number_of(x.dtype);
  view.rows = steps_of(x.rows);
  view.columns = steps_of(x.columns);
  constexpr int64_t kEight = 8;
  view.in_pieces = in_pieces(x, view.columns, view.rows, kEight);
  return view;
}

Factor factor_of(const Matrix& x) {
  Factor factor;
  factor.data = x.data;
  factor.lines = steps_of(x.rows);
  factor.terms = steps_of(x.columns);
  const int64_t piece = 16 / static_cast<int64_t>(dtype_size_bytes(x.dtype));
  factor.in_pieces = in_pieces(x, factor.terms, factor.lines, piece);
  if (factor.in_pieces) return factor;
  factor.in_pieces = in_pieces(x, factor.lines, factor.terms, piece);
  factor.terms_inside = !factor.in_pieces && (factor.terms.strides[2] == 1 || factor.lines.strides[2] != 1);
  return factor;
}

Finish finish_of(const linear::Epilogue& epilogue, const Axis& rows, const Matrix& out, bool accumulate) {
  Finish finish;
  finish.bias = view_of(epilogue.bias);
  finish.pre_activation = view_of(epilogue.pre_activation);
  finish.residual = view_of(epilogue.residual);
  finish.activation = static_cast<Activated>(epilogue.activation);
  finish.gradient = epilogue.gradient;
  const linear::MatrixDropout& dropout = epilogue.dropout;
  finish.dropout_threshold = dropout_threshold(dropout.p);
  finish.dropout_offset = dropout.offset;
  finish.dropout_rows = static_cast<unsigned>(std::max<int64_t>(rows.sizes[2], 1));
  finish.dropout_seed = dropout.seed;
  finish.dropout_factor = dropout.p < 1 ? static_cast<float>(1 / (1 - dropout.p)) : 0;
  finish.out = view_of(out);
  finish.accumulate = accumulate;
  return finish;
}

}  // namespace polyhead::cuda
