// A row whose largest score comes late: softmax began under a lower maximum, which is raised, and what was summed before is
// scaled. How that rounds must hang on the row alone.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "cases.h"
#include "every_kernel.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

struct Shape {
  DType dtype;
  int64_t dim;
};
constexpr Shape kShapes[] = {{DType::kFloat32, 64},  {DType::kFloat16, 64},  {DType::kBFloat16, 64},
                             {DType::kBFloat16, 32}, {DType::kBFloat16, 40}, {DType::kBFloat16, 72},
                             {DType::kBFloat16, 96}, {DType::kBFloat16, 128}};

// Row 0 sees the first `seen_by_first` keys, each row one more than the row before.
Problem causal_problem(const Shape& shape, int64_t queries, int64_t keys, int64_t seen_by_first) {
  Problem problem = problem_of("raised_maximum", shape.dtype, 1, 1, queries, keys, shape.dim);
  problem.desc.causal = true;
  problem.desc.query_offset = seen_by_first - 1;
  problem.edges = false;
  return problem;
}

// Scores are those of random numbers, but those of the keys `at` larger by 12, 24 and so on, for all queries.
Inputs rising_inputs(const Problem& problem, const std::vector<int64_t>& at) {
  Inputs in = random_inputs(problem);
  const int64_t dim = problem.desc.head_dim;
  for (int64_t n = 0; n < in.query.size(); n += dim) in.query.set(n, std::sqrt(static_cast<double>(dim)));
  for (int64_t n = 0; n < in.key.size(); n += dim) in.key.set(n, 0);
  double score = 0;
  for (const int64_t key : at) in.key.set(key * dim, score += 12);
  return in;
}

// The first rows of the only head, [1, rows, 1, dim].
Array first_rows(const Array& a, int64_t count, int64_t dim) {
  Array part(a.dtype, {1, count, 1, dim});
  for (int64_t n = 0; n < part.size(); ++n) part.set(n, a.at(n));
  return part;
}

// Raised within the first keys, within and between units and blocks of keys, and among the first and among later keys behind
// what is computed together, 512 or 1,024.
const std::vector<int64_t> kLate = {3, 40, 41, 127, 128, 300, 513, 1025, 1030, 1100};

TEST(RaisedMaximum, IsAsDefined) {
  for (const Shape& shape : kShapes) {
    const Problem problem = causal_problem(shape, 70, 1200, 1131);
    const AttentionDesc desc = problem_desc(problem);
    for (size_t first = 0; first < kLate.size(); ++first) {
      const Inputs in = rising_inputs(problem, {kLate.begin() + static_cast<ptrdiff_t>(first), kLate.end()});
      const Outputs want = run(*kernel_list().back(), desc, in);
      for_every_kernel(desc, [&](const Kernel& kernel) {
        const Outputs got = run(kernel, desc, in);
        for (int64_t at = 0; at < want.out.size(); ++at) {
          ASSERT_NEAR(got.out.at(at), want.out.at(at), 0.02)
              << kernel.name << " " << at << " from key " << kLate[first];
        }
        for (int64_t at = 0; at < want.logsumexp.size(); ++at) {
          ASSERT_NEAR(got.logsumexp.at(at), want.logsumexp.at(at), 0.02) << kernel.name << " query " << at;
        }
      });
    }
  }
}

// Beside what else is done to scores, weights and O.
TEST(RaisedMaximum, IsAsDefinedWithOptions) {
  const std::vector<std::pair<const char*, void (*)(AttentionDesc&)>> options = {
      {"sinks", [](AttentionDesc& d) { d.has_sink_logits = true; }},
      {"dropout", [](AttentionDesc& d) { d.dropout_p = 0.3; }},
      {"softcap", [](AttentionDesc& d) { d.softcap = 60; }},
      {"alibi", [](AttentionDesc& d) { d.alibi_slopes_ndim = 1; }},
      {"bias",
       [](AttentionDesc& d) {
         d.attn_bias = {true, DType::kFloat32, {1, 1, d.seqlen_q, d.seqlen_k}};
       }},
      {"dims", [](AttentionDesc& d) { d.head_dim_v = d.head_dim - 28; }},
      {"window", [](AttentionDesc& d) { d.window_left = 700, d.sink_keys = 5; }},
  };
  for (const int64_t dim : {64, 128}) {
    for (const auto& [name, set] : options) {
      Problem problem = causal_problem({DType::kBFloat16, dim}, 70, 1200, 1131);
      set(problem.desc);
      const AttentionDesc desc = problem_desc(problem);
      const Inputs in = rising_inputs(problem, {kLate.begin() + 1, kLate.end()});
      const Outputs want = run(*kernel_list().back(), desc, in);
      for_every_kernel(desc, [&](const Kernel& kernel) {
        const Outputs got = run(kernel, desc, in);
        for (int64_t at = 0; at < want.out.size(); ++at) {
          ASSERT_NEAR(got.out.at(at), want.out.at(at), 0.03) << kernel.name << ", " << name << " " << at;
        }
        for (int64_t at = 0; at < want.logsumexp.size(); ++at) {
          ASSERT_NEAR(got.logsumexp.at(at), want.logsumexp.at(at), 0.02)
              << kernel.name << ", " << name << " query " << at;
        }
      });
    }
  }
}

