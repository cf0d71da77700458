// Trains a small transformer on the bytes of real text, in two to three minutes, and lets it write.
//
// The blocks, their gradients, the steps of decoding and all products are polyhead's; AdamW, cross-entropy, embedding,
// and the last norm are the example's. Files are read and written by what the command `polyhead` has for that (tools/).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "comparison.h"
#include "course.h"
#include "decoder.h"
#include "polyhead/executor.h"
#include "polyhead/kernels.h"
#include "tools/file.h"
#include "tools/machine.h"

namespace polyhead::demo {
namespace {

struct Options {
  std::string text;  // empty: this repository
  std::string out = POLYHEAD_REPOSITORY "/demo";
  bool resume = false;
  double seconds = 150;
  int64_t num_steps = 0;
  uint64_t seed = 1;
  double learning_rate = 3e-3;
  std::string prompt = "The ";
  int64_t num_sampled = 500;
  double temperature = 0.5;
  ModelDesc model;
};

constexpr int64_t kMostCount = 1'000'000'000;

constexpr const char* kExamples =
    R"(Examples, from the repository (elsewhere `train_text` itself takes the same options):
  ./dev demo                                     this repository's documents and sources, two to three minutes
  ./dev demo --text novel.txt --seconds 600      any text, for longer
  ./dev demo --text ~/notes                      a folder: its .md, .txt, .h, .cc, .c, .py and .cmake files
  ./dev demo --resume                            goes on where the last run was stopped
  ./dev demo --resume --prompt "Errors " --sample 200 --temperature 0.5
                                                 once it is trained: writes something else
  ./dev demo --context 2048 --batch 1 --steps 50 --out long
                                                 what long sequences cost with and without fused attention
  ./dev demo --layers 6 --size 384 --heads 6 --inner-size 1536 --seconds 1800 --out larger)";

void add_options(CLI::App& app, Options& options) {
  app.footer(kExamples);
  app.option_defaults()->always_capture_default();
  app.add_option("--text", options.text, "a file, or a folder [this repository]; a token is a byte")->default_str("");
  app.add_option("--out", options.out, "folder for model.safetensors, losses.csv and report.md");
  app.add_flag("--resume", options.resume, "go on with the model in that folder; it knows its steps, seed and rate");
  app.add_option("--seconds", options.seconds, "how long to train");
  app.add_option("--steps", options.num_steps, "how many steps instead; 0: as --seconds tells")
      ->check(CLI::Range(int64_t{0}, kMostCount));
  app.add_option("--seed", options.seed, "of the first weights, the batches and the sample");
  app.add_option("--learning-rate", options.learning_rate, "at its highest");
  app.add_option("--prompt", options.prompt, "how the sample begins");
  app.add_option("--sample", options.num_sampled, "bytes of the sample")->check(CLI::Range(int64_t{0}, kMostCount));
  app.add_option("--temperature", options.temperature, "of the sample: lower is more careful");
  app.add_option("--batch", options.model.batch, "sequences of a batch");
  app.add_option("--context", options.model.context, "bytes of a sequence");
  app.add_option("--size", options.model.size, "of the vector of a byte");
  app.add_option("--inner-size", options.model.inner_size, "of the feed-forward blocks");
  app.add_option("--heads", options.model.num_heads, "of attention; divide the size");
  app.add_option("--layers", options.model.num_layers, "each an AttentionBlock and a FeedForwardBlock");
}

// What would else come out after minutes.
Status check_options(const Options& options) {
  const auto invalid = [](std::string message) { return Status(StatusCode::kInvalidArgument, std::move(message)); };
  const struct {
    const char* name;
    double value, most;
  } numbers[] = {{"--seconds", options.seconds, 1e7},
                 {"--learning-rate", options.learning_rate, 0.5},
                 {"--temperature", options.temperature, 1e3}};
  for (const auto& number : numbers) {
    if (number.value > 0 && number.value <= number.most) continue;
    return invalid(fmt::format("{} is {}, must be above 0 and at most {}", number.name, number.value, number.most));
  }
  if (options.prompt.empty()) return invalid("--prompt is empty, it needs a byte at least");
  const auto prompt_bytes = static_cast<int64_t>(options.prompt.size());
  if (prompt_bytes > options.model.context) {
    return invalid(
        fmt::format("--prompt has {} bytes, the model's context takes {}", prompt_bytes, options.model.context));
  }
  return check_model_desc(options.model);
}

double mib(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// `peak`: GFLOP/s of all threads.
std::string comparison_text(const Comparison& comparison, const ModelDesc& desc, double peak) {
  std::string text = fmt::format("\nA training step, {} x {} bytes, forward and backward:\n", desc.batch, desc.context);
  text += fmt::format("  {:28}{:>12}{:>10}{:>9}{:>14}{:>20}\n", "", "time", "GFLOP/s", "of peak", "peak memory",
                      "of it attention's");
  const struct {
    const char* name;
    const StepCost& cost;
  } lines[] = {{"polyhead's AttentionBlock", comparison.fused}, {"unfused, weights stored", comparison.unfused}};
  for (const auto& line : lines) {
    const double gflops = step_flops(desc) / line.cost.seconds * 1e-9;
    text += fmt::format("  {:28}{:>9.1f} ms{:>10.1f}{:>7.0f} %{:>10.1f} MiB{:>16.1f} MiB\n", line.name,
                        line.cost.seconds * 1e3, gflops, 100 * gflops / peak, mib(line.cost.memory_bytes),
                        mib(line.cost.attention_bytes));
  }
  return text + fmt::format("  The losses differ by {:.1e}, the gradients by {:.1e} of the largest.\n",
                            comparison.loss_difference, comparison.gradient_difference);
}

std::string model_text(const ModelDesc& desc, const Text& text, int64_t num_parameters) {
  return fmt::format(
      "{}: {} bytes to train on, {} held out\n"
      "{} layers, {} heads of {}, vectors of {}, context {} bytes (a token is a byte): {} parameters\n"
      "{:.1f} GFLOP a step; {} threads, {}\n",
      text.name, text.train.size(), text.validation.size(), desc.num_layers, desc.num_heads, desc.head_dim(), desc.size,
      desc.context, num_parameters, step_flops(desc) * 1e-9, default_executor().num_threads(), tools::cpu_model());
}

std::string result_text(const CourseResult& result) {
  constexpr double kBitsPerNat = 1.4426950408889634;
  std::string text = "\n";
  if (result.seconds > 0) {
    text += fmt::format("{:.1f} s of steps, {:.0f} tokens/s. ", result.seconds, result.tokens_per_second);
  }
  return text + fmt::format("Held-out text: {:.3f} nats a byte ({:.2f} bits), bigram counts: {:.3f}.\n",
                            result.last_validation_loss, result.last_validation_loss * kBitsPerNat, result.bigram_loss);
}

// Bytes as a terminal may show them.
std::string shown(const std::string& text) {
  std::string safe;
  for (const char c : text) safe += c == '\n' || c == '\t' || (c >= ' ' && c <= '~') ? c : '?';
  return safe;
}

// Both ways must compute the same step: the rounding of float32 alone is allowed.
constexpr double kMostLossDifference = 1e-4, kMostGradientDifference = 1e-3;

// 0 if all that is shown is true.
int judge(const Comparison& comparison, const CourseResult& result, bool resumed) {
  const bool same =
      comparison.loss_difference <= kMostLossDifference && comparison.gradient_difference <= kMostGradientDifference;
  if (!same) fmt::print(stderr, "train_text: WRONG: fused and unfused attention differ\n");
  const bool learned = resumed || result.last_validation_loss < result.first_validation_loss;
  if (!learned) fmt::print(stderr, "train_text: WRONG: training did not lower the loss\n");
  return same && learned ? 0 : 1;
}

Result<CourseDesc> course_of(const Options& options) {
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("cannot make the folder {}: {}", tools::printable(options.out), error.message()));
  }
  CourseDesc course;
  course.seconds = options.seconds;
  course.num_steps = options.num_steps;
  course.resumed = options.resume;
  course.checkpoint = (std::filesystem::path(options.out) / "model.safetensors").string();
  course.losses = (std::filesystem::path(options.out) / "losses.csv").string();
  return course;
}

