// Text -> program: a recursive descent over Python's grammar of expressions.
#include <charconv>
#include <cmath>
#include <map>
#include <new>

#include "core/sentence.h"
#include "polyhead/program.h"
#include "program/ops.h"
#include "program/text.h"

namespace polyhead {
namespace program {
namespace {

struct Token {
  enum Kind : uint8_t { kEnd, kNewStatement, kName, kInteger, kFloat, kSign } kind = kEnd;
  std::string_view text;
  size_t at = 0;
};

// Signs of two letters stand before those of one.
constexpr std::string_view kSigns[] = {"**", "//", "<<", ">>", "<=", ">=", "==", "!=", "+", "-", "*", "/", "%",
                                       "<",  ">",  "=",  "&",  "|",  "^",  "~",  "(",  ")", "[", "]", ",", ":"};

class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text) { next(); }

  const Token& now() const { return now_; }
  bool is(std::string_view word) const {
    return (now_.kind == Token::kSign || now_.kind == Token::kName) && now_.text == word;
  }
  bool take(std::string_view word) {
    if (!is(word)) return false;
    next();
    return true;
  }

  void next() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
    now_ = {Token::kEnd, text_.substr(at_, 0), at_};
    if (at_ == text_.size()) return;
    const char c = text_[at_];
    if (c == ';' || c == '\n') return end(Token::kNewStatement, 1);
    if (is_digit(c) || (c == '.' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1]))) return number();
    if (is_letter(c)) {
      size_t length = 1;
      while (at_ + length < text_.size() && (is_letter(text_[at_ + length]) || is_digit(text_[at_ + length]))) ++length;
      return end(Token::kName, length);
    }
    for (const std::string_view sign : kSigns) {
      if (text_.substr(at_, sign.size()) == sign) return end(Token::kSign, sign.size());
    }
    end(Token::kSign, 1);  // nothing takes it
  }

 private:
  static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  void end(Token::Kind kind, size_t length) {
    now_ = {kind, text_.substr(at_, length), at_};
    at_ += length;
  }

  void number() {
    size_t length = 0;
    Token::Kind kind = Token::kInteger;
    const auto at = [&](size_t i) { return at_ + i < text_.size() ? text_[at_ + i] : ' '; };
    while (is_digit(at(length))) ++length;
    if (at(length) == '.') {
      kind = Token::kFloat;
      do ++length;
      while (is_digit(at(length)));
    }
    if (at(length) == 'e' || at(length) == 'E') {
      const size_t sign = at(length + 1) == '+' || at(length + 1) == '-' ? 1 : 0;
      if (is_digit(at(length + 1 + sign))) {
        kind = Token::kFloat;
        length += 1 + sign;
        while (is_digit(at(length))) ++length;
      }
    }
    end(kind, length);
  }

  std::string_view text_;
  size_t at_ = 0;
  Token now_;
};

// One level of binary operators, loosest first.
struct Infix {
  std::string_view sign;
  Op bools, ints;  // the same where the operands' types do not choose
};

class Parser {
 public:
  explicit Parser(std::string_view text) : tokens_(text) {}

  Result<SharedProgram> parse() {
    while (error_.empty() && tokens_.now().kind != Token::kEnd) {
      if (tokens_.now().kind == Token::kNewStatement) {
        tokens_.next();
      } else {
        statement();
      }
    }
    if (!error_.empty()) return invalid(error_);
    return builder_.build(score_, mask_);
  }

 private:
  static constexpr int kMostNesting = 200;

  Expression fail(const std::string& message) {
    if (error_.empty()) error_ = sentence("program: ", message);
    return {&builder_, 0};
  }
  Expression expected(std::string_view what) {
    const Token& now = tokens_.now();
    const std::string_view came = now.kind == Token::kEnd ? "the end"
                                  : now.text == "\n"      ? "the end of the line"
                                                          : now.text;
    const bool quoted = now.kind != Token::kEnd && now.text != "\n";
    return fail(
        sentence("expected ", what, " at ", now.at, ", there is ", quoted ? "\"" : "", came, quoted ? "\"" : ""));
  }

  void statement() {
    const Token name = tokens_.now();
    if (name.kind != Token::kName) return void(expected("a name"));
    tokens_.next();
    if (tokens_.take(":")) return declare(name.text);
    if (!tokens_.take("=")) return void(expected("\"=\" or \":\""));
    const Expression value = expression();
    if (!error_.empty()) return;
    if (tokens_.now().kind != Token::kNewStatement && tokens_.now().kind != Token::kEnd) {
      return void(expected("\";\" or an operator"));
    }
    Expression* const result = name.text == "score" ? &score_ : name.text == "mask" ? &mask_ : nullptr;
    const bool local = is_free_name(name.text) || (name.text[0] == '_' && name.text.size() > 1);
    if (result == nullptr && !local) return void(fail(sentence("\"", name.text, "\" cannot be assigned to")));
    if ((result != nullptr && result->given()) || values_.contains(name.text) || declared_.contains(name.text)) {
      return void(fail(sentence("\"", name.text, "\" is given twice")));
    }
    (result != nullptr ? *result : values_[name.text]) = value;
  }

