// Runs the code of a program on the scores of a tile of queries and a block of keys: values of low rates once for the
// tile and block, the others strip by strip, kStripKeys keys of all its queries. program/machine.cc computes.
#pragma once

#include "cpu/attention/functions.h"
#include "cpu/attention/program/memory.h"
#include "cpu/isa/tile.h"
#include "program/call.h"

namespace polyhead::cpu::POLYHEAD_ISA {

// Where a tile and a block lie.
struct ProgramPlace {
  int64_t b, h, offset, first_query, first_key;
};

// Which keys [begin, end) of the block the queries see: kept[key][vector], bits of lanes.
program::Seen run_mask(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin,
                       int end, int num_queries, uint16_t (*seen)[kTileQueries / 4]);

// What keys [begin, end) of the block need before run_score: it is then called for them once, or strip by strip.
void prepare_score(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end);

// memory.scores -> memory.results.
void run_score(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end);

// The same before run_gradients. `captures`: their sums will be given.
void prepare_gradients(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin,
                       int end, bool captures);

// memory.gradients, of the program's score, become those of the scores in memory.scores; and what they give to the captures
// is added to their sums.
void run_gradients(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end,
                   const CaptureSums& captures);

}  // namespace polyhead::cpu::POLYHEAD_ISA
