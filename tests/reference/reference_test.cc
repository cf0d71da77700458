// The definition itself, against what can be known without it: closed forms, tables made by hand, laws.
#include <gtest/gtest.h>

#include <cmath>

#include "core/philox.h"
#include "polyhead/dropout.h"
#include "reference/attention.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

constexpr double kInf = HUGE_VAL;

AttentionDesc sizes(int64_t queries, int64_t keys, int64_t dim, int64_t batch = 1, int64_t heads = 1,
                    int64_t heads_kv = 1) {
  AttentionDesc d;
  d.dtype = DType::kFloat64;
  d.batch = batch;
  d.num_heads = heads;
  d.num_heads_kv = heads_kv;
  d.seqlen_q = queries;
  d.seqlen_k = keys;
  d.head_dim = d.head_dim_v = dim;
  d.return_weights = ReturnWeights::kPerHead;
  return d;
}

Inputs draw(const AttentionDesc& desc, uint64_t seed = 1) {
  Problem p;
  p.desc = desc;
  p.seed = seed;
  p.layout = Layout::kBshd;
  return random_inputs(p);
}

Array filled(DType dtype, const std::vector<int64_t>& dims, const std::vector<double>& values) {
  Array a(dtype, dims);
  for (int64_t n = 0; n < a.size(); ++n) a.set(n, values[static_cast<size_t>(n) % values.size()]);
  return a;
}

Outputs exact(const AttentionDesc& desc, const Inputs& in) { return reference_outputs<double>(desc, in, true); }

void expect_near(const Array& got, const std::vector<double>& want, double tolerance = 1e-14) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(want.size()));
  for (int64_t n = 0; n < got.size(); ++n) {
    if (std::isfinite(want[n])) {
      EXPECT_NEAR(got.at(n), want[n], tolerance) << "element " << n;
    } else {
      EXPECT_EQ(got.at(n), want[n]) << "element " << n;
    }
  }
}

// The rows of weights of one head as text: 'x' where a weight is not 0.
std::string table(const Array& weights) {
  std::string text;
  const int64_t keys = weights.dims.back();
  for (int64_t n = 0; n < weights.size(); ++n) {
    text += weights.at(n) > 0 ? 'x' : '.';
    if (n % keys == keys - 1) text += ' ';
  }
  return text;
}

TEST(Reference, UniformWeightsAverageTheValues) {
  const AttentionDesc d = sizes(2, 5, 3);
  Inputs in = draw(d);
  in.query = Array(DType::kFloat64, in.query.dims);  // 0
  const Outputs o = exact(d, in);
  for (int64_t n = 0; n < 3; ++n) {
    double mean = 0;
    for (int64_t j = 0; j < 5; ++j) mean += in.value.at(j * 3 + n) / 5;
    EXPECT_NEAR(o.out.at(n), mean, 1e-15);
    EXPECT_NEAR(o.out.at(3 + n), mean, 1e-15);
  }
  expect_near(o.logsumexp, {std::log(5.0), std::log(5.0)});
}

TEST(Reference, OneKeyGivesItsValueAndItsScore) {
  AttentionDesc d = sizes(1, 1, 2);
  Inputs in = draw(d);
  in.query = filled(DType::kFloat64, in.query.dims, {3, 4});
  in.key = filled(DType::kFloat64, in.key.dims, {5, -1});
  Outputs o = exact(d, in);
  EXPECT_EQ(o.out, in.value);
  expect_near(o.logsumexp, {11 / std::sqrt(2.0)});
  d.scale = -3;
  expect_near(exact(d, in).logsumexp, {-33});
}

TEST(Reference, TwoKeysGiveASigmoid) {
  AttentionDesc d = sizes(1, 2, 1);
  d.scale = 1;
  Inputs in = draw(d);
  in.query = filled(DType::kFloat64, in.query.dims, {1});
  in.key = filled(DType::kFloat64, in.key.dims, {0.75, -0.5});
  const double p = 1 / (1 + std::exp(-1.25));
  const Outputs o = exact(d, in);
  expect_near(o.attn_weights, {p, 1 - p});
  expect_near(o.out, {p * in.value.at(0) + (1 - p) * in.value.at(1)});
  expect_near(o.logsumexp, {std::log(std::exp(0.75) + std::exp(-0.5))});
}

