// Programs from expressions: conversions, one step for equal values, what makes no sense.
#include <algorithm>
#include <map>
#include <mutex>

#include "core/sentence.h"
#include "polyhead/program.h"
#include "program/ops.h"
#include "program/schedule.h"
#include "program/text.h"

namespace polyhead {
namespace {

using program::row_of;
using program::Takes;

constexpr size_t kMostSteps = 128;
constexpr int kMostDims = ProgramStep::kMostOperands;  // of a captured tensor: its indices are operands

}  // namespace

const program::Schedule& program::schedule_of(const Program& program) { return *program.schedule_; }

Expression ProgramBuilder::fail(std::string message) {
  if (error_.empty()) error_ = std::move(message);
  if (steps_.empty()) steps_.emplace_back();  // what an expression may stand for
  return {this, 0};
}

Expression ProgramBuilder::add(ProgramStep step) {
  const auto same = std::find(steps_.begin(), steps_.end(), step);
  if (same != steps_.end()) return {this, static_cast<int>(same - steps_.begin())};
  if (steps_.size() == kMostSteps) return fail(sentence("the program has more than ", kMostSteps, " steps"));
  steps_.push_back(step);
  return {this, static_cast<int>(steps_.size()) - 1};
}

Expression ProgramBuilder::input(Op op) { return add({.op = op, .type = row_of(op).gives}); }

Expression ProgramBuilder::own(const Expression& x) {
  if (x.constant) return add(*x.constant);
  if (x.builder == this) return x;
  return fail(x.builder == nullptr ? "an operand is missing" : "an operand belongs to another builder");
}

CapturedTensor ProgramBuilder::capture(std::string_view name, ValueType type, int ndim) {
  for (size_t i = 0; i < captures_.size(); ++i) {
    if (captures_[i].name != name) continue;
    if (captures_[i].type != type || (ndim >= 0 && captures_[i].ndim != ndim)) {
      fail(sentence("tensor ", name, " is captured twice, with another type or rank"));
    }
    return {this, static_cast<int>(i)};
  }
  if (ndim > kMostDims) {
    fail(sentence("tensor ", name, " has ", ndim, " dims, takes 0 to ", kMostDims));
  }
  if (!program::is_free_name(name)) fail(sentence("a tensor is named \"", name, "\", which no tensor can be"));
  if (captures_.size() == Program::kMostCaptures) {
    fail(sentence("the program captures more than ", Program::kMostCaptures, " tensors"));
    return {this, 0};
  }
  captures_.push_back({std::string(name), type, ndim});
  return {this, static_cast<int>(captures_.size()) - 1};
}

Expression ProgramBuilder::gather(int capture, std::span<const Expression> index) {
  if (!error_.empty()) return {this, 0};
  Capture& of = captures_[static_cast<size_t>(capture)];
  if (of.ndim < 0) of.ndim = static_cast<int>(index.size());
  if (index.size() > kMostDims) {
    return fail(sentence("tensor ", of.name, " is given ", index.size(), " indices, takes ", kMostDims, " at most"));
  }
  if (static_cast<int>(index.size()) != of.ndim) {
    return fail(sentence("tensor ", of.name, " has ", of.ndim, " dims, is given ", index.size(), " indices"));
  }
  ProgramStep step{.op = Op::kGather, .type = of.type, .capture = static_cast<int16_t>(capture)};
  for (size_t i = 0; i < index.size(); ++i) {
    const Expression at = own(index[i]);
    if (!error_.empty()) return at;
    if (type_of(at) == ValueType::kFloat) {
      return fail(sentence("index ", i, " of tensor ", of.name, " is a float, takes an int"));
    }
    step.operands[i] = convert(at, ValueType::kInt).step;
  }
  return add(step);
}

Expression ProgramBuilder::convert(Expression x, ValueType type) {
  if (!error_.empty()) return x;  // what stands for values then, step 0, may never become of that type
  const ValueType from = type_of(x);
  if (from == type) return x;
  const ProgramStep of = steps_[static_cast<size_t>(x.step)];
  if (type == ValueType::kBool) {
    if (from == ValueType::kInt) return apply(Op::kNot, apply(Op::kEqual, x, 0));
    return fail("a float stands where a bool is expected");
  }
  if (from == ValueType::kBool) return convert(apply(Op::kSelect, x, 1, 0), type);
  if (type == ValueType::kInt) return add({.op = Op::kToInt, .type = type, .operands = {x.step, -1, -1, -1}});
  if (of.op == Op::kConstant) return add(*Expression(static_cast<double>(of.integer)).constant);
  return add({.op = Op::kToFloat, .type = type, .operands = {x.step, -1, -1, -1}});
}

// Both become the wider of their types, `least` at least.
void ProgramBuilder::unify(Expression& a, Expression& b, ValueType least) {
  const ValueType wider = std::min({type_of(a), type_of(b), least});  // kFloat < kInt < kBool
  a = convert(a, wider);
  b = convert(b, wider);
}

Expression ProgramBuilder::apply(Op op, Expression a, Expression b, Expression c) {
  const program::OpRow& row = row_of(op);
  Expression* const operands[3] = {&a, &b, &c};
  for (int i = 0; i < row.num_operands; ++i) {
    // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): an op has three operands at most but for kGather, which has its own way
    *operands[i] = own(*operands[i]);
    if (!error_.empty()) return {this, 0};
  }
  if (op == Op::kSelect) {
    a = convert(a, ValueType::kBool);
    unify(b, c, ValueType::kBool);
    if (!error_.empty()) return {this, 0};
    return add({.op = op, .type = type_of(b), .operands = {a.step, b.step, c.step, -1}});
  }
  if (op == Op::kToFloat) return convert(a, ValueType::kFloat);
  if (op == Op::kToInt) return convert(a, ValueType::kInt);
  if (row.num_operands < 2) b = a;
  const bool integral = row.takes == Takes::kInts || row.takes == Takes::kBools;
  if (integral && (type_of(a) == ValueType::kFloat || type_of(b) == ValueType::kFloat)) {
    return fail(sentence("\"", row.word, "\" is given a float, takes ", row.takes == Takes::kInts ? "ints" : "bools"));
  }
  if (row.takes == Takes::kBools) {
    a = convert(a, ValueType::kBool);
    b = convert(b, ValueType::kBool);
  } else {
    unify(a, b, row.takes == Takes::kFloats ? ValueType::kFloat : ValueType::kInt);
  }
  if (!error_.empty()) return {this, 0};
  if (const ProgramStep& of = steps_[static_cast<size_t>(a.step)]; op == Op::kNeg && of.op == Op::kConstant) {
    if (of.type == ValueType::kFloat) return own(-of.number);
    return own(static_cast<int64_t>(0 - static_cast<uint64_t>(of.integer)));
  }
  ProgramStep step{
      .op = op, .type = row.gives == ValueType::kFloat ? type_of(a) : row.gives, .operands = {a.step, -1, -1, -1}};
  if (row.num_operands > 1) step.operands[1] = b.step;
  return add(step);
}

Expression ProgramBuilder::combine(Op bools, Op ints, Expression a, Expression b) {
  a = own(a);
  b = own(b);
  if (!error_.empty()) return {this, 0};
  const bool both_bool = type_of(a) == ValueType::kBool && type_of(b) == ValueType::kBool;
  return apply(both_bool ? bools : ints, a, b);
}

namespace {

// Steps in the order in which the results need them, without those that they do not.
class Renumbered {
 public:
  explicit Renumbered(const std::vector<ProgramStep>& from) : from_(from), place_(from.size(), -1) {}

