// A row's statement as the body of a kernel, with registers of the widths that its types ask for, as ptxas wants them: the
// interpreter takes any.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_sim {

// "cvt.rn.f16.f32 d, a": the types in its name, in their order: {"f16", "f32"}.
inline std::vector<std::string> types_of(std::string_view statement) {
  std::vector<std::string> types;
  std::string part;
  for (const char c : std::string(statement.substr(0, statement.find(' '))) + ".") {
    if (c != '.') {
      part += c;
      continue;
    }
    const size_t digits = part.find_first_of("0123456789");
    const bool is_type = digits == 1 || (part.starts_with("bf16") || part.starts_with("tf32") || part == "pred");
    if (is_type && part != "b16x2") types.push_back(part);
    part.clear();
  }
  return types;
}

inline bool is_half(const std::string& type) {
  return type == "s16" || type == "u16" || type == "b16" || type == "f16" || type == "bf16";
}

// Operands by the letters of instruction_rows.h: 'a' to 'e' have 16 bits, not 32, where this says so.
inline std::array<bool, 5> halves_of(std::string_view statement) {
  const std::vector<std::string> types = types_of(statement);
  const std::string name(statement.substr(0, statement.find('.')));
  std::array<bool, 5> halves = {};
  const auto set = [&](const char* letters, bool half) {
    for (; *letters != 0; ++letters) halves[static_cast<size_t>(*letters - 'a')] = half;
  };
  if (types.empty()) return halves;
  const bool half = is_half(types.front());
  if (name == "cvt") {
    set("d", half);
    set("a", types.size() > 1 && is_half(types[1]));
  } else if (statement.find(".wide.") != statement.npos) {
    set("ab", half);
  } else if (name == "shl" || name == "shr") {
    set("ad", half);
  } else if (statement.find('{') != statement.npos && name == "mov") {
    const bool unpacks = statement[statement.find(' ') + 1] == '{';
    const bool four =
        statement.find(", b, a, b}") != statement.npos || statement.find("{d, _, _, e}") != statement.npos;
    set(unpacks ? "de" : "ab", types.front() == "b32" || four);
  } else {
    set("abcde", half);
  }
  return halves;
}

// Each lane runs `statement` on three words, of the first buffer, and puts two, its results, into the second. `per_lane`: it
// has words of its own there; else all have the same.
inline std::string body_of(const std::string& statement, bool per_lane) {
  const std::array<bool, 5> halves = halves_of(statement);
  const auto name_of = [&](char letter) -> std::string {
    static const std::pair<char, const char*> kNames[] = {
        {'d', "%r10"}, {'e', "%r11"}, {'D', "%rd10"}, {'E', "%rd11"}, {'p', "%p1"},   {'q', "%p2"},  {'a', "%r20"},
        {'b', "%r21"}, {'c', "%r22"}, {'A', "%rd20"}, {'B', "%rd21"}, {'C', "%rd22"}, {'u', "%p10"}, {'v', "%p11"}};
    const auto* named =
        std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& n) { return n.first == letter; });
    if (named == std::end(kNames)) return "";
    const bool half = letter >= 'a' && letter <= 'e' && halves[static_cast<size_t>(letter - 'a')];
    return half ? "%h" + std::string(named->second + 2) : named->second;
  };
  std::string body =
      "mov.u32 %r30, %tid.x; mov.u32 %r31, %ctaid.x; shl.b32 %r31, %r31, 5; add.u32 %r30, %r30, %r31; mul.wide.u32 "
      "%rd29, "
      "%r30, " +
      std::string(per_lane ? "24" : "0") +
      "; add.s64 %rd28, %rd0, %rd29;\n"
      "ld.global.u64 %rd20, [%rd28]; ld.global.u64 %rd21, [%rd28+8]; ld.global.u64 %rd22, [%rd28+16];\n"
      "cvt.u32.u64 %r20, %rd20; cvt.u32.u64 %r21, %rd21; cvt.u32.u64 %r22, %rd22;\n"
      "cvt.u16.u32 %h20, %r20; cvt.u16.u32 %h21, %r21; cvt.u16.u32 %h22, %r22;\n"
      "mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u64 %rd10, 0; mov.u64 %rd11, 0; mov.u16 %h10, 0; mov.u16 %h11, 0;\n"
      "setp.ne.u64 %p10, %rd22, 0; setp.ne.u64 %p11, %rd21, 0; setp.ne.u64 %p1, 0, 0; setp.ne.u64 %p2, 0, 0;\n";
  std::string results[2] = {"%rd10", "%rd11"};
  bool in_operands = false;
  int number = 0;
  for (size_t n = 0; n < statement.size(); ++n) {
    const char c = statement[n], next = n + 1 < statement.size() ? statement[n + 1] : ' ';
    in_operands = in_operands || c == ' ';
    const std::string name = name_of(c);
    const bool alone = in_operands && !std::isalnum(statement[n - 1]) && !std::isalnum(next) && !name.empty();
    body += alone ? name : std::string(1, c);
    if (alone && std::string_view("depq").find(c) != std::string_view::npos) results[number++] = name;
  }
  body += ";\nmul.wide.u32 %rd30, %r30, 16; add.s64 %rd31, %rd1, %rd30;\n";
  for (int n = 0; n < 2; ++n) {
    const std::string& from = results[n];
    if (from[1] == 'h') body += "cvt.u64.u16 %rd32, " + from + ";\n";
    if (from[1] == 'p') body += "selp.b64 %rd32, 1, 0, " + from + ";\n";
    if (from[1] == 'r') body += (from[2] == 'd' ? "mov.u64 %rd32, " : "cvt.u64.u32 %rd32, ") + from + ";\n";
    body += "st.global.u64 [%rd31+" + std::to_string(8 * n) + "], %rd32;\n";
  }
  return body;
}

}  // namespace cuda_sim
