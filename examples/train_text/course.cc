#include "course.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "tools/file.h"
#include "tools/progress.h"

namespace polyhead::demo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLeastSteps = 20;
constexpr int64_t kMostEpochs = 8;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The losses as lines "step,tokens,loss,validation_loss,bigram_loss", for plot_loss.py.
class LossFile {
 public:
  static Result<LossFile> open(const std::string& path, bool append) {
    LossFile file;
    file.file_.reset(std::fopen(path.c_str(), append ? "a" : "w"));
    if (file.file_ == nullptr) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("cannot write {}: {}", tools::printable(path), std::strerror(errno)));
    }
    std::fseek(file.file_.get(), 0, SEEK_END);
    if (std::ftell(file.file_.get()) == 0)
      fmt::print(file.file_.get(), "step,tokens,loss,validation_loss,bigram_loss\n");
    return file;
  }
  void add_loss(int64_t step, int64_t tokens, double loss) {
    fmt::print(file_.get(), "{},{},{:.6f},,\n", step, tokens, loss);
  }
  void add_validation(int64_t step, int64_t tokens, double loss, double bigram) {
    fmt::print(file_.get(), "{},{},,{:.6f},{:.6f}\n", step, tokens, loss, bigram);
    std::fflush(file_.get());
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_;
};

// Evaluations, and the lines that tell of them.
class Evaluations {
 public:
  Evaluations(Trainer& trainer, const Text& text, Transcript& transcript)
      : trainer_(trainer),
        transcript_(transcript),
        batches_(validation_batches(text, trainer.desc(), kNumValidationBatches)),
        bigram_(bigram_loss(text, batches_)) {}

  double bigram() const { return bigram_; }
  int64_t num_tokens() const { return trainer_.num_steps_done() * trainer_.desc().num_rows(); }

  Result<double> evaluate(LossFile& file, double training_loss, double tokens_per_second) {
    const Result<double> loss = trainer_.validation_loss(batches_);
    if (!loss.ok()) return loss;
    file.add_validation(trainer_.num_steps_done(), num_tokens(), *loss, bigram_);
    const auto figure = [](double number, const char* format) {
      return number > 0 ? fmt::format(fmt::runtime(format), number) : std::string("-");
    };
    transcript_.print(fmt::format("{:>7}{:>11}{:>10}{:>12.3f}{:>10.3f}{:>12}\n", trainer_.num_steps_done(),
                                  num_tokens(), figure(training_loss, "{:.3f}"), *loss, bigram_,
                                  figure(tokens_per_second, "{:.0f}")));
    return loss;
  }

 private:
  Trainer& trainer_;
  Transcript& transcript_;
  std::vector<Batch> batches_;
  double bigram_;
};

}  // namespace

int64_t steps_in_time(const CourseDesc& course, const Text& text, const ModelDesc& desc, double step_seconds) {
  if (course.num_steps > 0) return course.num_steps;
  // A forward pass is a third of a step; AdamW and drawing the batch add about a tenth.
  const auto evaluations = static_cast<double>((kNumEvaluations + 1) * kNumValidationBatches) * step_seconds / 3;
  const double steps = (course.seconds - evaluations) / (1.1 * step_seconds);
  const int64_t most = std::max(kMostEpochs * static_cast<int64_t>(text.train.size()) / desc.num_rows(), kLeastSteps);
  const auto fit = static_cast<int64_t>(std::clamp(steps, static_cast<double>(kLeastSteps), static_cast<double>(most)));
  return fit / kNumEvaluations * kNumEvaluations;  // the last evaluation falls on the last step
}

Result<CourseResult> train(Trainer& trainer, const Text& text, const CourseDesc& course, Transcript& transcript) {
  Result<LossFile> file = LossFile::open(course.losses, course.resumed);
  if (!file.ok()) return file.status();
  Evaluations evaluations(trainer, text, transcript);
  CourseResult result;
  result.bigram_loss = evaluations.bigram();
  transcript.print(fmt::format("\n{:>7}{:>11}{:>10}{:>12}{:>10}{:>12}\n", "step", "tokens", "loss", "validation",
                               "bigram", "tokens/s"));
  const Result<double> first = evaluations.evaluate(*file, 0, 0);
  if (!first.ok()) return first.status();
  result.first_validation_loss = result.last_validation_loss = *first;

  const int64_t num_steps = trainer.training().num_steps;
  const int64_t between = std::max<int64_t>(num_steps / kNumEvaluations, 1);
  tools::Progress progress(num_steps);
  double smooth = 0, seconds = 0;  // seconds of steps alone
  for (int64_t n = 1; trainer.num_steps_done() < num_steps; ++n) {
    const Clock::time_point start = Clock::now();
    const Result<double> loss = trainer.step(text);
    if (!loss.ok()) return loss.status();
    seconds += seconds_since(start);
    smooth = n == 1 ? *loss : 0.95 * smooth + 0.05 * *loss;
    result.seconds = seconds;
    result.tokens_per_second = static_cast<double>(n * trainer.desc().num_rows()) / seconds;
    const int64_t done = trainer.num_steps_done();
    file->add_loss(done, evaluations.num_tokens(), *loss);
    progress.show(done, fmt::format("loss {:.3f}, {:.0f} tokens/s", smooth, result.tokens_per_second));
    if (done % between != 0 && done != num_steps) continue;
    progress.hide();
    const Result<double> validation = evaluations.evaluate(*file, smooth, result.tokens_per_second);
    if (!validation.ok()) return validation.status();
    result.last_validation_loss = *validation;
    if (Status status = trainer.save(course.checkpoint); !status.ok()) return status;
  }
  return result;
}

}  // namespace polyhead::demo
