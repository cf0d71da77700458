#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace polyhead::tools {
namespace {

std::string cell_text(const Cell& cell, bool exact) {
  struct {
    bool exact;
    std::string operator()(std::monostate) const { return ""; }
    std::string operator()(const std::string& text) const { return text; }
    std::string operator()(double number) const {
      return exact && std::isfinite(number) ? fmt::format("{}", number) : number_text(number);
    }
    std::string operator()(int64_t number) const { return fmt::format("{}", number); }
    std::string operator()(bool truth) const { return truth ? "yes" : "no"; }
    std::string operator()(const std::vector<double>&) const { return ""; }  // no column of a text
  } visitor{exact};
  return std::visit(visitor, cell);
}

// Without the columns that hold a list.
Report without_lists(const Report& report) {
  Report text = {report.facts, {}, std::vector<std::vector<Cell>>(report.rows.size())};
  for (size_t c = 0; c < report.columns.size(); ++c) {
    const bool is_list = std::any_of(report.rows.begin(), report.rows.end(), [&](const auto& row) {
      return std::holds_alternative<std::vector<double>>(row[c]);
    });
    if (is_list) continue;
    text.columns.push_back(report.columns[c]);
    for (size_t r = 0; r < report.rows.size(); ++r) text.rows[r].push_back(report.rows[r][c]);
  }
  return text;
}

std::string markdown(const Report& report) {
  std::string text;
  for (const auto& [name, value] : report.facts) text += fmt::format("{}{} {}", text.empty() ? "" : "; ", name, value);
  if (!text.empty()) text += "\n";
  if (report.columns.empty()) return text;
  if (!text.empty()) text += "\n";
  std::vector<size_t> widths;
  std::vector<bool> is_number;
  for (size_t c = 0; c < report.columns.size(); ++c) {
    size_t width = std::max<size_t>(report.columns[c].size(), 3);
    bool number = !report.rows.empty();
    for (const auto& row : report.rows) {
      width = std::max(width, cell_text(row[c], false).size());
      number = number && !std::holds_alternative<std::string>(row[c]) && !std::holds_alternative<bool>(row[c]);
    }
    widths.push_back(width);
    is_number.push_back(number);
  }
  const auto add_line = [&](auto cell) {
    for (size_t c = 0; c < widths.size(); ++c) {
      std::string shown = cell(c);
      for (size_t bar = shown.find('|'); bar != std::string::npos; bar = shown.find('|', bar + 2))
        shown.insert(bar, "\\");
      text += is_number[c] ? fmt::format("| {:>{}} ", shown, widths[c]) : fmt::format("| {:<{}} ", shown, widths[c]);
    }
    text += "|\n";
  };
  add_line([&](size_t c) { return report.columns[c]; });
  add_line([&](size_t c) { return std::string(widths[c] - 1, '-') + (is_number[c] ? ":" : "-"); });
  for (const auto& row : report.rows) add_line([&](size_t c) { return cell_text(row[c], false); });
  return text;
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv(const Report& report) {
  std::string text;
  for (const auto& [name, value] : report.facts) text += fmt::format("# {}: {}\n", name, value);
  const auto add_line = [&](auto cell) {
    for (size_t c = 0; c < report.columns.size(); ++c) text += (c > 0 ? "," : "") + csv_field(cell(c));
    text += "\n";
  };
  add_line([&](size_t c) { return report.columns[c]; });
  for (const auto& row : report.rows) add_line([&](size_t c) { return cell_text(row[c], true); });
  return text;
}

std::string json(const Report& report) {
  nlohmann::ordered_json root;
  root["facts"] = nlohmann::ordered_json::object();
  for (const auto& [name, value] : report.facts) root["facts"][name] = value;
  root["rows"] = nlohmann::ordered_json::array();
  for (const auto& row : report.rows) {
    auto& object = root["rows"].emplace_back(nlohmann::ordered_json::object());
    for (size_t c = 0; c < row.size(); ++c) {
      auto& value = object[report.columns[c]];  // null
      std::visit(
          [&](const auto& held) {
            using T = std::decay_t<decltype(held)>;
            if constexpr (!std::is_same_v<T, std::monostate>) value = held;
          },
          row[c]);
    }
  }
  return root.dump(2, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

Result<Format> parse_format(std::string_view text) {
  if (text == "md") return Format::kMarkdown;
  if (text == "csv") return Format::kCsv;
  if (text == "json") return Format::kJson;
  return Status(StatusCode::kInvalidArgument, fmt::format("--format is '{}', must be one of md, csv, json", text));
}

std::string Report::text(Format format) const {
  if (format == Format::kJson) return json(*this);
  return format == Format::kCsv ? csv(without_lists(*this)) : markdown(without_lists(*this));
}

std::string number_text(double value) {
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return "nan";
  if (std::isinf(value) || magnitude == 0) return fmt::format("{}", value);
  if (magnitude >= 1e9 || magnitude < 1e-4) return fmt::format("{:.3g}", value);
  const int digits_before = static_cast<int>(std::floor(std::log10(magnitude))) + 1;
  return fmt::format("{:.{}f}", value, std::clamp(4 - digits_before, 0, 7));
}

}  // namespace polyhead::tools
