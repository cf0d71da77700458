// The harness for gradients must pass honest kernels and catch each kind of wrong one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "gradient_cases.h"
#include "gradient_poison.h"
#include "reference/attention.h"
#include "stateless.h"
#include "testing/definition.h"
#include "testing/judge.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

using Backward = void (*)(const AttentionDesc&, const BackwardArgs&, const polyhead::Run&);

// A kernel that computes as the yardstick does, but for what `backward` does differently.
Kernel kernel_of(Backward backward) {
  return {"sabotaged",
          Device::kCpu,
          [](const AttentionDesc&) { return std::string(); },
          nullptr,
          [](const AttentionDesc& desc, int) { return reference::backward_workspace_bytes<float>(desc); },
          nullptr,
          with_status(backward)};
}

void naive(const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
  reference::backward<float>(desc, args);
}

// With every option that a wrong kernel could forget.
Problem problem() {
  Problem p;
  p.name = "gradient_harness_test";
  AttentionDesc& d = p.desc;
  d.batch = 2;
  d.num_heads = 4;
  d.num_heads_kv = 2;
  d.seqlen_q = 40;
  d.seqlen_k = 70;
  d.head_dim = 16;
  d.head_dim_v = 24;
  d.softcap = 3;
  d.alibi_slopes_ndim = 1;
  d.has_sink_logits = true;
  d.causal = true;
  d.align = Align::kBottomRight;
  d.dropout_p = 0.2;
  d.attn_bias = {true, DType::kFloat32, {1, 4, 1, 70}};
  p.logsumexp = true;
  return p;
}

std::string judged(const Problem& p, Backward backward) { return mismatch(kernel_of(backward), p, backward_draws(p)); }

// Runs head dims backwards: other roundings, as good as the yardstick's.
void mirrored(const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
  auto flip = [](Tensor& t) {
    const int last = t.ndim - 1;
    if (!t.given() || t.dims[last] < 2) return;
    t.data = static_cast<uint8_t*>(t.data) +
             (t.dims[last] - 1) * t.strides[last] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
    t.strides[last] = -t.strides[last];
  };
  BackwardArgs flipped = args;
  for (Tensor* t : {&flipped.forward.query, &flipped.forward.key, &flipped.grad_query, &flipped.grad_key}) flip(*t);
  for (Tensor* t : {&flipped.forward.value, &flipped.forward.out, &flipped.grad_out, &flipped.grad_value}) flip(*t);
  reference::backward<float>(desc, flipped);
}

TEST(GradientHarness, PassesTheYardstickAndItsMirrorImage) {
  int failed = 0, passed = 0;
  for (const Problem& p : gradient_cases()) {
    const AttentionDesc& d = p.desc;
    if (d.dtype == DType::kFloat64 || d.batch * d.num_heads * d.seqlen_q * d.seqlen_k > 8000) continue;
    if (d.batch * d.num_heads * d.seqlen_q * d.seqlen_k == 0) continue;  // the plan's
    const std::vector<BackwardDraw> draws = backward_draws(p);
    RunOptions options = run_options(p);
    options.through_plan = false;
    for (Backward backward : {naive, mirrored}) {
      const std::string text = mismatch(kernel_of(backward), p, draws, options);
      EXPECT_EQ(text, "") << backward_command(backward == naive ? "naive" : "mirrored", p);
      ++(text.empty() ? passed : failed);
    }
    if (failed > 5) break;
  }
  EXPECT_GT(passed, 300);
}

TEST(GradientHarness, CatchesWhatIsForgotten) {
  struct Wrong {
    const char* what;
    Backward backward;
  };
  const Wrong kWrong[] = {
      {"the gradient of logsumexp",
       [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
         BackwardArgs less = args;
         less.grad_logsumexp = Tensor();
         reference::backward<float>(desc, less);
       }},
      {"dropout's mask",
       [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
         BackwardArgs other = args;
         other.forward.dropout_offset += 1;
         reference::backward<float>(desc, other);
       }},
      {"the diagonal",
       [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
         AttentionDesc other = desc;
         other.align = Align::kUnset;
         other.query_offset = desc.seqlen_k - desc.seqlen_q - 1;
         reference::backward<float>(other, args);
       }},
      {"softcap",
       [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
         AttentionDesc other = desc;
         other.softcap *= 1.001;
         reference::backward<float>(other, args);
       }},
      {"one head of a group",
       [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
         BackwardArgs zero = args;
         Array dO(DType::kFloat32, {desc.batch, desc.seqlen_q, desc.num_heads, desc.head_dim_v});
         for (int64_t n = 0; n < dO.size(); ++n) {
           const int64_t i[4] = {n / desc.head_dim_v / desc.num_heads / desc.seqlen_q,
                                 n / desc.head_dim_v / desc.num_heads % desc.seqlen_q,
                                 n / desc.head_dim_v % desc.num_heads, n % desc.head_dim_v};
           int64_t at = 0;
           for (int d = 0; d < 4; ++d) at += i[d] * args.grad_out.strides[d];
           dO.set(n, i[2] == 1 ? 0 : static_cast<const float*>(args.grad_out.data)[at]);
         }
         zero.grad_out = view(dO);
         reference::backward<float>(desc, zero);
       }},
  };
  const Problem p = problem();
  EXPECT_EQ(judged(p, naive), "");
  for (const Wrong& wrong : kWrong) EXPECT_NE(judged(p, wrong.backward), "") << wrong.what;
}

