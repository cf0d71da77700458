// polyhead compare: which rows of two runs of `bench` or `mha` differ, by their samples.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "file.h"
#include "quantiles.h"
#include "report.h"
#include "selection.h"

namespace polyhead::tools {
namespace {

using nlohmann::json;

struct CompareOptions {
  std::string before, after, format = "md";
  double least_percent = 3;
};

// What names a row; each kind of run has some of these.
constexpr const char* kNames[] = {"problem", "layer", "direction", "call", "kernel", "threads"};

struct Row {
  std::vector<Cell> names;
  std::string note;
  std::vector<double> samples_ms;  // as they were taken; empty where the kernel refused
  bool is_matched = false;
};

struct Run {
  std::vector<std::string> columns;  // those of kNames that it has
  std::vector<Row> rows;
};

Result<Row> read_row(const json& object, const std::vector<std::string>& columns) {
  Row row;
  for (const std::string& name : columns) {
    const json value = object.value(name, json());
    if (value.is_number_integer()) {
      row.names.emplace_back(value.get<int64_t>());
    } else if (value.is_string()) {
      row.names.emplace_back(value.get<std::string>());
    } else {
      return invalid("a row has no " + name);
    }
  }
  const json note = object.value("note", json()), samples = object.value("samples_ms", json());
  if (note.is_string()) row.note = note.get<std::string>();
  if (!samples.is_null() && !samples.is_array()) return invalid("samples_ms of a row is not a list");
  for (const json& sample : samples) {
    if (!sample.is_number() || !(sample.get<double>() > 0)) return invalid("samples_ms has something else than times");
    row.samples_ms.push_back(sample.get<double>());
  }
  return row;
}

Result<Run> parse_run(const std::string& text) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("rows") || !root["rows"].is_array() || root["rows"].empty()) {
    return invalid("must be the output of `polyhead bench` or `polyhead mha` with --json");
  }
  Run run;
  for (const char* name : kNames) {
    if (root["rows"][0].is_object() && root["rows"][0].contains(name)) run.columns.emplace_back(name);
  }
  if (run.columns.empty()) return invalid("its rows name no problem and no layer");
  for (const json& object : root["rows"]) {
    if (!object.is_object()) return invalid("its rows must be objects");
    auto row = read_row(object, run.columns);
    if (!row.ok()) return row.status();
    if (row->samples_ms.empty() && row->note.empty())
      return invalid("its rows have no samples_ms: an older polyhead's");
    run.rows.push_back(std::move(*row));
  }
  return run;
}

Result<Run> read_run(const std::string& path) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  if (file->size_bytes() > kMaxBytes) return invalid(printable(path) + " is larger than 1 GiB");
  std::string text(file->size_bytes(), '\0');
  if (Status s = file->read_at(0, text.data(), text.size()); !s.ok()) return s;
  auto run = parse_run(text);
  if (!run.ok()) return invalid(printable(path) + ": " + run.status().message());
  return run;
}

// The medians of equal consecutive parts of a run's samples: what drifts within a run parts them.
constexpr size_t kParts = 5;
std::vector<double> part_medians(const std::vector<double>& samples) {
  std::vector<double> medians;
  for (size_t part = 0; part < kParts; ++part) {
    const auto at = [&](size_t n) { return samples.begin() + static_cast<ptrdiff_t>(n * samples.size() / kParts); };
    medians.push_back(median({at(part), at(part + 1)}));
  }
  return medians;
}

std::string verdict(const Row& before, const Row& after, double least_percent) {
  if (std::min(before.samples_ms.size(), after.samples_ms.size()) < kParts) return "too few samples";
  const double ratio = median(after.samples_ms) / median(before.samples_ms);
  if (std::fabs(ratio - 1) * 100 < least_percent) return "same";
  const std::vector<double> first = part_medians(before.samples_ms), second = part_medians(after.samples_ms);
  const auto [first_min, first_max] = std::minmax_element(first.begin(), first.end());
  const auto [second_min, second_max] = std::minmax_element(second.begin(), second.end());
  if (*second_min > *first_max) return "slower";
  return *second_max < *first_min ? "faster" : "same";
}

class Comparison {
 public:
  Comparison(const CompareOptions& options, std::vector<std::string> columns) : options_(options) {
    report_.columns = std::move(columns);
    for (const char* column :
         {"before_ms", "after_ms", "ratio", "before_spread_percent", "after_spread_percent", "verdict"}) {
      report_.columns.emplace_back(column);
    }
  }

