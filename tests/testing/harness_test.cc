// The harness must pass honest kernels and catch each kind of wrong one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cases.h"
#include "core/dtype.h"
#include "poison.h"
#include "reference/attention.h"
#include "stateless.h"
#include "testing/bounds.h"
#include "testing/call.h"
#include "testing/judge.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

using Forward = void (*)(const AttentionDesc&, const ForwardArgs&, const polyhead::Run&);

// A kernel that computes as the yardstick does, but for what `forward` does differently.
Kernel kernel_of(Forward forward) {
  return {"sabotaged",
          Device::kCpu,
          [](const AttentionDesc&) { return std::string(); },
          [](const AttentionDesc& desc, int) { return reference::workspace_bytes<float>(desc); },
          nullptr,
          with_status(forward),
          nullptr};
}

Problem problem(int64_t queries = 66, int64_t keys = 130) {
  Problem p;
  p.name = "harness_test";
  p.desc.batch = 2;
  p.desc.num_heads = 4;
  p.desc.num_heads_kv = 2;
  p.desc.seqlen_q = queries;
  p.desc.seqlen_k = keys;
  p.desc.head_dim = p.desc.head_dim_v = 16;
  p.desc.align = Align::kBottomRight;
  return p;
}

std::string judged(const Problem& p, Forward forward, const RunOptions& options = {}) {
  return mismatch(kernel_of(forward), p, forward_draws(p), options);
}

void naive(const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
  reference::forward<float>(desc, args);
}

// Row i of a [B, S, H, D] view alone.
Tensor row_of(Tensor t, int64_t i) {
  t.data = static_cast<uint8_t*>(t.data) + i * t.strides[1] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  t.dims[1] = 1;
  return t;
}

// Sums in the opposite order: keys and head dims run backwards. As good as the yardstick, with other roundings.
void backwards(const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
  auto flip = [](Tensor& t, int dim) {
    if (t.dims[dim] > 1) {
      t.data = static_cast<uint8_t*>(t.data) +
               (t.dims[dim] - 1) * t.strides[dim] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
      t.strides[dim] = -t.strides[dim];
    }
  };
  ForwardArgs flipped = args;
  if (key_dtype(desc) != DType::kInt4x2) {  // two numbers of a byte keep their order
    flip(flipped.query, flipped.query.ndim - 1);
    flip(flipped.key, flipped.key.ndim - 1);
    if (flipped.key_scales.given()) flip(flipped.key_scales, flipped.key_scales.ndim - 1);
  }
  if (!desc.packed && !desc.has_seqlens_k && !desc.causal && desc.window_left < 0 && desc.window_right < 0 &&
      !desc.has_windows && desc.alibi_slopes_ndim == 0 && desc.dropout_p == 0) {
    flip(flipped.key, 1);
    flip(flipped.value, 1);
    for (Tensor* t : {&flipped.key_scales, &flipped.value_scales}) {
      if (t->given()) flip(*t, 1);
    }
    for (Tensor* t : {&flipped.attn_mask, &flipped.attn_bias}) {
      if (t->given()) flip(*t, 3);
    }
    if (flipped.attn_weights.given()) flip(flipped.attn_weights, flipped.attn_weights.ndim - 1);
    if (flipped.column_sums.given()) flip(flipped.column_sums, 2);
  }
  reference::forward<float>(desc, flipped);
}

TEST(Harness, PassesTheYardstickAndItsMirrorImage) {
  int failed = 0;
  for (const Problem& p : cases()) {
    if (p.desc.dtype == DType::kFloat64 || p.desc.seqlen_q * p.desc.seqlen_k > 20000) continue;
    const std::vector<ForwardDraw> draws = forward_draws(p);
    RunOptions options = run_options(p);
    options.through_plan = false;
    for (Forward forward : {naive, backwards}) {
      const std::string text = mismatch(kernel_of(forward), p, draws, options);
      EXPECT_EQ(text, "") << forward_command(forward == naive ? "naive" : "backwards", p);
      failed += !text.empty();
    }
    if (failed > 5) break;
  }
}

