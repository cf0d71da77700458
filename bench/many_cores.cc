// How evenly calls are shared among more cores than there are: the library cuts a call for so many threads, its own tasks
// run here one after the other, each is timed, and then they are dealt out in the library's order to threads of which
// each takes the next task when it is free. What no single machine shows is left out: memory that cores share.
//
//   many_cores --suite bench/suites/forward.txt --direction forward,backward --threads 16,32,64,128 --format md
//   many_cores 1x8x2048x64 --count --threads 64 --limit 1.15    computes nothing: as if all tasks took the same time
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <queue>

#include "core/threads.h"
#include "tools/machine.h"
#include "tools/operands.h"
#include "tools/report.h"
#include "tools/selection.h"

namespace polyhead::bench {
namespace {

using testing::invalid;
using testing::needed_gradients;
using testing::Problem;
using testing::problem_line;

// Of this thread: what others use of the core meanwhile does not count.
double cpu_ms() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

// The times of a call's tasks: a round for each run_tasks, behind which all threads wait.
struct Recording {
  std::vector<std::vector<double>> rounds_ms;
  double serial_ms = 0;  // beside them

  double tasks_ms() const {
    double sum = 0;
    for (const auto& round : rounds_ms) {
      for (const double task : round) sum += task;
    }
    return sum;
  }
  int64_t num_tasks() const {
    int64_t num = 0;
    for (const auto& round : rounds_ms) num += static_cast<int64_t>(round.size());
    return num;
  }
};
Recording* recording = nullptr;  // of the call that runs now
int64_t first_task = 0;
bool count_alone = false;  // tasks are not run: each counts as 1 ms

// When the last thread is done with tasks that start in their order, each on the first thread that is free.
double makespan_ms(const std::vector<double>& tasks, int threads) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int i = 0; i < threads; ++i) free_at.push(0);
  double last = 0;
  for (const double task : tasks) {
    const double end = free_at.top() + task;
    free_at.pop();
    free_at.push(end);
    last = std::max(last, end);
  }
  return last;
}

// Says that it has so many threads, and has none.
class Pretended final : public Executor {
 public:
  explicit Pretended(int threads) : threads_(threads) {}
  int num_threads() const override { return threads_; }
  void parallel_for(int count, void (*body)(void* context, int index), void* context) override {
    for (int i = 0; i < count; ++i) body(context, i);
  }

 private:
  int threads_;
};

struct Calls {
  tools::Operands operands;
  ForwardArgs forward = {};
  BackwardArgs backward = {};
};

// Each task's fastest time of a few calls that are cut for `threads`.
Result<Recording> record(const AttentionDesc& desc, Calls& calls, bool is_forward, int threads, int repeats) {
  Pretended executor(threads);
  PlanOptions options;
  options.where.executor = &executor;
  auto plan = polyhead::plan(desc, options);
  if (!plan.ok()) return plan.status();
  ForwardArgs forward = calls.forward;
  BackwardArgs backward = calls.backward;
  auto workspace = tools::give_workspace(plan->workspace_bytes(), forward);
  if (!workspace.ok()) return workspace.status();
  if (!is_forward) {
    if (Status s = plan->forward(forward); !s.ok() && !count_alone) return s;
    workspace = tools::give_workspace(plan->backward_workspace_bytes(), backward.forward);
    if (!workspace.ok()) return workspace.status();
  }
  Recording best;
  for (int n = 0; n <= repeats; ++n) {  // the first warms up
    Recording now;
    now.rounds_ms.reserve(64);
    recording = &now;
    const double start_ms = cpu_ms();
    const Status s = is_forward ? plan->forward(forward) : plan->backward(backward);
    now.serial_ms = count_alone ? 0 : cpu_ms() - start_ms - now.tasks_ms();
    recording = nullptr;
    if (!s.ok()) return s;
    if (n < 2) {
      best = std::move(now);
      continue;
    }
    best.serial_ms = std::min(best.serial_ms, now.serial_ms);
    for (size_t i = 0; i < best.rounds_ms.size(); ++i) {
      for (size_t j = 0; j < best.rounds_ms[i].size(); ++j)
        best.rounds_ms[i][j] = std::min(best.rounds_ms[i][j], now.rounds_ms[i][j]);
    }
  }
  return best;
}

struct Options {
  std::vector<std::string> suites;
  std::string direction = "forward", format = "md";
  std::vector<int> threads = {16, 32, 64, 128};
  int repeats = 3;
  bool count = false;
  double limit = 0;  // of the ratio; 0: none
};

