// Kernels with one more option of the scores (score_option/even_blocks.h) against plain loops: by every path, forward and
// backward, with the other options before it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <ostream>
#include <set>
#include <vector>

#include "cpu/attention/attn_weights_tasks.h"
#include "cpu/attention/backward_tasks.h"
#include "cpu/attention/decode_tasks.h"
#include "cpu/attention/score_gradient_tasks.h"
#include "cpu/attention/tiles.h"
#include "cpu/attention/tiny_tasks.h"
#include "layer/fingerprint.h"
#include "polyhead/layer.h"
#include "score_option/kernel.h"
#include "testing/judge.h"

namespace polyhead::testing {
namespace {

const cpu::IsaFunctions& kFunctions = cpu::with_option::kFunctions;

bool option_shows(int64_t j) { return j / 128 % 2 == 0 && j % 4 != 3; }

// What the kernels should give, by the definition with the option behind it.
struct Truth {
  Array out, logsumexp, column_sums, grad_query, grad_key, grad_value, grad_bias, grad_slopes;
  double slope_terms = 0;  // the sum of the absolute values of what adds up to one slope's gradient, of all
};

class Loops {
 public:
  Loops(const AttentionDesc& desc, const Inputs& in, const Array& parity_bias, const Array& grad_out)
      : d_(desc), in_(in), parity_bias_(parity_bias), grad_out_(grad_out) {
    truth_.out = Array(DType::kFloat64, grad_out.dims);
    truth_.logsumexp = Array(DType::kFloat64, {d_.batch, d_.num_heads, d_.seqlen_q});
    truth_.column_sums = Array(DType::kFloat64, {d_.batch, d_.num_heads, d_.seqlen_k});
    truth_.grad_query = Array(DType::kFloat64, in.query.dims);
    truth_.grad_key = Array(DType::kFloat64, in.key.dims);
    truth_.grad_value = Array(DType::kFloat64, in.value.dims);
    if (in.attn_bias.given()) truth_.grad_bias = Array(DType::kFloat64, in.attn_bias.dims);
    if (in.alibi_slopes.given()) truth_.grad_slopes = Array(DType::kFloat64, in.alibi_slopes.dims);
    for (int64_t b = 0; b < d_.batch; ++b) {
      for (int64_t h = 0; h < d_.num_heads; ++h) {
        for (int64_t i = 0; i < d_.seqlen_q; ++i) row(b, h, i);
      }
    }
  }
  const Truth& truth() const { return truth_; }

 private:
  static void add(Array& to, int64_t at, double x) { to.set(at, to.at(at) + x); }

  int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const auto& dims = in_.attn_bias.dims;
    return in_.attn_bias.index(
        {dims[0] == 1 ? 0 : b, dims[1] == 1 ? 0 : h, dims[2] == 1 ? 0 : i, dims[3] == 1 ? 0 : j});
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t g = h / (d_.num_heads / d_.num_heads_kv), dim = d_.head_dim;
    const Span span = span_of(d_, in_, b);
    const double scale = d_.scale.value_or(1 / std::sqrt(static_cast<double>(dim)));
    const double cap = d_.softcap > 0 ? d_.softcap : INFINITY;
    std::vector<double> score(static_cast<size_t>(d_.seqlen_k), -INFINITY), slope = score;
    double largest = -INFINITY, sum = 0, delta = 0;
    for (int64_t j = 0; j < d_.seqlen_k; ++j) {
      if (!visible(d_, in_, span, b, h, i, j) || !option_shows(j)) continue;
      double s = 0;
      for (int64_t n = 0; n < dim; ++n) {
        s += in_.query.at(in_.query.index({b, i, h, n})) * in_.key.at(in_.key.index({b, j, g, n}));
      }
      s *= scale;
      const double t = cap < INFINITY ? std::tanh(s / cap) : 0;
      if (cap < INFINITY) s = cap * t;
      if (in_.alibi_slopes.given()) s -= in_.alibi_slopes.at(h) * std::fabs(static_cast<double>(i + span.offset - j));
      if (in_.attn_bias.given()) s += in_.attn_bias.at(bias_at(b, h, i, j));
      const size_t k = static_cast<size_t>(j);
      score[k] = s + std::tanh(s) / 2 + parity_bias_.at(2 * h + (i + j) % 2);
      after_bias_.resize(score.size());
      after_bias_[k] = 1.5 - std::tanh(s) * std::tanh(s) / 2;
      slope[k] = 1 - t * t;
      largest = std::max(largest, score[k]);
    }
    for (double s : score) sum += std::exp(s - largest);
    std::vector<double> p(score.size()), dp(score.size());
    for (size_t j = 0; j < p.size(); ++j) {
      p[j] = sum > 0 && score[j] > -INFINITY ? std::exp(score[j] - largest) / sum : 0;
      if (p[j] == 0) continue;
      const int64_t key = static_cast<int64_t>(j);
      add(truth_.column_sums, truth_.column_sums.index({b, h, key}), p[j]);
      for (int64_t n = 0; n < d_.head_dim_v; ++n) {
        const int64_t o = truth_.out.index({b, i, h, n}), v = in_.value.index({b, key, g, n});
        add(truth_.out, o, p[j] * in_.value.at(v));
        add(truth_.grad_value, v, p[j] * grad_out_.at(o));
        dp[j] += grad_out_.at(o) * in_.value.at(v);
      }
      delta += p[j] * dp[j];
    }
    truth_.logsumexp.set(truth_.logsumexp.index({b, h, i}), sum > 0 ? largest + std::log(sum) : -INFINITY);
    for (size_t j = 0; j < p.size(); ++j) {
      if (p[j] == 0) continue;
      const int64_t key = static_cast<int64_t>(j);
      const double ds = p[j] * (dp[j] - delta) * after_bias_[j];
      if (in_.attn_bias.given()) add(truth_.grad_bias, bias_at(b, h, i, key), ds);
      if (in_.alibi_slopes.given()) {
        const double term = -ds * std::fabs(static_cast<double>(i + span.offset - key));
        add(truth_.grad_slopes, h, term);
        truth_.slope_terms += std::fabs(term);
      }
      for (int64_t n = 0; n < dim; ++n) {
        const int64_t q = in_.query.index({b, i, h, n}), k = in_.key.index({b, key, g, n});
        add(truth_.grad_query, q, ds * slope[j] * scale * in_.key.at(k));
        add(truth_.grad_key, k, ds * slope[j] * scale * in_.query.at(q));
      }
    }
  }