TEST(Harness, CatchesAMaskSkippedOnTheTailRow) {
  Problem p = problem();
  p.desc.causal = true;
  const Forward skips = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    AttentionDesc tail = desc;  // the last row but one sees the last key too
    tail.seqlen_q = 1;
    tail.align = Align::kUnset;
    tail.query_offset = desc.seqlen_k - 1;
    ForwardArgs one = args;
    one.query = row_of(args.query, desc.seqlen_q - 2);
    one.out = row_of(args.out, desc.seqlen_q - 2);
    one.logsumexp = Tensor();
    reference::forward<float>(tail, one);
  };
  EXPECT_NE(judged(p, skips), "");
  EXPECT_EQ(judged(p, naive), "");
}

TEST(Harness, CatchesNanThatLeaksFromHiddenKeys) {
  Problem p = problem();
  p.desc.has_seqlens_k = true;
  const Forward leaks = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    for (int64_t j = 0; j < desc.seqlen_k; ++j) {  // 0 * V, as a finite mask or a padded tile adds
      float* out = static_cast<float*>(args.out.data);
      *out += 0 * static_cast<const float*>(args.value.data)[j * args.value.strides[1]];
    }
  };
  const Inputs in = random_inputs(p);
  const Kernel kernel = kernel_of(leaks);
  const Outputs clean = run(kernel, p.desc, in);
  Judge judge(p);
  judge.add(p.desc, clean, expected(p.desc, in));
  EXPECT_EQ(judge.verdict(), "");
  bool caught = false;
  for (uint64_t seed = 1; seed < 4; ++seed) {
    caught |= !difference(run(kernel, p.desc, poison_hidden(p.desc, in, seed)), clean).empty();
  }
  EXPECT_TRUE(caught);
}

TEST(Harness, CatchesNanThatIsSwallowed) {
  const Problem p = problem();
  const Forward swallows = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    float* out = static_cast<float*>(args.out.data);
    for (int64_t n = 0; n < args.out.num_elements(); ++n) out[n] = std::isnan(out[n]) ? 0 : out[n];
  };
  const Inputs in = random_inputs(p);
  const Kernel kernel = kernel_of(swallows);
  const Outputs clean = run(kernel, p.desc, in);
  for (Poke poke : {Poke::kQuery, Poke::kKey, Poke::kValue}) {
    const Poked poked = poke_visible(p.desc, in, poke, 1);
    ASSERT_TRUE(poked.done);
    EXPECT_NE(poke_mismatch(p.desc, poked.inputs, clean, run(kernel, p.desc, poked.inputs)), "") << poked.where;
    EXPECT_EQ(poke_mismatch(p.desc, poked.inputs, clean, run(kernel_of(naive), p.desc, poked.inputs)), "");
  }
}

volatile float sink;

TEST(HarnessDeathTest, CatchesReadsPastEitherEnd) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (Guard guard : {Guard::kEnd, Guard::kStart}) {
    const Forward past_end = [](const AttentionDesc&, const ForwardArgs& args, const polyhead::Run&) {
      sink = static_cast<const float*>(args.key.data)[args.key.num_elements()];
    };
    const Forward before_start = [](const AttentionDesc&, const ForwardArgs& args, const polyhead::Run&) {
      sink = static_cast<const float*>(args.key.data)[-1];
    };
    RunOptions options;
    options.guard = guard;
    const Problem p = problem();
    const Inputs in = random_inputs(p);
    EXPECT_DEATH(
        {
          set_running(forward_command("sabotaged", p));
          run(kernel_of(guard == Guard::kEnd ? past_end : before_start), p.desc, in, options);
        },
        "crashed while running: polyhead verify 2x4/2x66/130x16 ");
  }
}

TEST(HarnessDeathTest, CatchesWritesBehindTheWorkspace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Forward writes = [](const AttentionDesc&, const ForwardArgs& args, const polyhead::Run&) {
    static_cast<volatile char*>(args.workspace)[args.workspace_bytes] = 1;
  };
  const Problem p = problem();
  const Inputs in = random_inputs(p);
  EXPECT_DEATH(run(kernel_of(writes), p.desc, in), "");
}

