// polyhead mha: a whole layer, as samples of multi-head attention show it: times, files, checks, places of the weights.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "command.h"
#include "machine.h"
#include "mha_files.h"
#include "mha_operands.h"
#include "mha_problem.h"
#include "mha_verify.h"
#include "progress.h"
#include "quantiles.h"
#include "report.h"
#include "selection.h"
#include "testing/words.h"

namespace polyhead::tools {
namespace {

using Clock = std::chrono::steady_clock;

struct MhaOptions {
  std::string kernel, threads, dump, format = "md";
  bool verify = false, layout = false, force = false;
  int64_t num_random = 0;
  uint64_t seed = 1;
  CLI::Option *dump_option = nullptr, *random_option = nullptr, *seed_option = nullptr;
  double min_time_ms = 100;
  int min_samples = 5;
};

// One kind of call, timed.
struct Phase {
  const char* name;
  std::function<Status()> call;
  double flops = 0;
  std::vector<double> samples_ms = {};
};

double call_flops(const MhaProblem& problem, const Layer& layer, bool keys_too) {
  const LayerDesc& d = problem.layer;
  const AttentionDesc& a = problem.attention.desc;
  const auto product = [](int64_t rows, int64_t in, int64_t out) {
    return 2 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out);
  };
  const int64_t rows_q = d.batch * d.beam * d.seqlen_q, rows_k = d.batch * d.beam_kv * d.seqlen_k;
  double flops = product(rows_q, d.query_size, d.num_heads * d.query_proj_size);
  if (d.out_proj_size > 0) flops += product(rows_q, a.num_heads * a.head_dim_v, layer.out_size());
  if (!keys_too) return flops;
  return flops + product(rows_k, d.key_size, d.num_heads_kv * d.key_proj_size) +
         product(rows_k, d.value_size, d.num_heads_kv * d.value_proj_size);
}

std::vector<Phase> phases_of(const MhaProblem& problem, const Layer& layer, const MhaCalls& calls) {
  const Explanation explanation = explain(problem.attention.desc);
  const auto beams = static_cast<double>(problem.layer.beam);
  const double products = call_flops(problem, layer, true), attention = beams * explanation.flops;
  if (problem.sweep) {
    return {{"sweep", [&calls] { return calls.sweep(); }, call_flops(problem, layer, false) + attention}};
  }
  std::vector<Phase> phases = {{"forward", [&calls] { return calls.forward(); }, products + attention}};
  if (!problem.training) return phases;
  phases.push_back(
      {"backward_data", [&calls] { return calls.backward_data(); }, products + beams * explanation.backward_flops});
  if (calls.has_weights()) {
    phases.push_back({"backward_weights", [&calls] { return calls.backward_weights(); }, products});
  }
  return phases;
}

class Run {
 public:
  Run(const MhaOptions& options, std::vector<std::string> kernels, std::vector<Threads> threads)
      : options_(options), kernels_(std::move(kernels)), threads_(std::move(threads)) {
    report_.columns = {"layer",  "kernel",      "threads",     "call", "median_ms",
                       "min_ms", "num_samples", "gflop_per_s", "note", "samples_ms"};
  }

  // A kernel that cannot compute the layer says so in its row.
  Status add(const MhaProblem& problem) {
    for (const std::string& kernel : kernels_) {
      for (const Threads& threads : threads_) {
        PlanOptions options;
        options.kernel = kernel;
        options.where.executor = threads.executor;
        const auto made = layer(layer_desc(problem), options);
        if (!made.ok() && made.status().code() != StatusCode::kUnsupported) return made.status();
        if (!made.ok()) {
          report_.rows.push_back(
              {mha_line(problem), kernel, int64_t{threads.count}, {}, {}, {}, {}, {}, made.status().message(), {}});
        } else if (Status s = time(problem, *made, threads.count); !s.ok()) {
          return s;
        }
      }
    }
    return {};
  }

  void print(Format format) {
    report_.facts = machine_facts();
    report_.facts.emplace_back(
        "method", fmt::format("warm caches; one round of calls to warm up, then at least {} ms and {} samples of each; "
                              "operations are the products of pairs that sizes, causal and window leave visible",
                              options_.min_time_ms, options_.min_samples));
    if (!options_.dump.empty()) report_.facts.emplace_back("wrote", options_.dump);
    fmt::print("{}", report_.text(format));
  }

