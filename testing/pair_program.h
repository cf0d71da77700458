// The program of a problem for one pair at a time. What programs mean is the reference's word for it (reference/program.h),
// which tests/program holds to a second telling of each of its programs; here it stands in attention's other definition.
#pragma once

#include <memory>
#include <vector>

#include "reference/program.h"
#include "testing/operands.h"

namespace polyhead::testing {

template <class T>
class PairProgram {
 public:
  PairProgram(const AttentionDesc& desc, const Inputs& in) {
    if (desc.program == nullptr) return;
    for (const Array& a : in.captures) captures_.push_back(view(a));
    values_.resize(desc.program->steps().size());
    adjoints_.resize(values_.size());
    program_ = std::make_unique<At>(*desc.program, captures_, values_.data(), adjoints_.data());
  }
  PairProgram(const PairProgram&) = delete;
  PairProgram& operator=(const PairProgram&) = delete;

  bool has_score() const { return program_ != nullptr && program_->has_score(); }
  bool visible(const reference::PairPlace& at) const { return program_ == nullptr || program_->visible(at); }

  // The score that the program makes of S.
  T score(const reference::PairPlace& at, T S) const {
    if (!has_score()) return S;
    program_->evaluate(at, S);
    return program_->score();
  }

  // Behind score() of a pair: the gradient of what came in, from that of what came out.
  T differentiate(T dS) const { return has_score() ? program_->differentiate(dS) : dS; }

  // Behind differentiate(1): of the steps that compute floats, the sum of the squares of what each adds to the score's error
  // if its result is off by itself, and how many there are. Functions err by more than one rounding.
  struct Roundings {
    double squares = 0, steps = 0;
  };
  Roundings roundings(const Program& program) const {
    Roundings sum;
    for (size_t n = 0; n < adjoints_.size(); ++n) {
      const ProgramStep& step = program.steps()[n];
      const bool exact = step.op == Op::kScore || step.op == Op::kGather || step.type != ValueType::kFloat;
      if (exact || adjoints_[n] == 0) continue;
      const bool function = step.op >= Op::kExp && step.op <= Op::kPow;
      const double off = static_cast<double>(adjoints_[n] * values_[n].number);
      sum.squares += (function ? 4 : 1) * off * off;
      sum.steps += function ? 4 : 1;
    }
    return sum;
  }

  // Behind differentiate(): add(n, gradient) for each element n of a capture that the pair's score has read.
  template <class Add>
  void for_each_gradient(int capture, const Add& add) const {
    if (has_score()) program_->for_each_gradient(capture, add);
  }

 private:
  using At = reference::ProgramAt<T>;

  std::vector<Tensor> captures_;
  mutable std::vector<reference::Value<T>> values_;
  mutable std::vector<T> adjoints_;
  std::unique_ptr<At> program_;  // null: no program
};

}  // namespace polyhead::testing