// NaN in the last value, which the last query alone sees, has the rows computed once more.
TEST(RaisedMaximum, ARowsBitsDoNotHangOnHiddenNans) {
  for (const Shape& shape : kShapes) {
    const Problem problem = causal_problem(shape, 70, 1200, 1131);
    const AttentionDesc desc = problem_desc(problem);
    const Inputs in = rising_inputs(problem, kLate);
    Inputs poked = in;
    poked.value.set(1199 * shape.dim + 7, NAN);
    for_every_kernel(desc, [&](const Kernel& kernel) {
      const Outputs want = run(kernel, desc, in), got = run(kernel, desc, poked);
      for (int64_t at = 0; at < 69 * shape.dim; ++at) {
        ASSERT_EQ(got.out.at(at), want.out.at(at)) << kernel.name << " row " << at / shape.dim;
      }
      ASSERT_TRUE(std::isnan(got.out.at(69 * shape.dim + 7))) << kernel.name;
    });
  }
}

// Fewer queries behind a row: more than go by another path.
TEST(RaisedMaximum, ARowsBitsDoNotHangOnHowManyFollow) {
  for (const Shape& shape : kShapes) {
    const Problem problem = causal_problem(shape, 64, 1200, 1073);
    const AttentionDesc desc = problem_desc(problem);
    const Inputs in = rising_inputs(problem, {40, 100, 131, 513, 700, 1074, 1090});
    for_every_kernel(desc, [&](const Kernel& kernel) {
      const Outputs want = run(kernel, desc, in);
      for (const int64_t queries : {63, 62, 47, 33}) {
        const AttentionDesc fewer = problem_desc(causal_problem(shape, queries, 1200, 1073));
        Inputs part = in;
        part.query = first_rows(in.query, queries, shape.dim);
        const Outputs got = run(kernel, fewer, part);
        for (int64_t at = 0; at < got.out.size(); ++at) {
          ASSERT_EQ(got.out.at(at), want.out.at(at))
              << kernel.name << " " << queries << " queries, row " << at / shape.dim;
        }
        for (int64_t i = 0; i < queries; ++i) ASSERT_EQ(got.logsumexp.at(i), want.logsumexp.at(i)) << kernel.name;
      }
    });
  }
}

// Each query has its own window; that of another row hides parts of blocks, or nothing.
TEST(RaisedMaximum, ARowsBitsDoNotHangOnOtherRowsWindows) {
  for (const Shape& shape : kShapes) {
    Problem problem = problem_of("raised_maximum", shape.dtype, 1, 1, 64, 1200, shape.dim);
    problem.desc.has_windows = true;
    problem.edges = false;
    const AttentionDesc desc = problem_desc(problem);
    Inputs all = rising_inputs(problem, {40, 100, 131, 513, 700, 1074, 1090});
    for (int64_t i = 0; i < 64; ++i) all.window_lo.set(i, 0), all.window_hi.set(i, 1200);
    Inputs some = all;
    for (int i = 1; i < 64; i += 2) some.window_lo.set(i, 12 * i), some.window_hi.set(i, 800 + i);
    for_every_kernel(desc, [&](const Kernel& kernel) {
      const Outputs want = run(kernel, desc, all), got = run(kernel, desc, some);
      for (int64_t i = 0; i < 64; i += 2) {
        for (int64_t d = 0; d < shape.dim; ++d) {
          ASSERT_EQ(got.out.at(i * shape.dim + d), want.out.at(i * shape.dim + d)) << kernel.name << " row " << i;
        }
        ASSERT_EQ(got.logsumexp.at(i), want.logsumexp.at(i)) << kernel.name << " row " << i;
      }
    });
  }
}

}  // namespace
}  // namespace polyhead::testing
