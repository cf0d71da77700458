// `polyhead mha`: its options, its judge, and the command itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "testing/elements.h"
#include "tools/array.h"
#include "tools/mha_verify.h"
#include "tools/new_tensors.h"
#include "tools/safetensors.h"
#include "tools_command.h"

namespace polyhead::tools {
namespace {

using nlohmann::json;
using polyhead::testing::leaves_out;
using polyhead::testing::Ran;
using ToolsMhaCommand = polyhead::testing::ToolsCommand;

MhaProblem problem_of(const std::string& line) {
  const auto problem = parse_mha(split_words(line));
  EXPECT_TRUE(problem.ok()) << line << ": " << problem.status().message();
  return problem.ok() ? *problem : MhaProblem();
}

Layer reference_layer(const MhaProblem& problem) {
  PlanOptions options;
  options.kernel = "reference";
  const auto made = layer(layer_desc(problem), options);
  EXPECT_TRUE(made.ok()) << mha_line(problem) << ": " << made.status().message();
  return *made;
}

MhaTruth truth_of(const MhaProblem& problem) {
  auto truth = mha_truth(problem, reference_layer(problem));
  EXPECT_TRUE(truth.ok()) << truth.status().message();
  return std::move(*truth);
}

// Results that hold the yardstick's numbers.
MhaResults yardstick_results(const MhaProblem& problem, const MhaTruth& truth) {
  auto results = new_results(problem, reference_layer(problem));
  EXPECT_TRUE(results.ok()) << results.status().message();
  for (size_t n = 0; n < kNumLayerResults; ++n) {
    const Numbers& from = truth.results.yardstick[n];
    EXPECT_EQ(results->of[n].num_elements(), from.size()) << kLayerResultNames[n];
    size_t i = 0;
    fill(results->of[n], [&] { return from.values[i++]; });
  }
  return std::move(*results);
}

std::vector<Verdict> judge(const MhaProblem& problem, const MhaTruth& truth, const MhaResults& got) {
  MhaJudge judge(problem);
  judge.add(truth.results, got);
  return judge.verdicts();
}

constexpr char kLine[] =
    "--batch 2 --heads 4 --kv-heads 2 --beam 2 --seqlen-q 5 --seqlen-k 7 --q-size 6 --k-size 5 --q-proj 4 --v-proj 3 "
    "--o-proj 5 --biases --residual --bias b,h,q,k --alibi --sinks --align top_left --lengths --weights head";
// Of everything that a layer may have.
const std::string kAll =
    std::string(kLine) +
    " --score 'score * c0[h] + c1[q] + c2[k] + c3[b] + c4[h, q] * c5[h, k] + c6[] + c7[q, k]' --captured "
    "'c0: f32[h]; c1: f32[q]; c2: f32[k]; c3: f32[b]; c4: f32[h, q]; c5: f32[h, k]; c6: f32[]; c7: f32[q, k]'";

TEST(ToolsMha, LinesParseBackToTheirLayers) {
  std::set<std::string> seen;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const MhaProblem problem = random_mha(seed);
    const std::string line = mha_line(problem);
    const MhaProblem parsed = problem_of(line);
    ASSERT_EQ(mha_line(parsed), line);
    const LayerDesc a = layer_desc(problem), b = layer_desc(parsed);
    EXPECT_EQ(a.value_size, b.value_size) << line;
    EXPECT_EQ(a.key_proj_size, b.key_proj_size) << line;
    EXPECT_EQ(a.out_proj_size, b.out_proj_size) << line;
    EXPECT_EQ(a.output_dropout_p, b.output_dropout_p) << line;
    EXPECT_EQ(a.attention.dropout_p, b.attention.dropout_p) << line;
    EXPECT_EQ(parsed.training, problem.training) << line;
    EXPECT_EQ(parsed.attention.desc.head_dim, problem.attention.desc.head_dim) << line;
    reference_layer(problem);
    for (const std::string& word : split_words(line)) seen.insert(word.substr(0, word.find('=')));
  }
  for (const ProblemOption& option : mha_options()) {
    const std::string name = option.name;
    if (name == "--seqlens-q" || name == "--seqlens-k") continue;  // those are random here
    EXPECT_EQ(seen.count(name), 1u) << name << " is never drawn";
  }
}

TEST(ToolsMha, SizesThatAreNotGivenFollowFromTheOthers) {
  const MhaProblem plain = problem_of("");
  EXPECT_EQ(mha_line(plain), "--batch 8 --heads 8 --seqlen-q 128 --q-size 512");
  EXPECT_EQ(plain.layer.query_proj_size, 64);
  EXPECT_EQ(plain.layer.out_proj_size, 512);
  EXPECT_TRUE(plain.training);
  const auto small = parse_mha(split_words("--heads 2"), /*small=*/true);
  ASSERT_TRUE(small.ok());
  EXPECT_EQ(mha_line(*small), "--batch 2 --heads 2 --seqlen-q 32 --q-size 64");
  const MhaProblem cross = problem_of("--heads 4 --kv-heads=2 --q-size 12 --k-size 5 --v-proj 0 --seqlen-k 3 --sweep");
  EXPECT_EQ(cross.layer.value_size, 5);
  EXPECT_EQ(cross.layer.key_proj_size, 3);
  EXPECT_EQ(cross.layer.value_proj_size, 0);
  EXPECT_EQ(cross.attention.desc.head_dim_v, 5);
  EXPECT_EQ(cross.attention.desc.seqlen_k, 3);
  EXPECT_FALSE(cross.training);
  const MhaProblem last = problem_of("--heads 4 --heads 2 --biases --biases=ko");
  EXPECT_EQ(last.layer.num_heads, 2);
  EXPECT_TRUE(last.layer.key_bias && last.layer.out_bias && !last.layer.query_bias && !last.layer.value_bias);
}

TEST(ToolsMha, MistakesAreToldInWords) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--haeds 8", "unknown option '--haeds'"},
      {"8x16", "unknown option '8x16'"},
      {"--packed", "unknown option '--packed'"},
      {"--heads", "--heads needs a value: --heads N"},
      {"--heads -1", "--heads is '-1', must be an integer >= 0"},
      {"--q-size 8.5", "--q-size is '8.5', must be an integer >= 0"},
      {"--dtype int8", "--dtype is 'int8', must be one of "},
      {"--data-layout nbv", "--data-layout is 'nbv', must be one of tnbv"},
      {"--data-layout vtnb", "--data-layout is 'vtnb', must be one of tnbv"},
      {"--biases=qx", "--biases is 'qx', must be letters of qkvo"},
      {"--same q", "--same is 'q', must be qkv or kv"},
      {"--same qkv --k-size 3", "--same qkv: query and key must have the same"},
      {"--same kv --v-size 3", "--same: --k-size 512 and --v-size 3 must be equal"},
      {"--residual=2", "--residual is '2', must be 0 or 1"},
      {"--output-dropout x", "--output-dropout is 'x', must be a number"},
      {"--batch 2 --seqlens-q 1,2,3", "--seqlens-q has 3 lengths, must have one for each of --batch 2"},
      {"--seqlens-k 1,-2", "--seqlens-k is '1,-2', must be one length for each sequence"},
      {"--infer --accumulate", "--accumulate with --infer or --sweep: inference has no gradients"}};
  for (const auto& [line, sentence] : cases) {
    const auto problem = parse_mha(split_words(line));
    ASSERT_FALSE(problem.ok()) << line;
    EXPECT_EQ(problem.status().message().substr(0, sentence.size()), sentence) << line;
  }
}

