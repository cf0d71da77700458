// polyhead bench: how fast each kernel computes each problem.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>

#include "cold_caches.h"
#include "command.h"
#include "machine.h"
#include "operands.h"
#include "polyhead/kernels.h"
#include "progress.h"
#include "quantiles.h"
#include "report.h"
#include "selection.h"

namespace polyhead::tools {
namespace {

using Clock = std::chrono::steady_clock;

struct BenchOptions {
  std::vector<std::string> suites;
  std::string kernel = "best", threads, format = "md", direction = "forward";
  double min_time_ms = 300, warmup_ms = 50;
  int min_samples = 5;
  bool cold = false;
};

// Multiply-adds on registers in `dtype`, of the machine's best kernel on one thread, measured once a run; none where no
// kernel has vector arithmetic (float64).
class Peaks {
 public:
  std::optional<double> gflops(DType dtype) {
    if (dtype == DType::kFloat64) return std::nullopt;
    const auto [known, is_new] = known_.try_emplace(dtype, 0);
    if (is_new) known->second = measure_peak_gflops(dtype, 0.1);
    return known->second;
  }

  std::string text() const {
    std::string text;
    for (const auto& [dtype, gflops] : known_) {
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", short_dtype_name(dtype), number_text(gflops));
    }
    return text.empty() ? "not measured" : text + " GFLOP/s per thread";
  }

 private:
  std::map<DType, double> known_;
};

enum class Direction { kForward, kBackward };

const char* direction_name(Direction direction) { return direction == Direction::kForward ? "forward" : "backward"; }

Result<std::vector<Direction>> parse_directions(const std::string& list) {
  std::vector<Direction> directions;
  for (const std::string& name : split(list, ',')) {
    if (name != "forward" && name != "backward") {
      return invalid(fmt::format("--direction is '{}', must be forward, backward or forward,backward", list));
    }
    directions.push_back(name == "forward" ? Direction::kForward : Direction::kBackward);
  }
  return directions;
}

// The calls of a problem. Backward alone is timed: on what one call of forward wrote.
struct Calls {
  Operands operands;
  ForwardArgs forward = {};
  BackwardArgs backward = {};
  double forward_flops = 0, backward_flops = 0;
};

// One kernel on one number of threads, in one direction.
struct Contender {
  std::string kernel;
  int threads = 0;
  Executor* executor = nullptr;
  Direction direction = Direction::kForward;
  std::optional<Plan> plan;
  std::string refusal;
  Buffer workspace;
  ForwardArgs forward;
  BackwardArgs backward;
  int calls_per_sample = 1;
  double total_ms = 0;
  std::vector<double> samples_ms;  // of one call

  double call_ms(int calls) {
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) {
      const Status s = direction == Direction::kForward ? plan->forward(forward) : plan->backward(backward);
      if (!s.ok()) refusal = s.message();
    }
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / calls;
  }
};

class Bench {
 public:
  Bench(const BenchOptions& options, std::vector<std::string> kernels, std::vector<Threads> threads,
        std::vector<Direction> directions, std::optional<ColdCaches> cold)
      : options_(options),
        kernels_(std::move(kernels)),
        threads_(std::move(threads)),
        directions_(std::move(directions)),
        cold_(std::move(cold)) {}

  Result<int> run(const std::vector<Problem>& problems, Format format) {
    Report report;
    report.columns = {"problem",  "direction",      "kernel",      "threads",     "median_ms",
                      "min_ms",   "spread_percent", "num_samples", "gflop_per_s", "peak_percent",
                      "gb_per_s", "note",           "samples_ms"};
    Progress progress(static_cast<int64_t>(problems.size()));
    for (size_t i = 0; i < problems.size(); ++i) {
      const auto show = [&] { progress.show(static_cast<int64_t>(i), problem_line(problems[i])); };
      if (Status s = measure(problems[i], show, report); !s.ok()) {
        return problems.size() == 1 ? s : invalid(problem_line(problems[i]) + ": " + s.message());
      }
    }
    report.facts = machine_facts();
    std::string threads;
    for (const Threads& t : threads_) threads += fmt::format("{}{}", threads.empty() ? "" : ", ", t.count);
    report.facts.emplace_back("threads", threads);
    report.facts.emplace_back("peak", peaks_.text());
    report.facts.emplace_back(
        "method",
        fmt::format("{}; {} ms warm-up, then at least {} ms and {} samples each, contenders taking "
                    "turns; spread is (p90 - p10) / median; rates are of the median; operations are the products of "
                    "visible pairs: 2 forward, 5 backward (fewer with --needs)",
                    caches_text(), options_.warmup_ms, options_.min_time_ms, options_.min_samples));
    fmt::print("{}", report.text(format));
    return 0;
  }

