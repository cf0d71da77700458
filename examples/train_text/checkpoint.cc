// Trainer::save and Trainer::load: the parameters as tensors of their own, and what else the next step depends on.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "tools/safetensors.h"
#include "trainer.h"

namespace polyhead::demo {
namespace {

constexpr const char* kFirstMoments = "training.first_moments";
constexpr const char* kSecondMoments = "training.second_moments";
constexpr const char* kState = "training.state";
constexpr const char* kSizes = "training.sizes";

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

struct State {
  int64_t step = 0, num_steps = 0;
  int64_t seed_bits = 0, learning_rate_bits = 0;
};

struct Sizes {
  int64_t batch, context, size, inner_size, num_heads, num_layers;
};

Sizes sizes_of(const ModelDesc& d) { return {d.batch, d.context, d.size, d.inner_size, d.num_heads, d.num_layers}; }

Tensor integers(const void* data, size_t bytes) {
  return Tensor(data, DType::kInt64, {static_cast<int64_t>(bytes / sizeof(int64_t))});
}

// The elements of a tensor in the file, which must be what `expected` says.
Status read_into(const tools::SafetensorsFile& file, const std::string& name, const Tensor& expected, void* to) {
  const Result<tools::Array> array = file.read(name);
  if (!array.ok()) return array.status();
  const Tensor& t = array->tensor;
  if (t.dtype != expected.dtype || t.ndim != expected.ndim || !std::equal(t.dims, t.dims + t.ndim, expected.dims)) {
    return invalid(fmt::format("tensor {} is {} {}, expected {} {}", name, dtype_name(t.dtype), tools::dims_text(t),
                               dtype_name(expected.dtype), tools::dims_text(expected)));
  }
  std::memcpy(to, t.data, static_cast<size_t>(t.num_elements()) * dtype_size_bytes(t.dtype));
  return {};
}

// Numbers, none below `least`: what is not finite would spread through the model.
Status read_numbers(const tools::SafetensorsFile& file, const std::string& name, const Tensor& to, float least) {
  Status status = read_into(file, name, to, to.data);
  const auto* const numbers = static_cast<const float*>(to.data);
  for (int64_t i = 0; status.ok() && i < to.num_elements(); ++i) {
    if (numbers[i] >= least && std::isfinite(numbers[i])) continue;
    status = invalid(fmt::format("tensor {} has {} at {}, expected {}", name, numbers[i], i,
                                 least < 0 ? "finite numbers" : "finite numbers from 0 on"));
  }
  return status;
}

}  // namespace

Status Trainer::save(const std::string& path) const {
  const State state{step_, training_.num_steps, std::bit_cast<int64_t>(training_.seed),
                    std::bit_cast<int64_t>(training_.learning_rate)};
  const Sizes sizes = sizes_of(desc());
  tools::NamedTensors tensors;
  for (const Parameter& parameter : parameters_.all()) {
    tensors.emplace_back(parameter.name, parameter.in(floats(weight_memory_)));
  }
  tensors.emplace_back(kFirstMoments, Tensor(first_moments_.get(), DType::kFloat32, {parameters_.size()}));
  tensors.emplace_back(kSecondMoments, Tensor(second_moments_.get(), DType::kFloat32, {parameters_.size()}));
  tensors.emplace_back(kState, integers(&state, sizeof state));
  tensors.emplace_back(kSizes, integers(&sizes, sizeof sizes));
  return tools::write_safetensors(path, tensors, /*overwrite=*/true);
}

Status Trainer::load(const std::string& path) {
  const Result<tools::SafetensorsFile> file = tools::SafetensorsFile::open(path);
  if (!file.ok()) return file.status();
  const Sizes expected = sizes_of(desc());
  Sizes sizes{};
  State state;
  Status status = read_into(*file, kSizes, integers(&sizes, sizeof sizes), &sizes);
  if (status.ok()) status = read_into(*file, kState, integers(&state, sizeof state), &state);
  if (!status.ok()) return status;
  if (std::memcmp(&sizes, &expected, sizeof sizes) != 0) {
    return invalid(fmt::format(
        "{} has a model of batch {}, context {}, size {}, inner size {}, {} heads and {} layers, this one is {}, {}, "
        "{}, {}, {} and {}",
        tools::printable(path), sizes.batch, sizes.context, sizes.size, sizes.inner_size, sizes.num_heads,
        sizes.num_layers, expected.batch, expected.context, expected.size, expected.inner_size, expected.num_heads,
        expected.num_layers));
  }
  const auto rate = std::bit_cast<double>(state.learning_rate_bits);
  constexpr int64_t kMostSteps = int64_t{1} << 40;
  const bool counts =
      state.step >= 0 && state.step <= kMostSteps && state.num_steps >= 0 && state.num_steps <= kMostSteps;
  if (!counts || !(rate > 0 && rate < 1)) {
    return invalid(fmt::format("{} has step {} of {} and learning rate {}, which is no training of ours",
                               tools::printable(path), state.step, state.num_steps, rate));
  }

  // Into memory of its own first: a file that turns out bad must not leave half of itself behind.
  tools::Buffer fresh[3];
  for (tools::Buffer& buffer : fresh) {
    Result<tools::Buffer> made = allocate(static_cast<size_t>(parameters_.size()) * sizeof(float));
    if (!made.ok()) return made.status();
    buffer = std::move(*made);
    std::fill_n(floats(buffer), parameters_.size(), 0.0f);
  }
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const auto moments = [&](const tools::Buffer& in) { return Tensor(in.get(), DType::kFloat32, {parameters_.size()}); };
  for (const Parameter& parameter : parameters_.all()) {
    if (status.ok()) status = read_numbers(*file, parameter.name, parameter.in(floats(fresh[0])), kLowest);
  }
  if (status.ok()) status = read_numbers(*file, kFirstMoments, moments(fresh[1]), kLowest);
  if (status.ok()) status = read_numbers(*file, kSecondMoments, moments(fresh[2]), 0);
  if (!status.ok()) return status;
  std::copy_n(floats(fresh[0]), parameters_.size(), floats(weight_memory_));  // the views of it stay as they are
  first_moments_ = std::move(fresh[1]);
  second_moments_ = std::move(fresh[2]);
  step_ = state.step;
  training_.seed = std::bit_cast<uint64_t>(state.seed_bits);
  training_.num_steps = state.num_steps;
  training_.learning_rate = rate;
  return {};
}

}  // namespace polyhead::demo
