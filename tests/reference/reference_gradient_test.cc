// The reference's gradients: finite differences in float64, closed forms, laws.
#include <gtest/gtest.h>

#include <cmath>

#include "poison.h"
#include "reference/attention.h"
#include "testing/call.h"
#include "testing/operands.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

// What comes in from behind.
struct Incoming {
  Array grad_out, grad_logsumexp;  // of the dims of out and logsumexp
};

Problem problem(uint64_t seed, AttentionDesc desc) {
  Problem p;
  p.name = "gradient";
  p.desc = desc;
  p.desc.dtype = DType::kFloat64;
  p.seed = seed;
  p.layout = Layout::kBshd;
  if (p.desc.attn_bias.given) p.desc.attn_bias.dtype = DType::kFloat64;
  return p;
}

AttentionDesc sizes(int64_t batch, int64_t heads, int64_t heads_kv, int64_t q, int64_t k, int64_t d, int64_t dv) {
  AttentionDesc desc;
  desc.batch = batch;
  desc.num_heads = heads;
  desc.num_heads_kv = heads_kv;
  desc.seqlen_q = q;
  desc.seqlen_k = k;
  desc.head_dim = d;
  desc.head_dim_v = dv;
  return desc;
}

Array normal(const Array& like, uint64_t seed) {
  Array a(like.dtype, like.dims);
  Random random(seed);
  for (int64_t n = 0; n < a.size(); ++n) a.set(n, random.normal());
  return a;
}

Incoming incoming(const Outputs& o, uint64_t seed) { return {normal(o.out, seed), normal(o.logsumexp, seed + 1)}; }

// All gradients the inputs have, overwritten into arrays of NaN, or added to what `into` holds.
template <class T = double>
Gradients gradients(const AttentionDesc& desc, const Inputs& in, const Outputs& o, const Incoming& grad,
                    const Gradients* into = nullptr) {
  Gradients g = into ? *into : Gradients();
  BackwardArgs args;
  args.forward = dense_args(in);
  args.forward.out = view(o.out);
  args.forward.logsumexp = view(o.logsumexp);
  args.grad_out = view(grad.grad_out);
  args.grad_logsumexp = view(grad.grad_logsumexp);
  args.accumulate = into != nullptr;
  for (const GradientName& name : kGradients) {
    Array& gradient = g.*name.gradient;
    if (!into) {
      gradient = in.*name.input;
      std::fill(gradient.bytes.begin(), gradient.bytes.end(), uint8_t{0xff});
    }
    args.*name.tensor = view(gradient);
  }
  reference::backward<T>(desc, args);
  return g;
}

double inner(const Array& a, const Array& b) {
  double sum = 0;
  for (int64_t n = 0; n < a.size(); ++n) {
    if (std::isfinite(b.at(n))) sum += a.at(n) * b.at(n);  // L of a row that sees no key
  }
  return sum;
}

double loss(const AttentionDesc& desc, const Inputs& in, const Incoming& grad) {
  const Outputs o = reference_outputs<double>(desc, in, true);
  return inner(grad.grad_out, o.out) + inner(grad.grad_logsumexp, o.logsumexp);
}

// Moves the elements of one input by step times `direction` both ways, and compares the change of the loss with what
// the gradient says of it.
void expect_difference(const Problem& p, const Inputs& in, const Incoming& grad, const Gradients& g,
                       const GradientName& name, const Array& direction, double step) {
  Inputs up = in, down = in;
  double predicted = 0, size = 0;
  Array &x_up = up.*name.input, &x_down = down.*name.input;
  for (int64_t n = 0; n < direction.size(); ++n) {
    if (!std::isfinite((in.*name.input).at(n))) continue;  // a bias of -inf
    x_up.set(n, x_up.at(n) + step * direction.at(n));
    x_down.set(n, x_down.at(n) - step * direction.at(n));
    predicted += (g.*name.gradient).at(n) * (x_up.at(n) - x_down.at(n));
    size += std::fabs((g.*name.gradient).at(n) * (x_up.at(n) - x_down.at(n)));
  }
  const double measured = loss(p.desc, up, grad) - loss(p.desc, down, grad);
  EXPECT_NEAR(measured, predicted, 2e-6 * size + 1e-11) << name.name << "\n" << forward_command("reference", p);
}

