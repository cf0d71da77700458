#include "opcodes.h"

#include <algorithm>

namespace cuda_sim {
namespace {

const OpcodeTable& table() {
  static const OpcodeTable all = [] {
    OpcodeTable made;
    add_integer_opcodes(made);
    add_float_opcodes(made);
    add_convert_opcodes(made);
    add_warp_opcodes(made);
    add_tensor_opcodes(made);
    add_copy_opcodes(made);
    add_group_opcodes(made);
    add_mbarrier_opcodes(made);
    return made;
  }();
  return all;
}

}  // namespace

Opcode find_opcode(const std::string& name) {
  const auto found = table().find(name);
  return found != table().end() ? found->second : memory_opcode(name);
}

std::vector<std::string> table_names() {
  std::vector<std::string> names;
  for (const auto& [name, opcode] : table()) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace cuda_sim