Status add_rows(const Problem& problem, bool is_forward, const Options& options, tools::Report& report) {
  auto operands = tools::Operands::create(problem);
  if (!operands.ok()) return operands.status();
  Calls calls{std::move(*operands)};
  const AttentionDesc desc = calls.operands.desc();
  calls.forward = calls.operands.forward();
  const double pairs = tools::visible_pairs(desc, calls.forward);
  double flops = 2 * pairs * static_cast<double>(desc.head_dim + desc.head_dim_v);
  double bytes = tools::traffic_bytes(calls.forward);
  if (!is_forward) {
    const auto backward = calls.operands.backward(problem);
    if (!backward.ok()) return backward.status();
    calls.backward = *backward;
    flops = tools::backward_flops(desc, *needed_gradients(problem), pairs);
    bytes = tools::traffic_bytes(calls.backward);
  }
  const auto alone = record(desc, calls, is_forward, 1, options.repeats);
  if (!alone.ok()) return alone.status();
  for (const int threads : options.threads) {
    const auto shared = record(desc, calls, is_forward, threads, options.repeats);
    if (!shared.ok()) return shared.status();
    double critical_ms = shared->serial_ms, longest_ms = 0;
    for (const auto& round : shared->rounds_ms) {
      critical_ms += makespan_ms(round, threads);
      for (const double task : round) longest_ms = std::max(longest_ms, task);
    }
    const Recording& whole = options.count ? *shared : *alone;
    const double one_thread_ms = whole.tasks_ms() + whole.serial_ms, ideal_ms = one_thread_ms / threads;
    if (options.limit > 0 && critical_ms > options.limit * ideal_ms) {
      return invalid(fmt::format("{} {} on {} threads: {} tasks take {:.2f} times the ideal, must be at most {}",
                                 problem_line(problem), is_forward ? "forward" : "backward", threads,
                                 shared->num_tasks(), critical_ms / ideal_ms, options.limit));
    }
    report.rows.push_back({problem_line(problem), std::string(is_forward ? "forward" : "backward"),
                           static_cast<int64_t>(threads), static_cast<int64_t>(shared->rounds_ms.size()),
                           shared->num_tasks(), one_thread_ms, ideal_ms, critical_ms, critical_ms / ideal_ms,
                           shared->tasks_ms() / one_thread_ms, longest_ms, shared->serial_ms, flops / critical_ms / 1e6,
                           bytes / critical_ms / 1e6});
  }
  return {};
}

Result<int> run(const Options& options, const std::vector<std::string>& words) {
  const auto format = tools::parse_format(options.format);
  if (!format.ok()) return format.status();
  count_alone = options.count;
  const auto problems = tools::select_problems(words, options.suites);
  if (!problems.ok()) return problems.status();
  tools::Report report;
  report.columns = {"problem",     "direction", "threads", "rounds",     "tasks",     "one_thread_ms", "ideal_ms",
                    "critical_ms", "ratio",     "work",    "longest_ms", "serial_ms", "gflop_per_s",   "gb_per_s"};
  for (const Problem& problem : *problems) {
    for (const bool is_forward : {true, false}) {
      const char* name = is_forward ? "forward" : "backward";
      if (options.direction.find(name) == std::string::npos) continue;
      if (Status s = add_rows(problem, is_forward, options, report); !s.ok()) return s;
    }
  }
  report.facts = tools::machine_facts();
  report.facts.emplace_back(
      "method",
      "tasks as cut for so many threads, timed one after the other on one core, dealt out in their "
      "order; ideal: the call on one thread / threads; work: time of all tasks / that call; the "
      "rates are those that the critical path would need");
  std::fputs(report.text(*format).c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace polyhead::bench

// Instead of the library's run_tasks (ld's --wrap), while a call is recorded.
namespace polyhead {
void real_run_tasks(const Run& run, int64_t num_tasks, void (*task)(void* context, int64_t index, int lane),
                    void* context) __asm__("__real__ZN8polyhead9run_tasksERKNS_3RunElPFvPvliES3_");
void timed_run_tasks(const Run& run, int64_t num_tasks, void (*task)(void* context, int64_t index, int lane),
                     void* context) __asm__("__wrap__ZN8polyhead9run_tasksERKNS_3RunElPFvPvliES3_");

void timed_run_tasks(const Run& run, int64_t num_tasks, void (*task)(void* context, int64_t index, int lane),
                     void* context) {
  if (bench::recording == nullptr) return real_run_tasks(run, num_tasks, task, context);
  auto& round = bench::recording->rounds_ms.emplace_back(static_cast<size_t>(num_tasks), 1.0);
  if (bench::count_alone) return;
  // Another task is the first one in each call: it takes longer than the others.
  const int64_t first = bench::first_task++ % std::max<int64_t>(num_tasks, 1);
  double start = bench::cpu_ms();
  for (int64_t n = 0; n < num_tasks; ++n) {
    const int64_t i = (first + n) % num_tasks;
    task(context, i, 0);
    const double end = bench::cpu_ms();
    round[static_cast<size_t>(i)] = end - start;
    start = end;
  }
}
}  // namespace polyhead

int main(int argc, char** argv) {
  CLI::App app("How evenly calls are shared among more cores than there are.");
  polyhead::bench::Options options;
  app.allow_extras();
  app.add_option("--suite", options.suites, "a file of problems, one a line")
      ->type_name("FILE")
      ->allow_extra_args(false);
  app.add_option("--direction", options.direction, "forward (default), backward or forward,backward");
  app.add_option("--threads", options.threads, "numbers of threads, as 16,64 (default: 16,32,64,128)")->delimiter(',');
  app.add_option("--repeats", options.repeats, "calls, of which each task's fastest time counts (3)");
  app.add_flag("--count", options.count, "run no task: each counts as 1 ms");
  app.add_option("--limit", options.limit, "exit status 2 if a ratio is larger");
  app.add_option("--format", options.format, "md (default), csv or json");
  CLI11_PARSE(app, argc, argv);
  const auto done = polyhead::bench::run(options, app.remaining());
  if (done.ok()) return *done;
  std::fprintf(stderr, "many_cores: %s\n", done.status().message().c_str());
  return 2;
}