// Finite differences along random directions of each input, and along a few of its elements.
void expect_gradients(const Problem& p) {
  const Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(p.desc, in, true);
  const Incoming grad = incoming(o, p.seed + 17);
  const Gradients g = gradients(p.desc, in, o, grad);
  Random random(p.seed);
  for (const GradientName& name : kGradients) {
    const Array& input = in.*name.input;
    if (input.size() == 0) continue;
    const double step = input.dtype == DType::kFloat32 ? 0x1p-19 : 1e-5;
    Array direction = normal(Array(DType::kFloat64, input.dims), random.bits());
    if (input.dtype == DType::kFloat32) {  // slopes are powers of 2 down to 2^-8: steps that float32 adds exactly
      for (int64_t n = 0; n < direction.size(); ++n) direction.set(n, std::round(4 * direction.at(n)) / 4);
    }
    expect_difference(p, in, grad, g, name, direction, step);
    for (int n = 0; n < 8; ++n) {
      direction = Array(DType::kFloat64, input.dims);
      direction.set(random.integer(0, input.size() - 1), 1);
      expect_difference(p, in, grad, g, name, direction, step);
    }
  }
}

TEST(ReferenceGradient, MatchesFiniteDifferencesForEachOption) {
  const AttentionDesc base = sizes(2, 4, 2, 5, 7, 3, 4);
  const auto bias = [](AttentionDesc& d, int64_t b, int64_t h, int64_t q, int64_t k) {
    d.attn_bias = {true, DType::kFloat64, {b, h, q, k}};
  };
  uint64_t seed = 0;
  const auto expect = [&](auto change) {
    AttentionDesc d = base;
    change(d);
    expect_gradients(problem(++seed, d));
  };
  expect([](auto&) {});
  expect([](auto& d) { d.scale = -0.7; });
  expect([](auto& d) { d.softcap = 1.5; });
  expect([](auto& d) { d.causal = true, d.align = Align::kTopLeft; });
  expect([](auto& d) { d.causal = true, d.query_offset = -2; });  // rows that see no key
  expect([](auto& d) { d.window_left = 2, d.window_right = 1, d.align = Align::kBottomRight; });
  expect([](auto& d) { d.alibi_slopes_ndim = 1, d.align = Align::kBottomRight; });
  expect([](auto& d) { d.alibi_slopes_ndim = 2, d.has_query_offsets = true; });
  expect([](auto& d) { d.attn_mask = {true, DType::kBool, {2, 1, 5, 7}}; });
  expect([](auto& d) { d.has_seqlens_q = d.has_seqlens_k = true; });
  expect([](auto& d) { d.dropout_p = 0.4; });
  expect([](auto& d) { d.has_sink_logits = true, d.dropout_p = 0.4; });
  expect([](auto& d) { d.normalizer = Normalizer::kNone, d.causal = true, d.query_offset = -2, d.dropout_p = 0.4; });
  expect([](auto& d) { d.packed = true, d.seqlen_q = 13, d.seqlen_k = 15, d.batch = 4; });
  expect([](auto& d) { d.seqlen_k = 1; });
  expect([](auto& d) { d.head_dim = 0; });
  for (int dims = 0; dims < 16; ++dims) {
    expect([&](auto& d) {
      bias(d, dims & 8 ? 2 : 1, dims & 4 ? 4 : 1, dims & 2 ? 5 : 1, dims & 1 ? 7 : 1);
      if (dims % 3 == 0) d.softcap = 2, d.dropout_p = 0.2;
    });
  }
}