  int add(int step) {
    const auto at = static_cast<size_t>(step);
    if (place_[at] >= 0) return place_[at];
    ProgramStep copy = from_[at];
    for (int i = 0; i < copy.num_operands(); ++i) copy.operands[i] = add(copy.operands[i]);
    steps.push_back(copy);
    return place_[at] = static_cast<int>(steps.size()) - 1;
  }

  std::vector<ProgramStep> steps;

 private:
  const std::vector<ProgramStep>& from_;
  std::vector<int> place_;
};

bool reads_score(const std::vector<ProgramStep>& steps, int step) {
  std::vector<bool> reads(static_cast<size_t>(step) + 1);
  for (size_t i = 0; i < reads.size(); ++i) {
    reads[i] = steps[i].op == Op::kScore;
    for (int n = 0; n < steps[i].num_operands(); ++n) {
      reads[i] = reads[i] || reads[static_cast<size_t>(steps[i].operands[n])];
    }
  }
  return reads.back();
}

// The program of that text that lives, or `made`.
SharedProgram only_one(SharedProgram made) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<const Program>, std::less<>> programs;
  const std::lock_guard lock(mutex);
  std::weak_ptr<const Program>& place = programs[made->text()];
  if (SharedProgram lives = place.lock()) return lives;
  place = made;
  if (programs.size() % 256 == 0) std::erase_if(programs, [](const auto& entry) { return entry.second.expired(); });
  return made;
}

}  // namespace