TEST(ToolsMha, DataLiesAsTheLayoutSays) {
  const std::pair<const char*, std::vector<int64_t>> cases[] = {{"nbtv", {60, 20, 5, 1}}, {"ntbv", {60, 5, 15, 1}},
                                                                {"bntv", {20, 40, 5, 1}}, {"btnv", {5, 40, 10, 1}},
                                                                {"tnbv", {15, 5, 30, 1}}, {"tbnv", {5, 10, 30, 1}}};
  for (const auto& [name, strides] : cases) {
    const MhaProblem problem = problem_of(
        "--batch 2 --beam 3 --beam-kv 3 --seqlen-q 4 --q-size 5 --heads 1 "
        "--residual --data-layout " +
        std::string(name));
    const auto operands = random_operands(problem, reference_layer(problem));
    ASSERT_TRUE(operands.ok());
    for (const Tensor* t : {&operands->args.query, &operands->args.residual, &operands->grad_out}) {
      EXPECT_EQ(std::vector<int64_t>(t->strides, t->strides + 4), strides) << name;
    }
  }
}

TEST(ToolsMha, TheYardstickPassesItsOwnBound) {
  for (const char* more : {"", " --dtype bf16", " --dtype f16", " --dtype f64 --bias-dtype f64", " --accumulate",
                           " --dropout 0.2 --output-dropout 0.3", " --windows --causal"}) {
    const MhaProblem problem = problem_of(kAll + more);
    const MhaTruth truth = truth_of(problem);
    const std::vector<Verdict> verdicts = judge(problem, truth, yardstick_results(problem, truth));
    EXPECT_EQ(verdicts.size(), kNumLayerResults) << more;
    for (const Verdict& verdict : verdicts) {
      EXPECT_TRUE(verdict.passed) << more << " " << verdict.fault;
      EXPECT_GT(verdict.allowed, 0) << more << " " << verdict.output;
    }
  }
}

