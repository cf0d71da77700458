// Problems in words: what parses, what it means, and what is said about words that do not.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "core/layout.h"
#include "testing/elements.h"
#include "tools/operands.h"
#include "tools/problem.h"
#include "tools/selection.h"

namespace polyhead::tools {
namespace {

std::vector<Problem> parse(const std::string& line) {
  const auto problems = parse_problems(split_words(line));
  EXPECT_TRUE(problems.ok()) << line << ": " << problems.status().message();
  return problems.ok() ? *problems : std::vector<Problem>();
}

Problem parse_one(const std::string& line) {
  const std::vector<Problem> problems = parse(line);
  EXPECT_EQ(problems.size(), 1u) << line;
  return problems.empty() ? Problem() : problems.front();
}

std::string error_of(const std::string& line) {
  const auto problems = parse_problems(split_words(line));
  EXPECT_FALSE(problems.ok()) << line;
  return problems.ok() ? "" : problems.status().message();
}

TEST(ToolsProblem, SizesAreRefinedBySlashes) {
  const AttentionDesc plain = parse_one("8x16x512x64").desc;
  EXPECT_EQ(plain.batch, 8);
  EXPECT_EQ(plain.num_heads, 16);
  EXPECT_EQ(plain.num_heads_kv, 16);
  EXPECT_EQ(plain.seqlen_q, 512);
  EXPECT_EQ(plain.seqlen_k, 512);
  EXPECT_EQ(plain.head_dim, 64);
  EXPECT_EQ(plain.head_dim_v, 64);
  const AttentionDesc refined = parse_one("8x16/4x512/640x64/80").desc;
  EXPECT_EQ(refined.num_heads_kv, 4);
  EXPECT_EQ(refined.seqlen_q, 512);
  EXPECT_EQ(refined.seqlen_k, 640);
  EXPECT_EQ(refined.head_dim, 64);
  EXPECT_EQ(refined.head_dim_v, 80);
  EXPECT_EQ(parse_one("0x0x0x0").desc.seqlen_k, 0);
}

TEST(ToolsProblem, ListsAndRangesGiveEveryCombination) {
  std::vector<std::string> lines;
  for (const Problem& problem : parse("1,8x16x128..1024x64")) lines.push_back(problem_line(problem));
  EXPECT_EQ(lines, (std::vector<std::string>{"1x16x128x64", "1x16x256x64", "1x16x512x64", "1x16x1024x64", "8x16x128x64",
                                             "8x16x256x64", "8x16x512x64", "8x16x1024x64"}));
  EXPECT_EQ(parse("1x1x128..512..128x8").size(), 4u);
  EXPECT_EQ(parse("1x1x3..20x8").size(), 3u);  // 3, 6, 12
  EXPECT_EQ(parse("1x16/1..4x8x8").size(), 3u);
  EXPECT_EQ(parse("1x1x0..0x8").size(), 1u);
  EXPECT_EQ(parse("1x1x8x8 --dtype f32,bf16 --causal=0,1 --window 4,0+8,0").size(), 8u);
  EXPECT_EQ(parse("1x1x8x8 2x1x8x8,16 --causal").size(), 3u);
  EXPECT_TRUE(parse("1x1x8x8 2x1x8x8,16 --causal").back().desc.causal);
}

TEST(ToolsProblem, OptionsMeanWhatTheySay) {
  const Problem p = parse_one(
      "2x4/2x64/96x32/16 --dtype bf16 --causal --align bottom_right --window 16,-1 --scale -0.5 --softcap 30 "
      "--alibi=batch --sinks "
      "--mask b,1,q,k:padding --bias 1,h,1,k --bias-dtype f16 --lengths=k --dropout 0.25 --weights mean --column-sums "
      "--logsumexp --layout strided --seed 7");
  EXPECT_EQ(p.desc.dtype, DType::kBFloat16);
  EXPECT_TRUE(p.desc.causal);
  EXPECT_EQ(p.desc.align, Align::kBottomRight);
  EXPECT_EQ(p.desc.window_left, 16);
  EXPECT_EQ(p.desc.window_right, -1);
  EXPECT_EQ(p.desc.scale, -0.5);
  EXPECT_EQ(p.desc.softcap, 30);
  EXPECT_EQ(p.desc.alibi_slopes_ndim, 2);
  EXPECT_TRUE(p.desc.has_sink_logits);
  EXPECT_EQ(parse_one("1x1x8x8 --normalizer none").desc.normalizer, Normalizer::kNone);
  EXPECT_EQ(parse_one("1x1x8x8 --window 3,0 --sink-keys 4").desc.sink_keys, 4);
  EXPECT_EQ(parse_one("1x1x8x8 --mask 1,1,q,3 --mask-at-end").desc.attn_mask.dims[3], 3);
  EXPECT_TRUE(parse_one("1x1x8x8 --mask 1,1,q,3 --mask-at-end").desc.mask_at_end);
  EXPECT_EQ(p.mask_kind, MaskKind::kPadding);
  EXPECT_EQ(p.desc.attn_mask.dtype, DType::kBool);
  const int64_t mask[4] = {2, 1, 64, 96}, bias[4] = {1, 4, 1, 96};
  for (int d = 0; d < 4; ++d) EXPECT_EQ(p.desc.attn_mask.dims[d], mask[d]);
  for (int d = 0; d < 4; ++d) EXPECT_EQ(p.desc.attn_bias.dims[d], bias[d]);
  EXPECT_EQ(p.desc.attn_bias.dtype, DType::kFloat16);
  EXPECT_FALSE(p.desc.has_seqlens_q);
  EXPECT_TRUE(p.desc.has_seqlens_k);
  EXPECT_EQ(p.desc.dropout_p, 0.25);
  EXPECT_EQ(p.desc.return_weights, ReturnWeights::kMean);
  EXPECT_TRUE(p.desc.return_column_sums);
  EXPECT_TRUE(p.logsumexp);
  EXPECT_EQ(p.layout, Layout::kStrided);
  EXPECT_EQ(p.seed, 7u);
  EXPECT_EQ(p.needs, kAllGradients);
  EXPECT_FALSE(p.accumulate);
  EXPECT_EQ(parse_one("1x1x8x8 --needs value,query").needs, 5u);
  EXPECT_EQ(parse("1x1x8x8 --needs query,key+attn_bias").back().needs, 8u);
  EXPECT_TRUE(parse_one("1x1x8x8 --accumulate").accumulate);
  EXPECT_EQ(parse_one("1x1x8x8 --mask 1,1,8,8").desc.attn_mask.dims[2], 8);
  EXPECT_EQ(parse_one("1x1x8x8 --query-offset -3").desc.query_offset, -3);
  EXPECT_TRUE(parse_one("1x1x8x8 --query-offset random").desc.has_query_offsets);
  EXPECT_EQ(parse_one("1x1x8x8 --seed 18446744073709551615").seed, UINT64_MAX);
  // The last one counts, as when a suite's line is overridden.
  EXPECT_EQ(parse_one("1x1x8x8 --dtype f32 --dtype=f16").desc.dtype, DType::kFloat16);
  EXPECT_FALSE(parse_one("1x1x8x8 --causal --causal=0").desc.causal);
}

TEST(ToolsProblem, LinesParseBackToTheSameProblem) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const std::string line = problem_line(random_problem(seed));
    EXPECT_EQ(problem_line(parse_one(line)), line);
  }
}

