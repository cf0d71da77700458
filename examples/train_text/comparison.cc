#include "comparison.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>
#include <vector>

namespace polyhead::demo {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<int64_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

// One of the two, with gradients of its own.
struct Contender {
  Model model;
  tools::Buffer gradient_memory;
  ModelParameters gradients;
  std::vector<double> seconds;
  double loss = 0;

  Status run(const ModelParameters& weights, const Batch& batch) {
    const Clock::time_point start = Clock::now();
    const Result<double> mean = model.loss_and_gradients(weights, batch.bytes(), gradients);
    if (!mean.ok()) return mean.status();
    loss = *mean;
    seconds.push_back(seconds_since(start));
    return {};
  }
  const float* all_gradients() const { return reinterpret_cast<const float*>(gradient_memory.get()); }
};

Result<Contender> contender(const ModelDesc& desc, const Parameters& parameters, AttentionKind kind) {
  Result<Model> model = Model::make(desc, kind);
  if (!model.ok()) return model.status();
  Result<tools::Buffer> memory = allocate(static_cast<size_t>(parameters.size()) * sizeof(float));
  if (!memory.ok()) return memory.status();
  auto* const gradients = reinterpret_cast<float*>(memory->get());
  std::fill_n(gradients, parameters.size(), 0.0f);
  Result<ModelParameters> bound = bind(desc, parameters, gradients);
  if (!bound.ok()) return bound.status();
  return Contender{std::move(*model), std::move(*memory), std::move(*bound), {}, 0};
}

StepCost cost_of(const Contender& one, const Parameters& parameters) {
  const size_t array_bytes = static_cast<size_t>(parameters.size()) * sizeof(float);
  return {median(one.seconds), one.model.memory_bytes() + 4 * array_bytes, one.model.attention_bytes()};
}

}  // namespace

Result<Comparison> compare_attention(const ModelDesc& desc, const Parameters& parameters,
                                     const ModelParameters& weights, const Batch& batch, double seconds) {
  Result<Contender> fused = contender(desc, parameters, AttentionKind::kFused);
  if (!fused.ok()) return fused.status();
  Result<Contender> unfused = contender(desc, parameters, AttentionKind::kUnfused);
  if (!unfused.ok()) return unfused.status();
  constexpr int kWarmUps = 1, kLeastRounds = 3;
  const Clock::time_point start = Clock::now();
  for (int round = 0; round < kWarmUps + kLeastRounds || seconds_since(start) < seconds; ++round) {
    for (Contender* each : {&*fused, &*unfused}) {
      if (round == kWarmUps) each->seconds.clear();
      if (Status status = each->run(weights, batch); !status.ok()) return status;
    }
  }
  Comparison comparison;
  comparison.fused = cost_of(*fused, parameters);
  comparison.unfused = cost_of(*unfused, parameters);
  comparison.loss_difference = std::abs(fused->loss - unfused->loss);
  double largest = 0, difference = 0;
  for (int64_t i = 0; i < parameters.size(); ++i) {
    const auto ours = static_cast<double>(fused->all_gradients()[i]);
    const auto theirs = static_cast<double>(unfused->all_gradients()[i]);
    largest = std::max(largest, std::abs(theirs));
    difference = std::max(difference, std::abs(ours - theirs));
  }
  comparison.gradient_difference = largest > 0 ? difference / largest : difference;
  return comparison;
}

}  // namespace polyhead::demo
