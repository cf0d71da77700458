// Every named program on every kernel: against what it means in double, forward and all gradients, and the laws.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels_to_test.h"
#include "programs.h"
#include "reference/attention.h"
#include "sanitizer.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

struct Shape {
  Sizes4 sizes;
  int64_t heads_kv, dim;
  DType dtype = DType::kFloat32;
  bool with_options = false;  // softcap, ALiBi, a mask, a bias and a window besides
};

// One problem: inputs, outputs, gradients, in their dtypes.
struct Call {
  AttentionDesc desc;
  Inputs in;
  Arrays captures;
  Array grad_out;
  Array out, logsumexp;  // what backward is given; not given: what forward wrote
};

struct Results {
  Array out, logsumexp, grad_query, grad_key, grad_value, grad_bias, grad_slopes;
  Arrays grad_captures;

  std::vector<const Array*> all() const {
    std::vector<const Array*> list = {&out, &logsumexp, &grad_query, &grad_key, &grad_value, &grad_bias, &grad_slopes};
    for (const Array& a : grad_captures) list.push_back(&a);
    return list;
  }
  static std::string name(size_t n) {
    static const char* const kNames[] = {"out",        "logsumexp", "grad_query", "grad_key",
                                         "grad_value", "grad_bias", "grad_slopes"};
    return n < 7 ? kNames[n] : "grad_captures " + std::to_string(n - 7);
  }
};

Array drawn(DType dtype, std::vector<int64_t> dims, Random& random) {
  Array a(dtype, std::move(dims));
  a.fill([&] { return random.normal(); });
  return a;
}

Call make_call(const NamedProgram& program, const Shape& shape, uint64_t seed) {
  Random random(seed);
  Call call;
  AttentionDesc& d = call.desc;
  d.batch = shape.sizes.batch;
  d.num_heads = shape.sizes.heads;
  d.num_heads_kv = shape.heads_kv;
  d.seqlen_q = shape.sizes.seqlen_q;
  d.seqlen_k = shape.sizes.seqlen_k;
  d.head_dim = shape.dim;
  d.head_dim_v = shape.dim;
  d.dtype = shape.dtype;
  call.in.query = drawn(d.dtype, {d.batch, d.seqlen_q, d.num_heads, d.head_dim}, random);
  call.in.key = drawn(d.dtype, {d.batch, d.seqlen_k, d.num_heads_kv, d.head_dim}, random);
  call.in.value = drawn(d.dtype, {d.batch, d.seqlen_k, d.num_heads_kv, d.head_dim}, random);
  if (shape.with_options) {
    d.softcap = 3;
    d.query_offset = 2;
    d.window_left = 70;
    d.alibi_slopes_ndim = 1;
    call.in.alibi_slopes = Array(DType::kFloat32, {d.num_heads});
    call.in.alibi_slopes.fill([&] { return 0.02 * random.uniform(); });
    d.attn_mask = {true, DType::kBool, {1, d.num_heads, d.seqlen_q, d.seqlen_k}};
    call.in.attn_mask = Array(DType::kBool, {1, d.num_heads, d.seqlen_q, d.seqlen_k});
    call.in.attn_mask.fill([&] { return random.integer(0, 7) != 0; });
    d.attn_bias = {true, DType::kFloat32, {1, 1, d.seqlen_q, d.seqlen_k}};
    call.in.attn_bias = Array(DType::kFloat32, {1, 1, d.seqlen_q, d.seqlen_k});
    call.in.attn_bias.fill([&] { return random.integer(0, 30) == 0 ? -HUGE_VAL : random.normal(); });
  }
  call.grad_out = drawn(d.dtype, call.in.query.dims, random);
  Result<SharedProgram> parsed = parse_program(program.text);
  EXPECT_TRUE(parsed.ok()) << program.name << ": " << parsed.status().message();
  d.program = *parsed;
  for (const CaptureOf& capture : program.captures(shape.sizes)) {
    Array a(capture.dtype, capture.dims);
    for (int64_t n = 0; n < a.size(); ++n) a.set(n, capture.element(n, random));
    call.captures.push_back(a);
    CaptureShape told{capture.dtype, static_cast<int>(capture.dims.size()), {}};
    std::copy(capture.dims.begin(), capture.dims.end(), told.dims);
    d.captures.push_back(told);
  }
  return call;
}