  const AttentionDesc& d_;
  const Inputs& in_;
  const Array &parity_bias_, &grad_out_;
  Truth truth_;
  std::vector<double> after_bias_;  // derivative of the option's score
};

// Up to 64 roundings of float32, of the largest element or of `magnitude`.
void expect_close(const char* name, const Array& got, const Array& want, double magnitude = 0) {
  ASSERT_EQ(got.dims, want.dims) << name;
  for (int64_t n = 0; n < want.size(); ++n) {
    if (std::isfinite(want.at(n))) magnitude = std::max(magnitude, std::fabs(want.at(n)));
  }
  for (int64_t n = 0; n < want.size(); ++n) {
    if (want.at(n) == got.at(n)) continue;
    ASSERT_LE(std::fabs(got.at(n) - want.at(n)), 64 * 0x1p-24 * magnitude)
        << name << " at " << n << " of " << want.size();
  }
}

struct Case {
  const char* name;
  int64_t batch, heads, heads_kv, q, k, dim;
  bool options;      // softcap, slopes, a bias by query and key, causal
  bool bias_by_key;  // or a bias by key alone, whose gradient has a pass of its own
  bool mask;

  friend std::ostream& operator<<(std::ostream& out, const Case& made) { return out << made.name; }
};

class ScoreOption : public ::testing::TestWithParam<Case> {
 protected:
  ScoreOption() {
    const Case& c = GetParam();
    Problem problem = problem_of(c.name, DType::kFloat32, c.batch, c.heads, c.q, c.k, c.dim);
    desc = problem.desc;
    desc.num_heads_kv = c.heads_kv;
    desc.align = Align::kBottomRight;
    if (c.options) {
      desc.softcap = 2;
      desc.alibi_slopes_ndim = 1;
      desc.causal = true;
    }
    if (c.options || c.bias_by_key)
      give(desc.attn_bias, c.bias_by_key ? 1 : c.heads, c.bias_by_key ? 1 : c.q, DType::kFloat32);
    if (c.mask) give(desc.attn_mask, 1, c.q, DType::kBool);
    problem.desc = desc;
    in = random_inputs(problem);
    // Scores of tens, not of hundreds, whose roundings would show.
    if (c.options) in.alibi_slopes = slopes(c.heads);
    grad_out = Array(DType::kFloat32, {c.batch, c.q, c.heads, c.dim});
    Random random(3);
    for (int64_t n = 0; n < grad_out.size(); ++n) grad_out.set(n, random.normal());
    parity_bias = Array(DType::kFloat32, {c.heads, 2});
    for (int64_t n = 0; n < parity_bias.size(); ++n) {  // tiny heads ask an option that is the same for all of them
      parity_bias.set(n, cpu::tiny_takes(desc) && n > 1 ? parity_bias.at(n % 2) : random.normal() / 4);
    }
    captures[0] = view(parity_bias);
    desc.score_option = &kEvenBlocks;
    truth = Loops(desc, in, parity_bias, grad_out).truth();
    hide_nan();
  }

