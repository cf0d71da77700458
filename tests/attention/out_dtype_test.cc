// Results in float32 beside 16-bit inputs (AttentionDesc::out_dtype and grad_dtype): the sums that 16 bits would round.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "kernels_to_test.h"
#include "left_out.h"
#include "polyhead/merge.h"
#include "reference/attention.h"
#include "testing/bounds.h"
#include "testing/guard.h"
#include "testing/random.h"

namespace polyhead::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF64 = DType::kFloat64;
constexpr DType kHalves[] = {DType::kBFloat16, DType::kFloat16};

Array normal(DType dtype, const std::vector<int64_t>& dims, uint64_t seed) {
  Array a(dtype, dims);
  Random random(seed);
  for (int64_t n = 0; n < a.size(); ++n) a.set(n, random.normal());
  return a;
}

Array converted(const Array& from, DType dtype) {
  Array to(dtype, from.dims);
  for (int64_t n = 0; n < to.size(); ++n) to.set(n, from.at(n));
  return to;
}

// One for each path through the CPU kernels.
struct Path {
  const char* name;
  int64_t batch, heads, heads_kv, seqlen_q, seqlen_k, dim, dim_v;
  bool causal = false;
};
constexpr Path kPaths[] = {
    {"tiny", 3, 10, 5, 7, 9, 16, 13},
    {"decode", 2, 8, 2, 1, 1100, 64, 40},
    {"tiles", 1, 4, 2, 100, 203, 72, 40},
    {"hidden_rows", 2, 2, 1, 203, 113, 64, 64, true},  // queries 0 to 89 see no key
};

AttentionDesc desc_of(const Path& path, DType dtype) {
  AttentionDesc d;
  d.batch = path.batch;
  d.num_heads = path.heads;
  d.num_heads_kv = path.heads_kv;
  d.seqlen_q = path.seqlen_q;
  d.seqlen_k = path.seqlen_k;
  d.head_dim = path.dim;
  d.head_dim_v = path.dim_v;
  d.causal = path.causal;
  d.align = Align::kBottomRight;
  d.dtype = dtype;
  return d;
}

std::vector<int64_t> out_dims(const AttentionDesc& d) { return {d.batch, d.seqlen_q, d.num_heads, d.head_dim_v}; }
std::vector<int64_t> logsumexp_dims(const AttentionDesc& d) { return {d.batch, d.num_heads, d.seqlen_q}; }

struct Operands {
  Array of[3];  // query, key, value

  Operands(const AttentionDesc& d, uint64_t seed)
      : of{normal(d.dtype, {d.batch, d.seqlen_q, d.num_heads, d.head_dim}, seed),
           normal(d.dtype, {d.batch, d.seqlen_k, d.num_heads_kv, d.head_dim}, seed + 1),
           normal(d.dtype, {d.batch, d.seqlen_k, d.num_heads_kv, d.head_dim_v}, seed + 2)} {}

  ForwardArgs arguments() const {
    ForwardArgs args;
    args.query = view(of[0]);
    args.key = view(of[1]);
    args.value = view(of[2]);
    return args;
  }
};

struct Result {
  Array out, logsumexp;
};
struct Saved : Result {
  Array grad_out;
};
using Gradients3 = std::array<Array, 3>;

// Through a plan, every element of guarded memory that starts as NaN.
Result forward(const Kernel& kernel, const AttentionDesc& d, const Operands& in, Layout layout = Layout::kPadded) {
  const polyhead::Result<Plan> made = plan(d, {.kernel = kernel.name});
  EXPECT_EQ(made.status().message(), "");
  const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
  const Placed out = Placed::output(out_dtype(d), out_dims(d), layout, Guard::kEnd);
  const Placed logsumexp = Placed::output(kF32, logsumexp_dims(d), Layout::kBshd, Guard::kEnd);
  ForwardArgs args = in.arguments();
  args.out = out.tensor();
  args.logsumexp = logsumexp.tensor();
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  EXPECT_EQ(made->forward(args).message(), "");
  std::vector<std::string> faults;
  Result result{out.result("out", &faults), logsumexp.result("logsumexp", &faults)};
  EXPECT_EQ(faults, std::vector<std::string>());
  return result;
}

BackwardArgs arguments(const Operands& in, const Saved& saved) {
  BackwardArgs args;
  args.forward = in.arguments();
  args.forward.out = view(saved.out);
  args.forward.logsumexp = view(saved.logsumexp);
  args.grad_out = view(saved.grad_out);
  return args;
}

constexpr Tensor BackwardArgs::*kGradientTensors[] = {&BackwardArgs::grad_query, &BackwardArgs::grad_key,
                                                      &BackwardArgs::grad_value};

