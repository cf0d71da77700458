// The command as its users meet it: output formats, files, exit codes and sentences.
#include "tools_command.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "polyhead/kernels.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using polyhead::testing::leaves_out;
using polyhead::testing::Ran;
using polyhead::testing::ToolsCommand;

// RFC 4180, after lines that begin with '#'.
std::vector<std::vector<std::string>> parse_csv(const std::string& text) {
  std::vector<std::vector<std::string>> rows(1, {""});
  bool quoted = false, comment = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (comment) {
      comment = c != '\n';
    } else if (quoted) {
      if (c == '"' && i + 1 < text.size() && text[i + 1] == '"')
        rows.back().back() += text[++i];
      else if (c == '"')
        quoted = false;
      else
        rows.back().back() += c;
    } else if (c == '#' && rows.back() == std::vector<std::string>{""}) {
      comment = true;
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      rows.back().emplace_back();
    } else if (c == '\n') {
      rows.push_back({""});
    } else {
      rows.back().back() += c;
    }
  }
  EXPECT_FALSE(quoted);
  rows.pop_back();
  return rows;
}

// The cells of the table's lines, the dashes left out.
std::vector<std::vector<std::string>> parse_markdown(const std::string& text) {
  std::vector<std::vector<std::string>> rows;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string line = text.substr(start, end - start);
    start = end + 1;
    if (line.substr(0, 2) != "| " || line.substr(0, 5) == "| ---") continue;
    std::vector<std::string> cells;
    for (size_t at = 2; at < line.size();) {
      size_t bar = at;
      while (line[bar] != '|' || line[bar - 1] == '\\') ++bar;
      std::string cell = line.substr(at, bar - at);
      cell.erase(0, cell.find_first_not_of(' '));
      cell.erase(cell.find_last_not_of(' ') + 1);
      cells.push_back(cell);
      at = bar + 2;
    }
    rows.push_back(cells);
  }
  return rows;
}

TEST_F(ToolsCommand, EveryHelpHasTwoExamples) {
  EXPECT_EQ(run("--help").code, 0);
  EXPECT_EQ(run("--version").out.substr(0, 5), std::string(polyhead::version()));
  for (const char* command : {"run", "bench", "compare", "verify", "mha", "fuse", "explain", "kernels", "info"}) {
    const Ran help = run(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0);
    const size_t examples = help.out.find("\nExamples:\n  polyhead " + std::string(command));
    ASSERT_NE(examples, std::string::npos) << help.out;
    EXPECT_NE(help.out.find("\n  polyhead " + std::string(command), examples + 12), std::string::npos) << help.out;
    EXPECT_TRUE(help.err.empty());
    const std::string name = command;
    const bool takes_problem = name != "compare" && name != "fuse" && name != "kernels" && name != "info";
    EXPECT_EQ(help.out.find("--alibi[=head]") != std::string::npos, takes_problem);
    EXPECT_EQ(help.out.find("PROBLEM...") != std::string::npos, takes_problem);
    if (name == "compare" || name == "fuse" || (name != "explain" && takes_problem))
      continue;  // those examples take minutes, or files
    for (size_t at = examples; (at = help.out.find("\n  polyhead ", at)) != std::string::npos; ++at) {
      const size_t start = at + 12;
      const std::string example = help.out.substr(start, help.out.find('\n', start) - start);
      EXPECT_EQ(run(example).code, 0) << example;
    }
  }
}

