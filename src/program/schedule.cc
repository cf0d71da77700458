#include "program/schedule.h"

#include <algorithm>
#include <bit>
#include <map>
#include <optional>

#include "program/ops.h"

namespace polyhead::program {
namespace {

// query * q + key * k + constant + the value of instruction `rest`, if there is one.
struct Affine {
  int64_t query = 0, key = 0, constant = 0;
  int rest = -1;

  bool is_diagonal() const { return query != 0 && query == -key; }
};

// Beyond this a coefficient might wrap.
constexpr int64_t kMostCoefficient = int64_t{1} << 31;

bool is_small(const Affine& x) {
  const auto small = [](int64_t c) { return -kMostCoefficient < c && c < kMostCoefficient; };
  return small(x.query) && small(x.key) && small(x.constant);
}

bool is_comparison(Op op) { return op == Op::kLess || op == Op::kLessEqual || op == Op::kEqual; }

Rate joined(Rate a, Rate b) { return a == Rate::kUniform || a == b ? b : b == Rate::kUniform ? a : Rate::kFull; }

class Builder {
 public:
  Builder(std::vector<Instruction>& instructions, bool transposes)
      : instructions_(instructions), transposes_(transposes) {}

  int add(Instruction x) {
    x.rate = rate_of(x);
    const auto same = std::find(instructions_.begin(), instructions_.end(), x);
    if (same != instructions_.end()) return static_cast<int>(same - instructions_.begin());
    instructions_.push_back(x);
    return static_cast<int>(instructions_.size()) - 1;
  }
  int add(Op op, ValueType type, int a, int b = -1, int c = -1) {
    Instruction x{.op = op, .type = type, .operands = {a, b, c, -1}};
    while (x.num_operands < 3 && x.operands[x.num_operands] >= 0) ++x.num_operands;
    x.takes = at(x.operands[x.num_operands - 1]).type;
    return add(x);
  }
  int number(double value) { return add({.number = static_cast<float>(value)}); }
  int integer(int64_t value) { return add({.type = ValueType::kInt, .takes = ValueType::kInt, .integer = value}); }

  // A step whose operands have become instructions.
  int translate(const ProgramStep& step, const int32_t (&operands)[ProgramStep::kMostOperands]) {
    Instruction x{.op = placed(step.op), .type = step.type, .takes = step.type, .capture = step.capture};
    x.num_operands = static_cast<int16_t>(step.num_operands());
    std::copy_n(operands, x.num_operands, x.operands);
    if (x.num_operands > 0) x.takes = at(x.operands[x.num_operands - 1]).type;
    x.number = static_cast<float>(step.number);
    x.integer = step.integer;
    if (step.type == ValueType::kInt) {
      if (const auto affine = affine_of(x); affine && affine->is_diagonal() && is_small(*affine)) return along(*affine);
    }
    if (const int simpler = by_power_of_two(x); simpler >= 0) return simpler;
    if (is_comparison(x.op) && x.takes == ValueType::kInt) {
      if (const int compared = compare_along(x); compared >= 0) return compared;
    }
    return add(x);
  }

  const Instruction& at(int i) const { return instructions_[static_cast<size_t>(i)]; }

 private:
  Op placed(Op op) const {
    if (!transposes_) return op;
    return op == Op::kQuery ? Op::kKey : op == Op::kKey ? Op::kQuery : op;
  }

  Rate rate_of(const Instruction& x) const {
    if (x.op == Op::kQuery) return Rate::kQuery;
    if (x.op == Op::kKey) return Rate::kKey;
    if (x.op == kDiagonal) return Rate::kDiagonal;
    if (x.op == Op::kScore || x.op == kGradient) return Rate::kFull;
    Rate rate = Rate::kUniform;
    for (int i = 0; i < x.num_operands; ++i) rate = joined(rate, at(x.operands[i]).rate);
    return rate;
  }

  std::optional<Affine> affine(int i) const {
    const Instruction& x = at(i);
    if (x.type != ValueType::kInt) return {};
    if (const auto found = affine_of(x)) return found;
    if (x.rate != Rate::kUniform) return {};
    return Affine{.rest = i};
  }

