#include "wiring.h"

#include <algorithm>

#include "call.h"
#include "core/dtype.h"

namespace polyhead::onnxruntime {

namespace {

// ViewStep::kLeadTwo; false where the dims ahead of the last two are not `sizes` together, or do not lie in one run.
bool lead_two(const std::vector<int>& sizes, const Tensor& tensor, Tensor& next) {
  if (tensor.ndim < 3) return false;
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim - 2; ++i) {
    if (i > 0 && tensor.strides[i - 1] != tensor.strides[i] * tensor.dims[i]) return false;
    count *= tensor.dims[i];
  }
  const int64_t told = std::abs(int64_t{sizes[0]} * sizes[1]);
  if (told == 0 || count % told != 0) return false;
  const int64_t a = sizes[0] < 0 ? count / told : sizes[0], b = sizes[1] < 0 ? count / told : sizes[1];
  if (a * b != count) return false;
  const int64_t inner = tensor.strides[tensor.ndim - 3];
  const int64_t dims[] = {a, b, tensor.dims[tensor.ndim - 2], tensor.dims[tensor.ndim - 1]};
  const int64_t strides[] = {inner * b, inner, tensor.strides[tensor.ndim - 2], tensor.strides[tensor.ndim - 1]};
  next.ndim = 4;
  std::copy(std::begin(dims), std::end(dims), next.dims);
  std::copy(std::begin(strides), std::end(strides), next.strides);
  return true;
}

}  // namespace

bool follow(const std::vector<ViewStep>& steps, Tensor& tensor) {
  for (const ViewStep& step : steps) {
    Tensor next = tensor;
    switch (step.kind) {
      case ViewStep::kTranspose:
        if (step.order.size() != static_cast<size_t>(tensor.ndim)) return false;
        for (int i = 0; i < tensor.ndim; ++i) {
          next.dims[i] = tensor.dims[step.order[static_cast<size_t>(i)]];
          next.strides[i] = tensor.strides[step.order[static_cast<size_t>(i)]];
        }
        break;
      case ViewStep::kOnesAhead:
        if (tensor.ndim + step.count > Tensor::kMaxDims) return false;
        next = with_leading_ones(tensor, tensor.ndim + static_cast<int>(step.count));
        break;
      case ViewStep::kLeadTwo:
        if (!lead_two(step.order, tensor, next)) return false;
        break;
      case ViewStep::kMergeFirst: return false;
    }
    tensor = next;
  }
  return true;
}

std::vector<int64_t> dims_behind(const std::vector<ViewStep>& steps, std::vector<int64_t> dims) {
  for (const ViewStep& step : steps) {
    if (step.kind == ViewStep::kTranspose) {
      const std::vector<int64_t> before = dims;
      for (size_t i = 0; i < dims.size(); ++i) dims[i] = before[static_cast<size_t>(step.order[i])];
    } else if (step.kind == ViewStep::kMergeFirst) {
      dims[1] *= dims[0];
      dims.erase(dims.begin());
    }
  }
  return dims;
}

Tensor seen_before(const std::vector<ViewStep>& steps, const std::vector<int64_t>& dims, Tensor tensor) {
  for (size_t i = steps.size(); i-- > 0;) {
    const std::vector<ViewStep> ahead(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(i));
    const std::vector<int64_t> before = dims_behind(ahead, dims);
    Tensor seen = tensor;
    if (steps[i].kind == ViewStep::kTranspose) {
      for (size_t k = 0; k < before.size(); ++k) {
        const int at = steps[i].order[k];
        seen.dims[at] = tensor.dims[k];
        seen.strides[at] = tensor.strides[k];
      }
    } else {
      seen = with_leading_ones(tensor, tensor.ndim + 1);
      seen.dims[0] = before[0];
      seen.dims[1] = before[1];
      seen.strides[0] = tensor.strides[0] * before[1];
    }
    tensor = seen;
  }
  return tensor;
}