TEST_F(ToolsCommand, InfoAndKernelsNameWhatTheLibraryHas) {
  std::string names;
  for (const std::string& name : polyhead::kernels()) names += (names.empty() ? "" : " ") + name;
  const auto facts_of = [](const json& info) {
    std::map<std::string, json> facts;
    for (const json& row : info["rows"]) facts[row["what"]] = row["value"];
    return facts;
  };
  std::map<std::string, json> facts = facts_of(run_json("info"));
  EXPECT_EQ(facts["kernels"], names);
  EXPECT_EQ(facts["features used"], polyhead::cpu_features());
  const bool arm = polyhead::cpu_features() == "neon";
  EXPECT_EQ(arm, facts.count("extensions reported") == 1 &&
                     facts["extensions reported"].get<std::string>().rfind("asimd", 0) == 0);
  EXPECT_GE(facts["threads"].get<int>(), 1);
  EXPECT_TRUE(facts.count("version") && facts.count("compiler") && facts.count("cpu"));
  EXPECT_EQ(facts_of(json::parse(run("info --format json", "POLYHEAD_THREADS=3").out))["POLYHEAD_THREADS"], "3");

  const json kernels = run_json("kernels")["rows"];
  ASSERT_FALSE(kernels.empty());
  EXPECT_EQ(kernels.back()["kernel"], "reference");
  EXPECT_EQ(kernels.back()["usable_here"], true);
  EXPECT_EQ(kernels.back()["head_dim_float64"], "1...");
  size_t usable = 0;
  for (const json& row : kernels) usable += row["usable_here"].get<bool>();
  EXPECT_EQ(usable, polyhead::kernels().size());
}

TEST_F(ToolsCommand, ExplainNamesEveryKernelAndItsReason) {
  const json told = run_json("explain 2x4/2x64/96x32 --causal --align bottom_right --dtype f64")["rows"];
  EXPECT_EQ(told.size(), run_json("kernels")["rows"].size());
  EXPECT_EQ(told.back()["kernel"], "reference");
  int taken = 0;
  for (const json& row : told) {
    taken += row["taken"].get<bool>();
    EXPECT_FALSE(row["reason"].get<std::string>().empty());
    EXPECT_EQ(row["flops"], 2.0 * 2 * 4 * (32 + 32) * (64 * 33 + 64 * 63 / 2));
    EXPECT_EQ(row["backward_flops"], 2.0 * 2 * 4 * (3 * 32 + 2 * 32) * (64 * 33 + 64 * 63 / 2));
    EXPECT_EQ(row["workspace_bytes"].is_number(), row["taken"].get<bool>());
    EXPECT_EQ(row["backward_workspace_bytes"].is_number(), row["taken"].get<bool>());
  }
  EXPECT_EQ(taken, 1);
  const Ran refused = run("explain 2x4/3x8x8");
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("num_heads_kv"), std::string::npos) << refused.err;
}

TEST_F(ToolsCommand, BenchGivesTheSameTableInEveryFormat) {
  const std::string line =
      "bench 1x2x16,24x8 --mask b,1,q,k --causal=0,1 --kernel all,reference --kernel reference --min-time 1 --warm-up "
      "0 --threads 1,2";
  EXPECT_EQ(run(line).code, 2) << "an option given twice";
  const std::string table =
      "bench 1x2x16,24x8 --mask b,1,q,k --causal=0,1 --kernel reference --min-time 1 --warm-up 0 --threads 1,2";
  const json root = run_json(table);
  for (const char* fact : {"polyhead", "compiler", "cpu", "load", "date", "threads", "peak", "method"})
    EXPECT_TRUE(root["facts"].count(fact)) << fact;
  const json rows = root["rows"];
  ASSERT_EQ(rows.size(), 8u);
  for (const json& row : rows) {
    EXPECT_EQ(row["kernel"], "reference");
    EXPECT_EQ(row["direction"], "forward");
    EXPECT_GE(row["median_ms"].get<double>(), row["min_ms"].get<double>());
    EXPECT_GE(row["num_samples"].get<int>(), 5);
    EXPECT_GT(row["gflop_per_s"].get<double>(), 0);
    EXPECT_GT(row["gb_per_s"].get<double>(), 0);
    EXPECT_GT(row["peak_percent"].get<double>(), 0);
    EXPECT_EQ(row["note"], "");
  }
  const auto csv = parse_csv(run(table + " --format csv").out);
  const auto markdown = parse_markdown(run(table).out);
  ASSERT_EQ(csv.size(), rows.size() + 1);
  ASSERT_EQ(markdown.size(), rows.size() + 1);
  EXPECT_EQ(csv[0], markdown[0]);
  for (size_t r = 0; r < rows.size(); ++r) {
    ASSERT_EQ(csv[r + 1].size(), csv[0].size());
    ASSERT_EQ(markdown[r + 1].size(), csv[0].size());
    for (size_t c = 0; c < 4; ++c) EXPECT_EQ(csv[r + 1][c], markdown[r + 1][c]);
    EXPECT_EQ(csv[r + 1][0], rows[r]["problem"]);
    EXPECT_GT(std::strtod(csv[r + 1][4].c_str(), nullptr), 0);
  }
}