TEST(ToolsMha, OneWrongElementFails) {
  const MhaProblem problem = problem_of(kAll);
  const MhaTruth truth = truth_of(problem);
  const MhaResults got = yardstick_results(problem, truth);
  for (size_t n = 0; n < kNumLayerResults; ++n) {
    const double allowed = judge(problem, truth, got)[n].allowed;
    auto* element = static_cast<float*>(got.of[n].data);
    const float right = *element;
    for (const float wrong : {right + 20 * static_cast<float>(allowed), NAN, INFINITY}) {
      *element = wrong;
      const std::vector<Verdict> verdicts = judge(problem, truth, got);
      for (size_t m = 0; m < kNumLayerResults; ++m) {
        EXPECT_EQ(verdicts[m].passed, m != n) << kLayerResultNames[m] << " " << wrong << " " << verdicts[m].fault;
      }
    }
    *element = right;
  }
}

TEST(ToolsMha, ResultsThatWereNotWrittenFail) {
  const MhaProblem problem = problem_of(kLine);
  const auto untouched = new_results(problem, reference_layer(problem));
  ASSERT_TRUE(untouched.ok());
  for (const Verdict& verdict : judge(problem, truth_of(problem), *untouched))
    EXPECT_FALSE(verdict.passed) << verdict.output;
}

// The loops against what the reference kernel computes by the library's own way, in float64: two that know nothing of
// each other.
TEST(ToolsMha, TheReferenceLayerInFloat64IsTheTruth) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    MhaProblem problem = random_mha(seed);
    problem.attention.desc.dtype = DType::kFloat64;
    const Layer made = reference_layer(problem);
    const MhaTruth truth = truth_of(problem);
    const auto results = new_results(problem, made);
    ASSERT_TRUE(results.ok());
    const auto calls = MhaCalls::create(problem, made, truth.operands, *results);
    ASSERT_TRUE(calls.ok());
    ASSERT_EQ(calls->run(problem).message(), "");
    for (size_t n = 0; n < kNumLayerResults; ++n) {
      const std::vector<double> got = element_values(results->of[n]);
      const bool is_float64 = results->of[n].dtype == DType::kFloat64;
      for (size_t i = 0; i < got.size(); ++i) {
        const double size = std::fabs(truth.results.magnitude[n].values[i]);
        ASSERT_NEAR(got[i], truth.results.exact[n].values[i], is_float64 ? 1e-11 * size : 1e-2 * size + 1e-7)
            << mha_line(problem) << " " << kLayerResultNames[n] << " element " << i;
      }
    }
  }
}

TEST_F(ToolsMhaCommand, LayoutTellsWhereEachWeightLies) {
  const std::string line = "--heads 4 --kv-heads 2 --q-size 12 --k-size 5 --v-proj 0 --biases=qo --dtype bf16";
  const Layer made = reference_layer(problem_of(line));
  const json root = run_json("mha --layout " + line);
  EXPECT_EQ(root["facts"]["weights_bytes"], std::to_string(made.weights_bytes()));
  EXPECT_EQ(root["facts"]["reserve_bytes"], std::to_string(made.reserve_bytes()));
  ASSERT_EQ(root["rows"].size(), static_cast<size_t>(kNumWeightKinds));
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    const json& row = root["rows"][static_cast<size_t>(kind)];
    const WeightLayout at = made.weight_layout(static_cast<WeightKind>(kind));
    EXPECT_EQ(row["weight"], kWeightFields[kind].name);
    EXPECT_EQ(row["present"], at.present) << row;
    if (!at.present) continue;
    EXPECT_EQ(row["offset"], at.offset);
    EXPECT_EQ(row["offset_bytes"], 2 * at.offset);
    EXPECT_EQ(row["dims"], dims_text(std::vector<int64_t>(at.dims, at.dims + at.ndim)));
    EXPECT_EQ(row["strides"], dims_text(std::vector<int64_t>(at.strides, at.strides + at.ndim)));
  }
}