TEST(Reference, AnIdentityAsValueGivesTheWeights) {
  AttentionDesc d = sizes(4, 6, 6);
  d.head_dim = 3;
  Inputs in = draw(d);
  for (int64_t n = 0; n < 36; ++n) in.value.set(n, n % 7 == 0);
  const Outputs o = exact(d, in);
  EXPECT_EQ(o.out.bytes, o.attn_weights.bytes);
  for (int64_t i = 0; i < 4; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 6; ++j) sum += o.attn_weights.at(i * 6 + j);
    EXPECT_NEAR(sum, 1, 1e-15);
  }
}

TEST(Reference, SeesWhatCausalAndWindowLet) {
  const auto seen = [](int64_t queries, int64_t keys, auto change) {
    AttentionDesc d = sizes(queries, keys, 1);
    d.scale = 0;
    change(d);
    return table(exact(d, draw(d)).attn_weights);
  };
  EXPECT_EQ(seen(3, 5, [](auto& d) { d.causal = true, d.align = Align::kTopLeft; }), "x.... xx... xxx.. ");
  EXPECT_EQ(seen(3, 5, [](auto& d) { d.causal = true, d.align = Align::kBottomRight; }), "xxx.. xxxx. xxxxx ");
  EXPECT_EQ(seen(5, 3, [](auto& d) { d.causal = true, d.align = Align::kBottomRight; }), "... ... x.. xx. xxx ");
  EXPECT_EQ(seen(5, 3, [](auto& d) { d.causal = true, d.align = Align::kTopLeft; }), "x.. xx. xxx xxx xxx ");
  EXPECT_EQ(seen(3, 5, [](auto& d) { d.causal = true, d.query_offset = 1; }), "xx... xxx.. xxxx. ");
  EXPECT_EQ(seen(3, 5, [](auto& d) { d.causal = true, d.query_offset = -2; }), "..... ..... x.... ");
  EXPECT_EQ(seen(3, 5, [](auto& d) { d.causal = true, d.query_offset = 100; }), "xxxxx xxxxx xxxxx ");
  EXPECT_EQ(seen(4, 4, [](auto& d) { d.window_left = 1; }), "xxxx xxxx .xxx ..xx ");
  EXPECT_EQ(seen(4, 4, [](auto& d) { d.window_right = 0; }), "x... xx.. xxx. xxxx ");
  EXPECT_EQ(seen(4, 4, [](auto& d) { d.window_left = 1, d.window_right = 1; }), "xx.. xxx. .xxx ..xx ");
  EXPECT_EQ(seen(3, 5, [](auto& d) { d.window_left = d.window_right = 0, d.align = Align::kBottomRight; }),
            "..x.. ...x. ....x ");
  EXPECT_EQ(seen(4, 4, [](auto& d) { d.window_left = 1, d.window_right = 2, d.causal = true; }),
            "x... xx.. .xx. ..xx ");
  EXPECT_EQ(seen(4, 6, [](auto& d) { d.window_left = 0, d.sink_keys = 2, d.causal = true, d.query_offset = 1; }),
            "xx.... xxx... xx.x.. xx..x. ");
  EXPECT_EQ(seen(2, 3, [](auto& d) { d.window_left = INT64_MAX, d.query_offset = INT64_MAX; }), "xxx .xx ");
  EXPECT_EQ(seen(2, 3, [](auto& d) { d.window_right = 0, d.query_offset = INT64_MIN; }), "... ... ");
}

