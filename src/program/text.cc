#include "program/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iterator>

#include "core/sentence.h"
#include "program/ops.h"

namespace polyhead::program {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  std::string text(digits.data(), end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

class Writer {
 public:
  explicit Writer(const Program& program) : program_(program), names_(program.steps().size()) {}

  std::string write() {
    for (const Capture& capture : program_.captures()) {
      text_ += sentence(capture.name, ": ", type_name(capture.type), "; ");
    }
    name_values();
    if (program_.mask() >= 0) text_ += sentence("mask = ", written(program_.mask(), false));
    if (program_.score() < 0) return text_;
    return text_ + sentence(program_.mask() >= 0 ? "; " : "", "score = ", written(program_.score(), false));
  }

  std::vector<std::string> steps() {
    name_values();
    std::vector<std::string> texts;
    for (size_t i = 0; i < names_.size(); ++i) {
      const std::string name = names_[i];
      names_[i].clear();
      texts.push_back(sentence(name, name.empty() ? "" : " = ", written(static_cast<int>(i), false)));
      names_[i] = name;
    }
    return texts;
  }

 private:
  const ProgramStep& step(int at) const { return program_.steps()[static_cast<size_t>(at)]; }

  void name_values() {
    std::vector<int> uses(names_.size());
    for (const ProgramStep& s : program_.steps()) {
      for (int i = 0; i < s.num_operands(); ++i) ++uses[static_cast<size_t>(s.operands[i])];
    }
    for (int result : {program_.mask(), program_.score()}) {
      if (result >= 0) ++uses[static_cast<size_t>(result)];
    }
    int named = 0;
    for (size_t i = 0; i < names_.size(); ++i) {
      if (uses[i] < 2 || step(static_cast<int>(i)).num_operands() == 0) continue;
      const std::string value = written(static_cast<int>(i), false);
      names_[i] = sentence("_", ++named);
      text_ += sentence(names_[i], " = ", value, "; ");
    }
  }

  std::string listed(const ProgramStep& s) const {
    std::string list;
    for (int i = 0; i < s.num_operands(); ++i) list += sentence(i == 0 ? "" : ", ", written(s.operands[i], false));
    return list;
  }

  // `inside`: as an operand, which wants parentheses around operators.
  std::string written(int at, bool inside) const {
    if (const std::string& name = names_[static_cast<size_t>(at)]; !name.empty()) return name;
    const ProgramStep& s = step(at);
    const OpRow& row = row_of(s.op);
    if (s.op == Op::kConstant) {
      if (s.type == ValueType::kFloat) return float_text(s.number);
      return s.type == ValueType::kInt ? sentence(s.integer) : s.integer != 0 ? "True" : "False";
    }
    if (s.op == Op::kGather) {
      return sentence(program_.captures()[static_cast<size_t>(s.capture)].name, "[", listed(s), "]");
    }
    if (row.form == Form::kName) return row.word;
    if (row.form == Form::kCall) return sentence(row.word, "(", listed(s), ")");
    std::string text = row.form == Form::kPrefix
                           ? sentence(row.word, written(s.operands[0], true))
                           : sentence(written(s.operands[0], true), " ", row.word, " ", written(s.operands[1], true));
    return inside ? sentence("(", text, ")") : text;
  }

  const Program& program_;
  std::vector<std::string> names_;  // of the values that have one
  std::string text_;
};

}  // namespace

bool is_free_name(std::string_view name) {
  static constexpr std::string_view kWords[] = {"score", "mask",  "b",    "h",     "q",    "k",    "offset",
                                                "True",  "False", "inf",  "nan",   "and",  "or",   "not",
                                                "int",   "float", "bool", "clamp", "ceil", "where"};
  if (name.empty() || !is_letter(name[0]) || (name[0] == '_' && name.size() > 1 && is_digit(name[1]))) return false;
  if (!std::all_of(name.begin(), name.end(), [](char c) { return is_letter(c) || is_digit(c); })) return false;
  return function_named(name) == nullptr && std::find(std::begin(kWords), std::end(kWords), name) == std::end(kWords);
}

std::string text_of(const Program& program) { return Writer(program).write(); }

std::vector<std::string> texts_of_steps(const Program& program) { return Writer(program).steps(); }

}  // namespace polyhead::program
