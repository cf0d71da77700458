// Every named program on every kernel: against what it means in double, forward and all gradients, and the laws.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "calls.h"
#include "kernels_to_test.h"
#include "left_out.h"
#include "programs.h"
#include "reference/attention.h"
#include "sanitizer.h"

namespace polyhead::testing {
namespace {

// Largest errors over some draws of the numbers: a gradient of one element errs by chance more, or less, than another way
// of computing it.
struct LargestErrors {
  std::vector<double> kernel, naive, magnitude;

  void add(const ProgramResults& got, const ProgramResults& exact, const ProgramResults& by_naive) {
    const auto g = got.all(), e = exact.all(), n = by_naive.all();
    kernel.resize(g.size()), naive.resize(g.size()), magnitude.resize(g.size());
    for (size_t i = 0; i < g.size(); ++i) {
      kernel[i] = std::max(kernel[i], largest_difference(*g[i], *e[i], &magnitude[i]));
      naive[i] = std::max(naive[i], largest_difference(*n[i], *e[i]));
    }
  }
  void judge(const ProgramResults& of, const std::vector<double>& terms, const std::string& what) const {
    for (size_t i = 0; i < kernel.size(); ++i) {
      const double sums = 4 * epsilon(DType::kFloat32) * terms[i];
      const double ulps = 4 * epsilon(of.all()[i]->dtype) * std::max(magnitude[i], 1e-3) + sums;
      EXPECT_LE(kernel[i], (i < 2 ? 2 : 3) * naive[i] + ulps)
          << what << ": " << ProgramResults::name(i) << ", the naive formula errs by " << naive[i];
    }
  }
};

// O and L by the second telling of a program, in double.
ProgramResults by_meaning(const NamedProgram& program, const ProgramCall& call) {
  const AttentionDesc& d = call.desc;
  ProgramResults r;
  r.out = Array(DType::kFloat64, call.in.query.dims);
  r.logsumexp = Array(DType::kFloat64, {d.batch, d.num_heads, d.seqlen_q});
  for (int64_t b = 0; b < d.batch; ++b) {
    for (int64_t h = 0; h < d.num_heads; ++h) {
      const int64_t g = h / (d.num_heads / d.num_heads_kv);
      for (int64_t q = 0; q < d.seqlen_q; ++q) {
        std::vector<double> score(static_cast<size_t>(d.seqlen_k), -HUGE_VAL);
        for (int64_t k = 0; k < d.seqlen_k; ++k) {
          PairAt at{0, b, h, q, k};
          for (int64_t n = 0; n < d.head_dim; ++n) {
            at.score += element(call.in.query, {b, q, h, n}) * element(call.in.key, {b, k, g, n});
          }
          at.score /= std::sqrt(static_cast<double>(d.head_dim));
          if (program.mask && !program.mask(at, call.captures)) continue;
          score[static_cast<size_t>(k)] = program.score ? program.score(at, call.captures) : at.score;
        }
        const double most = *std::max_element(score.begin(), score.end());
        double sum = 0;
        for (const double s : score) sum += most == -HUGE_VAL ? 0 : std::exp(s - most);
        r.logsumexp.set(r.logsumexp.index({b, h, q}), most + std::log(sum));
        for (int64_t n = 0; n < d.head_dim; ++n) {
          double o = 0;
          for (int64_t k = 0; k < d.seqlen_k && sum > 0; ++k) {
            o += std::exp(score[static_cast<size_t>(k)] - most) / sum * element(call.in.value, {b, k, g, n});
          }
          r.out.set(r.out.index({b, q, h, n}), o);
        }
      }
    }
  }
  return r;
}

std::vector<Shape> shapes() {
  if (memory_alone()) return {{{2, 4, 67, 131}, 2, 16}};
  const std::vector<Shape> all = {{{1, 2, 67, 131}, 1, 16},
                                  {{2, 2, 70, 65}, 2, 16, DType::kBFloat16},
                                  {{1, 2, 64, 128}, 1, 8, DType::kFloat16},
                                  {{1, 2, 70, 140}, 1, 16, DType::kFloat32, true},
                                  {{2, 2, 1, 129}, 2, 16},
                                  {{1, 4, 5, 700}, 2, 16, DType::kFloat32, true}};
  // Of kernels that take seconds for each: tests/cuda/CMakeLists.txt.
  const char* const one = std::getenv("POLYHEAD_TEST_SHAPE");
  return one == nullptr ? all : std::vector<Shape>{all.at(static_cast<size_t>(std::atoi(one)))};
}

class Programs : public ::testing::TestWithParam<NamedProgram> {};

TEST_P(Programs, MeanWhatTheySay) {
  if (memory_alone()) GTEST_SKIP() << "numbers are tested without sanitizers";
  for (const Sizes4& sizes : {Sizes4{2, 2, 40, 40}, Sizes4{1, 2, 33, 70}}) {
    const ProgramCall call = in_double(make_call(GetParam(), {sizes, 1, 8}, 5));
    const ProgramResults got = by_kernel(call, "reference", executor(1)), want = by_meaning(GetParam(), call);
    EXPECT_LE(largest_difference(got.out, want.out), 1e-6);
    EXPECT_LE(largest_difference(got.logsumexp, want.logsumexp), 1e-6);
  }
}

struct Draw {
  ProgramCall call;
  ProgramResults exact, naive;
  std::vector<double> terms = {};  // largest_terms()
};

void test_kernel(const Kernel& kernel, const std::vector<Draw>& draws, const std::string& what) {
  LargestErrors errors;
  ProgramResults first;
  for (const Draw& draw : draws) {
    const ProgramResults got = by_kernel(draw.call, kernel.name, executor(1));
    if (!memory_alone()) errors.add(got, draw.exact, draw.naive);
    if (&draw == &draws.front()) first = got;
  }
  errors.judge(first, draws.front().terms, what);
  const auto one = first.all();
  for (const int threads : {3, 0}) {
    const ProgramResults again = by_kernel(draws.front().call, kernel.name, executor(threads));
    const auto others = again.all();
    for (size_t i = 0; i < one.size(); ++i) {
      const std::string name = ProgramResults::name(i);
      EXPECT_EQ(difference(name.c_str(), *one[i], *others[i]), "") << what << ", on " << threads << " threads";
    }
  }
}

TEST_P(Programs, OnEveryKernel) {
  uint64_t seed = 1;
  for (const Shape& shape : shapes()) {
    std::vector<Draw> draws;
    for (int n = 0; n < (memory_alone() || !GetParam().score ? 1 : 3); ++n) {
      ++seed;
      draws.push_back({make_call(GetParam(), shape, seed), {}, {}, {}});
      if (memory_alone()) continue;
      ProgramCall& call = draws.back().call;
      give_exact_out(call);
      draws.back().exact = by_kernel(in_double(call), "reference", executor(1));
      draws.back().naive = in_float(draws.back().call);
    }
    if (!memory_alone()) draws.front().terms = largest_terms(draws.front().call);
    for (const Kernel* kernel : kernels_to_test()) {
      if (kernel == &kReference || refuses(kernel->name, kernel->why_not(draws[0].call.desc))) continue;
      test_kernel(*kernel, draws,
                  std::string(kernel->name) + ", " + GetParam().text + ", seed " + std::to_string(seed));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Programs, ::testing::ValuesIn(named_programs()),
                         [](const auto& test) { return test.param.name; });

// The definition's own gradients, by differences of the sum of out * grad_out.
TEST(ProgramGradients, AreDifferences) {
  if (memory_alone()) GTEST_SKIP() << "numbers are tested without sanitizers";
  for (const NamedProgram& program : named_programs()) {
    if (!program.score) continue;
    ProgramCall call = in_double(make_call(program, {{1, 2, 9, 11}, 1, 4}, 3));
    const ProgramResults at = by_kernel(call, "reference", executor(1));
    const auto objective = [&] {
      const Array out = by_kernel(call, "reference", executor(1)).out;
      double sum = 0;
      for (int64_t n = 0; n < out.size(); ++n) sum += out.at(n) * call.grad_out.at(n);
      return sum;
    };
    for (size_t i = 0; i < call.captures.size(); ++i) {
      Array& capture = call.captures[i];
      for (int64_t n = 0; is_float_dtype(capture.dtype) && n < capture.size(); n += 1 + capture.size() / 9) {
        constexpr double kStep = 1e-5;
        const double value = capture.at(n);
        capture.set(n, value + kStep);
        const double above = objective();
        capture.set(n, value - kStep);
        const double below = objective();
        capture.set(n, value);
        EXPECT_NEAR(at.grad_captures[i].at(n), (above - below) / (2 * kStep), 1e-6) << program.name << " element " << n;
      }
    }
    for (int64_t n = 0; n < call.in.query.size(); n += 13) {
      constexpr double kStep = 1e-6;
      const double value = call.in.query.at(n);
      call.in.query.set(n, value + kStep);
      const double above = objective();
      call.in.query.set(n, value - kStep);
      const double below = objective();
      call.in.query.set(n, value);
      EXPECT_NEAR(at.grad_query.at(n), (above - below) / (2 * kStep), 1e-5) << program.name << " query " << n;
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
