// One PTX statement to an instruction: its operands become slots.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "program.h"

namespace cuda_sim {

struct Slot {
  int index = 0;
  bool wide = false, predicate = false;
};

// The value of a symbol that stands for the launch's own shared memory: where it begins is known at the kernel's end.
constexpr int64_t kDynamicShared = int64_t{0x5ca1ab1e} << 32;  // no constant of a kernel looks like it

// The slots of a kernel.
class Slots {
 public:
  Slot add(bool wide, bool predicate);
  int constant(uint64_t bits, bool wide);
  int special(Special what);
  void move_to(Kernel& kernel);

 private:
  int next_ = 0;
  std::map<std::pair<uint64_t, bool>, int> constants_;
  std::map<Special, int> specials_;
};

// What names mean where a statement stands.
struct Lookup {
  std::function<const Slot*(const std::string& name)> slot;             // of a register; null: no such
  std::function<bool(const std::string& name, int64_t* value)> symbol;  // of a parameter or variable
};

// Words of a line, parted by blanks and commas outside of brackets; a type's '.' belongs to it.
std::vector<std::string> words_of(const std::string& text);

// Without `place`. The label that it jumps to, if any, is in *label. Throws Fault.
Instruction instruction_of(const std::string& statement, const Lookup& lookup, Slots& slots, Module& module,
                           std::string* label);

}  // namespace cuda_sim
