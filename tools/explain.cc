// polyhead explain, kernels and info: what would run here, and why.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "command.h"
#include "machine.h"
#include "polyhead/executor.h"
#include "polyhead/kernels.h"
#include "polyhead/program_explanation.h"
#include "report.h"
#include "selection.h"
#include "testing/call.h"

namespace polyhead::tools {
namespace {

struct ExplainOptions {
  std::string kernel = "best", format = "md";
};

constexpr const char* kProgramColumns[] = {"blocks_none", "blocks_some", "blocks_all", "depends_on"};

// What a problem's program adds to the row of the kernel that is taken. Of the operands only those are drawn that say which
// blocks are seen.
Result<std::vector<Cell>> program_cells(const Problem& problem) {
  if (problem.desc.program == nullptr) return std::vector<Cell>(std::size(kProgramColumns));
  static uint8_t unused = 0;
  ForwardArgs given;
  for (Tensor ForwardArgs::*operand : {&ForwardArgs::query, &ForwardArgs::key, &ForwardArgs::value,
                                       &ForwardArgs::attn_mask, &ForwardArgs::attn_bias}) {
    given.*operand = Tensor(&unused, DType::kBool, {1});
  }
  const Inputs in = random_inputs(problem, given);
  ForwardArgs args = dense_args(in);
  std::vector<Tensor> captures;
  for (const testing::Array& a : in.captures) captures.push_back(view(a));
  args.captures = captures;
  const auto blocks = count_mask_blocks(problem_desc(problem), args);
  if (!blocks.ok()) return blocks.status();
  std::string rates;
  for (const ProgramValue& value : explain_program(*problem.desc.program)) {
    rates += fmt::format("{}{}: by {}", rates.empty() ? "" : "; ", value.expression, value.depends_on);
  }
  return std::vector<Cell>{blocks->none, blocks->some, blocks->all, rates};
}

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
  const bool programs = std::any_of(problems->begin(), problems->end(),
                                    [](const Problem& problem) { return problem.desc.program != nullptr; });
  if (programs) report.columns.insert(report.columns.end(), std::begin(kProgramColumns), std::end(kProgramColumns));
  for (const Problem& problem : *problems) {
    const Explanation told = explain(problem_desc(problem), plan_options);
    if (told.status.code() == StatusCode::kInvalidArgument) return told.status;
    const auto program = program_cells(problem);
    if (!program.ok()) return program.status();
    for (const KernelReason& reason : told.reasons) {
      const bool taken = told.kernel == reason.kernel;
      std::vector<Cell> row = {problem_line(problem), std::string(reason.kernel), taken, reason.reason};
      if (reason.reason.empty()) row[3] = std::string(taken ? "taken" : "can");
      const auto bytes = [&](size_t count) { return taken ? Cell(static_cast<int64_t>(count)) : Cell(); };
      row.insert(row.end(),
                 {bytes(told.workspace_bytes), told.flops, bytes(told.backward_workspace_bytes), told.backward_flops});
      if (programs) row.resize(report.columns.size());
      if (programs && taken) std::copy(program->begin(), program->end(), row.end() - std::ssize(*program));
      report.rows.push_back(std::move(row));
    }
    if (!told.measured.empty()) fmt::print(stderr, "polyhead explain: {}\n", told.measured);
    if (!told.status.ok()) fmt::print(stderr, "polyhead explain: {}\n", told.status.message());
  }
  fmt::print("{}", report.text(*format));
  return 0;
}

// Why a kernel cannot compute it on its own device; "" if it can.
std::string why_not_anywhere(const std::string& kernel, const AttentionDesc& desc) {
  std::string why_not;
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    for (const KernelReason& told : explain(desc, {.kernel = {}, .where = {.device = device}}).reasons) {
      if (kernel != told.kernel) continue;
      if (told.reason.empty()) return "";
      if (why_not.empty()) why_not = told.reason;
    }
  }
  return why_not;
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
      can = why_not_anywhere(kernel, desc).empty();
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
    row.emplace_back(why_not_anywhere(reason.kernel, desc));
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
  const auto add = [&](const std::string& what, Cell value) { report.rows.push_back({what, std::move(value)}); };
  add("version", version_text());
  add("compiler", compiler_text());
  add("cpu", cpu_model());
  add("usable cpus", static_cast<int64_t>(num_usable_cpus()));
  add("features used", cpu_features());
  if (const std::string extensions = cpu_extensions(); !extensions.empty()) add("extensions reported", extensions);
  add("kernels", names);
  add("order of kernels", measured.empty() ? std::string("as the CPU's feature flags tell") : measured);
  for (const auto& [what, value] : cuda_facts()) add(what, value);
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
  CLI::App* app = root.add_subcommand(
      "explain", "tell which kernel computes a problem, and why not the others; what a program depends on");
  const auto options = std::make_shared<ExplainOptions>();
  app->allow_extras();
  app->add_option("--kernel", options->kernel, "best (default), or the name of a kernel to force");
  add_format_option(*app, options->format);
  app->footer(
      help_footer(true, "polyhead explain 8x16x512x64 --dtype bf16",
                  "polyhead explain 1x8x4096x64 --mask 'doc[q] == doc[k]' --captured 'doc: i64[k] 0..9 rising'"));
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