Result<Text> text_of(const Options& options) {
  Result<Text> text = read_text(options.text.empty() ? POLYHEAD_REPOSITORY : options.text, options.model.context);
  if (text.ok() && options.text.empty()) text->name = fmt::format("this repository's {} files", text->num_files);
  return text;
}

Result<int> run(const Options& options, const std::string& command) {
  const ModelDesc& desc = options.model;
  if (Status status = check_options(options); !status.ok()) return status;
  const Result<Text> text = text_of(options);
  if (!text.ok()) return text.status();
  const Result<CourseDesc> course = course_of(options);
  if (!course.ok()) return course.status();
  TrainingDesc training;
  training.seed = options.seed;
  training.learning_rate = options.learning_rate;
  Result<Trainer> trainer = Trainer::make(desc, training);
  if (!trainer.ok()) return trainer.status();
  if (options.resume) {
    if (Status status = trainer->load(course->checkpoint); !status.ok()) return status;
    training = trainer->training();
  }
  Transcript transcript;
  transcript.print(model_text(desc, *text, trainer->parameters().size()));

  const Batch batch = training_batch(*text, desc, training.seed, trainer->num_steps_done());
  const Result<Comparison> comparison =
      compare_attention(desc, trainer->parameters(), trainer->weights(), batch, options.seconds / 30);
  if (!comparison.ok()) return comparison.status();
  const int num_threads = std::min(default_executor().num_threads(), tools::num_usable_cpus());
  const double peak = measure_peak_gflops(DType::kFloat32, 0.1) * num_threads;
  transcript.print(comparison_text(*comparison, desc, peak));
  if (!options.resume || options.num_steps > 0) {
    training.num_steps = steps_in_time(*course, *text, desc, comparison->fused.seconds);
    trainer->set_training(training);
  }
  const Result<CourseResult> result = train(*trainer, *text, *course, transcript);
  if (!result.ok()) return result.status();
  transcript.print(result_text(*result));

  const Result<std::string> written =
      sample(desc, trainer->weights(), options.prompt, options.num_sampled, options.temperature, training.seed);
  if (!written.ok()) return written.status();
  transcript.print(fmt::format("\nIt writes:\n{}{}\n", shown(options.prompt), shown(*written)));
  const std::string report = (std::filesystem::path(options.out) / "report.md").string();
  if (Status status = transcript.write(report, command); !status.ok()) return status;
  fmt::print("\nThe model: {}\nIts losses: {}\nThis text: {}\n", course->checkpoint, course->losses, report);
  return judge(*comparison, *result, options.resume);
}

int run_program(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a small transformer on the bytes of real text and lets it write.", "train_text");
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  std::string command = "train_text";
  for (int i = 1; i < argc; ++i) command += fmt::format(" {}", argv[i]);
  const Result<int> code = run(options, command);
  if (code.ok()) return *code;
  fmt::print(stderr, "train_text: {}\n", code.status().message());
  return 2;
}

}  // namespace
}  // namespace polyhead::demo

int main(int argc, char** argv) try { return polyhead::demo::run_program(argc, argv); } catch (const std::bad_alloc&) {
  std::fputs("train_text: out of memory\n", stderr);
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "train_text: %s\n", error.what());
  return 2;
}
