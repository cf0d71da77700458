// Errors: sentences out of words and numbers: sentence("head_dim is ", 600, ", takes 1 to 512").
#pragma once

#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "polyhead/status.h"

namespace polyhead {

inline void append(std::string& text, std::string_view part) { text += part; }
inline void append(std::string& text, std::integral auto number) { text += std::to_string(number); }
inline void append(std::string& text, double number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", number);
  text += digits;
}

template <class... Parts>
std::string sentence(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

inline Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
inline Status out_of_memory() { return {StatusCode::kOutOfMemory, "out of memory"}; }

}  // namespace polyhead