// before: null, or what is added to.
Gradients3 backward(const Kernel& kernel, const AttentionDesc& d, const Operands& in, const Saved& saved,
                    const Gradients3* before = nullptr) {
  const polyhead::Result<Plan> made = plan(d, {.kernel = kernel.name});
  EXPECT_EQ(made.status().message(), "");
  const GuardedBytes workspace(made->backward_workspace_bytes(), Guard::kEnd, 0xff);
  BackwardArgs args = arguments(in, saved);
  args.forward.workspace = workspace.data();
  args.forward.workspace_bytes = workspace.size();
  args.accumulate = before != nullptr;
  std::vector<Placed> placed;
  for (size_t n = 0; n < 3; ++n) {
    placed.push_back(before ? Placed::accumulator((*before)[n], Layout::kPadded, Guard::kEnd)
                            : Placed::output(grad_dtype(d), in.of[n].dims, Layout::kPadded, Guard::kEnd));
    args.*kGradientTensors[n] = placed[n].tensor();
  }
  EXPECT_EQ(made->backward(args).message(), "");
  std::vector<std::string> faults;
  Gradients3 gradients;
  for (size_t n = 0; n < 3; ++n) gradients[n] = placed[n].result("gradient", &faults);
  EXPECT_EQ(faults, std::vector<std::string>());
  return gradients;
}

// The formula in arithmetic of T, its results in `stored`.
template <class T>
Result formula(const AttentionDesc& d, const Operands& in, DType stored) {
  Result result{Array(stored, out_dims(d)), Array(stored == kF64 ? kF64 : kF32, logsumexp_dims(d))};
  ForwardArgs args = in.arguments();
  args.out = view(result.out);
  args.logsumexp = view(result.logsumexp);
  reference::forward<T>(d, args);
  return result;
}

template <class T>
Gradients3 formula(const AttentionDesc& d, const Operands& in, const Saved& saved, DType stored) {
  BackwardArgs args = arguments(in, saved);
  Gradients3 gradients;
  for (size_t n = 0; n < 3; ++n) {
    gradients[n] = Array(stored, in.of[n].dims);
    args.*kGradientTensors[n] = view(gradients[n]);
  }
  reference::backward<T>(d, args);
  return gradients;
}

Saved saved_of(const AttentionDesc& d, const Operands& in) {
  return {formula<double>(d, in, out_dtype(d)), normal(out_dtype(d), out_dims(d), 99)};
}

double largest(const Array& a) {
  double most = 0;
  for (int64_t n = 0; n < a.size(); ++n) most = std::max(most, std::fabs(a.at(n)));
  return most;
}
double largest_error(const Array& got, const Array& exact) {
  double most = 0;
  for (int64_t n = 0; n < got.size(); ++n) most = std::fmax(most, std::fabs(got.at(n) - exact.at(n)));
  return most;
}
double rms_error(const Array& got, const Array& exact) {
  double sum = 0;
  for (int64_t n = 0; n < got.size(); ++n) sum += (got.at(n) - exact.at(n)) * (got.at(n) - exact.at(n));
  return std::sqrt(sum / static_cast<double>(got.size()));
}

// wide: float32, as good as the formula in float32 arithmetic, or of pairs, whose P and dS are rounded, better than
// narrow: the same in 16 bits.
void expect_unrounded(const char* name, const Array& wide, const Array& narrow, const Array& exact, const Array& naive,
                      double factor, bool pairs) {
  ASSERT_EQ(wide.dtype, kF32) << name;
  ASSERT_EQ(naive.dtype, kF32) << name;
  if (pairs) {
    EXPECT_LT(rms_error(wide, exact), 0.9 * rms_error(narrow, exact)) << name;
  } else {
    EXPECT_LE(largest_error(wide, exact), factor * largest_error(naive, exact) + 0x1p-21 * largest(exact)) << name;
  }
  // 2^-16 of the float32 numbers are bfloat16's, 2^-13 float16's: what had been rounded on the way would show here.
  int64_t short_numbers = 0, others = 0;
  const Array rounded = converted(wide, narrow.dtype);
  for (int64_t n = 0; n < wide.size(); ++n) {
    if (wide.at(n) != 0) ++(wide.at(n) == rounded.at(n) ? short_numbers : others);
  }
  EXPECT_LT(short_numbers * 20, others) << name;
}