// Online softmax in blocks of 64 keys: sums of earlier blocks must be rescaled when a new maximum comes.
template <bool rescale>
void online(const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
  const float* Q = static_cast<const float*>(args.query.data);
  const float* K = static_cast<const float*>(args.key.data);
  const float* V = static_cast<const float*>(args.value.data);
  const int64_t dim = desc.head_dim;
  const int64_t group_size = desc.num_heads / desc.num_heads_kv;
  for (int64_t row = 0; row < desc.batch * desc.seqlen_q * desc.num_heads; ++row) {
    const int64_t h = row % desc.num_heads, b = row / desc.num_heads / desc.seqlen_q;
    std::vector<float> O(static_cast<size_t>(dim), 0.0f), S(64);
    float m = -INFINITY, l = 0;
    for (int64_t first = 0; first < desc.seqlen_k; first += 64) {
      const int64_t keys = std::min<int64_t>(64, desc.seqlen_k - first);
      const int64_t base = ((b * desc.seqlen_k + first) * desc.num_heads_kv + h / group_size) * dim;
      float m_new = m;
      for (int64_t j = 0; j < keys; ++j) {
        const float* K_j = K + base + j * desc.num_heads_kv * dim;
        S[j] = std::inner_product(K_j, K_j + dim, Q + row * dim, 0.0f) / std::sqrt(static_cast<float>(dim));
        m_new = std::max(m_new, S[j]);
      }
      const float factor = rescale ? std::exp(m - m_new) : 1;
      for (float& o : O) o *= factor;
      l *= factor;
      m = m_new;
      for (int64_t j = 0; j < keys; ++j) {
        const float P = std::exp(S[j] - m);
        l += P;
        for (int64_t d = 0; d < dim; ++d) O[d] += P * V[base + j * desc.num_heads_kv * dim + d];
      }
    }
    for (int64_t d = 0; d < dim; ++d) static_cast<float*>(args.out.data)[row * dim + d] = O[d] / l;
    const int64_t i = row / desc.num_heads % desc.seqlen_q;
    float* L = static_cast<float*>(args.logsumexp.data);
    L[(b * desc.num_heads + h) * desc.seqlen_q + i] = m + std::log(l);
  }
}

TEST(Harness, CatchesAMissingRescale) {
  EXPECT_EQ(judged(problem(), online<true>), "");
  EXPECT_NE(judged(problem(), online<false>), "");
}

TEST(Harness, CatchesRowsNotWritten) {
  const Forward forgets = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    AttentionDesc less = desc;
    less.seqlen_q -= 1;
    ForwardArgs part = args;
    part.query.dims[1] = part.out.dims[1] = part.logsumexp.dims[2] = less.seqlen_q;
    reference::forward<float>(less, part);
  };
  EXPECT_NE(judged(problem(), forgets).find("not written"), std::string::npos);
}

TEST(Harness, CatchesWritesBetweenElements) {
  const Forward writes = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    static_cast<float*>(args.out.data)[args.out.strides[3] * args.out.dims[3]] = 0;
  };
  RunOptions options;
  options.layout = Layout::kPadded;
  EXPECT_NE(judged(problem(), writes, options).find("between elements"), std::string::npos);
  EXPECT_EQ(judged(problem(), naive, options), "");
}

TEST(Harness, CatchesAnInputThatIsWritten) {
  const Forward writes = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    static_cast<float*>(args.query.data)[7] += 1;
  };
  EXPECT_NE(judged(problem(), writes).find("query was written"), std::string::npos);
}

TEST(Harness, CatchesAnInnermostStrideTakenForOne) {
  const Forward ignores = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    ForwardArgs wrong = args;
    wrong.key.strides[3] = 1;
    reference::forward<float>(desc, wrong);
  };
  RunOptions options;
  options.layout = Layout::kTransposed;
  EXPECT_EQ(judged(problem(), ignores), "");
  EXPECT_NE(judged(problem(), ignores, options), "");
}

