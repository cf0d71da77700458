// The memory that a thread needs to run a program: the same for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "program/code.h"

namespace polyhead::cpu {

constexpr int kStripKeys = 8;

struct ProgramMemory {
  // Tiles [key][query]. In forward what the program makes of scores takes their place.
  float *scores = nullptr, *results = nullptr, *gradients = nullptr;
  char *low = nullptr, *registers = nullptr;
};

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct ProgramLayout {
  static constexpr int64_t kAlignment = 64;  // bytes more than bytes(), where memory is not aligned
  int64_t tile_bytes = 0, low_bytes = 0, register_bytes = 0;
  bool gradients = false;

  ProgramLayout(const program::Code& code, bool backward) : gradients(backward) {
    tile_bytes = int64_t{program::kCodeKeys} * program::kCodeQueries * static_cast<int64_t>(sizeof(float));
    int64_t low = 0, registers = 0;
    const program::Pass* const passes[] = {&code.for_mask,
                                           &code.for_score,
                                           &code.for_score_gradient,
                                           &code.for_gradients,
                                           &code.transposed->for_mask,
                                           &code.transposed->for_score};
    for (const program::Pass* pass : passes) {
      low = larger(low, pass->low_elements);
      registers = larger(registers, pass->num_registers);
    }
    // Of 8 bytes an element: integers may need 64 bits.
    low_bytes = (low * 8 + 63) / 64 * 64;
    register_bytes = registers * kStripKeys * program::kCodeQueries * 8;
  }
  int64_t tiles() const { return gradients ? 3 : 1; }
  int64_t bytes() const { return tiles() * tile_bytes + low_bytes + register_bytes; }

  // `memory` is aligned to 64.
  ProgramMemory at(char* memory) const {
    ProgramMemory m;
    m.scores = m.results = reinterpret_cast<float*>(memory);
    if (gradients) {
      m.results = reinterpret_cast<float*>(memory + tile_bytes);
      m.gradients = reinterpret_cast<float*>(memory + 2 * tile_bytes);
    }
    m.low = memory + tiles() * tile_bytes;
    m.registers = m.low + low_bytes;
    return m;
  }
};

}  // namespace polyhead::cpu