TEST(ReferenceGradient, MatchesFiniteDifferencesOfRandomProblems) {
  int tested = 0;
  for (uint64_t seed = 1; tested < 300; ++seed) {
    const Problem random = without_cache(random_problem(seed));
    AttentionDesc d = random.desc;
    d.return_weights = ReturnWeights::kNone;
    d.return_column_sums = false;
    d.out_dtype.reset();
    d.grad_dtype.reset();
    d.program = nullptr;  // tests/program has differences of its own
    d.captures.clear();
    if (d.batch * d.num_heads * d.seqlen_q * d.seqlen_k * (d.head_dim + d.head_dim_v) > 20000) continue;
    if (d.dropout_p == 1) continue;  // the scale 1 / (1 - p) is not defined there
    expect_gradients(problem(seed, d));
    if (HasFailure()) break;
    ++tested;
  }
}

TEST(ReferenceGradient, OneKeyPassesItsValueOn) {
  Problem p = problem(1, sizes(1, 2, 1, 3, 1, 4, 2));
  const Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(p.desc, in, true);
  Incoming grad = incoming(o, 2);
  grad.grad_logsumexp = Array();
  const Gradients g = gradients(p.desc, in, o, grad);
  for (int64_t n = 0; n < g.query.size(); ++n) EXPECT_NEAR(g.query.at(n), 0, 1e-15);
  for (int64_t n = 0; n < g.key.size(); ++n) EXPECT_NEAR(g.key.at(n), 0, 1e-15);
  for (int64_t d = 0; d < 2; ++d) {
    double sum = 0;
    for (int64_t row = 0; row < 6; ++row) sum += grad.grad_out.at(row * 2 + d);
    EXPECT_NEAR(g.value.at(d), sum, 1e-15);
  }
}

TEST(ReferenceGradient, TheGradientOfLogsumexpIsTheWeights) {
  AttentionDesc d = sizes(1, 1, 1, 2, 5, 3, 2);
  d.attn_bias = {true, DType::kFloat64, {1, 1, 2, 5}};
  d.return_weights = ReturnWeights::kPerHead;
  const Problem p = problem(3, d);
  const Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(p.desc, in, true);
  Incoming grad;
  grad.grad_out = Array(DType::kFloat64, o.out.dims);  // 0
  grad.grad_logsumexp = normal(o.logsumexp, 4);
  const Gradients g = gradients(p.desc, in, o, grad);
  for (int64_t n = 0; n < 10; ++n) {
    EXPECT_NEAR(g.attn_bias.at(n), o.attn_weights.at(n) * grad.grad_logsumexp.at(n / 5), 1e-15);
  }
  for (int64_t n = 0; n < g.value.size(); ++n) EXPECT_EQ(g.value.at(n), 0);
}

TEST(ReferenceGradient, ABroadcastBiasGetsTheSum) {
  AttentionDesc d = sizes(2, 3, 3, 4, 5, 3, 3);
  d.attn_bias = {true, DType::kFloat64, {2, 3, 4, 5}};
  const Problem full = problem(5, d);
  d = full.desc;
  Inputs in = random_inputs(full);
  for (int64_t n = 0; n < in.attn_bias.size(); ++n) in.attn_bias.set(n, 0.1 * static_cast<double>(n % 5));  // by key
  const Outputs o = reference_outputs<double>(d, in, true);
  const Incoming grad = incoming(o, 6);
  const Gradients whole = gradients(d, in, o, grad);
  AttentionDesc by_key = d;
  by_key.attn_bias.dims[0] = by_key.attn_bias.dims[1] = by_key.attn_bias.dims[2] = 1;
  Inputs one = in;
  one.attn_bias = Array(DType::kFloat64, {1, 1, 1, 5});
  for (int64_t j = 0; j < 5; ++j) one.attn_bias.set(j, in.attn_bias.at(j));
  const Gradients reduced = gradients(by_key, one, o, grad);
  for (int64_t j = 0; j < 5; ++j) {
    double sum = 0;
    for (int64_t n = j; n < whole.attn_bias.size(); n += 5) sum += whole.attn_bias.at(n);
    EXPECT_NEAR(reduced.attn_bias.at(j), sum, 1e-14);
  }
  EXPECT_EQ(reduced.query, whole.query);
}