TEST(Reference, TakesEachSequencesOwnLengthsAndOffset) {
  AttentionDesc d = sizes(3, 4, 1, 2);
  d.scale = 0;
  d.causal = true;
  d.align = Align::kBottomRight;
  d.has_seqlens_q = d.has_seqlens_k = true;
  Inputs in = draw(d);
  in.seqlens_q = filled(DType::kInt32, {2}, {2, 3});
  in.seqlens_k = filled(DType::kInt64, {2}, {3, 1});
  const Outputs o = exact(d, in);
  EXPECT_EQ(table(o.attn_weights), "xx.. xxx. .... .... .... x... ");
  expect_near(o.logsumexp, {std::log(2.0), std::log(3.0), -kInf, -kInf, -kInf, 0});

  d.align = Align::kUnset;
  d.has_query_offsets = true;
  in.query_offsets = filled(DType::kInt32, {2}, {-1, 5});
  EXPECT_EQ(table(exact(d, in).attn_weights), ".... x... .... x... x... x... ");

  d.causal = d.has_query_offsets = d.has_seqlens_q = false, d.mask_at_end = true;
  d.attn_mask = {true, DType::kBool, {1, 1, 3, 2}};
  in.attn_mask = filled(DType::kBool, {1, 1, 3, 2}, {1, 0, 0, 1, 0, 0});
  EXPECT_EQ(table(exact(d, in).attn_weights), "xx.. x.x. x... .... x... .... ");
}

TEST(Reference, BroadcastsMaskAndBias) {
  AttentionDesc d = sizes(2, 3, 1, 2, 2, 1);
  d.scale = 0;
  d.attn_mask = {true, DType::kBool, {2, 1, 1, 3}};
  d.attn_bias = {true, DType::kFloat64, {1, 2, 2, 1}};
  Inputs in = draw(d);
  in.attn_mask = filled(DType::kBool, {2, 1, 1, 3}, {1, 0, 1, 0, 1, 1});
  in.attn_bias = filled(DType::kFloat64, {1, 2, 2, 1}, {0, 7, -kInf, -1});
  const Outputs o = exact(d, in);
  EXPECT_EQ(table(o.attn_weights), "x.x x.x ... x.x .xx .xx ... .xx ");
  const double two = std::log(2.0);
  expect_near(o.logsumexp, {two, two + 7, -kInf, two - 1, two, two + 7, -kInf, two - 1});
}

TEST(Reference, AppliesSoftcapThenBiasThenAlibi) {
  AttentionDesc d = sizes(2, 2, 1);
  d.scale = 0.5;
  d.softcap = 3;
  d.attn_bias = {true, DType::kFloat32, {1, 1, 1, 2}};
  d.alibi_slopes_ndim = 1;
  d.query_offset = 2;  // query i stands at key 2 + i
  Inputs in = draw(d);
  in.query = filled(DType::kFloat64, in.query.dims, {4, -1});
  in.key = filled(DType::kFloat64, in.key.dims, {3, 1});
  in.attn_bias = filled(DType::kFloat32, {1, 1, 1, 2}, {0.25, 10});
  in.alibi_slopes = filled(DType::kFloat32, {1}, {0.5});
  const double S[4] = {3 * std::tanh(6 / 3.0) + 0.25 - 0.5 * 2, 3 * std::tanh(2 / 3.0) + 10 - 0.5 * 1,
                       3 * std::tanh(-1.5 / 3) + 0.25 - 0.5 * 3, 3 * std::tanh(-0.5 / 3) + 10 - 0.5 * 2};
  const double L[2] = {std::log(std::exp(S[0]) + std::exp(S[1])), std::log(std::exp(S[2]) + std::exp(S[3]))};
  const Outputs o = exact(d, in);
  expect_near(o.logsumexp, {L[0], L[1]});
  expect_near(o.attn_weights,
              {std::exp(S[0] - L[0]), std::exp(S[1] - L[0]), std::exp(S[2] - L[1]), std::exp(S[3] - L[1])});
}