  static Array slopes(int64_t heads) {
    Array x(DType::kFloat32, {heads});
    for (int64_t h = 0; h < heads; ++h) x.set(h, 0x1p-8 * static_cast<double>(h + 1));
    return x;
  }

  void give(decltype(AttentionDesc::attn_bias)& operand, int64_t heads, int64_t queries, DType dtype) {
    operand.given = true;
    operand.dtype = dtype;
    operand.dims[0] = 1;
    operand.dims[1] = heads;
    operand.dims[2] = queries;
    operand.dims[3] = desc.seqlen_k;
  }

  // What the option hides is not read, or does not matter.
  void hide_nan() {
    for (Array* x : {&in.key, &in.value}) {
      const int64_t row = desc.num_heads_kv * desc.head_dim;
      for (int64_t n = 0; n < x->size(); ++n) {
        if (!option_shows(n / row % desc.seqlen_k)) x->set(n, n % 2 == 0 ? NAN : INFINITY);
      }
    }
  }

  using Path = void (*)(const cpu::IsaFunctions&, const AttentionDesc&, const ForwardArgs&, const Sequences&,
                        const polyhead::Run&);
  void expect_forward(Path path, size_t workspace_bytes) {
    ForwardArgs args = dense_args(in);
    args.captures = captures;
    Array out(DType::kFloat32, truth.out.dims), logsumexp(DType::kFloat32, truth.logsumexp.dims);
    Array sums(DType::kFloat32, truth.column_sums.dims);
    args.out = view(out);
    args.logsumexp = view(logsumexp);
    if (desc.return_column_sums) args.column_sums = view(sums);
    Array workspace = memory(workspace_bytes);
    args.workspace = workspace.bytes.data();
    path(kFunctions, desc, args, sequences(args), executor(1));
    expect_close("out", out, truth.out);
    expect_close("logsumexp", logsumexp, truth.logsumexp);
    if (desc.return_column_sums) expect_close("column_sums", sums, truth.column_sums);
  }

  // The desc tells all lengths: no table is needed.
  Sequences sequences(const ForwardArgs& args) const {
    Sequences all;
    EXPECT_TRUE(all.read(desc, args, nullptr).ok());
    return all;
  }

  static Array memory(size_t bytes) { return Array(DType::kFloat64, {static_cast<int64_t>(bytes / 8)}); }

  struct Taken {
    Array query, key, value, bias, slopes, out, logsumexp, workspace;
    BackwardArgs args;
  };
  // The arguments of a backward call for all gradients.
  void take(Taken& t, size_t workspace_bytes) {
    const auto rounded = [](const Array& x) {
      Array y(DType::kFloat32, x.dims);
      for (int64_t n = 0; n < x.size(); ++n) y.set(n, x.at(n));
      return y;
    };
    t.out = rounded(truth.out);
    t.logsumexp = rounded(truth.logsumexp);
    t.query = Array(DType::kFloat32, in.query.dims);
    t.key = Array(DType::kFloat32, in.key.dims);
    t.value = Array(DType::kFloat32, in.value.dims);
    t.args.forward = dense_args(in);
    t.args.forward.captures = captures;
    t.args.forward.out = view(t.out);
    t.args.forward.logsumexp = view(t.logsumexp);
    t.args.grad_out = view(grad_out);
    t.args.grad_query = view(t.query);
    t.args.grad_key = view(t.key);
    t.args.grad_value = view(t.value);
    if (in.attn_bias.given()) t.args.grad_attn_bias = view(t.bias = Array(DType::kFloat32, in.attn_bias.dims));
    if (in.alibi_slopes.given())
      t.args.grad_alibi_slopes = view(t.slopes = Array(DType::kFloat32, in.alibi_slopes.dims));
    t.workspace = memory(workspace_bytes);
    t.args.forward.workspace = t.workspace.bytes.data();
  }
  void expect_gradients(const Taken& t) {
    expect_close("grad_query", t.query, truth.grad_query);
    expect_close("grad_key", t.key, truth.grad_key);
    expect_close("grad_value", t.value, truth.grad_value);
    if (t.bias.given()) expect_close("grad_attn_bias", t.bias, truth.grad_bias);
    if (t.slopes.given()) expect_close("grad_alibi_slopes", t.slopes, truth.grad_slopes, truth.slope_terms);
  }