 private:
  Status time(const MhaProblem& problem, const Layer& layer, int threads) {
    const auto operands = random_operands(problem, layer);
    if (!operands.ok()) return operands.status();
    const auto results = new_results(problem, layer);
    if (!results.ok()) return results.status();
    const auto calls = MhaCalls::create(problem, layer, *operands, *results);
    if (!calls.ok()) return calls.status();
    if (Status s = calls->run(problem); !s.ok()) return s;
    if (!options_.dump.empty()) {
      if (Status s = write_dump(options_.dump, options_.force, problem, layer, *operands, *results); !s.ok()) return s;
    }
    std::vector<Phase> phases = phases_of(problem, layer, *calls);
    if (Status s = take_samples(phases); !s.ok()) return s;
    for (const Phase& phase : phases) {
      const double ms = median(phase.samples_ms);
      const std::string note =
          problem.sweep && problem.layer.seqlen_q > 0
              ? fmt::format("{} ms a step", number_text(ms / static_cast<double>(problem.layer.seqlen_q)))
              : "";
      report_.rows.push_back({mha_line(problem), std::string(layer.kernel_name()), int64_t{threads},
                              std::string(phase.name), ms,
                              *std::min_element(phase.samples_ms.begin(), phase.samples_ms.end()),
                              static_cast<int64_t>(phase.samples_ms.size()), phase.flops / std::max(ms, 1e-9) / 1e6,
                              note, phase.samples_ms});
    }
    return {};
  }

  // In rounds: a call needs what the ones before it have left.
  Status take_samples(std::vector<Phase>& phases) const {
    constexpr int kMaxSamples = 100000;
    double total_ms = 0;
    for (int n = 0; n < kMaxSamples && (n < options_.min_samples || total_ms < options_.min_time_ms); ++n) {
      for (Phase& phase : phases) {
        const auto start = Clock::now();
        if (Status s = phase.call(); !s.ok()) return s;
        phase.samples_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
        total_ms += phase.samples_ms.back();
      }
    }
    return {};
  }

  const MhaOptions& options_;
  std::vector<std::string> kernels_;
  std::vector<Threads> threads_;
  Report report_;
};

Result<int> print_layout(const MhaProblem& problem, Format format) {
  const auto made = layer(layer_desc(problem));
  if (!made.ok()) return made.status();
  Report report;
  report.facts = {{"layer", mha_line(problem)},
                  {"weights_bytes", fmt::format("{}", made->weights_bytes())},
                  {"prepacked_weights_bytes", fmt::format("{}", made->prepacked_weights_bytes())},
                  {"workspace_bytes", fmt::format("{}", made->workspace_bytes())},
                  {"backward_workspace_bytes", fmt::format("{}", made->backward_workspace_bytes())},
                  {"reserve_bytes", fmt::format("{}", made->reserve_bytes())}};
  report.columns = {"weight", "present", "offset", "offset_bytes", "dims", "strides"};
  const auto element_bytes = static_cast<int64_t>(dtype_size_bytes(problem.attention.desc.dtype));
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    const WeightLayout at = made->weight_layout(static_cast<WeightKind>(kind));
    const std::string name = kWeightFields[kind].name;
    if (!at.present) {
      report.rows.push_back({name, false, {}, {}, std::string(), std::string()});
      continue;
    }
    report.rows.push_back({name, true, at.offset, at.offset * element_bytes,
                           dims_text(std::vector<int64_t>(at.dims, at.dims + at.ndim)),
                           dims_text(std::vector<int64_t>(at.strides, at.strides + at.ndim))});
  }
  fmt::print("{}", report.text(format));
  return 0;
}

Status check_options(const MhaOptions& options, const std::vector<std::string>& words) {
  if (options.random_option->count() > 0 && options.num_random < 1) {
    return invalid(fmt::format("--random is {}, must be 1 or more", options.num_random));
  }
  if (options.dump_option->count() > 0 && options.dump.empty()) return invalid("--dump is empty, must name a folder");
  if (options.num_random > 0 && !words.empty()) {
    return invalid("--random draws its layers itself; leave out the options of a layer");
  }
  if (options.layout && (options.verify || options.num_random > 0 || !options.dump.empty())) {
    return invalid("--layout is about one layer, which is not run: not with --verify, --random or --dump");
  }
  if (!options.dump.empty() && (options.verify || options.num_random > 0)) {
    return invalid("--dump writes the tensors of one layer that is run: not with --verify or --random");
  }
  if (!(options.min_time_ms >= 0 && options.min_time_ms <= 1e7)) {
    return invalid("--min-time is in milliseconds, must be from 0 to 1e7");
  }
  if (options.min_samples < 1) return invalid(fmt::format("--samples is {}, must be 1 or more", options.min_samples));
  if (options.dump.empty()) return {};
  return check_may_dump(options.dump, options.force);
}