TEST(Reference, TakesTheSlopesOfEachSequenceAndHead) {
  AttentionDesc d = sizes(1, 2, 1, 2, 2, 2);
  d.scale = 0;
  d.query_offset = 0;
  d.alibi_slopes_ndim = 2;
  Inputs in = draw(d);
  in.alibi_slopes = filled(DType::kFloat32, {2, 2}, {0, 1, 2, 3});
  std::vector<double> L;
  for (double slope : {0, 1, 2, 3}) L.push_back(std::log(1 + std::exp(-slope)));
  expect_near(exact(d, in).logsumexp, L);
  d.alibi_slopes_ndim = 1;
  in.alibi_slopes = filled(DType::kFloat32, {2}, {2, 3});
  expect_near(exact(d, in).logsumexp, {L[2], L[3], L[2], L[3]});
}

TEST(Reference, ShiftsTheLogsumexpOnlyWithTheScores) {
  AttentionDesc d = sizes(5, 7, 4, 1, 2, 1);
  Inputs in = draw(d);
  const Outputs plain = exact(d, in);
  for (double shift : {130.0, -130.0, 1e5}) {
    d.attn_bias = {true, DType::kFloat64, {1, 1, 1, 1}};
    in.attn_bias = filled(DType::kFloat64, {1, 1, 1, 1}, {shift});
    const Outputs shifted = exact(d, in);
    for (int64_t n = 0; n < plain.out.size(); ++n) EXPECT_NEAR(shifted.out.at(n), plain.out.at(n), 1e-10);
    for (int64_t n = 0; n < 10; ++n) EXPECT_NEAR(shifted.logsumexp.at(n), plain.logsumexp.at(n) + shift, 1e-10);
  }
}

TEST(Reference, ReadsTheKeysOfTheGroup) {
  const AttentionDesc grouped = sizes(3, 5, 4, 2, 6, 2), repeated = sizes(3, 5, 4, 2, 6, 6);
  const Inputs in = draw(grouped);
  Inputs all = draw(repeated);
  all.query = in.query;
  for (int64_t row = 0; row < 2 * 5; ++row) {
    for (int64_t h = 0; h < 6; ++h) {
      for (int64_t n = 0; n < 4; ++n) {
        all.key.set((row * 6 + h) * 4 + n, in.key.at((row * 2 + h / 3) * 4 + n));
        all.value.set((row * 6 + h) * 4 + n, in.value.at((row * 2 + h / 3) * 4 + n));
      }
    }
  }
  EXPECT_EQ(difference(exact(grouped, in), exact(repeated, all)), "");
}

TEST(Reference, PackedSequencesAreSequences) {
  AttentionDesc d = sizes(20, 30, 4, 3, 2, 1);
  d.return_weights = ReturnWeights::kNone;
  d.packed = true;
  d.causal = true;
  d.align = Align::kBottomRight;
  d.alibi_slopes_ndim = 2;
  Inputs in = draw(d);
  in.cu_seqlens_q = filled(DType::kInt32, {4}, {0, 6, 6, 17});  // 3 rows behind the end
  in.cu_seqlens_k = filled(DType::kInt64, {4}, {0, 11, 15, 30});
  const Outputs packed = exact(d, in);
  for (int64_t b = 0; b < 3; ++b) {
    Slice one = slice_batch(d, in, b, b + 1);
    one.desc.packed = false;
    one.inputs.cu_seqlens_q = one.inputs.cu_seqlens_k = Array();
    for (Array* a : {&one.inputs.query, &one.inputs.key, &one.inputs.value}) a->dims.insert(a->dims.begin(), 1);
    const Outputs alone = exact(one.desc, one.inputs);
    const int64_t first = static_cast<int64_t>(in.cu_seqlens_q.at(b));
    for (int64_t n = 0; n < alone.out.size(); ++n) EXPECT_EQ(alone.out.at(n), packed.out.at(first * 8 + n));
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < one.desc.seqlen_q; ++i) {
        EXPECT_EQ(alone.logsumexp.at(h * one.desc.seqlen_q + i), packed.logsumexp.at(h * 20 + first + i));
      }
    }
  }
  for (int64_t n = 17 * 8; n < 20 * 8; ++n) EXPECT_EQ(packed.out.at(n), 0);
  for (int64_t i = 17; i < 20; ++i) EXPECT_EQ(packed.logsumexp.at(i), -kInf);
}