 private:
  template <class Show>
  Status measure(const Problem& problem, Show show, Report& report) {
    const AttentionDesc desc = problem_desc(problem);
    if (Status s = explain(desc).status; s.code() == StatusCode::kInvalidArgument) return s;
    const auto prepared = prepare(problem);
    if (!prepared.ok()) return prepared.status();
    const Calls& calls = *prepared;
    std::vector<Contender> contenders;
    for (const Direction direction : directions_) {
      for (const std::string& kernel : kernels_) {
        for (const Threads& threads : threads_) {
          Contender& contender = contenders.emplace_back();
          contender.kernel = kernel;
          contender.threads = threads.count;
          contender.executor = threads.executor;
          contender.direction = direction;
          if (Status s = enter(desc, threads, calls, contender); !s.ok()) return s;
          show();
        }
      }
    }
    take_samples(contenders, show);
    for (Contender& contender : contenders) {
      const bool is_forward = contender.direction == Direction::kForward;
      const double flops = is_forward ? calls.forward_flops : calls.backward_flops;
      report.rows.push_back(
          row(problem, contender, flops, is_forward ? traffic_bytes(calls.forward) : traffic_bytes(calls.backward)));
    }
    return {};
  }

  std::string caches_text() const {
    if (!cold_) return "warm caches";
    return fmt::format("cold caches, {} MiB written before each call", cold_->size_bytes() >> 20);
  }

  Result<Calls> prepare(const Problem& problem) const {
    auto operands = Operands::create(problem);
    if (!operands.ok()) return operands.status();
    Calls calls{std::move(*operands)};
    const AttentionDesc& desc = calls.operands.desc();
    calls.forward = calls.operands.forward();
    const double pairs = visible_pairs(desc, calls.forward);
    calls.forward_flops = 2 * pairs * static_cast<double>(desc.head_dim + desc.head_dim_v);
    if (std::count(directions_.begin(), directions_.end(), Direction::kBackward) > 0) {
      const auto backward = calls.operands.backward(problem);
      if (!backward.ok()) return backward.status();
      calls.backward = *backward;
      calls.backward_flops = backward_flops(desc, *needed_gradients(problem), pairs);
    }
    if (!problem.logsumexp) calls.forward.logsumexp = {};
    return calls;
  }

  // Plans and warms up.
  Status enter(const AttentionDesc& desc, const Threads& threads, const Calls& calls, Contender& contender) const {
    PlanOptions options;
    options.kernel = contender.kernel;
    options.where.executor = threads.executor;
    auto planned = plan(desc, options);
    if (!planned.ok()) {
      contender.refusal = planned.status().message();
      return {};
    }
    contender.kernel = planned->kernel_name();
    contender.forward = calls.forward;
    contender.backward = calls.backward;
    const bool is_forward = contender.direction == Direction::kForward;
    if (!is_forward) contender.forward.logsumexp = calls.operands.forward().logsumexp;
    auto workspace = give_workspace(planned->workspace_bytes(), contender.forward);
    if (!workspace.ok()) return workspace.status();
    if (!is_forward) {
      if (Status s = planned->forward(contender.forward); !s.ok()) return s;
      workspace = give_workspace(planned->backward_workspace_bytes(), contender.backward.forward);
      if (!workspace.ok()) return workspace.status();
    }
    contender.workspace = std::move(*workspace);
    contender.plan = std::move(*planned);
    constexpr double kSampleMs = 0.02;  // far above the clock's resolution
    double best_ms = contender.call_ms(1);
    const auto start = Clock::now();
    while (Clock::now() - start < std::chrono::duration<double, std::milli>(options_.warmup_ms)) {
      best_ms = std::min(best_ms, contender.call_ms(1));
    }
    if (cold_) return {};
    contender.calls_per_sample = static_cast<int>(std::clamp(kSampleMs / std::max(best_ms, 1e-6), 1.0, 1e5));
    return {};
  }

  template <class Show>
  void take_samples(std::vector<Contender>& contenders, Show show) {
    constexpr size_t kMaxSamples = 100000;
    const auto wants_more = [&](const Contender& c) {
      if (!c.plan || !c.refusal.empty() || c.samples_ms.size() == kMaxSamples) return false;
      return c.total_ms < options_.min_time_ms || c.samples_ms.size() < static_cast<size_t>(options_.min_samples);
    };
    while (std::any_of(contenders.begin(), contenders.end(), wants_more)) {
      for (Contender& c : contenders) {
        if (!wants_more(c)) continue;
        const auto start = Clock::now();
        if (cold_) cold_->empty(*c.executor);
        c.samples_ms.push_back(c.call_ms(c.calls_per_sample));
        c.total_ms += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
      }
      show();
    }
  }