  void declare(std::string_view name) {
    ValueType type = ValueType::kFloat;
    if (tokens_.is("int")) {
      type = ValueType::kInt;
    } else if (tokens_.is("bool")) {
      type = ValueType::kBool;
    } else if (!tokens_.is("float")) {
      return void(expected("float, int or bool"));
    }
    tokens_.next();
    if (!is_free_name(name)) return void(fail(sentence("no tensor can be named \"", name, "\"")));
    if (values_.contains(name) || !declared_.emplace(name, type).second) {
      return void(fail(sentence("\"", name, "\" is given twice")));
    }
    builder_.capture(name, type);
  }

  // Levels of Python's grammar, loosest first.
  Expression expression() {
    if (++nesting_ > kMostNesting) return fail(sentence("expressions nest deeper than ", kMostNesting));
    const Expression value = either();
    --nesting_;
    return value;
  }

  Expression either() {
    Expression a = both();
    while (error_.empty() && tokens_.take("or")) a = apply(Op::kOr, a, both());
    return a;
  }
  Expression both() {
    Expression a = negation();
    while (error_.empty() && tokens_.take("and")) a = apply(Op::kAnd, a, negation());
    return a;
  }
  Expression negation() {
    int negations = 0;
    while (tokens_.take("not")) ++negations;
    Expression a = comparison();
    return negations == 0 ? a : negations % 2 == 1 ? apply(Op::kNot, a) : apply(Op::kNot, apply(Op::kNot, a));
  }

  // a < b <= c is a < b and b <= c.
  Expression comparison() {
    Expression a = infix(0), all;
    while (error_.empty()) {
      const std::string_view sign = tokens_.now().text;
      if (tokens_.now().kind != Token::kSign ||
          !(sign == "<" || sign == "<=" || sign == ">" || sign == ">=" || sign == "==" || sign == "!=")) {
        return all.given() ? all : a;
      }
      tokens_.next();
      const Expression b = infix(0);
      const Expression one = sign == "<"    ? apply(Op::kLess, a, b)
                             : sign == "<=" ? apply(Op::kLessEqual, a, b)
                             : sign == ">"  ? apply(Op::kLess, b, a)
                             : sign == ">=" ? apply(Op::kLessEqual, b, a)
                             : sign == "==" ? apply(Op::kEqual, a, b)
                                            : apply(Op::kNot, apply(Op::kEqual, a, b));
      all = all.given() ? apply(Op::kAnd, all, one) : one;
      a = b;
    }
    return a;
  }

  Expression infix(size_t level) {
    static constexpr size_t kLevels = 6;
    static constexpr Infix kInfixes[kLevels][4] = {
        {{"|", Op::kOr, Op::kBitOr}},
        {{"^", Op::kBitXor, Op::kBitXor}},
        {{"&", Op::kAnd, Op::kBitAnd}},
        {{"<<", Op::kShiftLeft, Op::kShiftLeft}, {">>", Op::kShiftRight, Op::kShiftRight}},
        {{"+", Op::kAdd, Op::kAdd}, {"-", Op::kSub, Op::kSub}},
        {{"*", Op::kMul, Op::kMul},
         {"/", Op::kDiv, Op::kDiv},
         {"//", Op::kFloorDiv, Op::kFloorDiv},
         {"%", Op::kMod, Op::kMod}},
    };
    if (level == kLevels) return unary();
    Expression a = infix(level + 1);
    for (bool found = true; found && error_.empty();) {
      found = false;
      for (const Infix& row : kInfixes[level]) {
        if (row.sign.empty() || !tokens_.take(row.sign)) continue;
        found = true;
        const Expression b = infix(level + 1);
        if (!error_.empty()) break;
        a = row.bools == row.ints ? apply(row.bools, a, b) : builder_.combine(row.bools, row.ints, a, b);
        break;
      }
    }
    return a;
  }

  Expression unary() {
    if (++nesting_ > kMostNesting) return fail(sentence("expressions nest deeper than ", kMostNesting));
    Expression value;
    if (tokens_.take("-")) {
      value = negative();
    } else if (tokens_.take("+")) {
      value = unary();
    } else if (tokens_.take("~")) {
      const Expression x = unary();
      if (error_.empty())
        value = builder_.combine(Op::kNot, Op::kBitXor, x, builder_.is_bool(x) ? Expression(true) : -1);
    } else {
      value = power();
    }
    --nesting_;
    return value;
  }

  Expression negative() {
    const Token number = tokens_.now();
    if (number.kind == Token::kInteger || number.kind == Token::kFloat || number.text == "inf") {
      tokens_.next();
      if (!tokens_.is("**")) return constant(number, true);
      return apply(Op::kNeg, power_of(constant(number, false)));
    }
    const Expression x = unary();
    return error_.empty() ? apply(Op::kNeg, x) : x;
  }

