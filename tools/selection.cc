#include "selection.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <fstream>

#include "file.h"
#include "polyhead/kernels.h"
#include "testing/sizes.h"

namespace polyhead::tools {
namespace {

std::vector<std::string> split_list(std::string_view list) {
  std::vector<std::string> items;
  for (size_t start = 0; start <= list.size();) {
    const size_t comma = std::min(list.find(',', start), list.size());
    if (comma > start) items.emplace_back(list.substr(start, comma - start));
    start = comma + 1;
  }
  return items;
}

Status append_suite(const std::string& path, const std::vector<std::string>& options, std::vector<Problem>& problems) {
  constexpr uint64_t kMaxSuiteBytes = 16 << 20;
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  if (file->size_bytes() > kMaxSuiteBytes) return invalid(printable(path) + " is larger than 16 MiB: not a suite");
  std::string text(file->size_bytes(), '\0');
  if (Status s = file->read_at(0, text.data(), text.size()); !s.ok()) return s;
  int number = 0;
  for (size_t start = 0; start < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', start), text.size());
    std::vector<std::string> words = split_words(std::string_view(text).substr(start, end - start));
    start = end + 1;
    if (words.empty()) continue;
    words.insert(words.end(), options.begin(), options.end());
    const auto line = parse_problems(words);
    if (!line.ok()) return invalid(fmt::format("{}:{}: {}", path, number + 1, line.status().message()));
    problems.insert(problems.end(), line->begin(), line->end());
  }
  return {};
}

}  // namespace

Result<std::vector<Problem>> select_problems(const std::vector<std::string>& words,
                                             const std::vector<std::string>& suites) {
  if (suites.empty()) return parse_problems(words);
  if (const auto sizes = std::find_if(words.begin(), words.end(), names_sizes); sizes != words.end()) {
    return invalid("problem " + printable(*sizes) + " beside --suite: give one or the other");
  }
  std::vector<Problem> problems;
  for (const std::string& suite : suites) {
    if (Status s = append_suite(suite, words, problems); !s.ok()) return s;
  }
  if (problems.empty()) return invalid("the suite names no problem");
  return problems;
}

Result<Problem> select_problem(const std::vector<std::string>& words) {
  const auto problems = parse_problems(words);
  if (!problems.ok()) return problems.status();
  if (problems->size() == 1) return problems->front();
  return invalid(fmt::format("{} problems, where exactly one is expected", problems->size()));
}

std::vector<std::string> known_kernels() {
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 1;
  std::vector<std::string> names;
  for (const KernelReason& reason : explain(desc).reasons) names.emplace_back(reason.kernel);
  return names;
}

Result<std::vector<std::string>> select_kernels(std::string_view list) {
  if (list == "best") return std::vector<std::string>{""};
  if (list == "all") {
    std::vector<std::string> usable = kernels();
    if (usable.size() > 1) std::erase(usable, "reference");
    return usable;
  }
  const std::vector<std::string> known = known_kernels();
  std::vector<std::string> names = split_list(list);
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return invalid(fmt::format("--kernel is {}; known are {}, all and best", printable(name), fmt::join(known, ", ")));
  }
  if (names.empty())
    return invalid(fmt::format("--kernel is empty; known are {}, all and best", fmt::join(known, ", ")));
  return names;
}

Result<std::vector<Threads>> select_threads(std::string_view list) {
  std::vector<Threads> threads;
  for (const std::string& item : split_list(list)) {
    int count = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), count);
    if (error != std::errc() || end != item.data() + item.size() || count < 1 || count > 1024) {
      return invalid("--threads has " + printable(item) + ", must be numbers from 1 to 1024, as 1,2");
    }
    Executor* pool = new_thread_pool(count);
    threads.push_back({count, pool, std::unique_ptr<Executor>(pool)});
  }
  if (threads.empty()) threads.push_back({default_executor().num_threads(), &default_executor(), nullptr});
  return threads;
}

void add_format_option(CLI::App& app, std::string& format) {
  app.add_option("--format", format, "md (default), csv or json");
  app.add_flag_callback(
      "--json", [&format] { format = "json"; }, "the same as --format json");
}

std::string options_text(std::span<const ProblemOption> options) {
  std::string text;
  for (const ProblemOption& option : options) {
    const bool glued = option.value[0] == '[';
    const std::string usage = fmt::format("{}{}{}", option.name, glued ? "" : " ", option.value);
    text += fmt::format("  {:<28}{}\n", usage, option.text);
  }
  return text;
}

std::string help_footer(bool with_problem, std::string_view example, std::string_view another) {
  std::string text;
  if (with_problem) {
    text +=
        "Problem: BxHxSxD (batch, heads, length, head dim), refined BxH/GxSQ/SKxD/DV (key/value heads, query / key\n"
        "lengths, value's head dim), as 8x16x512x64 or 8x16/4x1/4096x128/64. Lists (1,8) and ranges (128..1024 "
        "doubles,\n"
        "128..1024..128 steps) anywhere give every combination; values of --window, --mask, --bias and --needs are "
        "listed with '+'.\n"
        "Programs of the scores stand in quotes, with what their tensors are drawn from:\n"
        "  --score 'score - slope[h] * abs(q - k)' --captured 'slope: f32[h] 0..1'\n"
        "  --mask 'k <= q and doc[b, q] == doc[b, k]' --captured 'doc: i64[b, k] 0..7 rising'\n"
        "\nOptions of a problem:\n";
    text += options_text(problem_options());
    text += "\n";
  }
  return text + fmt::format("Examples:\n  {}\n  {}", example, another);
}

}  // namespace polyhead::tools