  AttentionDesc desc;
  Inputs in;
  Array parity_bias, grad_out;
  Tensor captures[1];
  Truth truth;
};

TEST_P(ScoreOption, Tiles) {
  expect_forward(cpu::tiles_forward, cpu::tiles_workspace_bytes(kFunctions, desc, 1).value());
}

TEST_P(ScoreOption, ReturnedWeights) {
  desc.return_column_sums = true;
  expect_forward(cpu::weights_forward, cpu::weights_workspace_bytes(kFunctions, desc, 1).value());
}

TEST_P(ScoreOption, Decoding) {
  if (!cpu::decode_takes(desc)) GTEST_SKIP() << "more queries than decoding takes";
  expect_forward(cpu::decode_forward, cpu::decode_workspace_bytes(kFunctions, desc, 1).value());
}

TEST_P(ScoreOption, TinyHeads) {
  if (!cpu::tiny_takes(desc)) GTEST_SKIP() << "more than tiny heads take";
  expect_forward(cpu::tiny_forward, cpu::tiny_workspace_bytes(kFunctions, 1).value());
  Taken t;
  take(t, cpu::tiny_backward_workspace_bytes(kFunctions, 1).value());
  cpu::tiny_backward(kFunctions, desc, t.args, sequences(t.args.forward), executor(1));
  expect_gradients(t);
}

TEST_P(ScoreOption, Gradients) {
  Taken t;
  take(t, std::max(cpu::gradients_workspace_bytes(kFunctions, desc, 1),
                   cpu::score_gradients_workspace_bytes(kFunctions, desc, 1))
              .value());
  cpu::gradients_backward(kFunctions, desc, t.args, sequences(t.args.forward), executor(1));
  cpu::score_gradients_backward(kFunctions, desc, t.args, sequences(t.args.forward), executor(1));
  expect_gradients(t);
}

// For forward and backward.
struct Workspace {
  std::unique_ptr<void, decltype(&std::free)> memory;