TEST_F(ToolsMhaCommand, EachCallIsTimed) {
  const std::string options = " --min-time 0 --samples 2 --threads 1";
  const json train = run_json("mha --batch 1 --heads 2 --seqlen-q 6 --q-size 8" + options);
  ASSERT_EQ(train["rows"].size(), 3u);
  const char* const calls[] = {"forward", "backward_data", "backward_weights"};
  for (size_t r = 0; r < 3; ++r) {
    const json& row = train["rows"][r];
    EXPECT_EQ(row["call"], calls[r]);
    EXPECT_EQ(row["layer"], "--batch 1 --heads 2 --seqlen-q 6 --q-size 8");
    EXPECT_GE(row["median_ms"].get<double>(), row["min_ms"].get<double>());
    EXPECT_EQ(row["num_samples"], 2);
  }
  // Four products of [6, 8] and [8, 8], and S = Q K^T and P V with 36 pairs of 2 heads of 4.
  const json& forward = train["rows"][0];
  EXPECT_NEAR(forward["gflop_per_s"].get<double>() * forward["median_ms"].get<double>() * 1e6,
              2.0 * 4 * 6 * 8 * 8 + 2.0 * 36 * 2 * (4 + 4), 1e-3);
  const json sweep = run_json("mha --batch 1 --heads 2 --seqlen-q 6 --q-size 8 --sweep" + options)["rows"];
  ASSERT_EQ(sweep.size(), 1u);
  EXPECT_EQ(sweep[0]["call"], "sweep");
  EXPECT_NE(sweep[0]["note"].get<std::string>().find(" ms a step"), std::string::npos);
  EXPECT_EQ(run_json("mha --infer --batch 1 --q-size 8" + options)["rows"].size(), 1u);
  EXPECT_GE(run_json("mha --random 3 --seed 5 --kernel reference" + options)["rows"].size(), 3u);
}

TEST_F(ToolsMhaCommand, VerifyPassesWithEveryOption) {
  for (const char* more :
       {"", "--same kv --k-size 6 --v-size 6 --accumulate", "--infer --dropout 0.5", "--sweep --causal",
        "--dropout 0.3 --output-dropout 0.2 --windows", "--dtype bf16 --data-layout tbnv", "--o-proj 0 --biases=qkv",
        "--prepacked-weights", "--prepacked-weights --sweep"}) {
    const json rows = run_json("mha --verify --threads 1,3 " + std::string(kLine) + " " + more)["rows"];
    ASSERT_FALSE(rows.empty()) << more;
    for (const json& row : rows) {
      if (leaves_out(row)) continue;
      EXPECT_EQ(row["result"], "PASS") << row;
      EXPECT_LE(row["largest_error"].get<double>(), row["allowed"].get<double>()) << row;
    }
  }
  const json random = run_json("mha --random 20 --seed 3 --verify --kernel reference");
  EXPECT_EQ(random["facts"]["verified"], "20 layers");
  EXPECT_EQ(random["facts"]["passed"], "20");
  EXPECT_EQ(random["facts"]["seeds"], "3..22");
  EXPECT_TRUE(random["rows"].empty());
}

// No kernel but the reference takes float64, which --verify therefore judges too.
TEST_F(ToolsMhaCommand, Float64IsVerified) {
  const std::string line = "mha --verify --dtype f64 " + std::string(kLine);
  EXPECT_EQ(run_json(line)["facts"]["passed"], "1");
  const Ran refused = run(line + " --kernel cpu_generic");
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("nothing was verified: kernel is cpu_generic"), std::string::npos) << refused.err;
}