template <class Test>
void for_all(Test test) {
  for (const Path& path : kPaths) {
    for (const DType dtype : kHalves) {
      for (const Kernel* kernel : kernels_to_test()) {
        const AttentionDesc d = desc_of(path, dtype);
        if (refuses(kernel->name, kernel->why_not(d))) continue;
        SCOPED_TRACE(std::string(path.name) + " " + dtype_name(dtype) + " " + kernel->name);
        test(*kernel, d);
      }
    }
  }
}

TEST(OutDtype, ForwardGivesTheSumsThat16BitsRound) {
  for_all([](const Kernel& kernel, const AttentionDesc& d) {
    const Operands in(d, 1);
    AttentionDesc wide = d;
    wide.out_dtype = kF32;
    if (refuses(kernel.name, kernel.why_not(wide))) return;
    const Result narrow = forward(kernel, d, in), sums = forward(kernel, wide, in);
    EXPECT_TRUE(narrow.logsumexp == sums.logsumexp);
    // The reference computes in double and rounds to either at once; the others have the float32 sum first.
    EXPECT_TRUE(&kernel == &kReference || converted(sums.out, d.dtype) == narrow.out);
    expect_unrounded("out", sums.out, narrow.out, formula<double>(d, in, kF64).out, formula<float>(d, in, kF32).out, 2,
                     multiplies_pairs(kernel.name, d));
    for (const Layout layout : {Layout::kBhsd, Layout::kTransposed}) {
      EXPECT_TRUE(forward(kernel, wide, in, layout).out == sums.out);
    }
  });
}

// Whether a kernel computes float32 gradients by products of more digits (docs/semantics.md), so that they are not what it
// rounds to 16 bits, but nearer to the exact ones.
bool has_more_digits(const Kernel& kernel) {
  const bool on_gpu = std::string_view(kernel.name).starts_with("cuda");
  return on_gpu &&
         refuses(kernel.name, "P and dS of float32 gradients keep twice the digits, rounding gives other bits");
}

TEST(OutDtype, GradientsAreTheSumsThat16BitsRound) {
  for_all([](const Kernel& kernel, const AttentionDesc& d) {
    const Operands in(d, 4);
    const Saved saved = saved_of(d, in);
    AttentionDesc wide = d;
    wide.grad_dtype = kF32;
    const Gradients3 narrow = backward(kernel, d, in, saved), sums = backward(kernel, wide, in, saved);
    const Gradients3 exact = formula<double>(d, in, saved, kF64), naive = formula<float>(d, in, saved, kF32);
    const bool more_digits = has_more_digits(kernel);
    for (size_t n = 0; n < 3; ++n) {
      const Array rounded = converted(sums[n], d.dtype);
      if (more_digits) {
        EXPECT_LT(rms_error(rounded, exact[n]), 1.01 * rms_error(narrow[n], exact[n])) << n;
      } else {
        EXPECT_TRUE(&kernel == &kReference || rounded == narrow[n]) << n;
      }
      expect_unrounded("gradient", sums[n], narrow[n], exact[n], naive[n], 3, multiplies_pairs(kernel.name, d));
    }
  });
}

// grad_out and out of float32 are not rounded on the way in, by no kernel.
TEST(OutDtype, BackwardReadsFloat32) {
  for_all([](const Kernel& kernel, const AttentionDesc& given) {
    AttentionDesc d = given;
    d.out_dtype = kF32;
    d.grad_dtype = kF32;
    if (refuses(kernel.name, kernel.why_not(d))) return;
    const Operands in(d, 7);
    const Saved saved = saved_of(d, in);
    const Saved rounded{{converted(saved.out, d.dtype), saved.logsumexp}, converted(saved.grad_out, d.dtype)};
    const Gradients3 exact = formula<double>(d, in, saved, kF64), naive = formula<float>(d, in, saved, kF32);
    const Gradients3 of_rounded = formula<double>(given, in, rounded, kF64);
    const Gradients3 got = backward(kernel, d, in, saved);
    for (size_t n = 0; n < 3; ++n) {
      const double allowed = 3 * largest_error(naive[n], exact[n]) + 0x1p-21 * largest(exact[n]);
      EXPECT_LE(largest_error(got[n], exact[n]), allowed) << n;
      EXPECT_GT(largest_error(of_rounded[n], exact[n]), 20 * allowed) << "the bound would not notice rounding";
    }
  });
}