TEST(ReferenceGradient, RowsThatSeeNoKeyGiveNothing) {
  AttentionDesc d = sizes(2, 2, 1, 6, 5, 3, 3);
  d.causal = true;
  d.query_offset = -2;
  d.has_seqlens_q = d.has_seqlens_k = true;
  d.attn_bias = {true, DType::kFloat64, {1, 2, 1, 5}};
  d.alibi_slopes_ndim = 1;
  const Problem p = problem(9, d);
  d = p.desc;
  const Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(d, in, true);
  const Incoming grad = incoming(o, 10);
  const Gradients clean = gradients(d, in, o, grad);

  Incoming bad = grad;
  int hidden_rows = 0, hidden_keys = 0;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 6; ++i) {
        if (o.logsumexp.at((b * 2 + h) * 6 + i) != -HUGE_VAL) continue;
        ++hidden_rows;
        bad.grad_logsumexp.set((b * 2 + h) * 6 + i, std::nan(""));
        for (int64_t n = 0; n < 3; ++n) {
          bad.grad_out.set(((b * 6 + i) * 2 + h) * 3 + n, std::nan(""));
          EXPECT_EQ(clean.query.at(((b * 6 + i) * 2 + h) * 3 + n), 0);
        }
      }
    }
  }
  EXPECT_GT(hidden_rows, 3);
  const Gradients poisoned = gradients(d, poison_hidden(d, in, 1), o, bad);
  for (const GradientName& name : kGradients) EXPECT_EQ(poisoned.*name.gradient, clean.*name.gradient) << name.name;
  const Visibility seen(d, in);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 0; j < 5; ++j) {
      bool any = false;
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 6; ++i) any |= seen.at(b, h, i, j);
      }
      hidden_keys += !any;
      for (int64_t n = 0; n < 3; ++n) {
        EXPECT_EQ(clean.key.at((b * 5 + j) * 3 + n) != 0, any);
        EXPECT_EQ(clean.value.at((b * 5 + j) * 3 + n) != 0, any);
      }
    }
  }
  EXPECT_GT(hidden_keys, 0);
}

TEST(ReferenceGradient, AddsToWhatIsThereIfAsked) {
  AttentionDesc d = sizes(2, 4, 2, 3, 4, 3, 2);
  d.attn_bias = {true, DType::kFloat64, {1, 4, 1, 4}};
  d.alibi_slopes_ndim = 1;
  d.query_offset = 0;
  const Problem p = problem(11, d);
  d = p.desc;
  const Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(d, in, true);
  const Incoming grad = incoming(o, 12);
  const Gradients set = gradients(d, in, o, grad);
  Gradients before;
  for (const GradientName& name : kGradients) before.*name.gradient = normal(in.*name.input, 13);
  const Gradients added = gradients(d, in, o, grad, &before);
  for (const GradientName& name : kGradients) {
    const double tolerance = (in.*name.input).dtype == DType::kFloat32 ? 1e-6 : 1e-14;
    for (int64_t n = 0; n < (set.*name.gradient).size(); ++n) {
      EXPECT_NEAR((added.*name.gradient).at(n), (before.*name.gradient).at(n) + (set.*name.gradient).at(n), tolerance);
    }
  }
}

