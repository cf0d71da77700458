#include "trainer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "lanes.h"
#include "parallel.h"

namespace polyhead::demo {
namespace {

// AdamW (Loshchilov and Hutter, arXiv:1711.05101). Small batches are noisy: a second moment over about 100 of them.
constexpr double kBeta1 = 0.9, kBeta2 = 0.99;
constexpr float kAdamEps = 1e-8f;
constexpr double kWeightDecay = 0.1;
constexpr double kMostGradientNorm = 1;
constexpr int64_t kPiece = 1 << 14;  // parameters: sums do not depend on the number of threads

}  // namespace

double learning_rate_share(int64_t step, int64_t num_steps) {
  constexpr double kLowest = 0.1;
  const int64_t rising = std::max<int64_t>(num_steps / 20, 1);
  if (step < rising) return static_cast<double>(step + 1) / static_cast<double>(rising);
  const int64_t falling = std::max<int64_t>(num_steps - rising, 1);
  const double way = std::min(static_cast<double>(step - rising) / static_cast<double>(falling), 1.0);
  return kLowest + (1 - kLowest) * (1 + std::cos(std::numbers::pi * way)) / 2;
}

Result<Trainer> Trainer::make(const ModelDesc& desc, const TrainingDesc& training) {
  Result<Model> model = Model::make(desc, AttentionKind::kFused);
  if (!model.ok()) return model.status();
  Trainer trainer(std::move(*model), Parameters(desc), training);
  const Parameters& parameters = trainer.parameters_;
  for (tools::Buffer* to :
       {&trainer.weight_memory_, &trainer.gradient_memory_, &trainer.first_moments_, &trainer.second_moments_}) {
    Result<tools::Buffer> buffer = allocate(static_cast<size_t>(parameters.size()) * sizeof(float));
    if (!buffer.ok()) return buffer.status();
    *to = std::move(*buffer);
    std::fill_n(floats(*to), parameters.size(), 0.0f);
  }
  parameters.initialize(training.seed, floats(trainer.weight_memory_));
  Result<ModelParameters> weights = bind(desc, parameters, floats(trainer.weight_memory_));
  Result<ModelParameters> gradients = bind(desc, parameters, floats(trainer.gradient_memory_));
  if (!weights.ok()) return weights.status();
  if (!gradients.ok()) return gradients.status();
  trainer.weights_ = std::move(*weights);
  trainer.gradients_ = std::move(*gradients);
  return trainer;
}

// What the gradients are multiplied by so that their norm is at most kMostGradientNorm.
float Trainer::clip_factor() const {
  const float* gradients = floats(gradient_memory_);
  std::vector<double> squares(static_cast<size_t>((parameters_.size() + kPiece - 1) / kPiece));
  for_each_piece(parameters_.size(), kPiece, [&](int64_t begin, int64_t end) {
    const float* from = gradients + begin;
    squares[static_cast<size_t>(begin / kPiece)] =
        static_cast<double>(sum_of(end - begin, [&](int64_t i) { return from[i] * from[i]; }));
  });
  double square = 0;
  for (const double part : squares) square += part;
  const double norm = std::sqrt(square);
  return static_cast<float>(norm > kMostGradientNorm ? kMostGradientNorm / norm : 1.0);
}

//   m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2
//   w -= rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
void Trainer::update(float clip) {
  const double t = static_cast<double>(step_ + 1);
  const double rate = training_.learning_rate * learning_rate_share(step_, training_.num_steps);
  const auto beta1 = static_cast<float>(kBeta1), beta2 = static_cast<float>(kBeta2);
  const auto scale1 = static_cast<float>(rate / (1 - std::pow(kBeta1, t)));
  const auto scale2 = static_cast<float>(1 / (1 - std::pow(kBeta2, t)));
  const auto kept = static_cast<float>(1 - rate * kWeightDecay);
  float* const weights = floats(weight_memory_);
  const float* const gradients = floats(gradient_memory_);
  float *const first = floats(first_moments_), *const second = floats(second_moments_);
  const int64_t num_decaying = parameters_.num_decaying();
  for_each_piece(parameters_.size(), kPiece, [&](int64_t begin, int64_t end) {
    const int64_t border = std::clamp(num_decaying, begin, end);
    for (int64_t i = begin; i < border; ++i) weights[i] *= kept;
    for (int64_t i = begin; i < end; ++i) {
      const float g = gradients[i] * clip;
      first[i] = beta1 * first[i] + (1 - beta1) * g;
      second[i] = beta2 * second[i] + (1 - beta2) * g * g;
      weights[i] -= scale1 * first[i] / (std::sqrt(second[i] * scale2) + kAdamEps);
    }
  });
}

Result<double> Trainer::step(const Text& text) {
  const Batch batch = training_batch(text, desc(), training_.seed, step_);
  const Result<double> loss = model_.loss_and_gradients(weights_, batch.bytes(), gradients_);
  if (!loss.ok()) return loss;
  if (!std::isfinite(*loss)) return Status(StatusCode::kInternal, "the loss is not finite: training has failed");
  update(clip_factor());
  ++step_;
  return loss;
}

Result<double> Trainer::validation_loss(const std::vector<Batch>& batches) {
  double sum = 0;
  for (const Batch& batch : batches) {
    const Result<double> loss = model_.loss(weights_, batch.bytes());
    if (!loss.ok()) return loss;
    sum += *loss;
  }
  return sum / static_cast<double>(batches.size());
}

}  // namespace polyhead::demo