Array like(const Array& a) { return a.given() ? Array(a.dtype, a.dims) : Array(); }

Array cast(const Array& a, DType dtype) {
  if (!a.given()) return a;
  Array b(dtype, a.dims);
  for (int64_t n = 0; n < a.size(); ++n) b.set(n, a.at(n));
  return b;
}

bool is_float(DType dtype) { return dtype != DType::kBool && dtype != DType::kInt32 && dtype != DType::kInt64; }

// The same problem in float64, but for what must be float32.
Call in_double(const Call& call) {
  Call wide = call;
  wide.desc.dtype = DType::kFloat64;
  for (Array Call::*a : {&Call::grad_out, &Call::out, &Call::logsumexp}) wide.*a = cast(call.*a, DType::kFloat64);
  for (Array Inputs::*a : {&Inputs::query, &Inputs::key, &Inputs::value})
    wide.in.*a = cast(call.in.*a, DType::kFloat64);
  for (size_t i = 0; i < wide.captures.size(); ++i) {
    if (!is_float(wide.captures[i].dtype)) continue;
    wide.captures[i] = cast(wide.captures[i], DType::kFloat64);
    wide.desc.captures[i].dtype = DType::kFloat64;
  }
  return wide;
}

// What computes: a plan, or the reference in some arithmetic.
struct Computes {
  std::function<Status(const ForwardArgs&)> forward;
  std::function<Status(const BackwardArgs&)> backward;
};

Results compute(const Call& call, const Computes& by) {
  const AttentionDesc& d = call.desc;
  std::vector<Tensor> captures, grad_captures;
  for (const Array& a : call.captures) captures.push_back(view(a));
  Results r;
  const DType statistics = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  r.out = like(call.in.query);
  r.logsumexp = Array(statistics, {d.batch, d.num_heads, d.seqlen_q});
  ForwardArgs args = dense_args(call.in);
  args.captures = captures;
  args.out = view(r.out);
  args.logsumexp = view(r.logsumexp);
  Status status = by.forward(args);
  EXPECT_TRUE(status.ok()) << status.message();
  r.grad_query = like(call.in.query);
  r.grad_key = like(call.in.key);
  r.grad_value = like(call.in.value);
  r.grad_bias = like(call.in.attn_bias);
  r.grad_slopes = like(call.in.alibi_slopes);
  for (const Array& a : call.captures) r.grad_captures.push_back(is_float(a.dtype) ? like(a) : Array());
  BackwardArgs back;
  back.forward = args;
  if (call.out.given()) {
    back.forward.out = view(call.out);
    back.forward.logsumexp = view(call.logsumexp);
  }
  back.grad_out = view(call.grad_out);
  back.grad_query = view(r.grad_query);
  back.grad_key = view(r.grad_key);
  back.grad_value = view(r.grad_value);
  back.grad_attn_bias = view(r.grad_bias);
  back.grad_alibi_slopes = view(r.grad_slopes);
  for (const Array& a : r.grad_captures) grad_captures.push_back(view(a));
  back.grad_captures = grad_captures;
  status = by.backward(back);
  EXPECT_TRUE(status.ok()) << status.message();
  return r;
}

Results by_kernel(const Call& call, const char* kernel, Executor& executor) {
  PlanOptions options;
  options.kernel = kernel;
  options.where.executor = &executor;
  const Result<Plan> made = plan(call.desc, options);
  EXPECT_TRUE(made.ok()) << made.status().message();
  const size_t bytes = std::max(made->workspace_bytes(), made->backward_workspace_bytes());
  const GuardedBytes workspace(bytes / 64 * 64 + 64, Guard::kStart, 0xff);
  const auto give = [&](ForwardArgs& args, size_t needed) {
    args.workspace = workspace.data();
    args.workspace_bytes = needed;
  };
  return compute(call, {[&](ForwardArgs args) { return give(args, made->workspace_bytes()), made->forward(args); },
                        [&](BackwardArgs args) {
                          return give(args.forward, made->backward_workspace_bytes()), made->backward(args);
                        }});
}

// The contract's yardstick of error: its formula, naively, in float32.
Results in_float(const Call& call) {
  std::vector<int64_t> memory(
      (reference::workspace_bytes<float>(call.desc) + reference::backward_workspace_bytes<float>(call.desc)).value() /
          8 +
      8);
  return compute(
      call,
      {[&](const ForwardArgs& args) { return reference::forward_checked<float>(call.desc, args, memory.data()); },
       [&](const BackwardArgs& args) { return reference::backward_checked<float>(call.desc, args, memory.data()); }});
}

