// Runs a test on every kernel that takes a case, and says at the end which refused how many cases, and why.
//
// Under a sanitizer, whose business is memory and not numbers, a test computes no definition and leaves out large cases;
// POLYHEAD_TEST_FULL=1 tests everything there too.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "kernels_to_test.h"
#include "left_out.h"
#include "reference/attention.h"
#include "sanitizer.h"
#include "testing/problem_words.h"

namespace polyhead::testing {

// Multiplications of forward; the size of a case.
inline double products(const AttentionDesc& d) {
  double count = static_cast<double>(d.head_dim + d.head_dim_v);
  for (int64_t size : {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k}) count *= static_cast<double>(size);
  return count;
}

// Calls test(kernel) for every kernel to test that takes `desc`; the test is skipped if none does.
template <class Test>
void for_every_kernel(const AttentionDesc& desc, Test test) {
  constexpr double kMostSanitized = 1e7, kMostSanitizedNaive = 3e5;
  std::string reasons;
  bool tested = false;
  for (const Kernel* kernel : kernels_to_test()) {
    std::string why = kernel->why_not(desc);
    const double most = kernel == &kReference ? kMostSanitizedNaive : kMostSanitized;
    if (memory_alone() && products(desc) > most) why = "large, and sanitizers are slow";
    if (why.empty()) {
      tested = true;
      test(*kernel);
      continue;
    }
    why = std::string(kernel->name) + ": " + why;
    left_out().add(why);
    reasons += why + "\n";
  }
  if (!tested) GTEST_SKIP() << reasons;
}

// How GoogleTest shows a case.
inline void PrintTo(const Problem& problem, std::ostream* out) { *out << problem.name; }

// Elements of the dims' outermost, all of `first` and then all of `second`.
inline Array joined(const Array& first, const Array& second) {
  if (!first.given()) return {};
  Array both = first;
  both.dims[0] += second.dims[0];
  both.bytes.insert(both.bytes.end(), second.bytes.begin(), second.bytes.end());
  return both;
}

}  // namespace polyhead::testing