// Changes one gradient after the yardstick has computed it.
template <Tensor BackwardArgs::*kGradient, class Change>
void changed(const AttentionDesc& desc, const BackwardArgs& args, Change change) {
  reference::backward<float>(desc, args);
  float* data = static_cast<float*>((args.*kGradient).data);
  for (int64_t n = 0; n < (args.*kGradient).num_elements(); ++n) data[n] = change(n, data[n]);
}

TEST(GradientHarness, CatchesSmallErrorsInEachGradient) {
  const Problem p = problem();
  const Backward kOneElement[] = {
      [](const AttentionDesc& d, const BackwardArgs& a, const polyhead::Run&) {
        changed<&BackwardArgs::grad_query>(d, a, [](int64_t n, float x) { return n == 77 ? x + 2e-4f : x; });
      },
      [](const AttentionDesc& d, const BackwardArgs& a, const polyhead::Run&) {
        changed<&BackwardArgs::grad_key>(d, a, [](int64_t n, float x) { return n == 77 ? x + 2e-4f : x; });
      },
      [](const AttentionDesc& d, const BackwardArgs& a, const polyhead::Run&) {
        changed<&BackwardArgs::grad_value>(d, a, [](int64_t n, float x) { return n == 77 ? x + 2e-5f : x; });
      },
      [](const AttentionDesc& d, const BackwardArgs& a, const polyhead::Run&) {
        changed<&BackwardArgs::grad_attn_bias>(d, a, [](int64_t n, float x) { return n == 77 ? x + 2e-3f : x; });
      },
      [](const AttentionDesc& d, const BackwardArgs& a, const polyhead::Run&) {
        changed<&BackwardArgs::grad_alibi_slopes>(d, a, [](int64_t n, float x) { return n == 1 ? x + 0.1f : x; });
      },
      [](const AttentionDesc& d, const BackwardArgs& a, const polyhead::Run&) {
        changed<&BackwardArgs::grad_sink_logits>(d, a, [](int64_t n, float x) { return n == 1 ? x + 1e-3f : x; });
      },
  };
  for (size_t n = 0; n < kNumGradients; ++n) {
    const std::string text = judged(p, kOneElement[n]);
    EXPECT_EQ(text.rfind(kGradients[n].name, 0), 0u) << n << text;
  }
}

TEST(GradientHarness, CatchesWhatIsLeftOrWrittenOver) {
  Problem p = problem();
  p.accumulate = true;
  const Backward sets = [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    BackwardArgs set = args;
    set.accumulate = false;
    reference::backward<float>(desc, set);
  };
  EXPECT_EQ(judged(p, naive), "");
  EXPECT_NE(judged(p, sets), "");
  const Backward minus_zero = [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    changed<&BackwardArgs::grad_query>(desc, args, [](int64_t, float x) { return x == 0 ? -0.0f : x; });
  };
  p.accumulate = false;
  p.desc.align = Align::kUnset;
  p.desc.query_offset = -5;
  EXPECT_EQ(judged(p, naive), "");
  EXPECT_NE(judged(p, minus_zero).find("expected +0"), std::string::npos);
  const Backward lazy = [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    BackwardArgs less = args;
    less.grad_value = Tensor();
    reference::backward<float>(desc, less);
  };
  EXPECT_NE(judged(p, lazy).find("not written"), std::string::npos);
  const Backward scribbles = [](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    reference::backward<float>(desc, args);
    static_cast<float*>(args.grad_out.data)[3] += 1;
  };
  EXPECT_NE(judged(p, scribbles).find("grad_out was written"), std::string::npos);
}