Result<int> run_layers(const MhaOptions& options, const std::optional<MhaProblem>& problem,
                       std::vector<std::string> kernels, std::vector<Threads> threads, Format format) {
  if (!options.dump.empty() && (kernels.size() > 1 || threads.size() > 1)) {
    return invalid("--dump: name one kernel and one number of threads");
  }
  Run run(options, std::move(kernels), std::move(threads));
  if (problem) {
    if (Status s = run.add(*problem); !s.ok()) return s;
  } else {
    Progress progress(options.num_random);
    for (int64_t n = 0; n < options.num_random; ++n) {
      const MhaProblem drawn = random_mha(options.seed + static_cast<uint64_t>(n));
      progress.show(n, mha_line(drawn));
      if (Status s = run.add(drawn); !s.ok()) {
        return Status(s.code(), fmt::format("random layer '{}': {}", mha_line(drawn), s.message()));
      }
    }
  }
  run.print(format);
  return 0;
}

// To verify: all, and the reference, which alone takes float64.
Result<std::vector<std::string>> selected_kernels(const MhaOptions& options) {
  if (!options.kernel.empty()) return select_kernels(options.kernel);
  if (!options.verify) return select_kernels("best");
  auto all = select_kernels("all");
  if (all.ok() && all->back() != "reference") all->push_back("reference");
  return all;
}

Result<int> mha(const MhaOptions& options, std::vector<std::string> words) {
  const auto format = parse_format(options.format);
  if (!format.ok()) return format.status();
  if (Status s = check_options(options, words); !s.ok()) return s;
  auto kernels = selected_kernels(options);
  if (!kernels.ok()) return kernels.status();
  auto threads = select_threads(options.threads);
  if (!threads.ok()) return threads.status();
  std::optional<MhaProblem> problem;
  if (options.num_random == 0) {
    if (options.seed_option->count() > 0) words.push_back(fmt::format("--seed={}", options.seed));
    auto parsed = parse_mha(words, /*small=*/options.verify);
    if (!parsed.ok()) return parsed.status();
    problem = std::move(*parsed);
  }
  if (options.layout) return print_layout(*problem, *format);
  if (!options.verify) return run_layers(options, problem, std::move(*kernels), std::move(*threads), *format);
  const MhaVerification how = {std::move(*kernels), std::move(*threads), *format};
  return problem ? verify_mha(*problem, how) : verify_random_mha(options.seed, options.num_random, how);
}

std::string footer() {
  return "Problem: a layer, how it is called and drawn; all of it optional:\n" + options_text(mha_options()) +
         "\nExamples:\n"
         "  polyhead mha --batch 8 --heads 16 --seqlen-q 384 --q-size 1024 --biases --same qkv --threads 1,2\n"
         "  polyhead mha --heads 4 --kv-heads 2 --q-size 64 --seqlen-q 9 --seqlen-k 20 --lengths --verify\n"
         "  polyhead mha --random 500 --seed 7 --verify\n"
         "  polyhead mha --q-size 256 --sweep --causal --dump tensors\n"
         "  polyhead mha --q-size 1024 --heads 16 --kv-heads 4 --k-proj 64 --biases=qo --layout";
}

}  // namespace

Command add_mha(CLI::App& root) {
  CLI::App* app = root.add_subcommand("mha", "time, check or write down a whole layer: projections around attention");
  const auto options = std::make_shared<MhaOptions>();
  app->allow_extras();
  app->add_flag("--verify", options->verify, "check all results and gradients against float64 loops");
  app->add_flag("--layout", options->layout, "print where each weight lies, and how much memory calls take");
  options->dump_option =
      app->add_option("--dump", options->dump, "write the tensors of one run as .safetensors into this folder")
          ->type_name("FOLDER");
  app->add_flag("--force", options->force, "replace the files of --dump if they exist");
  options->random_option =
      app->add_option("--random", options->num_random, "so many random layers, of every combination of options");
  options->seed_option =
      app->add_option("--seed", options->seed, "of the first random layer, or of a layer's operands and dropout");
  app->add_option("--kernel", options->kernel,
                  "best (default), all, or names as cpu_avx2 (default of --verify: all and reference)");
  app->add_option("--threads", options->threads,
                  "numbers of threads, as 1,2 (default: POLYHEAD_THREADS, else all CPUs)");
  app->add_option("--min-time", options->min_time_ms, "time each layer at least so many milliseconds (100)");
  app->add_option("--samples", options->min_samples, "and take at least so many samples (5)");
  add_format_option(*app, options->format);
  app->footer(footer());
  return {app, [app, options] { return mha(*options, app->remaining()); }};
}

}  // namespace polyhead::tools