  std::optional<Affine> affine_of(const Instruction& x) const {
    if (x.op == Op::kQuery) return Affine{.query = 1};
    if (x.op == Op::kKey) return Affine{.key = 1};
    if (x.op == kDiagonal) return Affine{.query = 1, .key = -1};
    if (x.op == Op::kConstant) return Affine{.constant = x.integer};
    if (x.op != Op::kAdd && x.op != Op::kSub && x.op != Op::kMul && x.op != Op::kNeg) return {};
    const auto a = affine(x.operands[0]), b = x.num_operands > 1 ? affine(x.operands[1]) : Affine{};
    if (!a || !b || !is_small(*a) || !is_small(*b)) return {};
    switch (x.op) {
      case Op::kAdd:
        if (a->rest >= 0 && b->rest >= 0) return {};
        return Affine{a->query + b->query, a->key + b->key, a->constant + b->constant, std::max(a->rest, b->rest)};
      case Op::kSub:
        if (b->rest >= 0) return {};
        return Affine{a->query - b->query, a->key - b->key, a->constant - b->constant, a->rest};
      case Op::kNeg:
        if (a->rest >= 0) return {};
        return Affine{-a->query, -a->key, -a->constant, -1};
      default: break;
    }
    const Affine &factor = a->query == 0 && a->key == 0 ? *a : *b, &of = &factor == &*a ? *b : *a;
    if (factor.query != 0 || factor.key != 0 || factor.rest >= 0 || of.rest >= 0) return {};
    const int64_t by = factor.constant;
    return Affine{of.query * by, of.key * by, of.constant * by, -1};
  }

  // The value of an affine form of q - k.
  int along(const Affine& x) {
    int value = add({.op = kDiagonal, .type = ValueType::kInt, .takes = ValueType::kInt});
    if (x.query != 1) value = add(Op::kMul, ValueType::kInt, value, integer(x.query));
    if (x.constant != 0) value = add(Op::kAdd, ValueType::kInt, value, integer(x.constant));
    return x.rest < 0 ? value : add(Op::kAdd, ValueType::kInt, value, x.rest);
  }

  // a < b where a - b runs along the diagonals: the same of a - b and 0.
  int compare_along(const Instruction& x) {
    const auto a = affine(x.operands[0]), b = affine(x.operands[1]);
    if (!a || !b || (a->rest >= 0 && b->rest >= 0)) return -1;
    Affine left{a->query - b->query, a->key - b->key, a->constant - b->constant, a->rest};
    if (!left.is_diagonal() || !is_small(left) || !is_small(*a) || !is_small(*b)) return -1;
    const int right = b->rest >= 0 ? b->rest : integer(0);
    return add(x.op, ValueType::kBool, along(left), right);
  }

  int by_power_of_two(const Instruction& x) {
    if (x.op != Op::kFloorDiv && x.op != Op::kMod) return -1;
    const Instruction& by = at(x.operands[1]);
    if (by.op != Op::kConstant || by.integer <= 0 || !std::has_single_bit(static_cast<uint64_t>(by.integer))) return -1;
    const int64_t n = by.integer;
    if (x.op == Op::kMod) return add(Op::kBitAnd, ValueType::kInt, x.operands[0], integer(n - 1));
    return add(Op::kShiftRight, ValueType::kInt, x.operands[0], integer(std::countr_zero(static_cast<uint64_t>(n))));
  }

  std::vector<Instruction>& instructions_;
  const bool transposes_;
};

// Gradients of the floats that a score is made of, as instructions: reverse mode, from the last to the first.
class Gradients {
 public:
  Gradients(Builder& builder, int num_instructions)
      : b_(builder), adjoint_(static_cast<size_t>(num_instructions), -1) {}

  void run(int score) {
    adjoint_[static_cast<size_t>(score)] = b_.add({.op = kGradient});
    for (int i = score; i >= 0; --i) {
      if (const int g = of(i); g >= 0 && b_.at(i).type == ValueType::kFloat) pass_on(i, g);
    }
  }
  int of(int instruction) const { return adjoint_[static_cast<size_t>(instruction)]; }

 private:
  static constexpr ValueType kFloat = ValueType::kFloat, kBool = ValueType::kBool;

