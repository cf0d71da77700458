// Partial results joined row by row. A row reads its parts in index order and writes itself alone, so neither threads
// nor strides change a bit.
//   L_i, L, dL_i, dL, w_i = exp(L_i - L) scalars of a row     O_i, O, dO_i, dO [Dv] (one row)
#include "polyhead/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "attention/checks.h"
#include "core/dtype.h"
#include "core/sentence.h"
#include "core/threads.h"

namespace polyhead {
namespace {

// A query of a head. Packed: b is 0.
struct Row {
  int64_t b, i, h;
};

template <class E>
E* row_of(const Tensor& out, const Row& row) {
  if (out.dims[out.ndim - 1] == 0) return nullptr;  // rows without elements: strides may be any numbers
  const int64_t* stride = out.strides + (out.ndim - 3);
  const int64_t first = out.ndim == 4 ? row.b * out.strides[0] : 0;
  return static_cast<E*>(out.data) + first + row.i * stride[0] + row.h * stride[1];
}

template <class T>
T& statistic_of(const Tensor& logsumexp, const Row& row) {
  const int64_t* stride = logsumexp.strides + (logsumexp.ndim - 2);
  const int64_t first = logsumexp.ndim == 3 ? row.b * logsumexp.strides[0] : 0;
  return static_cast<T*>(logsumexp.data)[first + row.h * stride[0] + row.i * stride[1]];
}

template <class T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// Calls task(row) for every row of `out`, in parallel.
template <class Task>
void for_each_row(const Tensor& out, size_t num_parts, Executor* executor, const Task& task) {
  const int64_t* dims = out.dims + (out.ndim - 3);  // seqlen_q, num_heads, head_dim_v
  const int64_t num_rows = (out.ndim == 4 ? out.dims[0] : 1) * dims[0] * dims[1];
  constexpr int64_t kElementsOfTask = 1 << 15;
  const int64_t rows_of_task = std::max(int64_t{1}, kElementsOfTask / (dims[2] + 1) / static_cast<int64_t>(num_parts));
  const int64_t num_tasks = num_rows / rows_of_task + (num_rows % rows_of_task != 0);
  run_tasks(executor != nullptr ? *executor : default_executor(), num_tasks, [&](int64_t index, int) {
    const int64_t first = index * rows_of_task, end = std::min(num_rows, first + rows_of_task);
    for (int64_t n = first; n < end; ++n) task(Row{n / dims[1] / dims[0], n / dims[1] % dims[0], n % dims[1]});
  });
}

// Columns that are worked on at once, as numbers in T whatever dtype they lie in.
constexpr int64_t kColumns = 256;

// Calls f(elements, stride) with columns [first, ...) of a row, whatever their dtype.
template <class F>
void with_columns(const Tensor& out, const Row& row, int64_t first, const F& f) {
  const int64_t stride = out.strides[out.ndim - 1];
  with_element_type(out.dtype, [&]<class E>(E) { f(row_of<E>(out, row) + first * stride, stride); });
}

// sum[d] += w * x[d]
template <class T>
void add(T* sum, T w, const Tensor& out, const Row& row, int64_t first, int64_t columns) {
  with_columns(out, row, first, [&]<class E>(const E* x, int64_t stride) {
    if (stride == 1) {
      for (int64_t d = 0; d < columns; ++d) sum[d] += w * widen<T>(x[d]);
    } else {
      for (int64_t d = 0; d < columns; ++d) sum[d] += w * widen<T>(x[d * stride]);
    }
  });
}

template <class T>
void load(T* to, const Tensor& out, const Row& row, int64_t first, int64_t columns) {
  with_columns(out, row, first, [&]<class E>(const E* x, int64_t stride) {
    for (int64_t d = 0; d < columns; ++d) to[d] = widen<T>(x[d * stride]);
  });
}

// x[d] = w * from[d], rounded
template <class T>
void store(const Tensor& out, const Row& row, int64_t first, int64_t columns, T w, const T* from) {
  with_columns(out, row, first, [&]<class E>(E* x, int64_t stride) {
    for (int64_t d = 0; d < columns; ++d) x[d * stride] = narrow<E>(w * from[d]);
  });
}

// merged may be one of the parts: all L_i are read before L is written, and all O_i of a column before O.
template <class T>
void merge_row(std::span<const Partial> parts, const Partial& merged, const Row& row, int64_t dim) {
  T m = kMinusInfinity<T>;
  bool visible = false;
  for (const Partial& part : parts) {
    const T L_i = statistic_of<T>(part.logsumexp, row);
    if (L_i > m) m = L_i;
    visible = visible || L_i != kMinusInfinity<T>;  // NaN too: it reaches l
  }
  T l = 0;
  for (const Partial& part : parts) {
    const T L_i = statistic_of<T>(part.logsumexp, row);
    if (L_i != kMinusInfinity<T>) l += std::exp(L_i - m);
  }
  const T L = visible ? m + std::log(l) : kMinusInfinity<T>;

  for (int64_t first = 0; first < dim; first += kColumns) {
    const int64_t columns = std::min(kColumns, dim - first);
    T O[kColumns] = {};
    for (const Partial& part : parts) {
      const T L_i = statistic_of<T>(part.logsumexp, row);
      if (L_i != kMinusInfinity<T>) add(O, std::exp(L_i - m) / l, part.out, row, first, columns);
    }
    store(merged.out, row, first, columns, T(1), O);
  }
  if (merged.logsumexp.given()) statistic_of<T>(merged.logsumexp, row) = L;
}

template <class T>
void backward_row(const Partial& part, const Partial& merged, const Partial& grad_merged, const Partial& grad_part,
                  const Row& row, int64_t dim) {
  const T L_i = statistic_of<T>(part.logsumexp, row);
  const bool visible = L_i != kMinusInfinity<T>;
  const T w = visible ? std::exp(L_i - statistic_of<T>(merged.logsumexp, row)) : T(0);
  T sum = 0;
  for (int64_t first = 0; first < dim; first += kColumns) {
    const int64_t columns = std::min(kColumns, dim - first);
    T dO[kColumns];
    load(dO, grad_merged.out, row, first, columns);
    if (grad_part.logsumexp.given()) {
      T O_i[kColumns], O[kColumns];
      load(O_i, part.out, row, first, columns);
      load(O, merged.out, row, first, columns);
      for (int64_t d = 0; d < columns; ++d) sum += dO[d] * (O_i[d] - O[d]);
    }
    if (!visible) std::fill_n(dO, columns, T(0));
    if (grad_part.out.given()) store(grad_part.out, row, first, columns, w, dO);
  }
  if (!grad_part.logsumexp.given()) return;
  if (grad_merged.logsumexp.given()) sum += statistic_of<T>(grad_merged.logsumexp, row);
  statistic_of<T>(grad_part.logsumexp, row) = visible ? w * sum : T(0);
}

// Calls f(T()) with the type of the sums: double where all is float64, else float.
template <class F>
void with_sum_type(DType dtype, const F& f) {
  if (dtype == DType::kFloat64) {
    f(double());
  } else {
    f(float());
  }
}

}  // namespace

Status merge(std::span<const Partial> parts, const Partial& merged, Executor* executor) try {
  if (Status status = check_merge(parts, merged); !status.ok()) return status;
  const Tensor& out = merged.out;
  if (out.num_elements() == 0 && merged.logsumexp.num_elements() == 0) return {};
  with_sum_type(out.dtype, [&]<class T>(T) {
    for_each_row(out, parts.size(), executor,
                 [&](const Row& row) { merge_row<T>(parts, merged, row, out.dims[out.ndim - 1]); });
  });
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status merge_backward(std::span<const Partial> parts, const Partial& merged, const Partial& grad_merged,
                      std::span<const Partial> grad_parts, Executor* executor) try {
  if (Status status = check_merge_backward(parts, merged, grad_merged, grad_parts); !status.ok()) return status;
  const auto writes = [](const Partial& p) { return p.out.num_elements() > 0 || p.logsumexp.num_elements() > 0; };
  if (std::none_of(grad_parts.begin(), grad_parts.end(), writes)) return {};  // rows may be too many to count
  const Tensor& out = merged.out;
  with_sum_type(out.dtype, [&]<class T>(T) {
    for_each_row(out, parts.size(), executor, [&](const Row& row) {
      for (size_t i = 0; i < parts.size(); ++i) {
        backward_row<T>(parts[i], merged, grad_merged, grad_parts[i], row, out.dims[out.ndim - 1]);
      }
    });
  });
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