// On every kernel. POLYHEAD_RANDOM_SEED=first POLYHEAD_RANDOM_PROBLEMS=count ask for others.
TEST_F(ToolsMhaCommand, RandomLayersPass) {
  const Ran ran = run("mha --verify --random ${POLYHEAD_RANDOM_PROBLEMS:-50} --seed ${POLYHEAD_RANDOM_SEED:-1}");
  std::printf("%s", ran.out.c_str());
  EXPECT_EQ(ran.code, 0) << ran.err;
}

TEST_F(ToolsMhaCommand, DumpWritesEveryTensor) {
  const std::string line = "mha --min-time 0 --kernel reference --threads 1 " + kAll +
                           " --dropout 0.5 --windows --dump '" + path("tensors") + "'";
  ASSERT_EQ(run(line).code, 0);
  const MhaProblem problem = problem_of(kAll + " --dropout 0.5 --windows");
  const json told = json::parse(read(path("tensors/problem.json")));
  EXPECT_EQ(told["problem"], mha_line(problem));
  EXPECT_EQ(told["scale"], 0.5);
  const auto names = [&](const char* name) {
    std::set<std::string> found;
    const auto file = SafetensorsFile::open(path(name));
    EXPECT_TRUE(file.ok()) << file.status().message();
    for (const SafetensorsEntry& entry : file->entries()) found.insert(entry.name);
    return found;
  };
  EXPECT_EQ(
      names("tensors/inputs.safetensors"),
      (std::set<std::string>{"query",        "key",         "value",       "residual",    "attn_bias",   "alibi_slopes",
                             "sink_logits",  "seqlens_q",   "seqlens_k",   "window_lo",   "window_hi",   "grad_out",
                             "kept_weights", "captures[0]", "captures[1]", "captures[2]", "captures[3]", "captures[4]",
                             "captures[5]",  "captures[6]", "captures[7]"}));
  EXPECT_EQ(names("tensors/weights.safetensors").size(), static_cast<size_t>(kNumWeightKinds));
  EXPECT_EQ(names("tensors/results.safetensors").size(), kNumLayerResults);
  const auto out = read_array(path("tensors/results.safetensors") + ":out");
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(dims_text(out->tensor), "[2, 2, 5, 5]");
  const MhaTruth truth = truth_of(problem);
  const std::vector<double> got = element_values(out->tensor);
  for (size_t n = 0; n < got.size(); ++n) EXPECT_NEAR(got[n], truth.results.exact[kLayerOut].values[n], 1e-4);
  const Ran again = run(line);
  EXPECT_EQ(again.code, 2);
  EXPECT_NE(again.err.find("exists already; --force replaces it"), std::string::npos) << again.err;
  EXPECT_EQ(run(line + " --force").code, 0);
  EXPECT_EQ(run("mha --batch 1 --seqlen-q 2 --q-size 8 --dump '" + path("no/such/folder") + "'").code, 2);
}

TEST_F(ToolsMhaCommand, MistakesAreToldInWords) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--haeds 8", "unknown option '--haeds'"},
      {"--q-proj 3 --k-proj 4", "heads of query and key must be as long: query_proj_size is 3, key_proj_size is 4"},
      {"--heads 4 --kv-heads 3", "num_heads_kv"},
      {"--batch 2 --seqlen-q 4 --seqlens-q 3,9", "seqlens_q"},
      {"--batch 100000000 --seqlen-q 100000000", "too large"},
      {"--random -3", "--random is -3, must be 1 or more"},
      {"--random 0", "--random is 0, must be 1 or more"},
      {"--dump ''", "--dump is empty, must name a folder"},
      {"--beam 0", "beam is 0, must be at least 1"},
      {"--random 3 --heads 4", "--random draws its layers itself"},
      {"--random 3 --dump x", "--dump writes the tensors of one layer"},
      {"--layout --verify", "--layout is about one layer"},
      {"--samples 0", "--samples is 0, must be 1 or more"},
      {"--kernel cpu_best", "--kernel is 'cpu_best'; known are "},
      {"--format xml", "--format is 'xml', must be one of md, csv, json"}};
  for (const auto& [line, sentence] : cases) {
    const Ran ran = run("mha " + line);
    EXPECT_EQ(ran.code, 2) << line;
    EXPECT_NE(ran.err.find(sentence), std::string::npos) << line << "\n" << ran.err;
    EXPECT_TRUE(ran.out.empty()) << line;
  }
}

}  // namespace
}  // namespace polyhead::tools