TEST(Harness, CatchesSumsThatDependOnThreads) {
  const Forward depends = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run& run) {
    run.num_threads > 1 ? backwards(desc, args, run) : naive(desc, args, run);
  };
  const Problem p = problem();
  const Inputs in = random_inputs(p);
  RunOptions two;
  two.threads = 2;
  EXPECT_NE(difference(run(kernel_of(depends), p.desc, in, two), run(kernel_of(depends), p.desc, in)), "");
}

TEST(Harness, CatchesAWorkspaceTakenForZeros) {
  const Forward reads = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    const float sum = *static_cast<const float*>(args.workspace);
    reference::forward<float>(desc, args);
    static_cast<float*>(args.out.data)[3] += sum;
  };
  EXPECT_NE(judged(problem(), reads), "");
}

TEST(Harness, CatchesHiddenRowsThatAreNotZero) {
  Problem p = problem(130, 66);  // queries 0..63 see no key
  p.desc.causal = true;
  const Forward minus_zero = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    static_cast<float*>(args.out.data)[0] = -0.0f;
  };
  const Forward finite = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    static_cast<float*>(args.logsumexp.data)[0] = -3e38f;
  };
  EXPECT_EQ(judged(p, naive), "");
  EXPECT_NE(judged(p, minus_zero), "");
  EXPECT_NE(judged(p, finite), "");
}

TEST(Harness, CatchesAWorseError) {
  Problem p = problem(128, 192);
  p.desc.head_dim = p.desc.head_dim_v = 64;
  // P V with values rounded to bfloat16.
  const Forward coarse = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    ForwardArgs rounded = args;
    std::vector<float> value(static_cast<size_t>(args.value.num_elements()));
    for (size_t n = 0; n < value.size(); ++n) {
      value[n] = to_float(to_bfloat16(static_cast<const float*>(args.value.data)[n]));
    }
    rounded.value.data = value.data();
    reference::forward<float>(desc, rounded);
  };
  // Every result a hair too large: no single element errs by much.
  const Forward drifts = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    float* out = static_cast<float*>(args.out.data);
    for (int64_t n = 0; n < args.out.num_elements(); ++n) out[n] *= 1 + 6e-7f;
  };
  const Forward base_2 = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    reference::forward<float>(desc, args);
    float* L = static_cast<float*>(args.logsumexp.data);
    for (int64_t n = 0; n < args.logsumexp.num_elements(); ++n) L[n] *= 1.442695f;
  };
  EXPECT_EQ(judged(p, naive), "");
  EXPECT_NE(judged(p, coarse).find("2x the yardstick"), std::string::npos);
  EXPECT_NE(judged(p, drifts).find("mean signed error"), std::string::npos);
  EXPECT_NE(judged(p, base_2).find("logsumexp"), std::string::npos);
}

// In bfloat16 the largest error alone would let weights through that were truncated instead of rounded.
TEST(Harness, CatchesTruncatedBfloat16) {
  Problem p = problem(128, 192);
  p.desc.head_dim = p.desc.head_dim_v = 64;
  p.desc.dtype = DType::kBFloat16;
  const Forward truncates = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run&) {
    std::vector<float> exact(static_cast<size_t>(args.out.num_elements()));
    ForwardArgs wide = args;
    wide.out.data = exact.data();
    wide.out.dtype = DType::kFloat32;
    reference::forward<float>(desc, wide);
    for (size_t n = 0; n < exact.size(); ++n) {
      static_cast<BFloat16*>(args.out.data)[n] = {static_cast<uint16_t>(std::bit_cast<uint32_t>(exact[n]) >> 16)};
    }
  };
  EXPECT_EQ(judged(p, naive), "");
  EXPECT_NE(judged(p, truncates), "");
}