TEST(ToolsProblem, ProgramsStandInTheWordsOfAProblem) {
  const Problem p = parse_one(
      "2x4x8/9x16 --mask 'd = q - k; 0 <= d and d < left[b, q // 2]' --score \"score + table[h, d + 8] * tau[]\" "
      "--captured 'tau: f32[]; table: bf16[h, q+k-1] -1..1; left: i32[b, 4] 3..5 rising'  # as a shell takes it");
  ASSERT_NE(p.desc.program, nullptr);
  EXPECT_EQ(p.desc.program->text(),
            "tau: float; table: float; left: int; _1 = q - k; mask = (0 <= _1) and (_1 < left[b, q // 2]); "
            "score = score + (table[h, _1 + 8] * tau[])");
  ASSERT_EQ(p.desc.captures.size(), 3u);
  const CaptureShape shapes[] = {{DType::kFloat32, 1, {1}}, {DType::kBFloat16, 2, {4, 16}}, {DType::kInt32, 2, {2, 4}}};
  for (size_t n = 0; n < 3; ++n) EXPECT_EQ(p.desc.captures[n], shapes[n]) << n;
  const Inputs in = random_inputs(p);
  for (int64_t n = 0; n < in.captures[1].size(); ++n) EXPECT_LE(std::abs(in.captures[1].at(n)), 1);
  for (int64_t n = 0; n < 8; ++n) {
    EXPECT_TRUE(in.captures[2].at(n) >= 3 && in.captures[2].at(n) <= 5) << n;
    EXPECT_TRUE(n % 4 == 0 || in.captures[2].at(n) >= in.captures[2].at(n - 1)) << n;
  }
  // A list of values has no place in a program; a mask of dims may still be one.
  EXPECT_EQ(parse("1x1x8x8 --mask 1,1,q,k+1,1,1,k").size(), 2u);
  EXPECT_EQ(parse("1x1x8x8 --mask min(q,k)+3<9").size(), 1u);
  EXPECT_EQ(parse_one("1x1x8x8 --score score*2").desc.program->text(), "score = score * 2.0");
  const Problem both = parse_one("1x1x8x8 --mask 1,1,q,k --score 'x = score; score = x; mask = k < 3'");
  EXPECT_TRUE(both.desc.attn_mask.given && both.desc.program->mask() >= 0);
}

