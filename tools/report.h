// What a command prints on stdout: facts and a table, as Markdown, CSV or JSON.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "polyhead/status.h"

namespace polyhead::tools {

enum class Format { kMarkdown, kCsv, kJson };
Result<Format> parse_format(std::string_view text);

// A number that is not known is std::monostate: an empty cell, null in JSON. So are NaN and infinities in JSON.
// A column with a list in it is in JSON alone.
using Cell = std::variant<std::monostate, std::string, double, int64_t, bool, std::vector<double>>;

struct Report {
  std::vector<std::pair<std::string, std::string>> facts;
  std::vector<std::string> columns;     // of results: snake_case with the unit at the end, which is their key in JSON
  std::vector<std::vector<Cell>> rows;  // each as long as `columns`

  // Markdown: the facts in one line, then the table. CSV: the facts as lines that begin with '#', then the table, quoted
  // as RFC 4180 says. JSON: {"facts": {...}, "rows": [{column: value}, ...]}.
  std::string text(Format format) const;
};

// About four digits, never with an exponent where a person would not write one.
std::string number_text(double value);

}  // namespace polyhead::tools
