#include "contract/one_query.h"

#include <algorithm>
#include <vector>

namespace polyhead {
namespace {

bool reads(const Program& program, Op op) {
  const std::span<const ProgramStep> steps = program.steps();
  return std::any_of(steps.begin(), steps.end(), [&](const ProgramStep& step) { return step.op == op; });
}

// A name that none of the tensors has.
std::string free_name(const Program& program) {
  const std::span<const Capture> captures = program.captures();
  std::string name = "first";
  while (std::any_of(captures.begin(), captures.end(), [&](const Capture& c) { return c.name == name; })) name += '_';
  return name;
}

Expression constant(const ProgramStep& step) {
  if (step.type == ValueType::kFloat) return step.number;
  return step.type == ValueType::kBool ? Expression(step.integer != 0) : Expression(step.integer);
}

}  // namespace

Result<SharedProgram> from_first_query(const SharedProgram& program) {
  if (!reads(*program, Op::kQuery) && !reads(*program, Op::kOffset)) return program;
  ProgramBuilder builder;
  for (const Capture& capture : program->captures()) builder.capture(capture.name, capture.type, capture.ndim);
  const Expression first = builder.capture(free_name(*program), ValueType::kInt, 0)();
  std::vector<Expression> made;
  for (const ProgramStep& step : program->steps()) {
    Expression operands[ProgramStep::kMostOperands];
    const auto count = static_cast<size_t>(step.num_operands());
    for (size_t i = 0; i < count; ++i) operands[i] = made[static_cast<size_t>(step.operands[i])];
    switch (step.op) {
      case Op::kScore: made.push_back(builder.score()); break;
      case Op::kBatch: made.push_back(builder.batch()); break;
      case Op::kHead: made.push_back(builder.head()); break;
      case Op::kQuery: made.push_back(builder.query() + first); break;
      case Op::kKey: made.push_back(builder.key()); break;
      case Op::kOffset: made.push_back(builder.offset() - first); break;
      case Op::kConstant: made.push_back(constant(step)); break;
      case Op::kGather: made.push_back(builder.gather(step.capture, {operands, count})); break;
      default: made.push_back(builder.apply(step.op, operands[0], operands[1], operands[2])); break;
    }
  }
  const auto result = [&](int step) { return step < 0 ? Expression() : made[static_cast<size_t>(step)]; };
  return builder.build(result(program->score()), result(program->mask()));
}

}  // namespace polyhead