TEST(GradientHarness, CatchesALeakAndAHiddenNan) {
  Problem p = problem();
  p.desc.align = Align::kUnset;
  p.desc.query_offset = -5;
  p.desc.has_sink_logits = false;  // for which `out` is read everywhere
  const AttentionDesc& d = p.desc;
  const BackwardInputs in = random_backward_inputs(p);
  const Kernel honest = kernel_of(naive);
  const Kernel leaks = kernel_of([](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    const float hidden = *static_cast<const float*>(args.grad_out.data);  // row 0 sees no key
    changed<&BackwardArgs::grad_query>(desc, args, [&](int64_t, float x) { return x + 0 * hidden; });
  });
  const Kernel hides = kernel_of([](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    changed<&BackwardArgs::grad_key>(desc, args, [](int64_t, float x) { return std::isnan(x) ? 0 : x; });
  });
  const Kernel spreads = kernel_of([](const AttentionDesc& desc, const BackwardArgs& args, const polyhead::Run&) {
    bool any = false;
    changed<&BackwardArgs::grad_key>(desc, args, [&](int64_t, float x) { return (any |= std::isnan(x)) ? NAN : x; });
  });
  const BackwardInputs bad = poison_hidden(d, in, 1);
  EXPECT_NE(bad.grad_out, in.grad_out);
  EXPECT_NE(bad.out, in.out);
  EXPECT_EQ(difference(run(honest, d, bad), run(honest, d, in)), "");
  EXPECT_NE(difference(run(leaks, d, bad), run(leaks, d, in)), "");
  int done = 0;
  for (int poke = 0; poke < kNumGradientPokes; ++poke) {
    const PokedBackward poked = poke_visible(d, in, static_cast<GradientPoke>(poke), 5);
    if (!poked.done) continue;
    ++done;
    const Gradients clean = run(honest, d, in);
    EXPECT_EQ(poke_mismatch(poked, clean, run(honest, d, poked.inputs)), "") << poked.where;
    EXPECT_NE(poke_mismatch(poked, clean, run(hides, d, poked.inputs)), "") << poked.where;
    EXPECT_NE(poke_mismatch(poked, clean, run(spreads, d, poked.inputs)), "") << poked.where;
  }
  EXPECT_EQ(done, kNumGradientPokes);
}

// The definition that kernels are compared with is the reference, bit for bit, in both arithmetics.
template <class T>
std::string difference_from_reference(const AttentionDesc& desc, const BackwardInputs& in, bool wide) {
  const Visibility seen(desc, in.forward);
  const Gradients want = defined_gradients<T>(desc, in, seen, wide);
  Gradients got = want;
  BackwardArgs args = dense_args(in);
  for (const GradientName& name : kGradients) {
    Array& a = got.*name.gradient;
    const Array& before = in.before.*name.gradient;
    std::fill(a.bytes.begin(), a.bytes.end(), uint8_t{0xff});
    for (int64_t n = 0; n < before.size(); ++n) a.set(n, before.at(n));
    args.*name.tensor = view(a);
  }
  reference::backward<T>(desc, args);
  return difference(got, want);
}

TEST(GradientHarness, TheDefinitionIsTheReference) {
  int compared = 0;
  for (const Problem& problem : gradient_cases()) {
    const AttentionDesc& d = problem.desc;
    const double pairs = static_cast<double>(d.num_heads * d.seqlen_q) * static_cast<double>(d.batch * d.seqlen_k);
    if (pairs == 0 || pairs * static_cast<double>(d.head_dim + d.head_dim_v) > 2e6) continue;
    const BackwardInputs in = random_backward_inputs(problem);
    EXPECT_EQ(difference_from_reference<double>(d, in, true), "") << backward_command("reference", problem);
    EXPECT_EQ(difference_from_reference<float>(d, in, false), "") << backward_command("reference", problem);
    if (HasFailure()) break;
    ++compared;
  }
  EXPECT_GT(compared, 500);
}

// Where all terms have one sign, the sum of their absolute values is the gradient's.
TEST(GradientHarness, MagnitudesAreSumsOfAbsoluteTerms) {
  for (bool accumulate : {false, true}) {
    Problem p = problem();
    p.accumulate = accumulate;
    const AttentionDesc& d = p.desc;
    BackwardInputs in = random_backward_inputs(p);
    auto positive = [](Array& a, double sign) {
      for (int64_t n = 0; n < a.size(); ++n) a.set(n, sign * std::fabs(a.at(n)));
    };
    for (Array* a : {&in.forward.query, &in.forward.key, &in.forward.value, &in.grad_out, &in.grad_logsumexp}) {
      positive(*a, 1);
    }
    compute_forward(d, in);
    positive(in.out, -1);
    for (const GradientName& name : kGradients) {
      positive(in.before.*name.gradient, name.gradient == &Gradients::alibi_slopes ? -1 : 1);
    }
    const Visibility seen(d, in.forward);
    const Gradients exact = defined_gradients<double>(d, in, seen, true), magnitude = gradient_magnitudes(d, in, seen);
    for (const GradientName& name : kGradients) {
      const Array &e = exact.*name.gradient, &m = magnitude.*name.gradient;
      for (int64_t n = 0; n < e.size(); ++n) {
        EXPECT_NEAR(std::fabs(e.at(n)), m.at(n), 1e-12 * m.at(n)) << name.name << " " << n;
      }
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
