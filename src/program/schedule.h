// From a program to its code: what is the same for all queries, all keys or along a diagonal is computed once, and its
// gradients are steps like any other.
#pragma once

#include <memory>
#include <vector>

#include "polyhead/program.h"
#include "program/code.h"

namespace polyhead::program {

class Schedule : public Code {
 public:
  explicit Schedule(const Program& program) : Schedule(program, false) {}
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  // Of a step of the program.
  Rate rate_of_step(size_t step) const { return list_[static_cast<size_t>(made_[step])].rate; }

 private:
  Schedule(const Program& program, bool transposes);
  Pass pass_for(const std::vector<int>& results);
  const int32_t* kept(std::vector<int32_t> list);

  std::vector<Instruction> list_;
  std::vector<int32_t> made_;  // of each step the instruction
  std::vector<GatherGradient> gather_list_;
  std::vector<std::vector<int32_t>> lists_;
  std::unique_ptr<const Schedule> transposed_;
};

// The most instructions that the code of a program may have.
constexpr int kMostInstructions = 2048;

// Of a program; made with it.
const Schedule& schedule_of(const Program& program);

}  // namespace polyhead::program
