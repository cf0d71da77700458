#include "core/sentence.h"
#include "polyhead/program_explanation.h"
#include "program/schedule.h"
#include "program/text.h"

namespace polyhead {
namespace {

using program::Rate;

const char* what_of(Rate rate) {
  switch (rate) {
    case Rate::kUniform: return "nothing";
    case Rate::kQuery: return "q";
    case Rate::kKey: return "k";
    case Rate::kDiagonal: return "q - k";
    case Rate::kFull: break;
  }
  return "q, k";
}

}  // namespace

std::vector<ProgramValue> explain_program(const Program& program) {
  const program::Schedule& schedule = program::schedule_of(program);
  const std::vector<std::string> texts = program::texts_of_steps(program);
  const std::span<const ProgramStep> steps = program.steps();
  std::vector<bool> told(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    for (int n = 0; n < steps[i].num_operands(); ++n) {
      const auto operand = static_cast<size_t>(steps[i].operands[n]);
      if (schedule.rate_of_step(operand) != schedule.rate_of_step(i)) told[operand] = true;
    }
    if (texts[i].find(" = ") != std::string::npos) told[i] = true;
  }
  std::vector<ProgramValue> values;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto at = static_cast<int>(i);
    const char* const depends_on = what_of(schedule.rate_of_step(i));
    if (told[i] && steps[i].num_operands() > 0) values.push_back({texts[i], depends_on});
    for (const auto& [word, result] : {std::pair("mask = ", program.mask()), std::pair("score = ", program.score())}) {
      if (result != at) continue;
      const size_t equals = texts[i].find(" = ");
      const std::string name = equals == std::string::npos ? texts[i] : texts[i].substr(0, equals);
      if (told[i] && equals == std::string::npos) values.pop_back();
      values.push_back({word + name, depends_on});
    }
  }
  return values;
}

}  // namespace polyhead