TEST(ToolsProblem, NeededGradientsAreThoseThatTheProblemHas) {
  const auto needed = [](const std::string& line) { return *needed_gradients(parse_one("1x2x8x8 " + line)); };
  EXPECT_EQ(needed(""), 7u);
  EXPECT_EQ(needed("--bias 1,1,q,k"), 15u);
  EXPECT_EQ(needed("--alibi"), 23u);
  EXPECT_EQ(needed("--sinks"), 39u);
  EXPECT_EQ(needed("--alibi --needs key,alibi_slopes"), 18u);
  EXPECT_EQ(needed("--score 'score + t[h]' --captured 't: f32[h]'"), 71u);
  EXPECT_EQ(needed("--score 'score + t[h]' --captured 't: f32[h]' --needs captured"), 64u);
  EXPECT_EQ(needed("--mask 'k < t[h]' --captured 't: i32[h]'"), 7u);
  const auto missing = needed_gradients(parse_one("1x2x8x8 --alibi --needs key,attn_bias,alibi_slopes"));
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().message(), "--needs names attn_bias, which this problem has not");
}

TEST(ToolsProblem, ErrorsNameTheWordAndSayWhatToDo) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "no problem given; name one as BxHxSxD, for example 8x16x512x64"},
      {"8x16x512", "problem '8x16x512' has 3 sizes, must have 4: BxHxSxD, as 8x16x512x64, or BxH/GxSQ/SKxD/DV"},
      {"8/2x16x512x64", "problem '8/2x16x512x64': '8/2' has too many '/'; BxH/GxSQ/SKxD/DV is the form"},
      {"8x16xfivex64", "problem '8x16xfivex64': 'five' is not a size, first..last or first..last..step"},
      {"1x1x9223372036854775808x1",
       "problem '1x1x9223372036854775808x1': '9223372036854775808' is not a size, first..last or first..last..step"},
      {"1x1x8..4x1", "problem '1x1x8..4x1': range '8..4' does not lead from its first to its last size"},
      {"1x1x0..4x1", "problem '1x1x0..4x1': range '0..4' does not lead from its first to its last size"},
      {"1x1x4..8..0x1", "problem '1x1x4..8..0x1': range '4..8..0' does not lead from its first to its last size"},
      {"1x1x0..9000000000..1x1", "problem '1x1x0..9000000000..1x1': range '0..9000000000..1' is too long"},
      {"1..1000..1x1..1000..1x8x8", "the lists name more than 100000 problems"},
      {"1x1x1x1 --dtyp f32", "unknown option '--dtyp'; --help lists the known ones"},
      {"1x1x1x1 --dtype", "--dtype needs a value: --dtype T"},
      {"1x1x1x1 --dtype f8",
       "--dtype is 'f8', must be one of f32, bf16, f16, f64, float32, bfloat16, float16, float64"},
      {"1x1x1x1 --layout mixed:x", "--layout's seed is 'x', must be an integer >= 0"},
      {"1x1x1x1 --layout bsh",
       "--layout is 'bsh', must be one of bshd, bhsd, sbhd, qkv, strided, transposed, padded, junk, negative, "
       "expanded, "
       "mixed"},
      {"1x1x1x1 --packed=2", "--packed is '2', must be one of 0, 1, rows"},
      {"1x1x1x1 --fill zeros",
       "--fill is 'zeros', must be one of normal, shift_up, shift_down, large, underflow, outliers"},
      {"1x1x1x1 --causal=yes", "--causal is 'yes', must be 0 or 1"},
      {"1x1x1x1 --window 3", "--window is '3', must be LEFT,RIGHT, each -1 (open) or more"},
      {"1x1x1x1 --window 3,x", "--window is 'x', must be an integer"},
      {"1x1x1x1 --scale big", "--scale is 'big', must be a number"},
      {"1x1x1x1 --seed -1", "--seed is '-1', must be an integer >= 0"},
      {"1x1x1x1 --mask 1,1,q", "--mask is '1,1,q', must be four sizes as b,h,q,k with 1 where it broadcasts"},
      {"1x1x1x1 --mask q,1,1,1", "--mask is 'q,1,1,1', must be four sizes as b,h,q,k with 1 where it broadcasts"},
      {"1x1x1x1 --mask b,h,q,k:holes", "--mask's kind is 'holes', must be one of random, padding, blocks"},
      {"1x1x1x1 --align left", "--align is 'left', must be one of unset, top_left, bottom_right"},
      {"9223372036854775807x1x1x1 --packed",
       "batch is 9223372036854775807, must be at most 10000000 with random lengths or offsets"},
      {"1x1x1x1 --needs query,bias",
       "--needs has 'bias', must be names of query, key, value, attn_bias, alibi_slopes, sink_logits, captured, "
       "separated by commas"},
      {"1x1x1x1 --mask 'k <= w'", "program: \"w\" at 12 is no value: an element of a tensor is w[...]"},
      {"1x1x1x1 --score 'score +'", "program: expected a value at 15, there is the end"},
      {"1x1x1x1 --captured 'slope: f32[h]'", "--captured is given without --score or --mask, which could read it"},
      {"1x1x1x1 --score 'score + t[h]'",
       "the program reads t, which --captured does not tell: NAME: DTYPE[SIZES] LOW..HIGH rising, as 'slope: f32[h]; "
       "doc: i64[b, k] 0..7 rising'"},
      {"1x1x1x1 --score 'score + t[h]' --captured 't: f32[h, 2]'",
       "--captured: t has 2 dims, the program reads it with 1"},
      {"1x1x1x1 --score 'score + t[h]' --captured 't: f8[h]'",
       "--captured has 't: f8[h]', must be NAME: DTYPE[SIZES] LOW..HIGH rising, as 'slope: f32[h]; doc: i64[b, k] 0..7 "
       "rising'"},
      {"1x1x1x1 --score 'score + t[h]' --captured 't: f32[h]; t: f32[h]'", "--captured names t twice"},
      {"1x1x1x1 --score 'score + t[h]' --captured 't: f32[h-2]'",
       "--captured: size 'h-2' of t is -1, must be 0 or more"},
      {"1x1x1x1 --accumulate=2", "--accumulate is '2', must be 0 or 1"},
      {"1x1x1x1 --query-offset soon", "--query-offset is 'soon', must be an integer or 'random' (one per sequence)"}};
  for (const auto& [line, sentence] : cases) EXPECT_EQ(error_of(line), sentence);
}