double epsilon(DType dtype) {
  return dtype == DType::kBFloat16  ? 0x1p-8
         : dtype == DType::kFloat16 ? 0x1p-11
         : dtype == DType::kFloat32 ? 0x1p-23
                                    : 0x1p-52;
}

// Of all elements the largest difference; infinite where one is NaN or infinite and the other is not.
double largest_difference(const Array& a, const Array& b, double* magnitude = nullptr) {
  double largest = 0;
  for (int64_t n = 0; n < a.size(); ++n) {
    const double x = a.at(n), y = b.at(n);
    if (x == y || (x != x && y != y)) continue;
    const double difference = std::fabs(x - y);
    largest = std::max(largest, difference == difference ? difference : HUGE_VAL);
    if (magnitude != nullptr && std::isfinite(y)) *magnitude = std::max(*magnitude, std::fabs(y));
  }
  return largest;
}

// Largest errors over some draws of the numbers: a gradient of one element errs by chance more, or less, than another way
// of computing it.
struct LargestErrors {
  std::vector<double> kernel, naive, magnitude;

  void add(const Results& got, const Results& exact, const Results& by_naive) {
    const auto g = got.all(), e = exact.all(), n = by_naive.all();
    kernel.resize(g.size()), naive.resize(g.size()), magnitude.resize(g.size());
    for (size_t i = 0; i < g.size(); ++i) {
      kernel[i] = std::max(kernel[i], largest_difference(*g[i], *e[i], &magnitude[i]));
      naive[i] = std::max(naive[i], largest_difference(*n[i], *e[i]));
    }
  }
  void judge(const Results& of, double terms, const std::string& what) const {
    for (size_t i = 0; i < kernel.size(); ++i) {
      const double sums = i < 7 ? 0 : 4 * epsilon(DType::kFloat32) * terms;
      const double ulps = 4 * epsilon(of.all()[i]->dtype) * std::max(magnitude[i], 1e-3) + sums;
      EXPECT_LE(kernel[i], (i < 2 ? 2 : 3) * naive[i] + ulps)
          << what << ": " << Results::name(i) << ", the naive formula errs by " << naive[i];
    }
  }
};

// O and L by the second telling of a program, in double.
Results by_meaning(const NamedProgram& program, const Call& call) {
  const AttentionDesc& d = call.desc;
  Results r;
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
  return {{{1, 2, 67, 131}, 1, 16},
          {{2, 2, 70, 65}, 2, 16, DType::kBFloat16},
          {{1, 2, 64, 128}, 1, 8, DType::kFloat16},
          {{1, 2, 70, 140}, 1, 16, DType::kFloat32, true},
          {{2, 2, 1, 129}, 2, 16}};
}

class Programs : public ::testing::TestWithParam<NamedProgram> {};

TEST_P(Programs, MeanWhatTheySay) {
  if (memory_alone()) GTEST_SKIP() << "numbers are tested without sanitizers";
  for (const Sizes4& sizes : {Sizes4{2, 2, 40, 40}, Sizes4{1, 2, 33, 70}}) {
    const Call call = in_double(make_call(GetParam(), {sizes, 1, 8}, 5));
    const Results got = by_kernel(call, "reference", executor(1)), want = by_meaning(GetParam(), call);
    EXPECT_LE(largest_difference(got.out, want.out), 1e-6);
    EXPECT_LE(largest_difference(got.logsumexp, want.logsumexp), 1e-6);
  }
}

struct Draw {
  uint64_t seed;
  Call call;
  Results exact, naive;
  double terms = 0;  // an upper bound of the sum of the absolute values of what is added up for an element of a capture
};

