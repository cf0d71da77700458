// The tables that say what instructions do, one a file; find_opcode() of program.h asks all of them.
#pragma once

#include <string>
#include <unordered_map>

#include "program.h"

namespace cuda_sim {

using OpcodeTable = std::unordered_map<std::string, Opcode>;

void add_integer_opcodes(OpcodeTable& table);
void add_float_opcodes(OpcodeTable& table);
void add_convert_opcodes(OpcodeTable& table);
void add_warp_opcodes(OpcodeTable& table);    // branches, barriers, shuffles, votes
void add_tensor_opcodes(OpcodeTable& table);  // mma, ldmatrix, stmatrix
void add_copy_opcodes(OpcodeTable& table);    // cp.async
void add_group_opcodes(OpcodeTable& table);   // wgmma
void add_mbarrier_opcodes(OpcodeTable& table);

// Loads, stores and atomics; without `run` if it is none, or one that is not modelled.
Opcode memory_opcode(const std::string& name);

}  // namespace cuda_sim