TEST(ReferenceGradient, ComputesOnlyWhatIsAskedAndTheSame) {
  const Problem p = problem(14, sizes(1, 2, 1, 4, 5, 3, 2));
  const Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(p.desc, in, true);
  const Incoming grad = incoming(o, 15);
  const Gradients all = gradients(p.desc, in, o, grad);
  for (int subset = 0; subset < 8; ++subset) {
    Gradients g{in.query, in.key, in.value, {}, {}, {}, {}, {}};
    BackwardArgs args;
    args.forward = dense_args(in);
    args.forward.out = view(o.out);
    args.forward.logsumexp = view(o.logsumexp);
    args.grad_out = view(grad.grad_out);
    args.grad_logsumexp = view(grad.grad_logsumexp);
    if (subset & 1) args.grad_query = view(g.query);
    if (subset & 2) args.grad_key = view(g.key);
    if (subset & 4) args.grad_value = view(g.value);
    reference::backward<double>(p.desc, args);
    EXPECT_EQ(g.query, subset & 1 ? all.query : in.query);
    EXPECT_EQ(g.key, subset & 2 ? all.key : in.key);
    EXPECT_EQ(g.value, subset & 4 ? all.value : in.value);
  }
}

TEST(ReferenceGradient, PackedSequencesAreSequences) {
  AttentionDesc padded = sizes(2, 4, 2, 5, 6, 3, 2);
  padded.dropout_p = 0.3;
  padded.causal = true;
  padded.align = Align::kBottomRight;
  const Problem p = problem(16, padded);
  Inputs in = random_inputs(p);
  const Outputs o = reference_outputs<double>(p.desc, in, true);
  Incoming grad = incoming(o, 17);
  grad.grad_logsumexp = Array();
  const Gradients want = gradients(p.desc, in, o, grad);

  AttentionDesc packed = p.desc;
  packed.packed = true;
  packed.seqlen_q = 12;  // 2 rows behind the end
  packed.seqlen_k = 13;
  in.cu_seqlens_q = Array(DType::kInt32, {3});
  in.cu_seqlens_k = Array(DType::kInt32, {3});
  for (int b = 0; b < 3; ++b) {
    in.cu_seqlens_q.set(b, 5 * b);
    in.cu_seqlens_k.set(b, 6 * b);
  }
  const auto pack = [](Array& a, int64_t rows) {
    a.dims = {rows, a.dims[2], a.dims[3]};
    a.bytes.resize(static_cast<size_t>(a.size()) * sizeof(double), 0xff);
  };
  pack(in.query, 12);
  pack(in.key, 13);
  pack(in.value, 13);
  pack(grad.grad_out, 12);
  const Outputs o_packed = reference_outputs<double>(packed, in, true);
  const Gradients got = gradients(packed, in, o_packed, grad);
  const auto expect_same = [](const Array& g, const Array& w) {
    for (int64_t n = 0; n < g.size(); ++n) EXPECT_EQ(g.at(n), n < w.size() ? w.at(n) : 0);
  };
  expect_same(got.query, want.query);
  expect_same(got.key, want.key);
  expect_same(got.value, want.value);
}

TEST(ReferenceGradient, TheYardstickIsNear) {
  AttentionDesc d = sizes(2, 4, 2, 17, 19, 16, 8);
  d.softcap = 4;
  d.attn_bias = {true, DType::kFloat32, {1, 4, 1, 19}};
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Problem p = problem(18, d);
    p.desc.dtype = dtype;
    p.desc.attn_bias.dtype = DType::kFloat32;
    const Inputs in = random_inputs(p);
    const Outputs wide = reference_outputs<double>(p.desc, in, true), o = reference_outputs<float>(p.desc, in, false);
    Incoming grad;
    grad.grad_out = normal(o.out, 19);
    grad.grad_logsumexp = normal(o.logsumexp, 20);
    const Gradients exact = gradients<double>(p.desc, in, wide, grad);
    const Gradients naive = gradients<float>(p.desc, in, o, grad);
    const double tolerance = dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kBFloat16 ? 3e-2 : 4e-3;
    for (const GradientName& name : kGradients) {
      const Array &e = exact.*name.gradient, &g = naive.*name.gradient;
      for (int64_t n = 0; n < e.size(); ++n) EXPECT_NEAR(g.at(n), e.at(n), tolerance * (1 + std::fabs(e.at(n))));
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