// Scores as tensor cores sum them, of 32 additions each of which cuts off half an ulp: by a GPU's kernel alone, and no more.
TEST(Harness, JudgesTensorCoresByWhatTheyCutOff) {
  Problem p = problem(66, 66);
  p.desc.head_dim = 512;
  p.desc.dtype = DType::kFloat16;
  const Forward cuts = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run& run) {
    AttentionDesc less = desc;
    less.scale = (1 - 16.5 * kCut) / std::sqrt(512.0);
    naive(less, args, run);
  };
  const Forward cuts_more = [](const AttentionDesc& desc, const ForwardArgs& args, const polyhead::Run& run) {
    AttentionDesc less = desc;
    less.scale = (1 - 3 * 16.5 * kCut) / std::sqrt(512.0);
    naive(less, args, run);
  };
  const std::vector<ForwardDraw> draws = forward_draws(p);
  Kernel kernel = kernel_of(cuts);
  EXPECT_NE(mismatch(kernel, p, draws).find("logsumexp: mean signed error"), std::string::npos);
  kernel.name = "cuda_like";
  EXPECT_EQ(mismatch(kernel, p, draws), "");
  kernel.forward = kernel_of(cuts_more).forward;
  EXPECT_NE(mismatch(kernel, p, draws).find("logsumexp: mean signed error"), std::string::npos);
}

// The definition that kernels are compared with is the reference, bit for bit, in both arithmetics; they share no code.
template <class T>
std::string difference_from_reference(const AttentionDesc& desc, const Inputs& in, bool wide) {
  return difference(reference_outputs<T>(desc, in, wide), defined_outputs<T>(desc, in, Visibility(desc, in), wide));
}

TEST(Harness, TheDefinitionIsTheReference) {
  int compared = 0;
  for (const Problem& p : cases()) {
    const AttentionDesc& d = p.desc;
    const double pairs = static_cast<double>(d.num_heads * d.seqlen_q) * static_cast<double>(d.batch * d.seqlen_k);
    if (pairs * static_cast<double>(d.head_dim + d.head_dim_v) > 4e6) continue;
    const Inputs in = random_inputs(p);
    EXPECT_EQ(difference_from_reference<double>(d, in, true), "") << forward_command("reference", p);
    EXPECT_EQ(difference_from_reference<float>(d, in, false), "") << forward_command("reference", p);
    if (HasFailure()) break;
    ++compared;
  }
  EXPECT_GT(compared, 500);
}

TEST(Harness, MagnitudesAreSumsOfAbsoluteTerms) {
  Problem p = problem();
  p.desc.dropout_p = 0.3;
  Inputs in = random_inputs(p);
  const Expected want = expected(p.desc, in);
  for (int64_t n = 0; n < in.value.size(); ++n) in.value.set(n, std::fabs(in.value.at(n)));
  EXPECT_EQ(difference("out", reference_outputs<double>(p.desc, in, true).out, want.magnitude), "");
}

TEST(Harness, SeesTheSameVisiblePlacesAsTheReference) {
  int visible_places = 0;
  for (const Problem& p : cases()) {
    const AttentionDesc& d = p.desc;
    if (d.packed || d.seqlen_q * d.seqlen_k > 10000 || d.dtype != DType::kFloat32) continue;
    AttentionDesc uniform = d;  // all scores 0: a weight is 0 where hidden and only there
    uniform.return_weights = ReturnWeights::kPerHead;
    uniform.dropout_p = uniform.softcap = 0;
    uniform.alibi_slopes_ndim = 0;
    uniform.scale = 0;
    uniform.has_sink_logits = false;
    uniform.normalizer = Normalizer::kSoftmax;
    Inputs in = random_inputs(p);
    in.sink_logits = {};
    const Outputs got = run(kReference, uniform, in);
    int64_t n = 0;
    int64_t wrong = 0;
    for (int64_t b = 0; b < d.batch; ++b) {
      const Span s = span_of(d, in, b);
      for (int64_t h = 0; h < d.num_heads; ++h) {
        for (int64_t i = 0; i < d.seqlen_q; ++i) {
          for (int64_t j = 0; j < d.seqlen_k; ++j) {
            const bool seen = got.attn_weights.at(n++) > 0;
            visible_places += seen;
            wrong += seen != visible(d, in, s, b, h, i, j);
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0) << forward_command("reference", p);
  }
  EXPECT_GT(visible_places, 100000);
}

}  // namespace
}  // namespace polyhead::testing