  Expression power() { return power_of(primary()); }
  Expression power_of(Expression base) {
    if (!error_.empty() || !tokens_.take("**")) return base;
    return apply(Op::kPow, base, unary());
  }

  Expression constant(const Token& token, bool negative) {
    if (token.text == "inf") return negative ? -HUGE_VAL : HUGE_VAL;
    const char* const begin = token.text.data();
    const char* const end = begin + token.text.size();
    if (token.kind == Token::kFloat) {
      double value = 0;
      std::from_chars(begin, end, value);  // beyond a double: as it leaves it, 0
      return negative ? -value : value;
    }
    uint64_t value = 0;
    const bool fits = std::from_chars(begin, end, value).ec == std::errc();
    if (!fits || value > uint64_t{INT64_MAX} + (negative ? 1 : 0)) {
      return fail(sentence("\"", token.text, "\" does not fit an int64"));
    }
    return static_cast<int64_t>(negative ? 0 - value : value);
  }

  Expression primary() {
    const Token token = tokens_.now();
    if (tokens_.take("(")) {
      const Expression value = expression();
      if (error_.empty() && !tokens_.take(")")) return expected("\")\"");
      return value;
    }
    if (token.kind == Token::kInteger || token.kind == Token::kFloat) {
      tokens_.next();
      return constant(token, false);
    }
    if (token.kind != Token::kName) return expected("a value");
    tokens_.next();
    if (tokens_.is("[")) return element(token.text);
    if (tokens_.is("(")) return call(token.text);
    return named(token);
  }

  Expression named(const Token& token) {
    const std::string_view name = token.text;
    if (name == "score") return builder_.score();
    if (name == "b") return builder_.batch();
    if (name == "h") return builder_.head();
    if (name == "q") return builder_.query();
    if (name == "k") return builder_.key();
    if (name == "offset") return builder_.offset();
    if (name == "True") return true;
    if (name == "False") return false;
    if (name == "inf") return HUGE_VAL;
    if (name == "nan") return std::nan("");
    if (const auto value = values_.find(name); value != values_.end()) return value->second;
    return fail(sentence("\"", name, "\" at ", token.at, " is no value: an element of a tensor is ", name, "[...]"));
  }

  // The values up to `end`, and that taken.
  std::vector<Expression> list(std::string_view end) {
    std::vector<Expression> values;
    tokens_.next();
    while (error_.empty() && !tokens_.take(end)) {
      if (!values.empty() && !tokens_.take(",")) {
        expected(sentence("\",\" or \"", end, "\""));
        break;
      }
      values.push_back(expression());
    }
    return values;
  }

  Expression element(std::string_view name) {
    const std::vector<Expression> index = list("]");
    if (!error_.empty()) return {&builder_, 0};
    if (!is_free_name(name)) return fail(sentence("no tensor can be named \"", name, "\""));
    const auto declared = declared_.find(name);
    const ValueType type = declared == declared_.end() ? ValueType::kFloat : declared->second;
    const CapturedTensor tensor = builder_.capture(name, type);
    declared_.emplace(name, type);
    return builder_.gather(tensor.capture, index);
  }

  Expression call(std::string_view name) {
    std::vector<Expression> values = list(")");
    if (!error_.empty()) return {&builder_, 0};
    if (name == "clamp" && values.size() == 3) {
      return apply(Op::kMin, apply(Op::kMax, values[0], values[1]), values[2]);
    }
    if (name == "ceil" && values.size() == 1) {
      return apply(Op::kNeg, apply(Op::kFloor, apply(Op::kNeg, values[0])));
    }
    const OpRow* const row = function_named(name);
    const int needed = row != nullptr ? row->num_operands : name == "clamp" ? 3 : name == "ceil" ? 1 : -1;
    if (needed < 0) return fail(sentence("there is no function \"", name, "\""));
    if (row != nullptr && (row->op == Op::kMin || row->op == Op::kMax) && values.size() > 2) {
      Expression result = values[0];
      for (size_t i = 1; i < values.size(); ++i) result = apply(row->op, result, values[i]);
      return result;
    }
    if (row == nullptr || static_cast<int>(values.size()) != needed) {
      return fail(sentence(name, " takes ", needed, needed == 1 ? " value" : " values", ", is given ", values.size()));
    }
    values.resize(3);
    return apply(row->op, values[0], values[1], values[2]);
  }

  Expression apply(Op op, const Expression& a, const Expression& b = {}, const Expression& c = {}) {
    if (!error_.empty()) return {&builder_, 0};
    return builder_.apply(op, a, b, c);
  }

  Tokens tokens_;
  ProgramBuilder builder_;
  std::map<std::string_view, Expression> values_;
  std::map<std::string_view, ValueType> declared_;  // tensors, told or met
  Expression score_, mask_;
  int nesting_ = 0;
  std::string error_;
};

}  // namespace
}  // namespace program

Result<SharedProgram> parse_program(std::string_view text) try {
  return program::Parser(text).parse();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