TEST(ToolsProblem, RandomProblemsCoverEveryOptionAndAreAllLegal) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Problem problem = random_problem(seed);
    const Explanation told = explain(problem_desc(problem), {.kernel = "reference"});
    EXPECT_TRUE(told.status.ok()) << problem_line(problem) << ": " << told.status.message();
    for (const std::string& word : split_words(problem_line(problem))) {
      if (word[0] == '-' && word.size() > 2 && word[1] == '-') seen.insert(word.substr(0, word.find('=')));
    }
  }
  for (const ProblemOption& option : problem_options()) EXPECT_EQ(seen.count(option.name), 1u) << option.name;
}

TEST(ToolsProblem, EverySuiteOfTheBenchParsesAndHasAKernel) {
  int num_problems = 0;
  for (const auto& entry : std::filesystem::directory_iterator(POLYHEAD_SUITES)) {
    const auto problems = select_problems({}, {entry.path().string()});
    ASSERT_TRUE(problems.ok()) << problems.status().message();
    for (const Problem& problem : *problems) {
      const Explanation told = explain(problem_desc(problem));
      EXPECT_TRUE(told.status.ok()) << entry.path() << ": " << problem_line(problem) << ": " << told.status.message();
      ++num_problems;
    }
  }
  EXPECT_GT(num_problems, 0);
}

// Whether two tensors hold the same numbers.
bool same_numbers(const Tensor& a, const Tensor& b) { return element_values(a) == element_values(b); }

constexpr const char* kLayouts[] = {"bhsd", "sbhd", "qkv", "strided", "transposed", "padded", "negative"};

// The numbers of a problem are the same in every layout, so that --layout alone changes no result.
TEST(ToolsProblem, LayoutsHoldTheSameNumbers) {
  const std::string line = "2x4/2x9x5/3 --seed 5 --layout ";
  const auto expected = Operands::create(parse_one(line + "bshd"));
  ASSERT_TRUE(expected.ok());
  for (const char* layout : kLayouts) {
    const auto operands = Operands::create(parse_one(line + layout));
    ASSERT_TRUE(operands.ok()) << operands.status().message();
    for (Tensor ForwardArgs::*operand : {&ForwardArgs::query, &ForwardArgs::key, &ForwardArgs::value}) {
      const Tensor &t = operands->forward().*operand, &e = expected->forward().*operand;
      EXPECT_FALSE(std::equal(t.strides, t.strides + 4, e.strides)) << layout;
      EXPECT_TRUE(same_numbers(t, e)) << layout;
    }
    EXPECT_FALSE(overlaps_itself(operands->forward().out)) << layout;
  }
}

