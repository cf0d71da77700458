// Layers against plain loops over their formulas, on every kernel and dtype. POLYHEAD_TEST_CASES=name,name: those alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "device_under_test.h"
#include "kernels_to_test.h"
#include "layer_harness.h"
#include "left_out.h"
#include "testing/errors.h"

namespace polyhead::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// visit(problem) for every problem and dtype.
template <class Visit>
void for_each_dtype(Visit visit) {
  const char* const names = std::getenv("POLYHEAD_TEST_CASES");
  const std::string asked = std::string(",") + (names == nullptr ? "" : names) + ",";
  for (LayerProblem problem : layer_problems()) {
    if (names != nullptr && asked.find("," + problem.name + ",") == std::string::npos) continue;
    for (const DType dtype : kDTypes) {
      problem.desc.dtype = dtype;
      visit(problem);
    }
  }
}

// visit(kernel) for every kernel that takes the problem; how many.
template <class Visit>
int for_each_kernel(const LayerProblem& problem, Visit visit) {
  int num_run = 0;
  for (const Kernel* kernel : kernels_to_test(device_under_test.device)) {
    if (!why_not(problem, kernel->name).empty()) continue;
    const std::string what = problem.name + " " + dtype_name(problem.desc.dtype) + " on " + kernel->name;
    SCOPED_TRACE(what);
    set_running(what);
    visit(kernel->name);
    ++num_run;
  }
  return num_run;
}

// visit(problem, kernel) for every problem, dtype and kernel that goes together.
template <class Visit>
void for_each_problem(Visit visit) {
  int num_run = 0;
  for_each_dtype([&](const LayerProblem& problem) {
    num_run += for_each_kernel(problem, [&](const char* kernel) { visit(problem, kernel); });
  });
  EXPECT_GT(num_run, 0);
}

TEST(Layer, ForwardAndBackwardMatchTheFormulas) {
  int num_run = 0;
  for_each_dtype([&](const LayerProblem& problem) {
    LayerDraws draws(problem);
    num_run += for_each_kernel(problem, [&](const char* kernel) {
      EXPECT_EQ(draws.judge({.kernel = kernel, .layout_seed = problem.seed}), "");
    });
  });
  EXPECT_GT(num_run, 0);
}

TEST(Layer, SameBitsForAnyThreadsLayoutsAndNeighbours) {
  for_each_problem([](const LayerProblem& problem, const char* kernel) {
    const LayerInputs in = random_inputs(problem);
    const LayerResults plain = run(problem, in, {.kernel = kernel, .layout = Layout::kBshd});
    EXPECT_EQ(difference(plain, run(problem, in, {.kernel = kernel, .threads = 3, .layout = Layout::kBshd})), "");
    EXPECT_EQ(difference(plain, run(problem, in, {.kernel = kernel, .threads = 0, .layout_seed = 7})), "");
    EXPECT_EQ(
        difference(plain, run(problem, in, {.kernel = kernel, .threads = 2, .layout_seed = 8, .guard = Guard::kStart})),
        "");
  });
}

// Sequence `b` of a batch.
Array sequence_of(const Array& batch, int64_t b) {
  std::vector<int64_t> dims = batch.dims;
  dims[0] = 1;
  Array one(batch.dtype, dims);
  std::copy_n(batch.bytes.begin() + static_cast<ptrdiff_t>(b * one.bytes.size()), one.bytes.size(), one.bytes.begin());
  return one;
}

// Lengths choose kernels, of attention and of products: few tokens and many, queries beside many keys, tiny heads.
TEST(Layer, WhereNoKernelIsNamedTheBatchChangesNoBit) {
  if (device_under_test.device != Device::kCpu) GTEST_SKIP() << "a GPU has one kernel";
  constexpr int64_t kBatch = 13;  // more rows than vectors take of a weight that lies as it lies
  const struct {
    int64_t seqlen_q, seqlen_k, head_dim;
  } sizes[] = {{1, 1, 32}, {1, 40, 32}, {4, 4, 32}, {12, 12, 32}, {20, 20, 32}, {16, 16, 8}};
  for (const auto& [seqlen_q, seqlen_k, head_dim] : sizes) {
    LayerProblem problem;
    LayerDesc& desc = problem.desc;
    desc.seqlen_q = seqlen_q, desc.seqlen_k = seqlen_k, desc.num_heads = desc.num_heads_kv = 3;
    desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = 600;
    desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = head_dim;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      desc.dtype = dtype, desc.batch = kBatch;
      const LayerInputs in = random_inputs(problem);
      const LayerResults all = run(problem, in, {.kernel = "", .training = false});
      desc.batch = 1;
      for (const int64_t b : {int64_t{0}, kBatch - 1}) {
        LayerInputs alone = in;
        alone.query = sequence_of(in.query, b), alone.key = sequence_of(in.key, b);
        alone.value = sequence_of(in.value, b), alone.grad_out = sequence_of(in.grad_out, b);
        const LayerResults one = run(problem, alone, {.kernel = "", .training = false});
        EXPECT_TRUE(all.faults.empty() && one.faults.empty());
        EXPECT_TRUE(one.out == sequence_of(all.out, b))
            << dtype_name(dtype) << ", " << seqlen_q << " queries beside " << seqlen_k << " keys of " << head_dim;
      }
    }
  }
}