Result<SharedProgram> ProgramBuilder::build(Expression score, Expression mask) {
  if (score.given()) score = own(score);
  if (mask.given()) mask = own(mask);
  if (!score.given() && !mask.given()) fail("the program has neither score nor mask");
  if (error_.empty() && score.given()) score = convert(score, ValueType::kFloat);
  if (error_.empty() && mask.given()) mask = convert(mask, ValueType::kBool);
  if (error_.empty() && mask.given() && reads_score(steps_, mask.step))
    fail("the mask reads score, which only a score can");
  if (!error_.empty()) return invalid(error_);
  const std::shared_ptr<Program> made(new Program);
  Renumbered used(steps_);
  if (mask.given()) made->mask_ = used.add(mask.step);
  if (score.given()) made->score_ = used.add(score.step);
  made->steps_ = std::move(used.steps);
  made->captures_ = captures_;
  for (size_t i = 0; i < captures_.size(); ++i) {
    const auto reads = [&](const ProgramStep& step) { return step.capture == static_cast<int>(i); };
    if (std::any_of(made->steps_.begin(), made->steps_.end(), reads)) continue;
    return invalid(sentence("tensor ", captures_[i].name, " is captured, but neither score nor mask read it"));
  }
  made->text_ = program::text_of(*made);
  made->schedule_ = std::make_shared<const program::Schedule>(*made);
  if (made->schedule_->num_instructions > program::kMostInstructions) {
    return invalid(sentence("the program and its gradients have ", made->schedule_->num_instructions,
                            " instructions, at most ", program::kMostInstructions));
  }
  return only_one(made);
}

namespace {

ProgramBuilder* builder_of(const Expression& a, const Expression& b, const Expression& c = {}) {
  for (const Expression* x : {&a, &b, &c}) {
    if (x->builder != nullptr) return x->builder;
  }
  static thread_local ProgramBuilder none;  // of constants alone, with which C++ computes: nobody builds its program
  none = {};
  return &none;
}

Expression apply(Op op, const Expression& a, const Expression& b = {}, const Expression& c = {}) {
  return builder_of(a, b, c)->apply(op, a, b, c);
}

}  // namespace

Expression operator+(Expression a, Expression b) { return apply(Op::kAdd, a, b); }
Expression operator-(Expression a, Expression b) { return apply(Op::kSub, a, b); }
Expression operator*(Expression a, Expression b) { return apply(Op::kMul, a, b); }
Expression operator/(Expression a, Expression b) { return apply(Op::kDiv, a, b); }
Expression operator-(Expression a) { return apply(Op::kNeg, a); }
Expression operator<(Expression a, Expression b) { return apply(Op::kLess, a, b); }
Expression operator<=(Expression a, Expression b) { return apply(Op::kLessEqual, a, b); }
Expression operator>(Expression a, Expression b) { return apply(Op::kLess, b, a); }
Expression operator>=(Expression a, Expression b) { return apply(Op::kLessEqual, b, a); }
Expression operator==(Expression a, Expression b) { return apply(Op::kEqual, a, b); }
Expression operator!=(Expression a, Expression b) { return !(a == b); }
Expression operator&(Expression a, Expression b) { return builder_of(a, b)->combine(Op::kAnd, Op::kBitAnd, a, b); }
Expression operator|(Expression a, Expression b) { return builder_of(a, b)->combine(Op::kOr, Op::kBitOr, a, b); }
Expression operator!(Expression a) { return apply(Op::kNot, a); }
Expression floor_div(Expression a, Expression b) { return apply(Op::kFloorDiv, a, b); }
Expression floor_mod(Expression a, Expression b) { return apply(Op::kMod, a, b); }
Expression where(Expression condition, Expression a, Expression b) { return apply(Op::kSelect, condition, a, b); }
Expression min(Expression a, Expression b) { return apply(Op::kMin, a, b); }
Expression max(Expression a, Expression b) { return apply(Op::kMax, a, b); }
Expression abs(Expression x) { return apply(Op::kAbs, x); }
Expression exp(Expression x) { return apply(Op::kExp, x); }
Expression log(Expression x) { return apply(Op::kLog, x); }
Expression tanh(Expression x) { return apply(Op::kTanh, x); }
Expression sigmoid(Expression x) { return apply(Op::kSigmoid, x); }

}  // namespace polyhead