TEST(Reference, DropsByTheDocumentedFormula) {
  for (double p : {0.1, 0.5, 0.999, 1.0, 1e-6}) {
    AttentionDesc d = sizes(5, 19, 3, 2, 3, 1);
    d.return_column_sums = true;
    const Inputs in = draw(d);
    const Outputs plain = exact(d, in);
    d.dropout_p = p;
    Inputs dropping = in;
    dropping.dropout_seed = 0x123456789abcdef0;
    dropping.dropout_offset = 77;
    const Outputs dropped = exact(d, dropping);
    Array kept(DType::kBool, {2, 3, 5, 19});
    ASSERT_TRUE(dropout_mask(p, dropping.dropout_seed, dropping.dropout_offset, view(kept)).ok());
    for (int64_t n = 0; n < plain.attn_weights.size(); ++n) {
      const int64_t j = n % 19, i = n / 19 % 5;
      const auto head = static_cast<uint32_t>(n / 19 / 5);
      const auto words =
          philox4x32({head, static_cast<uint32_t>(i), static_cast<uint32_t>(j / 8), 77u}, {0x9abcdef0u, 0x12345678u});
      const uint32_t word = words[static_cast<size_t>(j % 8 / 2)];
      const uint32_t bits = j % 2 == 0 ? word & 0xffff : word >> 16;
      const bool keep = bits >= std::floor(p * 65536 + 0.5);
      EXPECT_EQ(kept.at(n), keep);
      EXPECT_DOUBLE_EQ(dropped.attn_weights.at(n), keep ? plain.attn_weights.at(n) / (1 - p) : 0);
    }
    EXPECT_EQ(dropped.logsumexp, plain.logsumexp);
    EXPECT_EQ(dropped.column_sums, plain.column_sums);
    if (p == 1) expect_near(dropped.out, std::vector<double>(static_cast<size_t>(plain.out.size()), 0.0), 0);
  }
}

TEST(Reference, KeepsAWeightWhoseBitsAreTheThreshold) {
  AttentionDesc d = sizes(1, 8, 1);
  d.scale = 0;
  Inputs in = draw(d);
  in.dropout_seed = 1;
  in.dropout_offset = 0;
  for (int64_t j = 0; j < 8; ++j) {
    const double bits = dropout_bits(1, 0, 0, 0, j);
    d.dropout_p = bits / 65536;
    EXPECT_GT(exact(d, in).attn_weights.at(j), 0);
    d.dropout_p = (bits + 1) / 65536;
    EXPECT_EQ(exact(d, in).attn_weights.at(j), 0);
  }
}

TEST(Reference, CountsDropoutWithinTheSequenceWhenPacked) {
  AttentionDesc d = sizes(4, 9, 2, 2);
  d.dropout_p = 0.5;
  Inputs in = draw(d);
  const Outputs padded = exact(d, in);
  AttentionDesc packed = d;
  packed.packed = true;
  packed.return_weights = ReturnWeights::kNone;
  packed.seqlen_q = 8;
  packed.seqlen_k = 18;
  in.cu_seqlens_q = filled(DType::kInt32, {3}, {0, 4, 8});
  in.cu_seqlens_k = filled(DType::kInt32, {3}, {0, 9, 18});
  for (Array* a : {&in.query, &in.key, &in.value}) a->dims = {a->dims[0] * a->dims[1], a->dims[2], a->dims[3]};
  EXPECT_EQ(exact(packed, in).out.bytes, padded.out.bytes);
}