// Eight shards of the keys go round a ring; each adds its part to what came before.
TEST(OutDtype, ARingOfFloat32PartsIsAsGoodAsTheWhole) {
  constexpr int64_t kShards = 8, kKeys = 128;
  for (const DType dtype : kHalves) {
    for (const Kernel* kernel : kernels_to_test()) {
      const AttentionDesc whole = desc_of({"ring", 1, 4, 2, 70, kShards * kKeys, 64, 64}, dtype);
      AttentionDesc wide = whole;
      wide.out_dtype = kF32;
      if (refuses(kernel->name, kernel->why_not(wide))) continue;
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + kernel->name);
      const Operands in(whole, 11);
      const Array exact = formula<double>(whole, in, kF64).out;
      const auto ring = [&](DType stored) {
        AttentionDesc shard = whole;
        shard.seqlen_k = kKeys;
        shard.out_dtype = stored;
        Result sum;
        for (int64_t k = 0; k < kShards; ++k) {
          Operands part = in;
          for (size_t n = 1; n < 3; ++n) {
            Array keys(dtype, {1, kKeys, in.of[n].dims[2], in.of[n].dims[3]});
            const size_t bytes = keys.bytes.size();
            std::copy_n(in.of[n].bytes.begin() + static_cast<std::ptrdiff_t>(bytes) * k, bytes, keys.bytes.begin());
            part.of[n] = keys;
          }
          const Result result = forward(*kernel, shard, part);
          if (k == 0) {
            sum = result;
            continue;
          }
          // After the last hop the result is rounded, once.
          Array out = k + 1 < kShards ? sum.out : Array(dtype, sum.out.dims);
          const Partial parts[] = {{view(sum.out), view(sum.logsumexp)}, {view(result.out), view(result.logsumexp)}};
          EXPECT_EQ(merge(parts, {view(out), view(sum.logsumexp)}).message(), "");
          sum.out = out;
        }
        return rms_error(sum.out, exact);
      };
      const double of_halves = ring(dtype), of_floats = ring(kF32);
      const double of_whole = rms_error(forward(*kernel, whole, in).out, exact);
      std::printf("ring of 8 shards, %s, %s: RMSE %.3g by float32 parts, %.3g by %s parts, %.3g of the whole at once\n",
                  dtype_name(dtype), kernel->name, of_floats, of_halves, dtype_name(dtype), of_whole);
      EXPECT_LT(of_floats, 1.1 * of_whole);
      EXPECT_GT(of_halves, 1.5 * of_floats);
    }
  }
}

TEST(OutDtype, GradientsOfManyCallsAddUpInFloat32) {
  constexpr int kCalls = 16;
  for (const DType dtype : kHalves) {
    for (const Kernel* kernel : kernels_to_test()) {
      const AttentionDesc d = desc_of({"microbatch", 1, 2, 1, 70, 90, 32, 32}, dtype);
      if (refuses(kernel->name, kernel->why_not(d))) continue;
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + kernel->name);
      const auto summed = [&](DType stored) {
        AttentionDesc each = d;
        each.grad_dtype = stored;
        Gradients3 sums;
        std::array<double, 3> errors{};
        std::array<Array, 3> exact;
        for (int call = 0; call < kCalls; ++call) {
          const Operands in(d, 20 + 3 * static_cast<uint64_t>(call));
          const Saved saved = saved_of(d, in);
          const Gradients3 one = formula<double>(d, in, saved, kF64);
          for (size_t n = 0; n < 3; ++n) {
            if (call == 0) exact[n] = Array(kF64, one[n].dims);
            for (int64_t i = 0; i < one[n].size(); ++i) exact[n].set(i, exact[n].at(i) + one[n].at(i));
          }
          sums = backward(*kernel, each, in, saved, call > 0 ? &sums : nullptr);
        }
        for (size_t n = 0; n < 3; ++n) errors[n] = rms_error(sums[n], exact[n]);
        return errors;
      };
      const std::array<double, 3> of_halves = summed(dtype), of_floats = summed(kF32);
      for (size_t n = 0; n < 3; ++n) {
        EXPECT_LT(of_floats[n] * (multiplies_pairs(kernel->name, d) ? 1.2 : 100), of_halves[n]) << n;
      }
    }
  }
}

TEST(OutDtype, WhatCannotBeIsRefused) {
  const struct {
    DType inputs, stored;
    const char* words;
  } cases[] = {
      {DType::kBFloat16, DType::kFloat16, " is float16, must be bfloat16 as dtype, or float32"},
      {DType::kFloat16, DType::kFloat64, " is float64, must be float16 as dtype, or float32"},
      {DType::kBFloat16, DType::kInt32, " is int32, must be bfloat16 as dtype, or float32"},
      {kF32, DType::kBFloat16, " is bfloat16, must be float32 as dtype"},
      {kF64, kF32, " is float32, must be float64 as dtype"},
  };
  for (const auto& c : cases) {
    AttentionDesc d = desc_of(kPaths[2], c.inputs);
    d.out_dtype = c.stored;
    EXPECT_EQ(plan(d).status().message(), std::string("out_dtype") + c.words);
    d.out_dtype = c.inputs;
    EXPECT_TRUE(plan(d).ok());
    d.grad_dtype = c.stored;
    EXPECT_EQ(plan(d).status().message(), std::string("grad_dtype") + c.words);
  }
}