  int f(Op op, int x, int y = -1) { return b_.add(op, kFloat, x, y); }
  int chain(int g, int slope) { return b_.add(kChain, kFloat, g, slope); }
  int select(int condition, int x, int y) { return b_.add(Op::kSelect, kFloat, condition, x, y); }
  int is(Op op, int x, int y) { return b_.add(op, kBool, x, y); }

  void give(int to, int gradient) {
    if (b_.at(to).op == Op::kConstant || b_.at(to).type != kFloat) return;
    int& sum = adjoint_[static_cast<size_t>(to)];
    sum = sum < 0 ? gradient : f(Op::kAdd, sum, gradient);
  }

  // y: the value whose gradient is g.
  void pass_on(int y, int g) {
    const Instruction s = b_.at(y);
    const int a = s.operands[0], b = s.operands[1];
    const int zero = b_.number(0), one = b_.number(1), half = b_.number(0.5);
    switch (s.op) {
      case Op::kAdd: give(a, g), give(b, g); break;
      case Op::kSub: give(a, g), give(b, f(Op::kNeg, g)); break;
      case Op::kMul: give(a, chain(g, b)), give(b, chain(g, a)); break;
      case Op::kDiv: give(a, chain(g, f(Op::kDiv, one, b))), give(b, f(Op::kNeg, chain(g, f(Op::kDiv, y, b)))); break;
      case Op::kNeg: give(a, f(Op::kNeg, g)); break;
      case Op::kAbs: {
        const int negative = select(is(Op::kLess, a, zero), f(Op::kNeg, g), zero);
        give(a, select(is(Op::kLess, zero, a), g, negative));
        break;
      }
      case Op::kMin:
      case Op::kMax: {
        const int equal = is(Op::kEqual, a, b), shared = f(Op::kMul, g, half);
        give(a, select(equal, shared, select(is(Op::kEqual, y, a), g, zero)));
        give(b, select(equal, shared, select(is(Op::kEqual, y, b), g, zero)));
        break;
      }
      case Op::kSelect: give(b, select(a, g, zero)), give(s.operands[2], select(a, zero, g)); break;
      default: pass_on_function(s, y, g); break;
    }
  }

  void pass_on_function(const Instruction& s, int y, int g) {
    const int a = s.operands[0], b = s.operands[1];
    const int zero = b_.number(0), one = b_.number(1), half = b_.number(0.5);
    switch (s.op) {
      case Op::kExp: give(a, chain(g, y)); break;
      case Op::kLog: give(a, chain(g, f(Op::kDiv, one, a))); break;
      case Op::kTanh: give(a, chain(g, f(Op::kSub, one, f(Op::kMul, y, y)))); break;
      case Op::kSigmoid: give(a, chain(g, f(Op::kMul, y, f(Op::kSub, one, y)))); break;
      case Op::kErf: {
        const int bell = f(Op::kExp, f(Op::kNeg, f(Op::kMul, a, a)));
        give(a, chain(g, f(Op::kMul, b_.number(1.12837916709551257390), bell)));
        break;
      }
      case Op::kSqrt: give(a, chain(g, f(Op::kDiv, half, y))); break;
      case Op::kRsqrt: give(a, chain(g, f(Op::kNeg, f(Op::kMul, half, f(Op::kDiv, y, a))))); break;
      case Op::kSin: give(a, chain(g, f(Op::kCos, a))); break;
      case Op::kCos: give(a, f(Op::kNeg, chain(g, f(Op::kSin, a)))); break;
      case Op::kPow: {
        const int slope = f(Op::kMul, b, f(Op::kPow, a, f(Op::kSub, b, one)));
        give(a, select(is(Op::kEqual, b, zero), zero, chain(g, slope)));
        give(b, select(is(Op::kEqual, y, zero), zero, chain(g, f(Op::kMul, y, f(Op::kLog, a)))));
        break;
      }
      default: break;  // floor and what is no float's: none
    }
  }