TEST_F(ToolsCommand, BenchTimesEachDirectionAlone) {
  const std::string options = " --kernel reference --threads 1 --min-time 0 --warm-up 0";
  const json rows = run_json("bench 1x2x32x16/8 --causal --direction forward,backward" + options)["rows"];
  ASSERT_EQ(rows.size(), 2u);
  const auto operations = [](const json& row) {
    return row["gflop_per_s"].get<double>() * row["median_ms"].get<double>();
  };
  const double pairs = 2.0 * 32 * 33 / 2;
  EXPECT_EQ(rows[0]["direction"], "forward");
  EXPECT_NEAR(operations(rows[0]), 2 * pairs * (16 + 8) / 1e6, 1e-9);
  EXPECT_EQ(rows[1]["direction"], "backward");
  EXPECT_NEAR(operations(rows[1]), 2 * pairs * (3 * 16 + 2 * 8) / 1e6, 1e-9);
  // S and dV alone; S, dP and the bias's own gradient.
  const json value = run_json("bench 1x2x32x16/8 --causal --needs value --direction backward" + options)["rows"];
  EXPECT_NEAR(operations(value[0]), 2 * pairs * (16 + 8) / 1e6, 1e-9);
  const json bias =
      run_json("bench 1x2x32x16/8 --bias 1,h,q,k --needs attn_bias+query --direction backward" + options)["rows"];
  ASSERT_EQ(bias.size(), 2u);
  EXPECT_EQ(bias[0]["problem"], "1x2x32x16/8 --bias 1,h,q,k --needs attn_bias");
  EXPECT_NEAR(operations(bias[0]), 2 * (2.0 * 32 * 32) * (16 + 8) / 1e6, 1e-9);
  EXPECT_EQ(bias[1]["problem"], "1x2x32x16/8 --bias 1,h,q,k --needs query");
}

