// Words of a command line and the values in them.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/status.h"

namespace polyhead::testing {

inline Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

inline std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

// At every separator; empty parts count.
inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// The whole text is one number, or none.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace polyhead::testing
