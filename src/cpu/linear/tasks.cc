#include "cpu/linear/tasks.h"

#include <algorithm>

#include "core/philox.h"

namespace polyhead::cpu {
namespace {

// Rows of a task of the operations that go row by row. With sums, each task has its own, which are then added in order:
// as many as the rows alone tell.
int64_t rows_with_sums(int64_t m) { return std::max<int64_t>(16, pieces(m, 64)); }

int64_t rows_without_sums(int64_t m, int64_t n, int num_threads) {
  constexpr int64_t kElements = 16 * 1024;  // enough that starting a task costs nothing beside it
  const int64_t fitting = std::max<int64_t>(1, kElements / std::max<int64_t>(n, 1));
  return std::max<int64_t>(1, std::min(fitting, pieces(m, num_threads)));
}

int64_t whole_vectors(int64_t n) { return (n + 15) / 16 * 16; }  // floats, whatever the kernel's lanes

}  // namespace

Matrix collapsed(const Matrix& x) { return {x.data, x.dtype, collapsed(x.rows), collapsed(x.columns)}; }

EpilogueWork epilogue_work(const linear::Epilogue& epilogue, const Axis& rows) {
  EpilogueWork work;
  work.bias = collapsed(epilogue.bias);
  work.pre_activation = collapsed(epilogue.pre_activation);
  work.residual = collapsed(epilogue.residual);
  work.activation = epilogue.activation;
  work.gradient = epilogue.gradient;
  const double p = epilogue.dropout.p;
  work.dropout = {dropout_threshold(p), epilogue.dropout.offset, epilogue.dropout.seed,
                  p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f};
  work.dropout_rows = std::max<int64_t>(rows.sizes[2], 1);
  work.changes_more_than_bias = epilogue.pre_activation.given() || epilogue.residual.given() ||
                                epilogue.activation != linear::Activation::kNone || work.dropout.threshold != 0;
  return work;
}

MemorySize sums_workspace_bytes(int64_t m, int64_t n) {
  return MemorySize(n).rounded_up(16) * pieces(m, rows_with_sums(m)) * (2 * sizeof(float));
}

void pointwise(const LinearFunctions& functions, const linear::PointwiseArgs& args, const Run& run) {
  const int64_t m = args.x.rows.size(), n = args.x.columns.size();
  const PointwiseWork work{collapsed(args.x), collapsed(args.y), args.accumulate,
                           epilogue_work(args.epilogue, args.y.given() ? args.y.rows : args.x.rows), n};
  const bool sums = args.sums.given();
  const int64_t rows = sums ? rows_with_sums(m) : rows_without_sums(m, n, run.num_threads);
  const int64_t chunks = n == 0 ? 0 : pieces(m, rows), stride = whole_vectors(n);
  float* partial = static_cast<float*>(args.workspace);
  run_tasks(run, chunks, [&](int64_t index, int) {
    functions.pointwise_rows(work, index * rows, std::min(m, (index + 1) * rows),
                             sums ? partial + index * stride : nullptr);
  });
  if (sums) functions.merge_sums(collapsed(args.sums), args.accumulate_sums, n, partial, chunks, stride);
}

void norm_forward(const LinearFunctions& functions, const linear::NormForwardArgs& args, const Run& run) {
  const int64_t m = args.x.rows.size(), n = args.x.columns.size();
  linear::NormForwardArgs work = args;
  for (Matrix linear::NormForwardArgs::*x :
       {&linear::NormForwardArgs::x, &linear::NormForwardArgs::residual, &linear::NormForwardArgs::sum,
        &linear::NormForwardArgs::gamma, &linear::NormForwardArgs::beta, &linear::NormForwardArgs::y}) {
    work.*x = collapsed(work.*x);
  }
  const int64_t rows = rows_without_sums(m, n, run.num_threads);
  run_tasks(run, pieces(m, rows), [&](int64_t index, int) {
    functions.norm_forward_rows(work, n, index * rows, std::min(m, (index + 1) * rows));
  });
}

void norm_backward(const LinearFunctions& functions, const linear::NormBackwardArgs& args, const Run& run) {
  const int64_t m = args.x.rows.size(), n = args.x.columns.size();
  linear::NormBackwardArgs work = args;
  for (Matrix linear::NormBackwardArgs::*x :
       {&linear::NormBackwardArgs::x, &linear::NormBackwardArgs::gamma, &linear::NormBackwardArgs::grad_y,
        &linear::NormBackwardArgs::residual, &linear::NormBackwardArgs::grad_x}) {
    work.*x = collapsed(work.*x);
  }
  const bool sums = args.grad_gamma.given() || args.grad_beta.given();
  const int64_t rows = sums ? rows_with_sums(m) : rows_without_sums(m, n, run.num_threads);
  const int64_t chunks = n == 0 ? 0 : pieces(m, rows), stride = whole_vectors(n);
  float* partial = static_cast<float*>(args.workspace);
  run_tasks(run, chunks, [&](int64_t index, int) {
    functions.norm_backward_rows(work, n, index * rows, std::min(m, (index + 1) * rows),
                                 sums ? partial + index * 2 * stride : nullptr, stride);
  });
  if (args.grad_gamma.given()) {
    functions.merge_sums(collapsed(args.grad_gamma), args.accumulate_parameters, n, partial, chunks, 2 * stride);
  }
  if (args.grad_beta.given()) {
    functions.merge_sums(collapsed(args.grad_beta), args.accumulate_parameters, n, partial + stride, chunks,
                         2 * stride);
  }
}

}  // namespace polyhead::cpu
