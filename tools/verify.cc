// polyhead verify: kernels against the reference.
#include "verify.h"

#include <fmt/format.h>

#include <memory>

#include "command.h"
#include "findings.h"
#include "progress.h"
#include "selection.h"
#include "words.h"

namespace polyhead::tools {
namespace {

struct VerifyOptions {
  std::vector<std::string> suites;
  std::string kernel = "all", threads, format = "md";
  bool gradients = false;
  int64_t num_random = 0;
  uint64_t seed = 1;
  CLI::Option* seed_option = nullptr;
};

// What one kernel computes on one number of threads, or why it cannot.
struct Contender {
  std::string kernel;  // "": the best
  const Threads* threads = nullptr;
  std::string refusal = {};
};

Result<Plan> plan_of(const AttentionDesc& desc, Contender& contender) {
  PlanOptions options;
  options.kernel = contender.kernel;
  options.where.executor = contender.threads->executor;
  auto planned = plan(desc, options);
  if (planned.ok()) {
    contender.kernel = planned->kernel_name();
  } else {
    contender.refusal = planned.status().message();
  }
  return planned;
}

Status compute(const Problem& problem, const Truth& truth, Contender& contender, Judge& judge) {
  const AttentionDesc& desc = truth.inputs.desc;
  const auto planned = plan_of(desc, contender);
  if (!planned.ok()) return {};
  const auto outputs = new_outputs(desc, true, problem.layout, problem.seed);
  if (!outputs.ok()) return outputs.status();
  ForwardArgs args = truth.inputs.args;
  outputs->give_to(args);
  const auto workspace = give_workspace(planned->workspace_bytes(), args);
  if (!workspace.ok()) return workspace.status();
  if (Status s = planned->forward(args); !s.ok()) return s;
  judge.add(truth, *outputs);
  return {};
}

Status compute(const Problem& problem, const GradientTruth& truth, Contender& contender, Judge& judge) {
  const AttentionDesc& desc = truth.inputs.desc;
  const auto planned = plan_of(desc, contender);
  if (!planned.ok()) return {};
  const auto gradients = new_gradients(problem, desc, truth.needs);
  if (!gradients.ok()) return gradients.status();
  BackwardArgs args = backward_args(problem, truth);
  gradients->give_to(args);
  const auto workspace = give_workspace(planned->backward_workspace_bytes(), args.forward);
  if (!workspace.ok()) return workspace.status();
  if (Status s = planned->backward(args); !s.ok()) return s;
  judge.add(truth, *gradients);
  return {};
}

// Judges the kernel on the problem's operands, and on others where its errors could be bad luck.
template <class Truth>
Status judge_kernel(const Problem& problem, const Truth& truth, Result<Truth> (*compute_truth_of)(const Problem&),
                    Contender& contender, Judge& judge) {
  if (Status s = compute(problem, truth, contender, judge); !s.ok()) return s;
  const AttentionDesc& desc = truth.inputs.desc;
  const int64_t num_rows = (desc.packed ? 1 : desc.batch) * desc.num_heads * desc.seqlen_q;
  Problem again = problem;
  for (int64_t n = 0; n < num_redraws(num_rows) && !judge.passed() && judge.could_be_chance(); ++n) {
    again.seed = redraw_seed(problem.seed, n);
    const auto redrawn = compute_truth_of(again);
    if (!redrawn.ok()) return redrawn.status();
    if (Status s = compute(again, *redrawn, contender, judge); !s.ok()) return s;
  }
  return {};
}

class Verification {
 public:
  Verification(const VerifyOptions& options, std::vector<std::string> kernels, std::vector<Threads> threads)
      : kernels_(std::move(kernels)),
        threads_(std::move(threads)),
        gradients_(options.gradients),
        findings_(options.num_random == 0) {}

  Status add(const Problem& problem) {
    if (const Status s = explain(problem_desc(problem)).status; s.code() == StatusCode::kInvalidArgument) return s;
    return gradients_ ? add(problem, compute_gradient_truth) : add(problem, compute_truth);
  }

  int num_failed() const { return findings_.num_failed(); }

  // seeds: of random problems, "7..506"; "" for others.
  Result<int> finish(int64_t num_problems, const std::string& seeds, Format format) {
    if (!seeds.empty()) findings_.add_fact("seeds", seeds);
    return findings_.finish(fmt::format("{}{} problems", gradients_ ? "gradients of " : "", num_problems), format);
  }

