// Packed sequences: each gives the bits of a batch that holds it alone, few queries or many, whatever lies beside it.
// Numbers: attention_test.cc, whose cases have packed sequences too.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cases.h"
#include "every_kernel.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

// Rows [first, end) of a packed [rows, ...] array, or columns of [heads, rows].
Array part_of(const Array& a, bool by_column, int64_t first, int64_t end) {
  const int64_t rows = by_column ? a.dims[0] : 1, columns = by_column ? a.dims[1] : a.dims[0];
  const int64_t each = rows * columns > 0 ? a.size() / (rows * columns) : 0;
  Array part(a.dtype, {rows * (end - first) * each});
  int64_t n = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t at = (row * columns + first) * each; at < (row * columns + end) * each; ++at) part.set(n++, a.at(at));
  }
  return part;
}

Array flat(Array a) {
  a.dims = {a.size()};
  return a;
}

// A packed call of one sequence as a batch.
Slice as_batch(Slice s) {
  s.desc.packed = false;
  const bool packed_keys = s.desc.page_size == 0;
  s.inputs.cu_seqlens_q = s.inputs.cu_seqlens_k = {};
  s.inputs.query.dims.insert(s.inputs.query.dims.begin(), 1);
  for (Array* a : {&s.inputs.key, &s.inputs.value, &s.inputs.key_scales, &s.inputs.value_scales}) {
    if (packed_keys && a->given()) a->dims.insert(a->dims.begin(), 1);
  }
  return s;
}

// Every step-th sequence of a packed problem, on a kernel that takes both. Returns how many were compared.
int compare_sequences(const Kernel& kernel, const Problem& problem, const Inputs& in, int64_t step) {
  const AttentionDesc d = problem_desc(problem);
  RunOptions options;
  options.threads = 2;
  const Outputs packed = run(kernel, d, in, options);
  int compared = 0;
  for (int64_t b = 0; b < d.batch; b += step) {
    const Span s = span_of(d, in, b);
    const Slice alone = as_batch(slice_batch(d, in, b, b + 1));
    const int64_t longest = std::max(s.len_q, s.len_k), dim = std::max(d.head_dim, d.head_dim_v);
    const bool tiny = std::max(longest, dim) <= 16;  // a path of batches alone (docs/kernels.md)
    if (s.len_q == 0 || tiny || refuses(kernel.name, kernel.why_not(alone.desc))) continue;
    const Outputs want = run(kernel, alone.desc, alone.inputs);
    const int64_t end = s.first_q + s.len_q;
    std::string trouble = difference("out", part_of(packed.out, false, s.first_q, end), flat(want.out));
    if (trouble.empty() && want.logsumexp.given()) {
      trouble = difference("logsumexp", part_of(packed.logsumexp, true, s.first_q, end), flat(want.logsumexp));
    }
    EXPECT_EQ(trouble, "") << "sequence " << b << "\n" << forward_command(kernel.name, problem);
    ++compared;
  }
  return compared;
}

TEST(Packed, GivesEachSequenceTheBitsItHasAlone) {
  int compared = 0;
  for (const Problem& problem : cases()) {
    if (!problem.desc.packed || (memory_alone() && products(problem.desc) > 3e6)) continue;
    const Inputs in = random_inputs(problem);
    for (const Kernel* kernel : kernels_to_test()) {
      if (refuses(kernel->name, kernel->why_not(problem_desc(problem)))) continue;
      set_running(forward_command(kernel->name, problem));
      compared += compare_sequences(*kernel, problem, in, 1);
    }
  }
  EXPECT_GT(compared, 0);
}

// More partial results than the workspace holds at once. Windows hide all but the end of one chunk of keys and the start of the next.
TEST(Packed, ComputesInWavesWhatTheWorkspaceDoesNotHoldAtOnce) {
  constexpr int64_t kSequences = 110, kQueries = 12, kKeys = 518;
  Problem problem = problem_of("waves", DType::kFloat32, kSequences, 48, kSequences * kQueries, kSequences * kKeys, 16);
  problem.desc.num_heads_kv = 2;
  problem.desc.packed = problem.desc.causal = true;
  problem.desc.align = Align::kBottomRight;
  problem.desc.window_left = 8;
  problem.cuts_rows = true;
  Inputs in = random_inputs(problem);
  for (int64_t b = 0; b <= kSequences; ++b) {
    in.cu_seqlens_q.set(b, static_cast<double>(b * kQueries));
    in.cu_seqlens_k.set(b, static_cast<double>(b * kKeys));
  }
  constexpr size_t kRows = kSequences * 48 * kQueries, kPartialBytes = kRows * 2 * (16 + 2) * sizeof(float);
  for (const Kernel* kernel : kernels_to_test()) {
    if (refuses(kernel->name, kernel->why_not(problem.desc)) || std::string(kernel->name) == "reference") continue;
    EXPECT_LT(kernel->workspace_bytes(problem.desc, 1).value(), kPartialBytes);
    EXPECT_EQ(compare_sequences(*kernel, problem, in, 9), 13);
  }
}

}  // namespace
}  // namespace polyhead::testing
