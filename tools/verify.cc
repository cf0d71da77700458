// polyhead verify: kernels against the reference.
#include <fmt/format.h>

#include <memory>

#include "command.h"
#include "findings.h"
#include "operands.h"
#include "progress.h"
#include "selection.h"
#include "testing/judge.h"

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

class Verification {
 public:
  Verification(const VerifyOptions& options, std::vector<std::string> kernels, std::vector<Threads> threads)
      : kernels_(std::move(kernels)),
        threads_(std::move(threads)),
        gradients_(options.gradients),
        findings_(options.num_random == 0) {}

  Status add(const Problem& problem) {
    if (Status s = explain(problem_desc(problem)).status; s.code() == StatusCode::kInvalidArgument) return s;
    if (Status s = check_memory(problem); !s.ok()) return s;
    if (!gradients_) return judge_all(problem, problem_line(problem), forward_draws(problem));
    if (problem.desc.page_size > 0) return invalid("--page-size is given with --gradients: paged keys have none");
    if (problem.desc.key_dtype || problem.desc.value_dtype) {
      return invalid("--key-dtype or --value-dtype is given with --gradients: keys and values with scales have none");
    }
    const auto needs = needed_gradients(problem);
    if (!needs.ok()) return needs.status();
    Problem needed = problem;
    needed.needs = *needs;
    return judge_all(needed, problem_line(problem), backward_draws(needed));
  }

  int num_failed() const { return findings_.num_failed(); }

  // seeds: of random problems, "7..506"; "" for others.
  Result<int> finish(int64_t num_problems, const std::string& seeds, Format format) {
    if (!seeds.empty()) findings_.add_fact("seeds", seeds);
    return findings_.finish(fmt::format("{}{} problems", gradients_ ? "gradients of " : "", num_problems), format);
  }

 private:
  // Every kernel on every number of threads, on the same draws.
  template <class Draw>
  Status judge_all(const Problem& problem, const std::string& line, const std::vector<Draw>& draws) {
    for (const std::string& name : kernels_) {
      for (const Threads& threads : threads_) {
        const auto chosen = choose_kernel(draws.front().desc, name);
        if (!chosen.ok()) {
          findings_.add_refused(line, name, threads.count, chosen.status().message());
          continue;
        }
        RunOptions options = run_options(problem);
        options.executor = threads.executor;
        const Judge judge = judged(**chosen, problem, draws, options);
        findings_.add(line, (*chosen)->name, threads.count, judge.verdicts(),
                      fmt::format("polyhead verify{} {} --kernel {} --threads {}", gradients_ ? " --gradients" : "",
                                  line, (*chosen)->name, threads.count));
      }
    }
    return {};
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
    if (options.gradients) problem = without_cache(problem);
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
    return invalid("--random draws its problems itself; leave out problems and their options");
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
  add_format_option(*app, options->format);
  app->footer(help_footer(true, "polyhead verify 2x8/2x113/203x80 --causal --align bottom_right --dtype bf16",
                          "polyhead verify --gradients --random 500 --seed 7"));
  return {app, [app, options] { return verify(*options, app->remaining()); }};
}

}  // namespace polyhead::tools