bool broadcast(std::vector<Tensor>& tensors, Tensor& like) {
  like = Tensor(nullptr, like.dtype, {1, 1, 1, 1});
  for (Tensor& tensor : tensors) {
    if (tensor.ndim > 4) return false;
    tensor = with_leading_ones(tensor, 4);
    for (int i = 0; i < 4; ++i) {
      if (tensor.dims[i] != 1 && like.dims[i] != 1 && like.dims[i] != tensor.dims[i]) return false;
      if (like.dims[i] == 1) like.dims[i] = tensor.dims[i];
    }
  }
  for (Tensor& tensor : tensors) {
    for (int i = 0; i < 4; ++i) {
      if (tensor.dims[i] != like.dims[i]) tensor.strides[i] = 0;
      tensor.dims[i] = like.dims[i];
    }
  }
  like = Tensor(nullptr, like.dtype, {like.dims[0], like.dims[1], like.dims[2], like.dims[3]});
  return true;
}

namespace {

struct Job {
  const Source* source;
  const std::vector<Tensor>* operands;
  Tensor out;
  int pieces;

  // f(row of out, rows of the operands, their strides) for the piece's rows.
  template <class E, class F>
  void rows(int piece, F&& f) const {
    const int64_t count = out.dims[0] * out.dims[1] * out.dims[2];
    for (int64_t row = count * piece / pieces; row < count * (piece + 1) / pieces; ++row) {
      const int64_t at[3] = {row / out.dims[2] / out.dims[1], row / out.dims[2] % out.dims[1], row % out.dims[2]};
      const auto start = [&](size_t k) {
        const Tensor& t = (*operands)[k];
        return at[0] * t.strides[0] + at[1] * t.strides[1] + at[2] * t.strides[2];
      };
      f(static_cast<E*>(out.data) + row * out.dims[3], start);
    }
  }

  void run_bool(int piece) const {
    rows<bool>(piece, [&](bool* to, const auto& start) {
      const Tensor &a = operands->front(), &b = operands->back();
      const bool *x = static_cast<const bool*>(a.data) + start(0),
                 *y = static_cast<const bool*>(b.data) + start(operands->size() - 1);
      for (int64_t j = 0; j < out.dims[3]; ++j) {
        to[j] = source->kind == Source::kNot ? !x[j * a.strides[3]] : x[j * a.strides[3]] && y[j * b.strides[3]];
      }
    });
  }

  template <class E>
  void run_numbers(int piece) const {
    using T = std::conditional_t<std::is_same_v<E, double>, double, float>;
    const E first = narrow<E>(source->numbers[0]), second = narrow<E>(source->numbers[1]);
    rows<E>(piece, [&](E* to, const auto& start) {
      const Tensor &a = operands->front(), &b = operands->back();
      if (source->kind == Source::kChoose) {
        const bool* x = static_cast<const bool*>(a.data) + start(0);
        for (int64_t j = 0; j < out.dims[3]; ++j) to[j] = x[j * a.strides[3]] ? first : second;
        return;
      }
      const E *x = static_cast<const E*>(a.data) + start(0),
              *y = static_cast<const E*>(b.data) + start(operands->size() - 1);
      for (int64_t j = 0; j < out.dims[3]; ++j) {
        const T value = widen<T>(x[j * a.strides[3]]);
        const T other = widen<T>(source->kind == Source::kTimes ? first : y[j * b.strides[3]]);
        to[j] = narrow<E>(source->kind == Source::kAdd        ? value + other
                          : source->kind == Source::kQuotient ? value / other
                                                              : value * other);
      }
    });
  }

  void run(int piece) const {
    if (out.dtype == DType::kBool) return run_bool(piece);
    with_element_type(out.dtype, [&](auto zero) { run_numbers<decltype(zero)>(piece); });
  }
};

}  // namespace

void compute(Executor& executor, const Source& source, const std::vector<Tensor>& operands, const Tensor& out) {
  constexpr int64_t kWorthAThread = 1 << 15;  // elements
  if (out.num_elements() == 0) return;
  Job job{&source, &operands, out, 1};
  job.pieces = static_cast<int>(std::min<int64_t>(out.num_elements() / kWorthAThread + 1, executor.num_threads()));
  executor.parallel_for(
      job.pieces, [](void* self, int i) { static_cast<const Job*>(self)->run(i); }, &job);
}

}  // namespace polyhead::onnxruntime
