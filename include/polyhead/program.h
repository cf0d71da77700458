// Score and mask programs: what is done to each score, and which keys a query sees, composed by the caller and run
// inside the attention kernels, forward and backward.
//
//   Result<SharedProgram> alibi = parse_program("score = score - slope[h] * abs(q - k); mask = k <= q");
//   desc.program = *alibi;                      // its tensor `slope` is described in desc.captures,
//   args.captures = ...                         // given with each call, and has a gradient in BackwardArgs::grad_captures
//
// A program is plain data: a list of steps, immutable, shared by plans; a backend receives it as such. It is written as
// text, or by expressions in C++ (ProgramBuilder); Python traces functions. Definition in code: src/reference/program.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/program_ops.h"
#include "polyhead/status.h"

namespace polyhead {

/// A tensor that a program reads. Each call gives it.
struct Capture {
  std::string name;
  ValueType type = ValueType::kFloat;  ///< kFloat: any floating dtype; kInt: int32 or int64; kBool: bool
  int ndim = 0;                        ///< 0: one number, given as a tensor of one dim of size 1

  bool operator==(const Capture&) const = default;
};

class Program;
namespace program {
class Schedule;  // src/program/schedule.h
const Schedule& schedule_of(const Program& program);
}  // namespace program

using SharedProgram = std::shared_ptr<const Program>;

/// At most one score and one mask, in steps that both may share. Equal programs are the same object as long as one of
/// them lives, so that pointers compare.
class Program {
 public:
  static constexpr int kMostCaptures = 8;

  std::span<const ProgramStep> steps() const { return steps_; }
  std::span<const Capture> captures() const { return captures_; }
  int score() const { return score_; }  ///< the step that is the score; -1: scores stay as they are
  int mask() const { return mask_; }    ///< the step that says whether a query sees a key; -1: all that it sees anyway
  const std::string& text() const { return text_; }  ///< canonical: parse_program(text()) is this program

 private:
  friend class ProgramBuilder;
  friend const program::Schedule& program::schedule_of(const Program& program);
  Program() = default;
  std::vector<ProgramStep> steps_;
  std::vector<Capture> captures_;
  int score_ = -1, mask_ = -1;
  std::string text_;
  std::shared_ptr<const program::Schedule> schedule_;
};

/// A program from its text: statements divided by `;` or ends of lines, in Python's grammar of expressions.
///
///   window: int;  d = q - k;  score = score + bias[h, min(abs(d), 31)];  mask = 0 <= d and d < window[h]
///
/// `name: float | int | bool` tells what a tensor holds (float where nothing is told), `name = expression` names a value;
/// `score` and `mask` are the results, one of them at least. In expressions stand score, b (batch), h (head), q (query),
/// k (key), offset, numbers, True and False, elements of tensors (`table[h, q - k]`, `number[]`), + - * / // % ** << >>
/// & | ^ ~ and or not, comparisons (chained too), and the functions where(condition, a, b), abs, min, max,
/// clamp(x, low, high), floor, ceil, exp, log, tanh, sigmoid, erf, sqrt, rsqrt, sin, cos, pow, float, int.
/// An error names what was expected, and where.
POLYHEAD_API Result<SharedProgram> parse_program(std::string_view text);

class ProgramBuilder;

/// A value of a program that is being built, or a number. Operators and functions below make new ones; operands of
/// different types become the wider one (bool, int, float). What makes no sense is reported by ProgramBuilder::build.
struct Expression {
  ProgramBuilder* builder = nullptr;  ///< null: a number, or nothing
  int step = -1;
  std::optional<ProgramStep> constant = {};

  Expression() = default;
  Expression(ProgramBuilder* b, int at) : builder(b), step(at) {}
  Expression(double value) : constant(ProgramStep{.number = value}) {}  // NOLINT: implicit on purpose
  Expression(bool value) : constant(ProgramStep{.type = ValueType::kBool, .integer = value}) {}    // NOLINT
  Expression(int64_t value) : constant(ProgramStep{.type = ValueType::kInt, .integer = value}) {}  // NOLINT
  Expression(int value) : Expression(int64_t{value}) {}                                            // NOLINT