 private:
  template <class Truth>
  Status add(const Problem& problem, Result<Truth> (*compute_truth_of)(const Problem&)) {
    const auto truth = compute_truth_of(problem);
    if (!truth.ok()) return truth.status();
    for (const std::string& kernel : kernels_) {
      for (const Threads& threads : threads_) {
        Contender contender{kernel, &threads};
        Judge judge;
        if (Status s = judge_kernel(problem, *truth, compute_truth_of, contender, judge); !s.ok()) return s;
        count(problem, contender, judge);
      }
    }
    return {};
  }

  void count(const Problem& problem, const Contender& contender, const Judge& judge) {
    const std::string line = problem_line(problem);
    const int threads = contender.threads->count;
    if (!contender.refusal.empty()) {
      findings_.add_refused(line, contender.kernel, threads, contender.refusal);
    } else {
      findings_.add(line, contender.kernel, threads, judge.verdicts(),
                    fmt::format("polyhead verify{} {} --kernel {} --threads {}", gradients_ ? " --gradients" : "", line,
                                contender.kernel, threads));
    }
  }

  std::vector<std::string> kernels_;
  std::vector<Threads> threads_;
  bool gradients_;
  Findings findings_;
};

Result<int> verify_random(const VerifyOptions& options, Verification verification, Format format) {
  constexpr int kMaxFailures = 20;
  Progress progress(options.num_random);
  int64_t done = 0;
  for (; done < options.num_random && verification.num_failed() < kMaxFailures; ++done) {
    Problem problem = random_problem(options.seed + static_cast<uint64_t>(done));
    if (!options.gradients) {
      problem.needs = kAllGradients;  // which say nothing about forward
      problem.accumulate = false;
    }
    progress.show(done, problem_line(problem));
    if (Status s = verification.add(problem); !s.ok()) {
      return Status(s.code(), fmt::format("random problem '{}': {}", problem_line(problem), s.message()));
    }
  }
  progress.hide();
  if (done < options.num_random) fmt::print(stderr, "stopped after {} failures\n", verification.num_failed());
  const uint64_t last = options.seed + static_cast<uint64_t>(done) - 1;
  return verification.finish(done, fmt::format("{}..{}", options.seed, last), format);
}

Result<int> verify(const VerifyOptions& options, std::vector<std::string> words) {
  const auto format = parse_format(options.format);
  if (!format.ok()) return format.status();
  auto kernels = select_kernels(options.kernel);
  if (!kernels.ok()) return kernels.status();
  auto threads = select_threads(options.threads);
  if (!threads.ok()) return threads.status();
  if (options.num_random < 0) return invalid(fmt::format("--random is {}, must be 1 or more", options.num_random));
  Verification verification(options, std::move(*kernels), std::move(*threads));
  if (options.num_random > 0) {
    if (words.empty() && options.suites.empty()) return verify_random(options, std::move(verification), *format);
    return invalid("--random draws its problems itself; leave problems and their options away");
  }
  if (options.seed_option->count() > 0) words.push_back(fmt::format("--seed={}", options.seed));
  const auto problems = select_problems(words, options.suites);
  if (!problems.ok()) return problems.status();
  Progress progress(static_cast<int64_t>(problems->size()));
  for (size_t i = 0; i < problems->size(); ++i) {
    const Problem& problem = (*problems)[i];
    progress.show(static_cast<int64_t>(i), problem_line(problem));
    if (Status s = verification.add(problem); !s.ok()) {
      return problems->size() == 1
                 ? s
                 : Status(s.code(), fmt::format("problem '{}': {}", problem_line(problem), s.message()));
    }
  }
  progress.hide();
  return verification.finish(static_cast<int64_t>(problems->size()), "", *format);
}

}  // namespace

Command add_verify(CLI::App& root) {
  CLI::App* app = root.add_subcommand("verify", "check kernels against the reference");
  const auto options = std::make_shared<VerifyOptions>();
  app->allow_extras();
  app->add_option("--suite", options->suites, "a file of problems, one a line")
      ->type_name("FILE")
      ->allow_extra_args(false);
  app->add_option("--kernel", options->kernel, "all (default), best, or names as cpu_avx512,cpu_avx2");
  app->add_option("--threads", options->threads,
                  "numbers of threads, as 1,3 (default: POLYHEAD_THREADS, else all CPUs)");
  app->add_flag("--gradients", options->gradients, "the gradients that the problem --needs, not forward's results");
  app->add_option("--random", options->num_random, "so many random problems, of every combination of options");
  options->seed_option =
      app->add_option("--seed", options->seed, "of the first random problem, or of a problem's operands");
  app->add_option("--format", options->format, "md (default), csv or json");
  app->footer(help_footer(true, "polyhead verify 2x8/2x113/203x80 --causal --align bottom_right --dtype bf16",
                          "polyhead verify --gradients --random 500 --seed 7"));
  return {app, [app, options] { return verify(*options, app->remaining()); }};
}

}  // namespace polyhead::tools
