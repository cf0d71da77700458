// What a program makes of scores: nothing, here. Where a desc has one, its kernels are compiled with a text of the same
// shape in the place of this file (program_text.cc).
#pragma once

#include "cuda/problem.h"

namespace polyhead::cuda {

// Of one head of a sequence.
struct ScoreProgram {
  static constexpr bool kHasMask = false, kHasScore = false;
  static constexpr int kGathers = 0;  // that have gradients

  __device__ ScoreProgram(const Captured*, int64_t, int64_t, int64_t) {}  // b, h, offset

  __device__ bool shows(int64_t, int64_t) const { return true; }                                 // q, k
  __device__ float score(float x, int64_t, int64_t) const { return x; }                          // x, q, k
  __device__ float gradient(float, float of_score, int64_t, int64_t) const { return of_score; }  // of x
  // Calls add(gather, uniform, capture, element, gradient) for each element that it read, counted in row-major order;
  // uniform: the same for all pairs.
  template <class Add>
  __device__ void gradients_of_captures(float, float, int64_t, int64_t, const Add&) const {}
};

}  // namespace polyhead::cuda