  bool given() const { return builder != nullptr || constant; }
};

/// A tensor of a program that is being built: tensor(i, j) is an element.
struct CapturedTensor {
  ProgramBuilder* builder = nullptr;
  int capture = -1;

  template <class... Index>
  Expression operator()(Index... index) const;
};

/// Builds a program by expressions:
///
///   ProgramBuilder p;
///   const CapturedTensor slope = p.capture("slope", ValueType::kFloat, 1);
///   Result<SharedProgram> alibi = p.build(p.score() - slope(p.head()) * abs(p.query() - p.key()), p.key() <= p.query());
class ProgramBuilder {
 public:
  Expression score() { return input(Op::kScore); }
  Expression batch() { return input(Op::kBatch); }
  Expression head() { return input(Op::kHead); }
  Expression query() { return input(Op::kQuery); }
  Expression key() { return input(Op::kKey); }
  Expression offset() { return input(Op::kOffset); }
  /// ndim -1: as it is first indexed.
  POLYHEAD_API CapturedTensor capture(std::string_view name, ValueType type, int ndim = -1);
  POLYHEAD_API Expression gather(int capture, std::span<const Expression> index);
  /// Converts the operands.
  POLYHEAD_API Expression apply(Op op, Expression a, Expression b = {}, Expression c = {});
  /// By `bools` where both are bools, else by `ints`.
  POLYHEAD_API Expression combine(Op bools, Op ints, Expression a, Expression b);
  bool is_bool(const Expression& x) const { return x.builder == this && type_of(x) == ValueType::kBool; }

  /// The program; a default Expression: no score, or no mask. The first thing that made no sense, else.
  POLYHEAD_API Result<SharedProgram> build(Expression score, Expression mask = {});

 private:
  POLYHEAD_API Expression input(Op op);
  Expression add(ProgramStep step);
  Expression own(const Expression& x);  // a constant becomes a step
  Expression convert(Expression x, ValueType type);
  Expression fail(std::string message);
  ValueType type_of(const Expression& x) const { return steps_[static_cast<size_t>(x.step)].type; }
  void unify(Expression& a, Expression& b, ValueType least);

  std::vector<ProgramStep> steps_;
  std::vector<Capture> captures_;
  std::string error_;  // the first
};

POLYHEAD_API Expression operator+(Expression a, Expression b);
POLYHEAD_API Expression operator-(Expression a, Expression b);
POLYHEAD_API Expression operator*(Expression a, Expression b);
POLYHEAD_API Expression operator/(Expression a, Expression b);  ///< a float
POLYHEAD_API Expression operator-(Expression a);
POLYHEAD_API Expression operator<(Expression a, Expression b);
POLYHEAD_API Expression operator<=(Expression a, Expression b);
POLYHEAD_API Expression operator>(Expression a, Expression b);
POLYHEAD_API Expression operator>=(Expression a, Expression b);
POLYHEAD_API Expression operator==(Expression a, Expression b);
POLYHEAD_API Expression operator!=(Expression a, Expression b);
POLYHEAD_API Expression operator&(Expression a, Expression b);  ///< of bools, or bit by bit
POLYHEAD_API Expression operator|(Expression a, Expression b);
POLYHEAD_API Expression operator!(Expression a);
POLYHEAD_API Expression floor_div(Expression a, Expression b);
POLYHEAD_API Expression floor_mod(Expression a, Expression b);
POLYHEAD_API Expression where(Expression condition, Expression a, Expression b);
POLYHEAD_API Expression min(Expression a, Expression b);
POLYHEAD_API Expression max(Expression a, Expression b);
POLYHEAD_API Expression abs(Expression x);
POLYHEAD_API Expression exp(Expression x);
POLYHEAD_API Expression log(Expression x);
POLYHEAD_API Expression tanh(Expression x);
POLYHEAD_API Expression sigmoid(Expression x);

template <class... Index>
Expression CapturedTensor::operator()(Index... index) const {
  const Expression indices[sizeof...(Index) + 1] = {index...};
  return builder->gather(capture, std::span<const Expression>(indices, sizeof...(Index)));
}

}  // namespace polyhead