// The same in each order of batch, beam and time in memory.
TEST(Layer, SixLayouts) {
  LayerProblem problem;
  for (const LayerProblem& p : layer_problems()) {
    if (p.name == "beams") problem = p;
  }
  const LayerInputs in = random_inputs(problem);
  const Result<Layer> made = layer(problem.desc);
  ASSERT_TRUE(made.ok());
  std::vector<float> buffer(made->weights_bytes() / sizeof(float));
  int order[] = {0, 1, 2};
  std::vector<Array> outs;
  do {
    std::vector<std::vector<float>> memory;
    // [batch, beam, time, vector] with the dims `order` from the outermost on.
    const auto lay = [&](const Array& a, bool filled) {
      Tensor t = view(a);
      int64_t stride = a.dims[3];
      for (int n = 2; n >= 0; --n) t.strides[order[n]] = stride, stride *= t.dims[order[n]];
      memory.emplace_back(static_cast<size_t>(a.size()));
      t.data = memory.back().data();
      for (int64_t n = 0; filled && n < a.size(); ++n) {
        int64_t at = n % t.dims[3], rest = n / t.dims[3];
        for (int dim = 2; dim >= 0; --dim) at += rest % t.dims[dim] * t.strides[dim], rest /= t.dims[dim];
        memory.back()[static_cast<size_t>(at)] = static_cast<float>(a.at(n));
      }
      return t;
    };
    memory.reserve(8);
    LayerForwardArgs args;
    args.query = lay(in.query, true), args.key = lay(in.key, true), args.value = lay(in.value, true);
    args.out = lay(in.grad_out, false);
    args.attn_bias = view(in.attn_bias), args.seqlens_k = view(in.seqlens_k);
    args.weights = made->weights_in(buffer.data());
    for (size_t n = 0; n < buffer.size(); ++n) buffer[n] = 0.1f * static_cast<float>(n % 7) - 0.3f;
    const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
    args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
    ASSERT_EQ(made->forward(args).message(), "");
    Array out = in.grad_out;
    for (int64_t n = 0; n < out.size(); ++n) {
      int64_t at = n % args.out.dims[3], rest = n / args.out.dims[3];
      for (int dim = 2; dim >= 0; --dim)
        at += rest % args.out.dims[dim] * args.out.strides[dim], rest /= args.out.dims[dim];
      out.set(n, static_cast<double>(static_cast<const float*>(args.out.data)[at]));
    }
    outs.push_back(out);
    EXPECT_EQ(difference("out", outs[0], out), "");
  } while (std::next_permutation(order, order + 3));
  EXPECT_EQ(outs.size(), 6u);
}

TEST(Layer, InferenceIsTrainingWithoutDropout) {
  for_each_problem([](const LayerProblem& problem, const char* kernel) {
    const LayerInputs in = random_inputs(problem);
    const LayerResults inferred = run(problem, in, {.kernel = kernel, .training = false});
    const LayerResults trained = run(inference(problem), in, {.kernel = kernel});
    ASSERT_TRUE(inferred.faults.empty()) << inferred.faults[0];
    EXPECT_EQ(difference("out", inferred.out, trained.out), "");
    EXPECT_EQ(difference("attn_weights", inferred.attn_weights, trained.attn_weights), "");
  });
}

TEST(Layer, StepsAfterForwardGiveItsRows) {
  for_each_dtype([](const LayerProblem& problem) {
    LayerDraws draws(inference(problem), false);
    for_each_kernel(problem, [&](const char* kernel) {
      const auto steps = [&](const LayerProblem& drawn, const LayerInputs& in) {
        return run_steps(drawn, in, {.kernel = kernel, .layout_seed = drawn.seed}, false);
      };
      EXPECT_EQ(draws.judge(steps), "");
    });
  });
}