TEST(OutDtype, TensorsHaveTheDtypesOfTheDesc) {
  AttentionDesc d = desc_of(kPaths[2], DType::kBFloat16);
  const Operands in(d, 1);
  d.out_dtype = kF32;
  const polyhead::Result<Plan> made = plan(d);
  ASSERT_TRUE(made.ok());
  const GuardedBytes workspace(std::max(made->workspace_bytes(), made->backward_workspace_bytes()), Guard::kEnd, 0);
  Saved saved = saved_of(d, in);
  const Array half = converted(saved.out, DType::kBFloat16);
  BackwardArgs args = arguments(in, saved);
  args.forward.workspace = workspace.data();
  args.forward.workspace_bytes = workspace.size();
  ForwardArgs forward_args = args.forward;
  forward_args.out = view(half);
  EXPECT_EQ(made->forward(forward_args).message(), "out is bfloat16, expected float32");
  Array gradient(kF32, in.of[0].dims);
  args.grad_query = view(gradient);
  EXPECT_EQ(made->backward(args).message(), "grad_query is float32, expected bfloat16");
  args.grad_out = view(half);
  EXPECT_EQ(made->backward(args).message(), "grad_out is bfloat16, expected float32");
}

Result random_part(DType dtype, uint64_t seed) {
  return {normal(dtype, {2, 5, 3, 300}, seed), normal(kF32, {2, 3, 5}, seed + 1)};
}
Partial views(const Result& part) { return {view(part.out), view(part.logsumexp)}; }

TEST(OutDtype, PartsOfAnyDtypesAreMergedAsTheirNumbersInFloat32) {
  const Result a = random_part(DType::kBFloat16, 1), b = random_part(kF32, 3), c = random_part(DType::kFloat16, 5);
  const Result wide_a{converted(a.out, kF32), a.logsumexp}, wide_c{converted(c.out, kF32), c.logsumexp};
  const Partial mixed[] = {views(a), views(b), views(c)}, wide[] = {views(wide_a), views(b), views(wide_c)};
  Result of_wide = random_part(kF32, 7);
  ASSERT_EQ(merge(wide, views(of_wide)).message(), "");
  for (const DType dtype : {kF32, DType::kBFloat16, DType::kFloat16}) {
    const Result merged = random_part(dtype, 8);
    ASSERT_EQ(merge(mixed, views(merged)).message(), "");
    EXPECT_TRUE(merged.out == converted(of_wide.out, dtype));
    EXPECT_TRUE(merged.logsumexp == of_wide.logsumexp);
  }
  const Result grad = random_part(DType::kBFloat16, 9), wide_grad{converted(grad.out, kF32), grad.logsumexp};
  const DType kinds[] = {DType::kFloat16, kF32, DType::kBFloat16};
  Result grads[3], wide_grads[3];
  Partial to[3], wide_to[3];
  for (size_t n = 0; n < 3; ++n) {
    grads[n] = random_part(kinds[n], 10);
    wide_grads[n] = random_part(kF32, 10);
    to[n] = views(grads[n]);
    wide_to[n] = views(wide_grads[n]);
  }
  ASSERT_EQ(merge_backward(mixed, views(of_wide), views(grad), to).message(), "");
  ASSERT_EQ(merge_backward(wide, views(of_wide), views(wide_grad), wide_to).message(), "");
  for (size_t n = 0; n < 3; ++n) {
    EXPECT_TRUE(grads[n].out == converted(wide_grads[n].out, kinds[n])) << n;
    EXPECT_TRUE(grads[n].logsumexp == wide_grads[n].logsumexp) << n;
  }
}

TEST(OutDtype, Float64PartsAreMergedAmongThemselves) {
  const Result a = random_part(kF32, 1), b{normal(kF64, {2, 5, 3, 300}, 3), normal(kF64, {2, 3, 5}, 4)};
  const Result merged = random_part(kF32, 5);
  const Partial parts[] = {views(a), views(b)}, others[] = {views(b), views(a)};
  EXPECT_EQ(merge(parts, views(merged)).message(), "parts[1].out is float64, expected float32");
  EXPECT_EQ(merge(others, views(b)).message(), "parts[1].out is float32, expected float64");
}

}  // namespace
}  // namespace polyhead::testing
