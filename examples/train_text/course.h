// The course of a training: how many steps there is time for, what is printed and written on the way.
#pragma once

#include <string>

#include "trainer.h"
#include "transcript.h"

namespace polyhead::demo {

struct CourseDesc {
  double seconds = 0;      // to train for
  int64_t num_steps = 0;   // instead, if it is not 0
  std::string checkpoint;  // where the model is saved: at each evaluation, and at the end
  std::string losses;      // a CSV file of all losses
  bool resumed = false;    // go on with that file
};

/// Evaluations of a whole training, the one before it not counted, and batches of each.
inline constexpr int64_t kNumEvaluations = 10;
inline constexpr int64_t kNumValidationBatches = 8;

/// As many steps of step_seconds (forward and backward) as fit, evaluations included; but no more than take each byte
/// of the text kMostEpochs times, after which a model of this size learns it by heart.
int64_t steps_in_time(const CourseDesc& course, const Text& text, const ModelDesc& desc, double step_seconds);

struct CourseResult {
  double first_validation_loss = 0, last_validation_loss = 0;
  double bigram_loss = 0;
  double seconds = 0, tokens_per_second = 0;  // of this run's steps
};

/// Trains up to trainer.training().num_steps.
Result<CourseResult> train(Trainer& trainer, const Text& text, const CourseDesc& course, Transcript& transcript);

}  // namespace polyhead::demo
