// What a sink means where numbers are none, and that it is one key more: tiles, decoding and tiny heads.
#include <gtest/gtest.h>

#include <cmath>

#include "every_kernel.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

struct Size {
  int64_t queries, keys, dim;
};
constexpr Size kSizes[] = {{70, 130, 24}, {3, 600, 24}, {9, 13, 8}};

// Query 0 sees no key; heads 0 to 3 have each another sink.
AttentionDesc blind_first_row(const Size& size) {
  AttentionDesc d = problem_of("", DType::kFloat32, 2, 4, size.queries, size.keys, size.dim).desc;
  d.causal = d.has_sink_logits = true;
  d.query_offset = -1;
  return d;
}

Inputs inputs_of(const AttentionDesc& desc) {
  Problem p;
  p.desc = desc;
  p.seed = 3;
  p.edges = false;
  return random_inputs(p);
}

TEST(Sinks, NanAndInfinityMakeRowsNanAndMinusInfinityIsNone) {
  for (const Size& size : kSizes) {
    const AttentionDesc d = blind_first_row(size);
    AttentionDesc without = d;
    without.has_sink_logits = false;
    Inputs in = inputs_of(d), plain = in;
    plain.sink_logits = {};
    const double kSinks[] = {NAN, HUGE_VAL, -HUGE_VAL, 0.5};
    for (int64_t h = 0; h < 4; ++h) in.sink_logits.set(h, kSinks[h]);
    for_every_kernel(d, [&](const Kernel& kernel) {
      const Outputs got = run(kernel, d, in), none = run(kernel, without, plain);
      for (int64_t row = 0; row < d.batch * d.num_heads * d.seqlen_q; ++row) {
        const int64_t b = row / d.seqlen_q / 4, h = row / d.seqlen_q % 4, i = row % d.seqlen_q;
        const double L = got.logsumexp.at(row);
        for (int64_t c = 0; c < d.head_dim_v; ++c) {
          const int64_t at = ((b * d.seqlen_q + i) * 4 + h) * d.head_dim_v + c;
          const double o = got.out.at(at);
          ASSERT_EQ(std::isnan(o), h < 2) << kernel.name << " row " << i << " head " << h;
          if (h == 2) {
            ASSERT_NEAR(o, none.out.at(at), 1e-6) << kernel.name;
          }
          if (h == 3 && i == 0) {
            ASSERT_EQ(o, 0) << kernel.name;
          }
        }
        ASSERT_EQ(std::isnan(L), h < 2) << kernel.name << " row " << i << " head " << h;
        if (h == 2 && i == 0) {
          ASSERT_EQ(L, -HUGE_VAL) << kernel.name;
        }
        if (h == 2 && i > 0) {
          ASSERT_NEAR(L, none.logsumexp.at(row), 1e-6) << kernel.name;
        }
        if (h == 3 && i == 0) {
          ASSERT_EQ(L, 0.5) << kernel.name;
        }
      }
    });
  }
}

// A key that everybody sees, with a score of 0 and a value of 0, is a sink of 0.
TEST(Sinks, AreOneKeyMoreWithoutAValue) {
  for (const Size& size : kSizes) {
    AttentionDesc d = problem_of("", DType::kFloat32, 2, 4, size.queries, size.keys, size.dim).desc, longer = d;
    d.has_sink_logits = true;
    Inputs in = inputs_of(d), with_key = in;
    for (int64_t h = 0; h < 4; ++h) in.sink_logits.set(h, 0);
    with_key.sink_logits = {};
    longer.seqlen_k += 1;
    for (Array Inputs::*rows : {&Inputs::key, &Inputs::value}) {
      const Array& from = in.*rows;
      Array to(from.dtype, {2, longer.seqlen_k, 4, size.dim});
      const int64_t row = 4 * size.dim;
      for (int64_t n = 0; n < from.size(); ++n) to.set(n + n / (size.keys * row) * row, from.at(n));
      with_key.*rows = to;
    }
    for_every_kernel(d, [&](const Kernel& kernel) {
      const Outputs got = run(kernel, d, in), want = run(kernel, longer, with_key);
      for (int64_t n = 0; n < got.out.size(); ++n) ASSERT_NEAR(got.out.at(n), want.out.at(n), 1e-6) << kernel.name;
      for (int64_t n = 0; n < got.logsumexp.size(); ++n) {
        ASSERT_NEAR(got.logsumexp.at(n), want.logsumexp.at(n), 2e-6) << kernel.name;
      }
    });
  }
}

}  // namespace
}  // namespace polyhead::testing