TEST(Reference, SumsAndAveragesItsWeights) {
  AttentionDesc d = sizes(4, 6, 3, 2, 3, 3);
  d.causal = true;
  d.query_offset = -1;  // query 0 sees no key
  d.return_column_sums = true;
  const Inputs in = draw(d);
  const Outputs o = exact(d, in);
  d.return_weights = ReturnWeights::kMean;
  const Outputs mean = exact(d, in);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 0; j < 6; ++j) {
      for (int64_t h = 0; h < 3; ++h) {
        double sum = 0;
        for (int64_t i = 0; i < 4; ++i) sum += o.attn_weights.at(((b * 3 + h) * 4 + i) * 6 + j);
        EXPECT_NEAR(o.column_sums.at((b * 3 + h) * 6 + j), sum, 1e-15);
      }
      for (int64_t i = 0; i < 4; ++i) {
        double sum = 0;
        for (int64_t h = 0; h < 3; ++h) sum += o.attn_weights.at(((b * 3 + h) * 4 + i) * 6 + j);
        EXPECT_NEAR(mean.attn_weights.at((b * 4 + i) * 6 + j), sum / 3, 1e-15);
      }
    }
  }
}

TEST(Reference, ARowThatSeesNoKeyIsZeroWhateverItHolds) {
  AttentionDesc d = sizes(2, 3, 2);
  d.return_column_sums = true;
  const auto check = [&](const char* how, const AttentionDesc& desc, Inputs in) {
    for (int64_t n = 0; n < in.query.size(); ++n) in.query.set(n, std::nan(""));
    for (int64_t n = 0; n < in.key.size(); ++n) in.key.set(n, kInf);
    for (int64_t n = 0; n < in.value.size(); ++n) in.value.set(n, -kInf);
    const Outputs o = exact(desc, in);
    EXPECT_EQ(o.out, Array(DType::kFloat64, o.out.dims)) << how;
    EXPECT_EQ(o.attn_weights, Array(DType::kFloat64, o.attn_weights.dims)) << how;
    EXPECT_EQ(o.column_sums, Array(DType::kFloat64, o.column_sums.dims)) << how;
    for (int64_t n = 0; n < o.logsumexp.size(); ++n) EXPECT_EQ(o.logsumexp.at(n), -kInf) << how;
  };
  const auto with = [&](auto change) {
    AttentionDesc desc = d;
    change(desc);
    return desc;
  };
  AttentionDesc desc = with([](auto& x) { x.causal = true, x.query_offset = -5; });
  check("causal", desc, draw(desc));
  desc = with([](auto& x) { x.window_left = 0, x.query_offset = 9; });
  check("window", desc, draw(desc));
  desc = with([](auto& x) { x.has_seqlens_k = true; });
  Inputs in = draw(desc);
  in.seqlens_k = filled(DType::kInt32, {1}, {0});
  check("seqlens_k", desc, in);
  desc = with([](auto& x) { x.has_seqlens_q = true; });
  in = draw(desc);
  in.seqlens_q = filled(DType::kInt32, {1}, {0});
  check("seqlens_q", desc, in);
  desc = with([](auto& x) { x.attn_mask = {true, DType::kBool, {1, 1, 1, 1}}; });
  in = draw(desc);
  in.attn_mask = filled(DType::kBool, {1, 1, 1, 1}, {0});
  check("mask", desc, in);
  desc = with([](auto& x) { x.attn_bias = {true, DType::kBFloat16, {1, 1, 1, 3}}; });
  in = draw(desc);
  in.attn_bias = filled(DType::kBFloat16, {1, 1, 1, 3}, {-kInf});
  check("bias", desc, in);
  // Each alone leaves keys, both together none.
  desc = with([](auto& x) { x.causal = true, x.query_offset = -1, x.attn_mask = {true, DType::kBool, {1, 1, 1, 3}}; });
  in = draw(desc);
  in.attn_mask = filled(DType::kBool, {1, 1, 1, 3}, {0, 1, 1});
  check("causal and mask", desc, in);
  desc = with([](auto& x) { x.seqlen_k = 0; });
  check("no keys", desc, draw(desc));
}