TEST(ToolsProblem, GradientsToAddToAndWhatComesInAreTheSameInEveryLayout) {
  const std::string line =
      "2x4/2x9x5/3 --bias 1,h,q,k --alibi --dtype bf16 --accumulate --logsumexp --seed 5 --layout ";
  const Problem plain = parse_one(line + "bshd");
  auto expected = Operands::create(plain);
  ASSERT_TRUE(expected.ok());
  const auto want = expected->backward(plain);
  ASSERT_TRUE(want.ok());
  for (const char* layout : kLayouts) {
    const Problem problem = parse_one(line + layout);
    auto operands = Operands::create(problem);
    ASSERT_TRUE(operands.ok());
    const auto got = operands->backward(problem);
    ASSERT_TRUE(got.ok());
    for (const GradientName& gradient : kGradients) {
      EXPECT_TRUE(same_numbers((*got).*gradient.tensor, (*want).*gradient.tensor)) << layout << " " << gradient.name;
      EXPECT_FALSE(overlaps_itself((*got).*gradient.tensor)) << layout << " " << gradient.name;
    }
    EXPECT_TRUE(same_numbers(got->grad_out, want->grad_out)) << layout;
    EXPECT_TRUE(same_numbers(got->grad_logsumexp, want->grad_logsumexp)) << layout;
  }
}

// One row per token: key lies behind query, value behind key.
TEST(ToolsProblem, QkvIsOneRowPerToken) {
  const auto operands = Operands::create(parse_one("2x4/2x9x5/3 --layout qkv"));
  ASSERT_TRUE(operands.ok());
  const ForwardArgs& args = operands->forward();
  constexpr int64_t kRow = 4 * 5 + 2 * 5 + 2 * 3;
  for (const Tensor* t : {&args.query, &args.key, &args.value}) {
    EXPECT_EQ(t->strides[0], 9 * kRow);
    EXPECT_EQ(t->strides[1], kRow);
  }
  const auto* query = static_cast<const float*>(args.query.data);
  EXPECT_EQ(static_cast<const float*>(args.key.data) - query, 4 * 5);
  EXPECT_EQ(static_cast<const float*>(args.value.data) - query, 4 * 5 + 2 * 5);
}

TEST(ToolsProblem, OperandsThatCannotBeAreRefusedInWords) {
  const auto error = [](const std::string& line) {
    const auto operands = Operands::create(parse_one(line));
    EXPECT_FALSE(operands.ok()) << line;
    return operands.ok() ? std::string() : operands.status().message();
  };
  EXPECT_NE(error("1x1x8/9x8 --layout qkv").find("--layout qkv with seqlen_q 8 and seqlen_k 9"), std::string::npos);
  EXPECT_NE(error("1x1x8x8 --packed --layout sbhd").find("--layout sbhd with --packed"), std::string::npos);
  EXPECT_NE(error("1000000x1000000x1000000x1000000").find("not enough memory"), std::string::npos);
  EXPECT_NE(error("9223372036854775807x9223372036854775807x1x1").find("not enough memory"), std::string::npos);
}

TEST(ToolsProblem, VisiblePairsCountWhatLengthsCausalAndWindowLeave) {
  const auto pairs_of = [](const Problem& problem) {
    const auto operands = Operands::create(problem);
    return visible_pairs(operands->desc(), operands->forward());
  };
  const auto pairs = [&](const std::string& line) { return pairs_of(parse_one(line)); };
  EXPECT_EQ(pairs("2x3x8x4"), 2 * 3 * 64);
  EXPECT_EQ(pairs("2x3x8x4 --causal"), 2 * 3 * 36);
  EXPECT_EQ(pairs("1x1x8x4 --window 1,0"), 15);
  EXPECT_EQ(pairs("1x1x4/8x4 --causal --align bottom_right"), 5 + 6 + 7 + 8);
  const Problem packed = parse_one("3x2x20x4 --packed --seed 3");
  double expected = 0;
  for (int64_t length : random_lengths(packed, Side::kQuery)) expected += 2.0 * static_cast<double>(length * length);
  EXPECT_EQ(pairs_of(packed), expected);
  EXPECT_GT(expected, 0);
}

}  // namespace
}  // namespace polyhead::tools