TEST_F(ToolsCommand, BenchTellsWhyAKernelCannotAndGoesOn) {
  const json rows =
      run_json("bench 1x1x8x8 --dtype f64 --kernel cpu_generic,reference --min-time 1 --warm-up 0")["rows"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_TRUE(rows[0]["median_ms"].is_null());
  EXPECT_NE(rows[0]["note"].get<std::string>().find("cpu_generic"), std::string::npos);
  EXPECT_TRUE(rows[1]["median_ms"].is_number());
  EXPECT_TRUE(rows[1]["peak_percent"].is_null());
}

TEST_F(ToolsCommand, SuitesAreReadAndTheirMistakesHavePlaces) {
  std::ofstream(path("good.txt")) << "# two problems\n1x1x8x8 --causal\n\n  1x1x9x8   # second\r\n";
  const json rows = run_json("bench --suite '" + path("good.txt") + "' --dtype bf16 --min-time 0 --warm-up 0")["rows"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["problem"], "1x1x8x8 --dtype bf16 --causal");
  EXPECT_EQ(rows[1]["problem"], "1x1x9x8 --dtype bf16");
  std::ofstream(path("bad.txt")) << "1x1x8x8\n1x1x8x8 --cusal\n";
  EXPECT_EQ(run("bench --suite '" + path("bad.txt") + "'").err,
            "polyhead bench: " + path("bad.txt") + ":2: unknown option '--cusal'; --help lists the known ones\n");
  EXPECT_NE(run("bench 1x1x8x8 --suite '" + path("good.txt") + "'").err.find("give one or the other"),
            std::string::npos);
  EXPECT_EQ(run("verify --suite '" + path("good.txt") + "' --kernel reference").code, 0);
}

TEST_F(ToolsCommand, RunWritesWhatItComputed) {
  const std::string line = "run 2x4/2x6x8/5 --logsumexp --weights head --column-sums --kernel reference";
  const json root = run_json(line + " --out '" + path("o.safetensors") + "'");
  ASSERT_EQ(root["rows"].size(), 4u);
  EXPECT_EQ(root["rows"][0]["shape"], "[2, 6, 4, 5]");
  EXPECT_EQ(root["rows"][1]["shape"], "[2, 4, 6]");
  EXPECT_EQ(root["rows"][0]["nan"], 0);
  EXPECT_TRUE(fs::exists(path("o.safetensors")));
  const Ran again = run(line + " --out '" + path("o.safetensors") + "'");
  EXPECT_EQ(again.code, 2);
  EXPECT_EQ(again.err, "polyhead run: '" + path("o.safetensors") + "' exists already; --force replaces it\n");
  EXPECT_EQ(run(line + " --force --out '" + path("o.safetensors") + "'").code, 0);
  EXPECT_NE(run(line + " --out '" + path("o.npy") + "'").err.find("can hold one tensor, not 4"), std::string::npos);
  // The same numbers in another layout, and by way of a file.
  const json plain = run_json("run 2x4/2x6x8/5 --kernel reference --out '" + path("p.npy") + "'")["rows"];
  EXPECT_EQ(plain[0]["fnv1a"], root["rows"][0]["fnv1a"]);
  for (const char* layout : {"bhsd", "sbhd", "strided", "qkv"}) {
    const json row = run_json(std::string("run 2x4/2x6x8/5 --kernel reference --layout ") + layout)["rows"][0];
    EXPECT_EQ(row["fnv1a"], plain[0]["fnv1a"]) << layout;
  }
}

TEST_F(ToolsCommand, RunGradientsWritesTheGradientsOfEachOperand) {
  const std::string line = "run 2x4/2x6x8/5 --bias 1,h,q,k --alibi --gradients --kernel reference";
  const json rows = run_json(line + " --out '" + path("g.safetensors") + "'")["rows"];
  std::vector<std::string> shapes;
  for (const json& row : rows) {
    shapes.push_back(row["tensor"].get<std::string>() + row["shape"].get<std::string>());
    EXPECT_EQ(row["nan"], 0) << row;
  }
  EXPECT_EQ(shapes,
            (std::vector<std::string>{"out[2, 6, 4, 5]", "grad_query[2, 6, 4, 8]", "grad_key[2, 6, 2, 8]",
                                      "grad_value[2, 6, 2, 5]", "grad_attn_bias[1, 4, 6, 6]", "grad_alibi_slopes[4]"}));
  // The same numbers in another layout, and one of them alone.
  for (const char* layout : {"bhsd", "sbhd", "strided", "qkv"}) {
    const json same = run_json(line + " --layout " + layout)["rows"];
    for (size_t r = 0; r < rows.size(); ++r) EXPECT_EQ(same[r]["fnv1a"], rows[r]["fnv1a"]) << layout << " " << r;
  }
  const json value = run_json(line + " --needs value")["rows"];
  ASSERT_EQ(value.size(), 2u);
  EXPECT_EQ(value[1]["fnv1a"], rows[3]["fnv1a"]);
  // A gradient that comes in for logsumexp changes those of query and key, not that of value.
  const json with = run_json(line + " --logsumexp")["rows"];
  EXPECT_NE(with[2]["fnv1a"], rows[1]["fnv1a"]);
  EXPECT_EQ(with[4]["tensor"], "grad_value");
  EXPECT_EQ(with[4]["fnv1a"], rows[3]["fnv1a"]);
  // grad_out from a file: zeros in, zeros out (dropout of 1 makes such a file).
  ASSERT_EQ(run("run 2x4/2x6x8/5 --dropout 1 --out '" + path("zero.npy") + "'").code, 0);
  const json zero = run_json(line + " --grad-out '" + path("zero.npy") + "'")["rows"];
  for (size_t r = 1; r < zero.size(); ++r) {
    EXPECT_EQ(zero[r]["min"], 0) << zero[r];
    EXPECT_EQ(zero[r]["max"], 0) << zero[r];
  }
  const std::string from = " --grad-out '" + path("g.safetensors") + ":grad_query'";
  const std::vector<std::pair<std::string, std::string>> mistakes = {
      {line + from, "grad_out dim 3 is 8, expected head_dim_v 5"},
      {"run 2x4/2x6x8/5" + from, "--grad-out is given without --gradients"},
      {"run 2x4/2x6x8/5 --gradients --accumulate", "--accumulate: a run has no gradients to add to; leave it out"},
      {"run 2x4/2x6x8/5 --gradients --needs attn_bias", "--needs names attn_bias, which this problem has not"}};
  for (const auto& [words, sentence] : mistakes) EXPECT_EQ(run(words).err, "polyhead run: " + sentence + "\n") << words;
}

TEST_F(ToolsCommand, RunTakesOperandsFromFiles) {
  // An output [1, 6, 2, 4] serves as query, key and value of the next call.
  ASSERT_EQ(run("run 1x2x6x4 --out '" + path("x.npy") + "'").code, 0);
  const std::string x = "'" + path("x.npy") + "'";
  const json root = run_json("run --query " + x + " --key " + x + " --value " + x + " --causal");
  EXPECT_EQ(root["facts"]["problem"], "1x2x6x4 --causal");
  EXPECT_EQ(root["rows"][0]["shape"], "[1, 6, 2, 4]");
  const json heads_first = run_json("run --layout bhsd --query " + x + " --key " + x + " --value " + x);
  EXPECT_EQ(heads_first["facts"]["problem"], "1x6x2x4 --layout bhsd");
  ASSERT_EQ(run("run 1x2x6x4 --weights head --logsumexp --out '" + path("w.safetensors") + "'").code, 0);
  const std::string weights = "'" + path("w.safetensors") + ":attn_weights'";
  EXPECT_EQ(run_json("run 1x2x6x4 --attn-bias " + weights)["facts"]["problem"], "1x2x6x4 --bias 1,h,q,k");
  const std::vector<std::pair<std::string, std::string>> mistakes = {
      {"run --query " + x, "no sizes given: name them as BxHxSxD, or give --query, --key and --value"},
      {"run 1x2x7x4 --query " + x, "query"},
      {"run 1x2x6x4 --attn-mask " + weights, "attn_mask"},
      {"run 1x2x6x4 --packed --query " + x, "packed operands from files: give query, key, value, cu_seqlens_q"},
      {"run --layout strided --query " + x + " --key " + x + " --value " + x,
       "--layout of operands from files must be bshd, bhsd or sbhd"},
      {"run 1x2x6x4 --query '" + path("w.safetensors") + "'", "holds 3 tensors; name one as FILE:NAME"},
      {"run 1x2x6x4 --query '" + path("none.npy") + "'", "cannot open"}};
  for (const auto& [line, sentence] : mistakes) {
    const Ran ran = run(line);
    EXPECT_EQ(ran.code, 2) << line;
    EXPECT_NE(ran.err.find(sentence), std::string::npos) << line << "\n" << ran.err;
    EXPECT_TRUE(ran.out.empty()) << line;
  }
}

TEST_F(ToolsCommand, Bfloat16FilesSayTheirDtype) {
  ASSERT_EQ(run("run 1x2x6x4 --dtype bf16 --out '" + path("b.npy") + "'").code, 0);
  const std::string operands =
      "run --query '" + path("b.npy") + "' --key '" + path("b.npy") + "' --value '" + path("b.npy") + "'";
  EXPECT_NE(run(operands).err.find("query holds 2-byte void elements, as NumPy writes bfloat16; say --dtype bf16"),
            std::string::npos);
  EXPECT_EQ(run_json(operands + " --dtype bf16")["rows"][0]["dtype"], "bfloat16");
}

TEST_F(ToolsCommand, VerifyPassesAndCountsWhatItDid) {
  const json rows = run_json("verify 1x2x16x8 --causal --dtype f32,bf16 --kernel all --threads 1,3")["rows"];
  EXPECT_FALSE(rows.empty());
  for (const json& row : rows) {
    if (leaves_out(row)) continue;
    EXPECT_EQ(row["result"], "PASS") << row;
    EXPECT_LE(row["largest_error"].get<double>(), row["allowed"].get<double>());
    EXPECT_LE(row["rmse"].get<double>(), row["allowed_rmse"].get<double>());
  }
  const json random = run_json("verify --random 20 --seed 3 --kernel reference");
  EXPECT_EQ(random["facts"]["verified"], "20 problems");
  EXPECT_EQ(random["facts"]["passed"], "20");
  EXPECT_EQ(random["facts"]["seeds"], "3..22");
  EXPECT_EQ(random["facts"]["failed"], "0");
  EXPECT_TRUE(random["rows"].empty());
  const json gradients =
      run_json("verify --gradients 1x2x16x8 --causal --bias 1,1,q,k --needs key,attn_bias --threads 1,3");
  ASSERT_FALSE(gradients["rows"].empty());
  size_t outputs = 0;
  for (const json& row : gradients["rows"]) {
    if (leaves_out(row)) continue;
    EXPECT_EQ(row["output"], outputs++ % 2 == 0 ? "grad_key" : "grad_attn_bias");
    EXPECT_EQ(row["result"], "PASS") << row;
    EXPECT_LE(row["largest_error"].get<double>(), row["allowed"].get<double>());
    EXPECT_LE(row["rmse"].get<double>(), row["allowed_rmse"].get<double>());
  }
  EXPECT_GT(outputs, 0u);
  const json more = run_json("verify --gradients --random 20 --seed 3 --kernel reference");
  EXPECT_EQ(more["facts"]["verified"], "gradients of 20 problems");
  EXPECT_EQ(more["facts"]["passed"], "20");
  const Ran nothing = run("verify 1x1x8x8 --dtype f64 --kernel cpu_generic");
  EXPECT_EQ(nothing.code, 2);
  EXPECT_NE(nothing.err.find("nothing was verified: kernel is cpu_generic"), std::string::npos) << nothing.err;
}

TEST_F(ToolsCommand, MistakesAreToldInWordsAndNothingIsPrinted) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "A subcommand is required"},
      {"dance", "unknown command 'dance'; known are run, bench, compare, verify, mha, fuse, explain, kernels, info"},
      {"bench", "no problem given; name one as BxHxSxD"},
      {"bench 1x1x8", "has 3 sizes, must have 4"},
      {"bench 1x1x8x8 --kernel cpu_best", "--kernel is 'cpu_best'; known are "},
      {"bench 1x1x8x8 --kernel ''", "--kernel is empty; known are "},
      {"bench 1x1x8x8 --threads 0", "--threads has '0', must be numbers from 1 to 1024"},
      {"bench 1x1x8x8 --format xml", "--format is 'xml', must be one of md, csv, json"},
      {"bench 1x1x8x8 --direction back", "--direction is 'back', must be forward, backward or forward,backward"},
      {"bench 1x1x8x8 --direction ''", "--direction is '', must be forward, backward or forward,backward"},
      {"bench 1x1x8x8 --needs query,attn_bias --direction backward",
       "--needs names attn_bias, which this problem has not"},
      {"verify --gradients 1x1x8x8 --needs alibi_slopes", "--needs names alibi_slopes, which this problem has not"},
      {"bench 1x1x8x8 --min-time nan", "--min-time and --warm-up are milliseconds"},
      {"bench 1x1x8x8 --samples 0", "--samples is 0, must be 1 or more"},
      {"bench 1x1x8x8 --scale nan", "scale"},
      {"bench 1x1x8/9x8 --causal", "align"},
      {"bench 1x3/2x8x8", "num_heads_kv"},
      {"bench 100000x100000x100000x100", "not enough memory"},
      {"run 1x1x8x8 1x1x9x8", "2 problems, where exactly one is expected"},
      {"run 1x1x8x8 --packed --weights head", "packed"},
      {"verify --random 5 --causal", "--random draws its problems itself"},
      {"verify 1x1x8x8 --random -3", "--random is -3"},
      {"kernels --frmat md", "--frmat"}};
  for (const auto& [line, sentence] : cases) {
    const Ran ran = run(line);
    EXPECT_EQ(ran.code, 2) << line;
    EXPECT_NE((ran.err + ran.out).find(sentence), std::string::npos) << line << "\n" << ran.err << ran.out;
  }
}

TEST_F(ToolsCommand, AForcedKernelOfTheEnvironmentIsUsed) {
  EXPECT_EQ(json::parse(run("run 1x1x8x8 --format json", "POLYHEAD_KERNEL=reference").out)["facts"]["kernel"],
            "reference");
  const Ran unknown = run("run 1x1x8x8", "POLYHEAD_KERNEL=none_such");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("POLYHEAD_KERNEL is none_such, known are "), std::string::npos) << unknown.err;
}

}  // namespace
