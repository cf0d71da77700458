// polyhead explain, kernels and info: what would run here, and why.
#include <fmt/format.h>

#include <cstdlib>
#include <memory>

#include "command.h"
#include "machine.h"
#include "operands.h"
#include "polyhead/executor.h"
#include "polyhead/kernels.h"
#include "report.h"
#include "selection.h"

namespace polyhead::tools {
namespace {

struct ExplainOptions {
  std::string kernel = "best", format = "md";
};

Result<int> explain_problems(const ExplainOptions& options, const std::vector<std::string>& words) {
  const auto format = parse_format(options.format);
  if (!format.ok()) return format.status();
  const auto problems = select_problems(words);
  if (!problems.ok()) return problems.status();
  const auto kernels = select_kernels(options.kernel);
  if (!kernels.ok()) return kernels.status();
  PlanOptions plan_options;
  plan_options.kernel = kernels->front();
  Report report;
  report.columns = {
      "problem", "kernel", "taken", "reason", "workspace_bytes", "flops", "backward_workspace_bytes", "backward_flops"};
  for (const Problem& problem : *problems) {
    const Explanation told = explain(problem_desc(problem), plan_options);
    if (told.status.code() == StatusCode::kInvalidArgument) return told.status;
    for (const KernelReason& reason : told.reasons) {
      const bool taken = told.kernel == reason.kernel;
      std::vector<Cell> row = {problem_line(problem), std::string(reason.kernel), taken, reason.reason};
      if (reason.reason.empty()) row[3] = std::string(taken ? "taken" : "can");
      const auto bytes = [&](size_t count) { return taken ? Cell(static_cast<int64_t>(count)) : Cell(); };
      row.insert(row.end(),
                 {bytes(told.workspace_bytes), told.flops, bytes(told.backward_workspace_bytes), told.backward_flops});
      report.rows.push_back(std::move(row));
    }
    if (!told.measured.empty()) fmt::print(stderr, "polyhead explain: {}\n", told.measured);
    if (!told.status.ok()) fmt::print(stderr, "polyhead explain: {}\n", told.status.message());
  }
  fmt::print("{}", report.text(*format));
  return 0;
}

// "1..512", "1..64, 128", "1..." (no end found), or "none": the head dims in [1, last] that a kernel takes in this dtype.
std::string head_dims_text(const std::string& kernel, DType dtype) {
  constexpr int64_t kLast = 1024;
  std::string text;
  int64_t first = 0;
  for (int64_t dim = 1; dim <= kLast + 1; ++dim) {
    bool can = false;
    if (dim <= kLast) {
      AttentionDesc desc;
      desc.dtype = dtype;
      desc.seqlen_q = desc.seqlen_k = 64;
      desc.head_dim = desc.head_dim_v = dim;
      for (const KernelReason& reason : explain(desc).reasons)
        can = can || (kernel == reason.kernel && reason.reason.empty());
    }
    if (can && first == 0) first = dim;
    if (can || first == 0) continue;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", first);
    if (dim - 1 == kLast) {
      text += "...";
    } else if (dim - 1 > first) {
      text += fmt::format("..{}", dim - 1);
    }
    first = 0;
  }
  return text.empty() ? "none" : text;
}

Result<int> list_kernels(const std::string& format_name) {
  const auto format = parse_format(format_name);
  if (!format.ok()) return format.status();
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 64;
  Report report;
  report.columns = {"kernel", "usable_here"};
  for (DType dtype : kDTypes) report.columns.push_back(fmt::format("head_dim_{}", dtype_name(dtype)));
  report.columns.emplace_back("reason");
  const std::vector<std::string> usable = kernels();
  for (const KernelReason& reason : explain(desc).reasons) {
    const bool can = std::find(usable.begin(), usable.end(), reason.kernel) != usable.end();
    std::vector<Cell> row = {std::string(reason.kernel), can};
    for (DType dtype : kDTypes) row.emplace_back(can ? head_dims_text(reason.kernel, dtype) : std::string("none"));
    row.emplace_back(reason.reason);
    report.rows.push_back(std::move(row));
  }
  fmt::print("{}", report.text(*format));
  return 0;
}

Result<int> show_info(const std::string& format_name) {
  const auto format = parse_format(format_name);
  if (!format.ok()) return format.status();
  const std::string measured = explain(AttentionDesc{}).measured;
  std::string names;
  for (const std::string& name : kernels()) names += (names.empty() ? "" : " ") + name;
  Report report;
  report.columns = {"what", "value"};
  const auto add = [&](std::string what, Cell value) { report.rows.push_back({std::move(what), std::move(value)}); };
  add("version", version_text());
  add("compiler", compiler_text());
  add("cpu", cpu_model());
  add("usable cpus", static_cast<int64_t>(num_usable_cpus()));
  add("features used", cpu_features());
  if (const std::string extensions = cpu_extensions(); !extensions.empty()) add("extensions reported", extensions);
  add("kernels", names);
  add("order of kernels", measured.empty() ? std::string("as the CPU's feature flags tell") : measured);
  add("threads", static_cast<int64_t>(default_executor().num_threads()));
  for (const char* variable : {"POLYHEAD_KERNEL", "POLYHEAD_THREADS", "POLYHEAD_VERBOSE"}) {
    const char* value = std::getenv(variable);
    add(variable, value == nullptr ? std::string("(not set)") : std::string(value));
  }
  fmt::print("{}", report.text(*format));
  return 0;
}

}  // namespace

Command add_explain(CLI::App& root) {
  CLI::App* app = root.add_subcommand("explain", "tell which kernel computes a problem, and why not the others");
  const auto options = std::make_shared<ExplainOptions>();
  app->allow_extras();
  app->add_option("--kernel", options->kernel, "best (default), or the name of a kernel to force");
  add_format_option(*app, options->format);
  app->footer(
      help_footer(true, "polyhead explain 8x16x512x64 --dtype bf16", "polyhead explain 1x8x128x80,600 --causal"));
  return {app, [app, options] { return explain_problems(*options, app->remaining()); }};
}

Command add_kernels(CLI::App& root) {
  CLI::App* app = root.add_subcommand("kernels", "list the kernels of this build, best first, and what they take");
  const auto format = std::make_shared<std::string>("md");
  add_format_option(*app, *format);
  app->footer(help_footer(false, "polyhead kernels", "polyhead kernels --format json"));
  return {app, [format] { return list_kernels(*format); }};
}

Command add_info(CLI::App& root) {
  CLI::App* app = root.add_subcommand("info", "show version, CPU, kernels, threads and environment");
  const auto format = std::make_shared<std::string>("md");
  add_format_option(*app, *format);
  app->footer(help_footer(false, "polyhead info", "polyhead info --format json"));
  return {app, [format] { return show_info(*format); }};
}

}  // namespace polyhead::tools
