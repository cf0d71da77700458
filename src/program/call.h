// A program in one call: with the tensors that the call gives. Plain data, as program/code.h.
#pragma once

#include "polyhead/tensor.h"
#include "program/code.h"

namespace polyhead::program {

constexpr int kMostCaptures = 8;

struct Range {
  int64_t low = 0, high = 0;  // both within
};

// Where a program is asked: some heads, queries and keys of one sequence or several.
struct Region {
  Range b, h, q, k, offset;
};

struct Call {
  const Code* code = nullptr;        // null: no program
  const Tensor* captures = nullptr;  // null: nothing is known of them
  Range ints[kMostCaptures];         // of all elements of a capture of ints
  bool rises[kMostCaptures] = {};    // whether the ints of each row, along the last dim, never fall
  bool wide = true;                  // integers need 64 bits
};

enum class Seen : uint8_t { kNone, kSome, kAll };

// What the mask shows of all pairs of a region: kSome is always right.
Seen seen(const Call& call, const Region& region);

// Where one value is asked: for a value of rate kDiagonal, q - k is `diagonal`.
struct Place {
  int64_t b = 0, h = 0, offset = 0, q = 0, k = 0, diagonal = 0;
};

// Whether the mask shows a pair.
bool shows(const Call& call, const Place& at);

// The element of its capture that gather instruction `gather` reads, counted in row-major order. The index must not read
// the score.
int64_t element(const Call& call, const Pass& pass, int gather, const Place& at);

}  // namespace polyhead::program
