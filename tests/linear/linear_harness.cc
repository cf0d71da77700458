#include "linear_harness.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "sanitizer.h"
#include "testing/judge.h"

namespace polyhead::testing {
namespace {

linear::Axis axis_of(const Tensor& t, int first, int end) {
  linear::Axis axis;
  for (int d = end - 1, n = 2; d >= first; --d, --n) {
    axis.sizes[n] = t.dims[d];
    axis.strides[n] = t.strides[d];
  }
  return axis;
}

linear::Matrix matrix_of(const Tensor& t, size_t row_dims) {
  if (!t.given()) return {};
  const int rows = static_cast<int>(row_dims);
  return {t.data, t.dtype, axis_of(t, 0, rows), axis_of(t, rows, t.ndim)};
}

}  // namespace

std::vector<const linear::Kernel*> linear_kernels_to_test() {
  const char* only = std::getenv("POLYHEAD_TEST_KERNEL");
  std::vector<const linear::Kernel*> list;
  for (const linear::Kernel* kernel : linear::kernel_list()) {
    if (kernel->device != Device::kCpu) continue;  // its tests lend it what lies there
    if (!only || std::string(only) == kernel->name) list.push_back(kernel);
  }
  return list;
}

std::string difference(const CallResult& a, const CallResult& b) {
  for (const CallResult* written : {&a, &b}) {
    for (const std::string& fault : written->faults) return fault;
  }
  for (const auto& [name, array] : a.arrays) {
    const std::string text = difference(name.c_str(), array, b.arrays.at(name));
    if (!text.empty()) return text;
  }
  return "";
}

Layout Operands::next_layout() {
  if (options_.layout != Layout::kMixed) return options_.layout;
  return static_cast<Layout>(random_.integer(0, kNumLayouts - 1));
}

linear::Matrix Operands::add(const char* name, bool output, Placed placed, size_t row_dims) {
  places_.push_back({name, output, std::move(placed)});
  return matrix_of(places_.back().placed.tensor(), row_dims);
}

linear::Matrix Operands::input(const char* name, const Array& array, size_t row_dims) {
  const Layout layout = next_layout();
  const bool transposed = options_.weights_transposed && std::strcmp(name, "b") == 0;
  return add(name, false, Placed::input(array, transposed ? Layout::kTransposed : layout, options_.guard), row_dims);
}

linear::Matrix Operands::output(const char* name, DType dtype, const std::vector<int64_t>& dims, size_t row_dims) {
  return add(name, true, Placed::output(dtype, dims, next_layout(), options_.guard), row_dims);
}

linear::Matrix Operands::updated(const char* name, const Array& array, size_t row_dims) {
  return add(name, true, Placed::accumulator(array, next_layout(), options_.guard), row_dims);
}

void* Operands::vector(const char* name, DType dtype, int64_t size) {
  return add(name, true, Placed::output(dtype, {size}, Layout::kBshd, options_.guard), 1).data;
}

const void* Operands::vector(const char* name, const Array& array) {
  return add(name, false, Placed::input(array, Layout::kBshd, options_.guard), 1).data;
}

void* Operands::workspace(size_t bytes) {
  workspace_.emplace_back(bytes, Guard::kEnd, uint8_t{0xff});
  return workspace_.back().data();
}

CallResult Operands::written() {
  CallResult written;
  for (const Place& place : places_) {
    if (place.output) {
      written.arrays[place.name] = place.placed.result(place.name.c_str(), &written.faults);
    } else if (!place.placed.unchanged()) {
      written.faults.push_back(place.name + " was written to");
    }
  }
  return written;
}

Array random_array(DType dtype, const std::vector<int64_t>& dims, uint64_t seed, double scale) {
  Array array(dtype, dims);
  Random random(seed);
  for (int64_t n = 0; n < array.size(); ++n) array.set(n, scale * random.normal());
  return array;
}

Array widened(const Array& array) {
  if (!array.given()) return {};
  Array wide(DType::kFloat64, array.dims);
  for (int64_t n = 0; n < array.size(); ++n) wide.set(n, array.at(n));
  return wide;
}

Array magnitudes(const Array& array) {
  Array wide = widened(array);
  for (int64_t n = 0; n < wide.size(); ++n) wide.set(n, std::fabs(wide.at(n)));
  return wide;
}

const ExpectedArrays& Draws::expected(size_t n) {
  if (n == draws_.size()) draws_.push_back(definition_(seed_of_draw(seed_, static_cast<int64_t>(n))));
  return draws_[n];
}

std::string Draws::judge(const std::function<CallResult(uint64_t seed)>& run, bool cut) {
  constexpr int64_t kElements = 4096, kMostDraws = 16;  // as many draws as give so many elements of the largest result
  std::map<std::string, Errors> errors;
  int64_t draws = 1;
  for (int64_t n = 0; n < draws; ++n) {
    const CallResult result = run(seed_of_draw(seed_, n));
    for (const std::string& fault : result.faults) return fault;
    if (memory_alone()) return "";
    const ExpectedArrays& d = expected(static_cast<size_t>(n));
    int64_t largest = 0;
    for (const auto& [name, got] : result.arrays) {
      // bfloat16's pair product rounds otherwise than float32's, and sums of few terms have few roundings to compare.
      Bound bound;
      bound.largest = 2;
      bound.rmse = got.dtype == DType::kBFloat16 ? 1.5 : 1.1;
      const auto shift = cut ? d.cut.find(name) : d.cut.end();
      add_errors(errors.try_emplace(name, name, bound).first->second, got, d.exact.at(name), d.naive.at(name),
                 numbers<double>(d.magnitude.at(name)), nullptr, nullptr,
                 shift == d.cut.end() ? nullptr : &shift->second);
      largest = std::max(largest, got.size());
    }
    if (largest > 0) draws = std::clamp<int64_t>(kElements / largest, 1, kMostDraws);
  }
  std::string text;
  for (const auto& [name, of_result] : errors) text += text_of(of_result);
  return text;
}

std::vector<int64_t> random_axis(Random& random, int64_t most, size_t most_dims) {
  constexpr int64_t kSizes[] = {1,  2,  3,  4,  5,  7,  8,  9,   11,  12,  13,  15,  16,  17,  23,  24,  25,  31,  32,
                                33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512, 513};
  std::vector<int64_t> dims;
  const size_t num_dims = static_cast<size_t>(random.integer(1, static_cast<int64_t>(most_dims)));
  for (size_t d = 0; d < num_dims; ++d) {
    int64_t size = most + 1;
    while (size > most) size = kSizes[random.integer(0, std::size(kSizes) - 1)];
    if (random.chance(0.02)) size = 0;
    dims.push_back(size);
    most = std::max<int64_t>(1, most / std::max<int64_t>(size, 1));
  }
  return dims;
}

}  // namespace polyhead::testing