// Keys behind the step are hidden, as causal hides them.
TEST(Layer, StepsThatAppendAreCausal) {
  for_each_dtype([](const LayerProblem& problem) {
    const LayerDesc& d = problem.desc;
    if (d.seqlen_q > d.seqlen_k) return;
    LayerProblem causal = inference(problem);
    if (d.attention.align == Align::kUnset && !d.attention.has_query_offsets) {
      causal.desc.attention.causal = true;
      causal.desc.attention.align = Align::kTopLeft;
    } else if (d.seqlen_q < d.seqlen_k || d.attention.align != Align::kTopLeft) {
      return;  // causal stands elsewhere than the steps
    }
    LayerDraws draws(causal, false);
    for_each_kernel(problem, [&](const char* kernel) {
      const auto steps = [&](LayerProblem drawn, const LayerInputs& in) {
        if (!d.attention.causal) drawn.desc.attention.causal = false;
        return run_steps(drawn, in, {.kernel = kernel, .layout_seed = drawn.seed}, true);
      };
      EXPECT_EQ(draws.judge(steps), "");
    });
  });
}

// NaN in every row of [batch, beam, time, vector] at or behind the longer of two lengths.
void poison_padding(Array& rows, const Array* lengths_q, const Array* lengths_k) {
  const int64_t steps = rows.dims[2], size = rows.dims[3];
  for (int64_t sequence = 0; sequence < rows.dims[0] * rows.dims[1]; ++sequence) {
    double end = 0;
    for (const Array* lengths : {lengths_q, lengths_k}) {
      if (lengths != nullptr) end = std::max(end, lengths->given() ? lengths->at(sequence) : HUGE_VAL);
    }
    for (int64_t t = 0; t < steps; ++t) {
      if (static_cast<double>(t) < end) continue;
      for (int64_t c = 0; c < size; ++c) {
        rows.set((sequence * steps + t) * size + c, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
}

TEST(Layer, PaddingIsNotSeen) {
  int num_poisoned = 0;
  for_each_problem([&](const LayerProblem& problem, const char* kernel) {
    const AttentionDesc& a = problem.desc.attention;
    if (!a.has_seqlens_q && !a.has_seqlens_k) return;
    LayerInputs in = random_inputs(problem);
    const LayerResults clean = run(problem, in, {.kernel = kernel});
    poison_padding(in.query, &in.seqlens_q, problem.key_is_query ? &in.seqlens_k : nullptr);
    if (problem.key_is_query) {
      in.key = in.value = in.query;
    } else {
      poison_padding(in.key, nullptr, &in.seqlens_k);
      poison_padding(in.value, nullptr, &in.seqlens_k);
    }
    poison_padding(in.grad_out, &in.seqlens_q, nullptr);
    EXPECT_EQ(difference(clean, run(problem, in, {.kernel = kernel})), "");
    ++num_poisoned;
  });
  EXPECT_GT(num_poisoned, 0);
}

TEST(Layer, WeightGradientsAddUp) {
  for_each_problem([](const LayerProblem& problem, const char* kernel) {
    const LayerInputs in = random_inputs(problem);
    LayerProblem other = problem;
    other.seed += 77;
    LayerRun adding{.kernel = kernel, .accumulate = true};
    adding.before.grad_weights = random_inputs(other).weights;
    const LayerResults set = run(problem, in, {.kernel = kernel}), added = run(problem, in, adding);
    ASSERT_TRUE(set.faults.empty() && added.faults.empty());
    for (size_t kind = 0; kind < kNumWeightKinds; ++kind) {
      const Array &s = set.grad_weights[kind], &b = adding.before.grad_weights[kind], &got = added.grad_weights[kind];
      for (int64_t n = 0; n < got.size(); ++n) {
        const double size = std::fabs(s.at(n)) + std::fabs(b.at(n));
        ASSERT_NEAR(got.at(n), s.at(n) + b.at(n), 2 * Ulp(got.dtype).of(size)) << "weight " << kind << " [" << n << "]";
      }
    }
  });
}

// The witness itself: its gradients are the slopes of sum(out * grad_out).
TEST(LayerWitness, GradientsAreSlopes) {
  for (LayerProblem problem : layer_problems()) {
    problem.desc.dtype = DType::kFloat64;
    if (problem.desc.attention.attn_bias.given) problem.desc.attention.attn_bias.dtype = DType::kFloat64;
    SCOPED_TRACE(problem.name);
    LayerInputs in = random_inputs(problem);
    if (in.query.size() > 1000) continue;
    const int64_t steps = problem.desc.seqlen_q, size = out_size_of(problem.desc);
    for (int64_t n = 0; n < in.grad_out.size() && in.seqlens_q.given(); ++n) {
      if (n / size % steps >= static_cast<int64_t>(in.seqlens_q.at(n / size / steps))) in.grad_out.set(n, 0);
    }
    const LayerResults want = expected(problem, in).exact;
    const auto loss = [&] {
      const Array out = expected(problem, in).exact.out;
      double sum = 0;
      for (int64_t n = 0; n < out.size(); ++n) sum += out.at(n) * in.grad_out.at(n);
      return sum;
    };
    struct Pair {
      Array* input;
      const Array* gradient;
    };
    std::vector<Pair> pairs = {{&in.query, &want.grad_inputs[0]},
                               {&in.key, problem.key_is_query ? nullptr : &want.grad_inputs[1]},
                               {&in.value, problem.value_is_key ? nullptr : &want.grad_inputs[2]},
                               {&in.attn_bias, &want.grad_attn_bias}};
    for (size_t kind = 0; kind < kNumWeightKinds; ++kind)
      pairs.push_back({&in.weights[kind], &want.grad_weights[kind]});
    Random random(problem.seed);
    for (const Pair& pair : pairs) {
      if (pair.gradient == nullptr || pair.input->size() == 0) continue;
      const int64_t n = random.integer(0, pair.input->size() - 1);
      const double x = pair.input->at(n), step = 1e-4;
      if (!std::isfinite(x)) continue;
      const auto loss_at = [&](double value) {
        pair.input->set(n, value);
        if (problem.key_is_query && pair.input == &in.query) in.key = in.query;
        if (problem.value_is_key && (pair.input == &in.key || problem.key_is_query)) in.value = in.key;
        return loss();
      };
      const double slope = (loss_at(x + step) - loss_at(x - step)) / (2 * step);
      loss_at(x);
      EXPECT_NEAR(slope, pair.gradient->at(n), 1e-5 * (1 + std::fabs(slope))) << "element " << n;
    }
  }
}

// Gradients of keys that all beams share are summed in float32: 512 equal beams give 512 times what one gives, which a
// running sum in 16 bits does not (it stands still once a summand is less than half its last bit).
TEST(Layer, SharedKeysSumTheirGradientsInFloat32) {
  constexpr int64_t kBeams = 512, kKeys = 5, kSize = 8;
  for (const Kernel* kernel : kernels_to_test()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(std::string(kernel->name) + " " + dtype_name(dtype));
      Random random(3);
      const auto drawn = [&](std::vector<int64_t> dims) {
        Array array(dtype, std::move(dims));
        for (int64_t n = 0; n < array.size(); ++n) array.set(n, 0.25 * random.normal());
        return array;
      };
      const Array key = drawn({1, 1, kKeys, kSize}), value = drawn({1, 1, kKeys, kSize});
      const Array one_query = drawn({1, 1, 1, kSize}), one_grad = drawn({1, 1, 1, kSize});
      const auto layer_of = [&](int64_t beams) {
        LayerDesc desc;
        desc.beam = beams, desc.seqlen_q = 1, desc.seqlen_k = kKeys;
        desc.query_size = desc.key_size = desc.value_size = kSize;
        desc.dtype = dtype;
        return layer(desc, PlanOptions{kernel->name, {}});
      };
      if (refused(layer_of(1).status()) || refused(layer_of(kBeams).status())) continue;
      const auto gradients = [&](int64_t beams) {
        const Result<Layer> made = layer_of(beams);
        EXPECT_TRUE(made.ok()) << made.status().message();
        Array out(dtype, {1, beams, 1, kSize}), grad_key = key, grad_value = value;
        std::vector<uint8_t> memory[2] = {
            std::vector<uint8_t>(made->reserve_bytes() + 64),
            std::vector<uint8_t>(std::max(made->workspace_bytes(), made->backward_workspace_bytes()) + 64)};
        const auto aligned = [](std::vector<uint8_t>& m) {
          return m.data() + (64 - reinterpret_cast<uintptr_t>(m.data()) % 64) % 64;
        };
        const auto each_beam = [&](const Array& array) {
          Tensor t = view(array);
          t.dims[1] = beams, t.strides[1] = 0;
          return t;
        };
        LayerBackwardArgs args;
        args.forward.query = each_beam(one_query), args.forward.key = view(key), args.forward.value = view(value);
        args.forward.out = view(out);
        args.forward.reserve = aligned(memory[0]), args.forward.reserve_bytes = made->reserve_bytes();
        args.forward.workspace = aligned(memory[1]), args.forward.workspace_bytes = memory[1].size() - 64;
        EXPECT_EQ(made->forward(args.forward).message(), "");
        args.grad_out = each_beam(one_grad);
        args.grad_key = view(grad_key), args.grad_value = view(grad_value);
        EXPECT_EQ(made->backward_data(args).message(), "");
        return std::pair(grad_key, grad_value);
      };
      const auto [one_key, one_value] = gradients(1);
      const auto [all_key, all_value] = gradients(kBeams);
      for (int64_t n = 0; n < all_key.size(); ++n) {
        EXPECT_EQ(all_key.at(n), kBeams * one_key.at(n)) << n;
        EXPECT_EQ(all_value.at(n), kBeams * one_value.at(n)) << n;
      }
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
