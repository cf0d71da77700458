// How products, epilogues and norms are cut for the CUDA kernels.
#include "cuda/linear_kernels.h"

#include <algorithm>

#include "core/sentence.h"
#include "cuda/call.h"
#include "cuda/linear_call.h"
#include "cuda/linear_decoding.h"
#include "cuda/linear_launch.h"
#include "cuda/machine.h"

namespace polyhead {
namespace cuda {
namespace {

using linear::axis;
using linear::Axis;
using linear::CopyRowsArgs;
using linear::GemmArgs;
using linear::GemmDesc;
using linear::Matrix;
using linear::matrix;
using linear::NamedMemory;
using linear::Norm;
using linear::NormBackwardArgs;
using linear::NormForwardArgs;
using linear::PointwiseArgs;
using linear::SumHeadsArgs;

std::string why_not(DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
    return sentence("dtype is ", dtype_name(dtype), ", takes float32, bfloat16 or float16");
  }
  return why_no_device();
}

// The columns that 16 threads do, eight each.
constexpr int64_t kColumnsOfBlock = 128;

// Of an operation that goes row by row. With sums each block has its own, which are then added in order: as many as the
// rows alone tell.
int rows_of_block(int64_t m, bool sums) {
  constexpr int64_t kFewest = 16, kMostBlocks = 64;
  return static_cast<int>(sums ? std::max(kFewest, pieces(m, kMostBlocks)) : kFewest);
}
int64_t row_blocks(int64_t m, bool sums) { return pieces(m, rows_of_block(m, sums)); }
MemorySize blocks_of(int64_t m, int64_t n, bool sums) {
  return MemorySize(row_blocks(m, sums)) * pieces(n, kColumnsOfBlock);
}
int64_t whole_pieces(int64_t n) { return (n + 15) / 16 * 16; }  // of floats

// How a product is cut: by its sizes alone.
struct Cut {
  GemmSize size = GemmSize::kSmall;
  int64_t row_tiles = 0, column_tiles = 0;
  int64_t slices = 1, slice_terms = 0;
};

Cut cut_of(const GemmDesc& desc) {
  constexpr int64_t kBusy = 216;    // blocks that fill every GPU twice
  constexpr int64_t kBlocks = 512;  // with slices
  constexpr int64_t kLeastTerms = 512, kTermsStep = 64;
  Cut cut;
  const Number number = number_of(desc.dtype);
  const auto tiles = [&](GemmSize size) {
    cut.size = size;
    const GemmTile tile = gemm_tile(number, size);
    cut.row_tiles = pieces(desc.m, tile.rows);
    cut.column_tiles = pieces(desc.n, tile.columns);
    const MemorySize all = MemorySize(cut.row_tiles) * cut.column_tiles;
    return all.fits() ? static_cast<int64_t>(all.value()) : INT64_MAX;
  };
  if (desc.m <= kFewRows && !desc.split_k) {
    tiles(GemmSize::kFew);
    return cut;
  }
  const int64_t most_slices = desc.split_k ? std::max<int64_t>(desc.k / kLeastTerms, 1) : 1;
  int64_t all = tiles(GemmSize::kLarge);
  if (all < kBusy / most_slices) all = tiles(GemmSize::kSmall);
  cut.slices = std::clamp<int64_t>(kBlocks / std::max<int64_t>(all, 1), 1, most_slices);
  cut.slice_terms = pieces(pieces(desc.k, cut.slices), kTermsStep) * kTermsStep;
  if (cut.slices > 1) cut.slices = pieces(desc.k, cut.slice_terms);
  return cut;
}

// B row by row, each beginning at a multiple of 16 bytes.
Matrix packed_view(const void* packed, int64_t k, int64_t n, DType dtype) {
  const int64_t piece = 16 / static_cast<int64_t>(dtype_size_bytes(dtype));
  return {const_cast<void*>(packed), dtype, axis(k, pieces(n, piece) * piece), axis(n, 1)};
}
MemorySize packed_bytes(int64_t k, int64_t n, DType dtype) {
  const int64_t piece = 16 / static_cast<int64_t>(dtype_size_bytes(dtype));
  return MemorySize(k) * (MemorySize(pieces(n, piece)) * 16);
}

MemorySize gemm_workspace_bytes(const GemmDesc& desc, int) {
  const int64_t slices = cut_of(desc).slices;
  if (slices == 1) return 0;
  return (MemorySize(desc.m) * MemorySize(desc.n) * slices * sizeof(float)).rounded_up(64);
}

MemorySize sums_workspace_bytes(int64_t m, int64_t n, DType) {
  return MemorySize(n).rounded_up(16) * row_blocks(m, true) * (2 * sizeof(float));
}

// m and n are above 0. x is the sum of num_terms matrices of floats, `term` apart.
Status finish_rows(const Matrix& x, int64_t num_terms, int64_t term, const Finish& finish, float* partial,
                   const Run& run) {
  PointwiseProblem p;
  const int64_t m = x.rows.size(), n = x.columns.size();
  Status status = check_sizes(m, n, num_terms);
  const bool sums = partial != nullptr;
  if (status.ok()) status = check_grid(blocks_of(m, n, sums));
  if (!status.ok()) return status;
  p.x = view_of(x);
  p.num_terms = static_cast<int>(num_terms);
  p.term = term;
  p.m = static_cast<int>(m), p.n = static_cast<int>(n);
  p.rows_of_block = rows_of_block(m, sums);
  p.finish = finish;
  p.partial = partial;
  p.stride = whole_pieces(n);
  return launched(launch_pointwise(p, stream_of(run)));
}

Status gemm(const GemmDesc& desc, const GemmArgs& args, const Run& run) {
  Status status = check_sizes(desc.m, desc.n, desc.k);
  if (!status.ok() || desc.m == 0 || desc.n == 0) return status;
  const Cut cut = cut_of(desc);
  status = check_grid(MemorySize(cut.row_tiles) * cut.column_tiles);
  if (!status.ok()) return status;
  const Matrix b = desc.prepacked ? packed_view(args.prepacked, desc.k, desc.n, desc.dtype) : args.b;
  GemmProblem p;
  p.number = number_of(desc.dtype);
  p.a = factor_of(args.a);
  p.b = factor_of(b.transposed());
  p.m = static_cast<int>(desc.m), p.n = static_cast<int>(desc.n), p.k = static_cast<int>(desc.k);
  p.row_tiles = static_cast<unsigned>(cut.row_tiles);
  p.column_tiles = static_cast<unsigned>(cut.column_tiles);
  if (cut.size == GemmSize::kFew && !p.a.terms_inside) p.a.terms_inside = true, p.a.in_pieces = false;
  p.num_slices = static_cast<int>(cut.slices);
  p.slice_terms = static_cast<int>(cut.slice_terms);
  p.finish = finish_of(args.epilogue, args.c.rows, args.c, args.accumulate);
  if (cut.slices > 1) p.partial = static_cast<float*>(args.workspace);
  const cudaStream_t stream = stream_of(run);
  status = launched(p.number == Number::kFloat32    ? launch_gemm<Float32>(p, cut.size, stream)
                    : p.number == Number::kBFloat16 ? launch_gemm<BFloat16>(p, cut.size, stream)
                                                    : launch_gemm<Float16>(p, cut.size, stream));
  if (!status.ok() || cut.slices == 1) return status;
  const Matrix sums = matrix(args.workspace, DType::kFloat32, desc.m, desc.n);
  return finish_rows(sums, cut.slices, desc.m * desc.n, p.finish, nullptr, run);
}

// out (+)= sums of `count` rows of n floats, `stride` apart.
Status merge(const float* partial, int64_t count, int64_t n, int64_t stride, const Matrix& out, bool accumulate,
             const Run& run) {
  MergeProblem p;
  p.partial = partial;
  p.count = static_cast<int>(count), p.n = static_cast<int>(n);
  p.stride = stride;
  p.out = view_of(out);
  p.accumulate = accumulate;
  return launched(launch_merge(p, stream_of(run)));
}

Status pointwise(const PointwiseArgs& args, const Run& run) {
  const int64_t m = args.x.rows.size(), n = args.x.columns.size();
  const bool sums = args.sums.given();
  Status status = check_sizes(m, n);
  if (!status.ok() || n == 0) return status;
  auto* const partial = sums ? static_cast<float*>(args.workspace) : nullptr;
  if (m > 0) {
    const Axis& rows = args.y.given() ? args.y.rows : args.x.rows;
    status = finish_rows(args.x, 1, 0, finish_of(args.epilogue, rows, args.y, args.accumulate), partial, run);
  }
  if (!status.ok() || !sums) return status;
  return merge(partial, row_blocks(m, true), n, whole_pieces(n), args.sums, args.accumulate_sums, run);
}

Status pack(const Matrix& b, void* packed, const Run& run) {
  PointwiseArgs args;
  args.x = b;
  args.y = packed_view(packed, b.rows.size(), b.columns.size(), b.dtype);
  return pointwise(args, run);
}

NormProblem norm_problem(Norm norm, const Matrix& x, const Matrix& residual, const Matrix& gamma, const void* mean,
                         const void* rstd) {
  NormProblem p;
  p.centred = norm == Norm::kLayerNorm;
  p.m = static_cast<int>(x.rows.size()), p.n = static_cast<int>(x.columns.size());
  p.x = view_of(x);
  p.residual = view_of(residual);
  p.gamma = view_of(gamma);
  p.mean = static_cast<float*>(const_cast<void*>(mean));
  p.rstd = static_cast<float*>(const_cast<void*>(rstd));
  return p;
}

Status norm_forward(const NormForwardArgs& args, const Run& run) {
  Status status = check_sizes(args.x.rows.size(), args.x.columns.size());
  if (!status.ok() || args.x.rows.size() == 0) return status;
  NormProblem p = norm_problem(args.norm, args.x, args.residual, args.gamma, args.mean, args.rstd);
  p.eps = static_cast<float>(args.eps);
  p.beta = view_of(args.beta);
  p.sum = view_of(args.sum);
  p.y = view_of(args.y);
  return launched(launch_norm_forward(p, stream_of(run)));
}

// The gradients of the parameters first: grad_x may be grad_y.
Status norm_backward(const NormBackwardArgs& args, const Run& run) {
  const int64_t m = args.x.rows.size(), n = args.x.columns.size();
  Status status = check_sizes(m, n);
  if (!status.ok() || n == 0) return status;
  NormProblem p = norm_problem(args.norm, args.x, args.residual, args.gamma, args.mean, args.rstd);
  p.grad_y = view_of(args.grad_y);
  p.grad_x = view_of(args.grad_x);
  p.accumulate = args.accumulate_x;
  if (args.grad_gamma.given() || args.grad_beta.given()) {
    p.partial = static_cast<float*>(args.workspace);
    p.stride = whole_pieces(n);
    p.rows_of_block = rows_of_block(m, true);
    status = check_grid(blocks_of(m, n, true));
    if (status.ok() && m > 0) status = launched(launch_norm_parameters(p, stream_of(run)));
    for (const auto& [gradient, first] :
         {std::pair(&args.grad_gamma, int64_t{0}), std::pair(&args.grad_beta, p.stride)}) {
      if (!status.ok() || !gradient->given()) continue;
      status =
          merge(p.partial + first, row_blocks(m, true), n, 2 * p.stride, *gradient, args.accumulate_parameters, run);
    }
  }
  if (!status.ok() || !args.grad_x.given() || m == 0) return status;
  return launched(launch_norm_backward(p, stream_of(run)));
}

Status copy_rows(const CopyRowsArgs& args, const Run& run) {
  const int64_t m = args.x.rows.size(), n = args.x.columns.size();
  Status status = check_sizes(m, n);
  if (status.ok()) status = check_grid(MemorySize(pieces(m, 8)) * pieces(n, kColumnsOfBlock));
  if (!status.ok() || m == 0 || n == 0) return status;
  CopyProblem p;
  p.x = view_of(args.x);
  p.y = view_of(args.y);
  p.m = static_cast<int>(m), p.n = static_cast<int>(n);
  p.beams = static_cast<unsigned>(args.x.rows.sizes[1]);
  p.steps = static_cast<unsigned>(args.x.rows.sizes[2]);
  for (int i = 0; i < 2; ++i) {
    const Tensor& t = args.lengths[i];
    if (!t.given()) continue;
    p.lengths[i] = {t.data, t.strides[0], t.strides[1], t.dtype == DType::kInt64};
  }
  return launched(launch_copy(p, stream_of(run)));
}

Status sum_heads(const SumHeadsArgs& args, const Run& run) {
  const int64_t m = args.y.rows.size(), n = args.y.columns.size();
  Status status = check_sizes(m, n, args.num_heads);
  if (!status.ok() || m == 0 || n == 0) return status;
  status = check_grid((MemorySize(m) * n).rounded_up(128).value() / 128);
  if (!status.ok()) return status;
  Matrix first = args.x;  // the others lie as far apart as their first columns
  first.columns = axis(n, n > 1 ? args.x.columns.offset(1) : 0);
  HeadsProblem p;
  p.x = view_of(first);
  p.y = view_of(args.y);
  p.m = static_cast<int>(m), p.n = static_cast<int>(n), p.heads = static_cast<int>(args.num_heads);
  p.head = args.num_heads > 1 ? args.x.columns.offset(n) : 0;
  p.accumulate = args.accumulate;
  return launched(launch_sum_heads(p, stream_of(run)));
}

Status clear(void* data, size_t bytes, const Run& run) {
  return launched(bytes == 0 ? cudaSuccess : cudaMemsetAsync(data, 0, bytes, stream_of(run)));
}

Status check_places(std::span<const NamedMemory> memory, const Run& run) { return check_place(memory, run.stream); }

}  // namespace
}  // namespace cuda

const linear::Kernel linear::kCudaSm80 = {"cuda_sm80",
                                          Device::kCuda,
                                          cuda::why_not,
                                          cuda::packed_bytes,
                                          cuda::pack,
                                          [] { return int64_t{0}; },
                                          cuda::gemm_workspace_bytes,
                                          cuda::gemm,
                                          cuda::sums_workspace_bytes,
                                          cuda::pointwise,
                                          cuda::norm_forward,
                                          cuda::norm_backward,
                                          cuda::copy_rows,
                                          cuda::sum_heads,
                                          cuda::clear,
                                          cuda::check_places,
                                          cuda::append,
                                          cuda::stand_at_step,
                                          cuda::copy_tokens,
                                          cuda::read_tokens};

}  // namespace polyhead