  std::vector<Cell> row(const Problem& problem, Contender& contender, double flops, double bytes) {
    std::vector<Cell> cells = {problem_line(problem), std::string(direction_name(contender.direction)),
                               contender.kernel, static_cast<int64_t>(contender.threads)};
    if (!contender.refusal.empty() || contender.samples_ms.empty()) {
      cells.resize(11);
      cells.emplace_back(contender.refusal);
      cells.emplace_back();
      return cells;
    }
    const std::vector<double>& ms = contender.samples_ms;
    const double median_ms = median(ms), gflops = flops / median_ms / 1e6;
    cells.insert(cells.end(), {median_ms, *std::min_element(ms.begin(), ms.end()), spread_percent(ms),
                               static_cast<int64_t>(ms.size()), gflops});
    if (const auto peak = peaks_.gflops(problem.desc.dtype)) {
      cells.emplace_back(100 * gflops / (*peak * std::min(contender.threads, num_usable_cpus())));
    } else {
      cells.emplace_back();
    }
    cells.emplace_back(bytes / median_ms / 1e6);
    cells.emplace_back(std::string());
    cells.emplace_back(ms);
    return cells;
  }

  const BenchOptions& options_;
  std::vector<std::string> kernels_;
  std::vector<Threads> threads_;
  std::vector<Direction> directions_;
  std::optional<ColdCaches> cold_;
  Peaks peaks_;
};

Result<int> bench(const BenchOptions& options, const std::vector<std::string>& words) {
  const auto format = parse_format(options.format);
  if (!format.ok()) return format.status();
  auto directions = parse_directions(options.direction);
  if (!directions.ok()) return directions.status();
  if (!(options.min_time_ms >= 0 && options.min_time_ms <= 1e7) ||
      !(options.warmup_ms >= 0 && options.warmup_ms <= 1e7)) {
    return invalid("--min-time and --warm-up are milliseconds, must be from 0 to 1e7");
  }
  if (options.min_samples < 1) return invalid(fmt::format("--samples is {}, must be 1 or more", options.min_samples));
  const auto problems = select_problems(words, options.suites);
  if (!problems.ok()) return problems.status();
  auto kernels = select_kernels(options.kernel);
  if (!kernels.ok()) return kernels.status();
  auto threads = select_threads(options.threads);
  if (!threads.ok()) return threads.status();
  std::optional<ColdCaches> cold;
  if (options.cold) {
    auto caches = ColdCaches::create();
    if (!caches.ok()) return caches.status();
    cold = std::move(*caches);
  }
  return Bench(options, std::move(*kernels), std::move(*threads), std::move(*directions), std::move(cold))
      .run(*problems, *format);
}

}  // namespace

Command add_bench(CLI::App& root) {
  CLI::App* app = root.add_subcommand("bench", "time kernels on problems");
  const auto options = std::make_shared<BenchOptions>();
  app->allow_extras();
  app->add_option("--suite", options->suites, "a file of problems, one a line; options given here apply to each")
      ->type_name("FILE")
      ->allow_extra_args(false);
  app->add_option("--kernel", options->kernel, "best (default), all, or names as cpu_avx512,cpu_avx2");
  app->add_option("--threads", options->threads,
                  "numbers of threads, as 1,2 (default: POLYHEAD_THREADS, else all CPUs)");
  app->add_option("--direction", options->direction,
                  "forward (default), backward (the gradients alone) or forward,backward");
  app->add_option("--min-time", options->min_time_ms, "sample each kernel at least so many milliseconds (300)");
  app->add_option("--samples", options->min_samples, "and take at least so many samples (5)");
  app->add_option("--warm-up", options->warmup_ms, "milliseconds before the first sample (50)");
  app->add_flag("--cold", options->cold,
                "empty the caches before every call, which is a sample: all threads write twice the memory of the "
                "last-level caches");
  add_format_option(*app, options->format);
  app->footer(
      help_footer(true, "polyhead bench 8x16x128..2048x64 --causal=0,1 --kernel all --threads 1,2",
                  "polyhead bench --suite bench/suites/bert_large.txt --direction forward,backward --format csv"));
  return {app, [app, options] { return bench(*options, app->remaining()); }};
}

}  // namespace polyhead::tools
