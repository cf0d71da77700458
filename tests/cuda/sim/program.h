// A PTX module as data: kernels, each a list of instructions whose operands are slots of a warp's registers.
//
// A slot is 32 words of 32 bits, one a lane. A 64-bit register has two slots, which hold 32 words of 64 bits; a 16-bit
// one uses the low halves of its words; a predicate is the first word of its slot, a bit a lane. Immediates and special
// registers (%tid.x) are slots like others, written before the kernel starts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_sim {

class Warp;

// A line of the source, from .loc. `from` is the line where an inlined function was called, 0 if none was.
struct Place {
  int file = 0, line = 0, from_file = 0, from = 0;
};

// What an instruction is to the scheduler.
enum class Kind : uint8_t {
  kLane,     // each lane for itself
  kBranch,   // to `target`, by the lanes whose predicate holds
  kExit,     // ends lanes
  kAligned,  // by all lanes of the warp together (mma, ldmatrix)
  kMembers,  // by the lanes of a mask, the last operand, together (shfl, vote, bar.warp)
  kGroup,    // by all lanes of four warps, each warp when it comes there (wgmma)
  kBarrier,  // bar.sync: waits for the block
  kArrive,   // bar.arrive: is counted, and goes on
  kPoll,     // mbarrier.try_wait: again and again, until its predicate holds
};

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam };

struct Instruction;
using Handler = void (*)(Warp& warp, const Instruction& instruction, uint32_t mask);

// What a name like "ld.global.v4.f32" means.
struct Opcode {
  Handler run = nullptr;
  // A letter an operand, results before '=': w 32 or 16 bits, l 64 bits, * either, p a predicate (! may negate it), @
  // an address in brackets, > a label, + a sum of 32 bits, which is both.
  std::string signature;
  Kind kind = Kind::kLane;
  Space space = Space::kGeneric;
  uint8_t bytes = 0;      // of an element in memory
  uint8_t vector = 1;     // elements
  bool sign = false;      // elements are extended with their sign
  bool constant = false;  // ld.global.nc: nobody may write it while the kernel runs
  bool moves = false;     // a register of 32 bits to another
  uint8_t variant = 0;    // what else the handler must know
};

struct Instruction : Opcode {
  static constexpr int kMostArgs = 20;
  uint8_t num_results = 0, num_args = 0;  // args[0 .. num_results) are written
  int16_t args[kMostArgs] = {};           // slots, results first; an address is its base
  uint32_t wide = 0;                      // which args have 64 bits
  uint32_t negated = 0;                   // which predicates are read negated
  std::vector<int16_t> sums;              // slots of wgmma's accumulators, which are none of args
  int16_t guard = -1;                     // the slot of its predicate; -1: none
  bool unless = false;                    // runs where the guard is false
  int64_t offset[2] = {};                 // added to the addresses, in their order
  int target = -1;                        // of a branch
  Place place;
  const std::string* name = nullptr;
};

struct Parameter {
  std::string name;
  int offset = 0, bytes = 0;
};

// A slot that holds the same in all lanes.
struct Constant {
  int slot = 0;
  bool wide = false;
  uint64_t bits = 0;
};

enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLane,
  kWarp,
  kMaskEqual,
  kMaskLess,
  kMaskLessEqual,
  kMaskGreater,
  kMaskGreaterEqual,
};

struct SpecialSlot {
  int slot = 0;
  Special what = Special::kLane;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  int parameter_bytes = 0;
  int shared_bytes = 0;     // declared; what a launch asks for lies behind
  int dynamic_align = 16;   // of that
  int local_bytes = 0;      // of a thread
  int most_threads = 1024;  // .maxntid
  int num_slots = 0;
  std::vector<Constant> constants;
  std::vector<SpecialSlot> specials;
  std::vector<Instruction> code;
};

struct Module {
  std::string target;  // sm_80, sm_90a
  std::map<std::string, Kernel> kernels;
  std::vector<std::vector<uint64_t>> globals;   // what .global variables hold, where the kernels find it
  std::vector<std::string> files;               // [n]: of .file n, without folders
  std::map<std::string, Opcode> used;           // opcodes by name; instructions point to the names
  std::string place(const Place& place) const;  // "kernel.cu:12 (from :30)", "header.h:12 (from kernel.cu:30)"
};

// Windows of the generic address space: a generic address is that of the space plus these. Global addresses are the
// host's own.
constexpr uint64_t kSharedWindow = uint64_t{1} << 56, kLocalWindow = uint64_t{2} << 56,
                   kParamWindow = uint64_t{3} << 56;
constexpr uint64_t kWindowMask = uint64_t{0xff} << 56;

// Whether a device of that compute capability, 80 for 8.0, can run it: where the target ends in 'a', that one alone, else
// later ones too.
bool runs_on(const Module& module, int capability);

// Bytes of shared memory that a block may have at most, on the least device that can run it.
int most_shared_bytes(const Module& module);

// Throws Fault: what is not understood, by name and line of the PTX.
Module parse(std::string_view ptx);

// The opcode of that name, or one without `run`. Operands that change the meaning are part of the name: "shfl...|"
// with a predicate as second result, "mov.b64/pack2" and "mov.b64/unpack2" with a vector as source or result.
Opcode find_opcode(const std::string& name);

// All names of the tables; loads, stores and atomics, whose names are made of parts, are not among them.
std::vector<std::string> table_names();

}  // namespace cuda_sim