  Builder& b_;
  std::vector<int> adjoint_;  // of the instructions of the score
};

}  // namespace

const int32_t* Schedule::kept(std::vector<int32_t> list) {
  lists_.push_back(std::move(list));
  return lists_.back().data();
}

// What `results` need, and where it lies: registers are given away when their value has been used last.
Pass Schedule::pass_for(const std::vector<int>& results) {
  const size_t count = list_.size();
  std::vector<int> last_use(count, -1);
  for (const int result : results) {
    if (result >= 0) last_use[static_cast<size_t>(result)] = static_cast<int>(count);
  }
  for (size_t i = count; i-- > 0;) {
    for (int n = 0; last_use[i] >= 0 && n < list_[i].num_operands; ++n) {
      int& last = last_use[static_cast<size_t>(list_[i].operands[n])];
      last = std::max(last, static_cast<int>(i));
    }
  }
  Pass pass;
  std::vector<int32_t> low, full, place(count, -1), free;
  for (size_t i = 0; i < count; ++i) {
    const Instruction& x = list_[i];
    if (last_use[i] < 0 || x.op == Op::kScore || x.op == kGradient) continue;  // these are a kernel's own tiles
    if (x.rate != Rate::kFull) {
      place[i] = pass.low_elements;
      pass.low_elements += width_of(x.rate);
      low.push_back(static_cast<int32_t>(i));
      continue;
    }
    if (free.empty()) free.push_back(pass.num_registers++);
    place[i] = free.back();
    free.pop_back();
    full.push_back(static_cast<int32_t>(i));
    for (int n = 0; n < x.num_operands; ++n) {
      const auto operand = static_cast<size_t>(x.operands[n]);
      const bool again = std::find(x.operands, x.operands + n, x.operands[n]) != x.operands + n;
      if (last_use[operand] != static_cast<int>(i) || again) continue;
      if (list_[operand].rate == Rate::kFull && place[operand] >= 0) free.push_back(place[operand]);
    }
  }
  pass.num_low = static_cast<int>(low.size());
  pass.num_full = static_cast<int>(full.size());
  pass.low = kept(std::move(low));
  pass.full = kept(std::move(full));
  pass.place = kept(std::move(place));
  return pass;
}

Schedule::Schedule(const Program& program, bool transposes) {
  Builder builder(list_, transposes);
  for (const ProgramStep& step : program.steps()) {
    int32_t operands[ProgramStep::kMostOperands] = {-1, -1, -1, -1};
    for (int i = 0; i < step.num_operands(); ++i) operands[i] = made_[static_cast<size_t>(step.operands[i])];
    made_.push_back(builder.translate(step, operands));
  }
  if (program.mask() >= 0) mask = made_[static_cast<size_t>(program.mask())];
  std::vector<int> adjoints;
  if (program.score() >= 0) {
    score = made_[static_cast<size_t>(program.score())];
  }
  if (score >= 0 && !transposes) {
    const int count = static_cast<int>(list_.size());
    Gradients gradients(builder, count);
    gradients.run(score);
    for (int i = 0; i < count; ++i) {
      const Instruction& x = list_[static_cast<size_t>(i)];
      if (gradients.of(i) < 0) continue;
      if (x.op == Op::kScore) score_gradient = gradients.of(i);
      if (x.op != Op::kGather || x.type != ValueType::kFloat) continue;
      gather_list_.push_back({i, gradients.of(i), x.capture});
      adjoints.push_back(gradients.of(i));
      adjoints.insert(adjoints.end(), x.operands, x.operands + x.num_operands);  // its indices are needed too
    }
    same_gradient = score_gradient >= 0 && list_[static_cast<size_t>(score_gradient)].op == kGradient;
  }
  for_mask = pass_for({mask});
  for (size_t i = 0; i < list_.size(); ++i) {
    if (list_[i].op == Op::kHead && for_mask.place[i] >= 0) mask_reads_head = true;
  }
  for_score = pass_for({score});
  for_score_gradient = pass_for({score_gradient});
  adjoints.push_back(score_gradient);
  for_gradients = pass_for(adjoints);
  instructions = list_.data();
  num_instructions = static_cast<int>(list_.size());
  gathers = gather_list_.data();
  num_gathers = static_cast<int>(gather_list_.size());
  if (transposes) return;
  transposed_.reset(new Schedule(program, true));
  transposed = transposed_.get();
}

}  // namespace polyhead::program