  Workspace(const Plan& made, ForwardArgs* args) : memory(nullptr, std::free) {
    args->workspace_bytes = (std::max(made.workspace_bytes(), made.backward_workspace_bytes()) + 63) / 64 * 64;
    memory.reset(args->workspace = std::aligned_alloc(64, args->workspace_bytes));
  }
};

TEST_P(ScoreOption, ThroughAPlan) {
  const Result<Plan> made = plan(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  EXPECT_STREQ(made->kernel_name(), "even_blocks");
  Taken t;
  take(t, 0);
  const Workspace workspace(*made, &t.args.forward);
  for (Array* a : {&t.out, &t.logsumexp}) std::fill(a->bytes.begin(), a->bytes.end(), uint8_t{0xff});
  EXPECT_EQ(made->forward(t.args.forward).message(), "");
  expect_close("out", t.out, truth.out);
  expect_close("logsumexp", t.logsumexp, truth.logsumexp);
  EXPECT_EQ(made->backward(t.args).message(), "");
  expect_gradients(t);
}

INSTANTIATE_TEST_SUITE_P(Paths, ScoreOption,
                         ::testing::Values(Case{"plain", 2, 4, 2, 70, 650, 24, false, false, false},
                                           Case{"options", 1, 4, 2, 150, 700, 16, true, false, false},
                                           Case{"bias_by_key", 2, 2, 1, 70, 300, 16, false, true, true},
                                           Case{"decoding", 2, 6, 2, 5, 1300, 32, true, false, true},
                                           Case{"one_query", 1, 2, 2, 1, 600, 16, false, false, false},
                                           Case{"tiny", 3, 8, 4, 9, 3, 8, false, false, false}),  // keys it shows
                         [](const auto& made) { return made.param.name; });

// A call of a desc with the option, which a test then breaks.
class Captures : public ::testing::Test {
 protected:
  Captures() {
    desc.seqlen_q = desc.seqlen_k = 5, desc.num_heads = desc.num_heads_kv = 4, desc.head_dim = desc.head_dim_v = 8;
    desc.score_option = &kEvenBlocks;
    const Tensor rows(memory.data(), DType::kFloat32, {1, 5, 4, 8});
    args.query = args.key = args.value = rows;
    args.out = Tensor(written.data(), DType::kFloat32, {1, 5, 4, 8});
    bias[0] = Tensor(memory.data(), DType::kFloat32, {4, 2});
    args.captures = {bias, 1};
    back.grad_out = rows;
    back.grad_query = args.out;
  }

  // Forward and backward say `message`, and write nothing.
  void expect_refused(const char* message) {
    const Result<Plan> made = plan(desc);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const Workspace workspace(*made, &args);
    const std::vector<float> before = written;
    EXPECT_EQ(made->forward(args).message(), message);
    back.forward = args;
    back.forward.out = args.query;
    back.forward.logsumexp = Tensor(memory.data(), DType::kFloat32, {1, 4, 5});
    EXPECT_EQ(made->backward(back).message(), message);
    EXPECT_EQ(written, before);
  }

  AttentionDesc desc;
  std::vector<float> memory = std::vector<float>(160), written = std::vector<float>(160, 7);
  Tensor bias[2];
  ForwardArgs args;
  BackwardArgs back;
};

TEST_F(Captures, AreCheckedByName) {
  args.captures = {};
  expect_refused("parity_bias is missing");
  args.captures = {bias, 1};
  bias[0].dims[0] = 3;
  expect_refused("parity_bias dim 0 is 3, expected num_heads 4");
  bias[0] = Tensor(memory.data(), DType::kFloat32, {8});
  expect_refused("parity_bias has 1 dims, expected 2: [num_heads, parities]");
  bias[0] = Tensor(memory.data(), DType::kInt32, {4, 2});
  expect_refused("parity_bias is int32, expected float32");
  bias[0] = Tensor(nullptr, DType::kFloat32, {4, 2});
  expect_refused("parity_bias is null, has 8 elements");
  bias[0] = bias[1] = Tensor(memory.data(), DType::kFloat32, {4, 2});
  args.captures = bias;
  expect_refused("captures has 2 tensors, score_option even_blocks captures 1");
  args.captures = {bias, 1};
  bias[0].device = Device::kCuda;
  expect_refused("parity_bias is not on the CPU, where this call computes");
  bias[0] = Tensor(written.data() + 152, DType::kFloat32, {4, 2});
  const Result<Plan> made = plan(desc);
  EXPECT_EQ(made->forward(args).message(), "out overlaps parity_bias");
}

TEST_F(Captures, AreRefusedWhereNothingIsCaptured) {
  desc.score_option = nullptr;
  expect_refused("captures are given, but the plan was made without score_option");
}

// Kernels without it say so, whoever asks, and a layer gives no captures.
TEST_F(Captures, NeedAKernelWithTheOption) {
  EXPECT_EQ(plan(desc, {.kernel = "reference"}).status().message(),
            "kernel is reference, which cannot compute this: score_option is even_blocks, takes none; these can: "
            "even_blocks");
  desc.score_option = nullptr;
  EXPECT_EQ(plan(desc, {.kernel = "even_blocks"}).status().code(), StatusCode::kUnsupported);
  LayerDesc layer_desc;
  layer_desc.attention.score_option = &kEvenBlocks;
  EXPECT_EQ(layer(layer_desc).status().message(), "attention.score_option is given, a layer's calls have no captures");
  const std::vector<Capture> many(24, kEvenBlocks.captures[0]);
  const polyhead::ScoreOption greedy = {"greedy", many};
  desc.score_option = &greedy;
  EXPECT_EQ(plan(desc).status().message(), "score_option greedy captures 24 tensors, a call takes at most 23");
}

// What fills the reserve of a layer tells its operands apart, captured ones by the same walk.
TEST_F(Captures, AreInTheFingerprint) {
  const Capture wide = {"parity_bias", [](const AttentionDesc&) {
                          return OperandShape(DType::kFloat32, {{"all", 2}});
                        }};
  const Capture other = {"other", kEvenBlocks.captures[0].shape};
  const polyhead::ScoreOption with_wide = {"even_blocks", {&wide, 1}}, with_other = {"even_blocks", {&other, 1}};
  AttentionDesc masked = desc;
  masked.attn_mask = {true, DType::kBool, {1, 1, 1, 5}};
  AttentionDesc descs[] = {desc, desc, desc, desc, masked};
  descs[1].score_option = &with_wide, descs[2].score_option = &with_other, descs[3].score_option = nullptr;
  std::set<uint64_t> prints;
  for (const AttentionDesc& d : descs) prints.insert(fingerprint_of(LayerDesc(), d));
  EXPECT_EQ(prints.size(), 5u);
  EXPECT_EQ(fingerprint_of(LayerDesc(), desc), fingerprint_of(LayerDesc(), descs[0]));
}

}  // namespace
}  // namespace polyhead::testing
