// Training: batches, gradients, AdamW, and all that has to be kept to go on later with the same bits.
#pragma once

#include <string>
#include <utility>

#include "model.h"
#include "text.h"

namespace polyhead::demo {

struct TrainingDesc {
  uint64_t seed = 1;
  int64_t num_steps = 0;        // of the whole training: the learning rate falls towards its end
  double learning_rate = 3e-3;  // at its highest
};

class Trainer {
 public:
  /// A model with fresh parameters.
  static Result<Trainer> make(const ModelDesc& desc, const TrainingDesc& training);

  /// One step; the batch's loss before it.
  Result<double> step(const Text& text);
  Result<double> validation_loss(const std::vector<Batch>& batches);

  int64_t num_steps_done() const { return step_; }
  const TrainingDesc& training() const { return training_; }
  void set_training(const TrainingDesc& training) { training_ = training; }
  const ModelDesc& desc() const { return model_.desc(); }
  const Parameters& parameters() const { return parameters_; }
  /// For this trainer's life.
  const ModelParameters& weights() const { return weights_; }

  /// Parameters under GPT-2's names, the moments, step and TrainingDesc, as safetensors. A file there is replaced once
  /// the new one is whole.
  Status save(const std::string& path) const;
  /// What save() wrote for a model of the same sizes; on an error this is as it was.
  Status load(const std::string& path);

 private:
  Trainer(Model model, Parameters parameters, const TrainingDesc& training)
      : model_(std::move(model)), parameters_(std::move(parameters)), training_(training) {}
  static float* floats(const tools::Buffer& buffer) { return reinterpret_cast<float*>(buffer.get()); }
  float clip_factor() const;
  void update(float clip);

  Model model_;
  Parameters parameters_;
  TrainingDesc training_;
  tools::Buffer weight_memory_, gradient_memory_, first_moments_, second_moments_;  // Parameters::size() floats each
  ModelParameters weights_, gradients_;
  int64_t step_ = 0;
};

/// Of step `step` of num_steps, as a share of the highest: up in the first twentieth, then down to a tenth by a cosine.
double learning_rate_share(int64_t step, int64_t num_steps);

}  // namespace polyhead::demo
