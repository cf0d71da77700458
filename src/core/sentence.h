// Error sentences out of words and numbers: sentence("head_dim is ", 600, ", takes 1 to 512").
#pragma once

#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

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

}  // namespace polyhead