TEST(Reference, AVisibleNanIsSeen) {
  AttentionDesc d = sizes(2, 2, 2);
  d.causal = true;
  const Inputs in = draw(d);
  Inputs bad = in;
  bad.key.set(2, std::nan(""));  // key 1, which query 1 alone sees
  Outputs o = exact(d, bad);
  EXPECT_EQ(o.out.at(0), exact(d, in).out.at(0));
  EXPECT_TRUE(std::isnan(o.out.at(2)) && std::isnan(o.out.at(3)) && std::isnan(o.logsumexp.at(1)));
  EXPECT_EQ(o.attn_weights.at(1), 0);

  bad = in;
  bad.value.set(3, std::nan(""));
  bad.key.set(2, -1e5 * in.query.at(2));  // far below: its weight underflows to 0
  bad.key.set(3, -1e5 * in.query.at(3));
  o = exact(d, bad);
  EXPECT_EQ(o.attn_weights.at(3), 0);
  EXPECT_FALSE(std::isnan(o.out.at(2)));
  EXPECT_TRUE(std::isnan(o.out.at(3)));

  d.attn_bias = {true, DType::kFloat32, {1, 1, 1, 2}};
  for (double value : {std::nan(""), kInf}) {
    bad = in;
    bad.attn_bias = filled(DType::kFloat32, {1, 1, 1, 2}, {0, value});
    o = exact(d, bad);
    EXPECT_FALSE(std::isnan(o.out.at(0)));
    EXPECT_TRUE(std::isnan(o.out.at(2)) && std::isnan(o.logsumexp.at(1)));
  }
}

TEST(Reference, AScoreThatOverflowsIsNoHiddenKey) {
  AttentionDesc d = sizes(1, 1, 1);
  d.dtype = DType::kFloat32;
  Inputs in = draw(d);
  in.query.set(0, 3e38);
  in.key.set(0, -3e38);
  EXPECT_TRUE(std::isnan(reference_outputs<float>(d, in, false).out.at(0)));  // exp(-inf - -inf)
  EXPECT_EQ(reference_outputs<double>(d, in, false).out, in.value);
}

TEST(Reference, TakesEmptySizes) {
  AttentionDesc d = sizes(3, 4, 0);
  d.head_dim_v = 2;
  for (std::optional<double> scale : {std::optional<double>(), std::optional<double>(7.0)}) {
    d.scale = scale;
    const Outputs o = exact(d, draw(d));
    expect_near(o.attn_weights, std::vector<double>(12, 0.25));
    expect_near(o.logsumexp, std::vector<double>(3, std::log(4.0)));
  }
  for (int lattice = 0; lattice < 128; ++lattice) {  // each size 0 or not
    const auto size = [&](int bit, int64_t n) { return lattice >> bit & 1 ? n : 0; };
    AttentionDesc e = sizes(size(0, 3), size(1, 4), size(2, 2), size(3, 2), size(4, 2), size(4, 1));
    e.head_dim_v = size(5, 2);
    e.packed = size(6, 1) != 0;
    e.return_weights = e.packed ? ReturnWeights::kNone : ReturnWeights::kMean;
    const Inputs in = draw(e);
    const Outputs o = exact(e, in);
    for (int64_t n = 0; n < o.out.size(); ++n) EXPECT_FALSE(std::isnan(o.out.at(n)));
    for (int64_t n = 0; e.seqlen_k == 0 && n < o.logsumexp.size(); ++n) EXPECT_EQ(o.logsumexp.at(n), -kInf);
  }
}

TEST(Reference, RoundsOnceToTheOutputsType) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    AttentionDesc d = sizes(9, 9, 8, 1, 2, 2);
    d.dtype = dtype;
    const Inputs in = draw(d);
    const Outputs wide = reference_outputs<double>(d, in, true), rounded = reference_outputs<double>(d, in, false);
    Array want(dtype, wide.out.dims);
    for (int64_t n = 0; n < want.size(); ++n) want.set(n, wide.out.at(n));
    EXPECT_EQ(rounded.out, want);
  }
}

TEST(Reference, NeedsNoWorkspaceOfItsCaller) {
  const AttentionDesc d = sizes(9, 70, 8, 2, 2, 1);
  const Inputs in = draw(d);
  EXPECT_EQ(difference(run(kReference, d, in), reference_outputs<double>(d, in, false)), "");
  EXPECT_EQ(kReference.workspace_bytes(d, 7).value() % 64, 0u);
}

}  // namespace
}  // namespace polyhead::testing