  void add(const Row& before, const Row& after) {
    if (before.samples_ms.empty() || after.samples_ms.empty()) {
      return add_without_times(before, before.samples_ms.empty() ? "before: " + before.note : "after: " + after.note);
    }
    const double first = median(before.samples_ms), second = median(after.samples_ms), ratio = second / first;
    const std::string judged = verdict(before, after, options_.least_percent);
    std::vector<Cell> cells = before.names;
    cells.insert(cells.end(),
                 {first, second, ratio, spread_percent(before.samples_ms), spread_percent(after.samples_ms), judged});
    report_.rows.push_back(std::move(cells));
    ++counts_[judged];
    sum_of_logs_ += std::log(ratio);
    ++num_ratios_;
  }

  void add_without_times(const Row& row, const std::string& why) {
    std::vector<Cell> cells = row.names;
    cells.resize(report_.columns.size() - 1);
    cells.emplace_back(why);
    report_.rows.push_back(std::move(cells));
  }

  std::string text(Format format) {
    std::string counts;
    for (const auto& [what, count] : counts_) counts += fmt::format("{}{} {}", counts.empty() ? "" : ", ", count, what);
    report_.facts = {
        {"before", options_.before},
        {"after", options_.after},
        {"rows", counts.empty() ? "none in both" : counts},
        {"geometric_mean_ratio",
         num_ratios_ == 0 ? "none" : number_text(std::exp(sum_of_logs_ / static_cast<double>(num_ratios_)))},
        {"method",
         fmt::format("ratio is after / before, of medians; faster and slower: by {} % or more, and every fifth "
                     "of one run's samples has its median beyond all of the other's; spread is (p90 - p10) / "
                     "median",
                     number_text(options_.least_percent))}};
    return report_.text(format);
  }

 private:
  const CompareOptions& options_;
  Report report_;
  std::map<std::string, int> counts_;
  double sum_of_logs_ = 0;
  int64_t num_ratios_ = 0;
};

Result<int> compare(const CompareOptions& options) {
  const auto format = parse_format(options.format);
  if (!format.ok()) return format.status();
  if (!(options.least_percent >= 0 && options.least_percent <= 1000)) {
    return invalid("--least is a percentage, must be from 0 to 1000");
  }
  auto before = read_run(options.before);
  if (!before.ok()) return before.status();
  auto after = read_run(options.after);
  if (!after.ok()) return after.status();
  if (before->columns != after->columns) return invalid("one is of `polyhead bench`, the other of `polyhead mha`");
  Comparison comparison(options, before->columns);
  for (const Row& row : before->rows) {
    const auto other = std::find_if(after->rows.begin(), after->rows.end(),
                                    [&](const Row& r) { return !r.is_matched && r.names == row.names; });
    if (other == after->rows.end()) {
      comparison.add_without_times(row, "before alone");
      continue;
    }
    other->is_matched = true;
    comparison.add(row, *other);
  }
  for (const Row& row : after->rows) {
    if (!row.is_matched) comparison.add_without_times(row, "after alone");
  }
  fmt::print("{}", comparison.text(*format));
  return 0;
}

}  // namespace

Command add_compare(CLI::App& root) {
  CLI::App* app = root.add_subcommand("compare", "tell which rows of two runs of bench or mha differ");
  const auto options = std::make_shared<CompareOptions>();
  app->add_option("BEFORE", options->before, "what `polyhead bench --json` or `polyhead mha --json` printed")
      ->required();
  app->add_option("AFTER", options->after, "the same of another build, machine or moment")->required();
  app->add_option("--least", options->least_percent, "differences below so many percent are none (3)");
  add_format_option(*app, options->format);
  app->footer(
      "A row differs if every fifth of one run's samples, in the order in which they were taken, is slower (by its "
      "median)\n"
      "than every fifth of the other's: of equal runs one row in 126. That is the noise within the runs; what changes\n"
      "between them (clock, other processes, where memory lies) shows only in several runs, taken in turns.\n\n" +
      help_footer(false, "polyhead compare before.json after.json", "polyhead compare a.json b.json --least 5 --json"));
  return {app, [options] { return compare(*options); }};
}

}  // namespace polyhead::tools