// Sum of |dS|, from the gradient of a bias that is added to the program's score, times the steepest slope by which some
// pairs' scores follow the captures.
double magnitude_of_terms(const NamedProgram& program, const Shape& shape, uint64_t seed) {
  if (!program.score) return 0;
  const Call call = in_double(make_call(program, shape, seed));
  NamedProgram with_bias = program;
  with_bias.text.replace(with_bias.text.find("score = "), 8, "score = bias_of_test[b, h, q, k] + ");
  Call biased = in_double(make_call(with_bias, shape, seed));
  const AttentionDesc& d = call.desc;
  const std::vector<int64_t> dims = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  // The bias stands where the text first names it.
  const auto captures = biased.desc.program->captures();
  const auto at =
      std::find_if(captures.begin(), captures.end(), [](const Capture& c) { return c.name == "bias_of_test"; });
  const auto place = at - captures.begin();
  biased.captures.insert(biased.captures.begin() + place, Array(DType::kFloat64, dims));
  CaptureShape told{DType::kFloat64, 4, {}};
  std::copy(dims.begin(), dims.end(), told.dims);
  biased.desc.captures.insert(biased.desc.captures.begin() + place, told);
  const Results of_bias = by_kernel(biased, "reference", executor(1));
  const Array& ds = of_bias.grad_captures[static_cast<size_t>(place)];
  double sum = 0, slope = 1;
  for (int64_t n = 0; n < ds.size(); ++n) sum += std::fabs(ds.at(n));
  Arrays moved = call.captures;
  for (Array& a : moved) {
    for (int64_t n = 0; is_float(a.dtype) && n < a.size(); ++n) a.set(n, a.at(n) + 1e-3);
  }
  for (int64_t q = 0; q < d.seqlen_q; q += 7) {
    for (int64_t k = 0; k < d.seqlen_k; k += 7) {
      const PairAt pair{0.5, 0, 0, q, k};
      const double steep = std::fabs(program.score(pair, moved) - program.score(pair, call.captures)) / 1e-3;
      if (std::isfinite(steep)) slope = std::max(slope, steep);
    }
  }
  return sum * slope;
}

void test_kernel(const Kernel& kernel, const std::vector<Draw>& draws, const std::string& what) {
  LargestErrors errors;
  Results first;
  for (const Draw& draw : draws) {
    const Results got = by_kernel(draw.call, kernel.name, executor(1));
    if (!memory_alone()) errors.add(got, draw.exact, draw.naive);
    if (&draw == &draws.front()) first = got;
  }
  errors.judge(first, draws.front().terms, what);
  const auto one = first.all();
  for (const int threads : {3, 0}) {
    const Results again = by_kernel(draws.front().call, kernel.name, executor(threads));
    const auto others = again.all();
    for (size_t i = 0; i < one.size(); ++i) {
      const std::string name = Results::name(i);
      EXPECT_EQ(difference(name.c_str(), *one[i], *others[i]), "") << what << ", on " << threads << " threads";
    }
  }
}

TEST_P(Programs, OnEveryKernel) {
  uint64_t seed = 1;
  for (const Shape& shape : shapes()) {
    std::vector<Draw> draws;
    for (int n = 0; n < (memory_alone() || !GetParam().score ? 1 : 3); ++n) {
      draws.push_back({++seed, make_call(GetParam(), shape, seed), {}, {}, 0});
      if (memory_alone()) continue;
      // Backward is given the same out and logsumexp, rounded as they are stored, whoever computes.
      Call& call = draws.back().call;
      const Results forward = by_kernel(in_double(call), "reference", executor(1));
      call.out = cast(forward.out, call.desc.dtype);
      call.logsumexp = cast(forward.logsumexp, DType::kFloat32);
      draws.back().exact = by_kernel(in_double(call), "reference", executor(1));
      draws.back().naive = in_float(draws.back().call);
    }
    if (!memory_alone()) draws.front().terms = magnitude_of_terms(GetParam(), shape, draws.front().seed);
    for (const Kernel* kernel : kernels_to_test()) {
      if (kernel == &kReference || !kernel->why_not(draws[0].call.desc).empty()) continue;
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
    Call call = in_double(make_call(program, {{1, 2, 9, 11}, 1, 4}, 3));
    const Results at = by_kernel(call, "reference", executor(1));
    const auto objective = [&] {
      const Array out = by_kernel(call, "reference", executor(1)).out;
      double sum = 0;
      for (int64_t n = 0; n < out.size(); ++n) sum += out.at(n) * call.grad_out.at(n);
      return sum;
    };
    for (size_t i = 0; i < call.captures.size(); ++i) {
      Array& capture = call.captures[i];
      for (int64_t n = 0; is_float(capture.dtype) && n < capture.size(); n += 1 + capture.size() / 9) {
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
