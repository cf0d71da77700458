// Programs in the command: run, verify, bench and explain take --score, --mask and --captured.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tools_command.h"

namespace {

using nlohmann::json;
using polyhead::testing::leaves_out;
using polyhead::testing::Ran;
using polyhead::testing::ToolsCommand;

constexpr const char* kAlibi = " --score 'score - slope[h] * abs(q - k)' --captured 'slope: f32[h] 0..1'";

TEST_F(ToolsCommand, RunsAProgramAndItsGradients) {
  const json causal = run_json("run 2x3x40x16 --causal --seed 4"),
             program = run_json("run 2x3x40x16 --mask 'k <= q' --seed 4");
  ASSERT_EQ(program["rows"].size(), 1u);
  EXPECT_EQ(program["rows"][0]["shape"], causal["rows"][0]["shape"]);
  for (const char* column : {"min", "mean", "max"}) {
    EXPECT_NEAR(program["rows"][0][column].get<double>(), causal["rows"][0][column].get<double>(), 1e-6) << column;
  }
  const json backward = run_json("run 2x3x40x16 --gradients" + std::string(kAlibi));
  EXPECT_EQ(backward["rows"].back()["tensor"], "grad_captures.slope");
  EXPECT_EQ(backward["rows"].back()["shape"], "[3]");
  const json one = run_json("run 2x3x40x16 --gradients --needs captured" + std::string(kAlibi));
  ASSERT_EQ(one["rows"].size(), 2u);
  EXPECT_EQ(one["rows"][1]["fnv1a"], backward["rows"].back()["fnv1a"]);
}

TEST_F(ToolsCommand, TakesCapturedTensorsFromFiles) {
  // 3 float32: 0.5, 0, 0.25; version 1 of the format.
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  header.resize(117, ' ');
  header += '\n';
  std::string bytes = std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header;
  const float slopes[3] = {0.5F, 0, 0.25F};
  bytes.append(reinterpret_cast<const char*>(slopes), sizeof slopes);
  std::ofstream(path("slope.npy"), std::ios::binary) << bytes;
  const std::string given = " --captured-file slope=" + path("slope.npy");
  const std::string line = "run 2x3x40x16 --score 'score - slope[h] * abs(q - k) + more[]' --captured 'more: f32[]'";
  const json from_file = run_json(line + given + " --gradients");
  EXPECT_EQ(from_file["rows"][4]["tensor"], "grad_captures.more");
  EXPECT_EQ(from_file["rows"][5]["shape"], "[3]");
  const json drawn = run_json(line + "'; slope: f32[h]' --gradients");
  EXPECT_EQ(drawn["rows"][5]["shape"], "[3]");
  EXPECT_NE(drawn["rows"][0]["fnv1a"], from_file["rows"][0]["fnv1a"]);
  const Ran unread = run("run 2x3x40x16 --mask 'k <= q'" + given);
  EXPECT_EQ(unread.code, 2);
  EXPECT_NE(unread.err.find("tensor slope is captured, but neither score nor mask read it"), std::string::npos)
      << unread.err;
  EXPECT_NE(run("run 2x3x40x16 --captured-file slope").err.find("must be NAME=FILE"), std::string::npos);
}

TEST_F(ToolsCommand, VerifiesProgramsAndRandomOnes) {
  for (const std::string more : {"", " --gradients --accumulate --logsumexp", " --dtype bf16 --packed"}) {
    const json rows = run_json("verify 2x4/2x70/65x24 --kernel all --threads 2" + std::string(kAlibi) +
                               " --mask 'k < 5 or q // 9 == k // 9'" + more)["rows"];
    ASSERT_FALSE(rows.empty());
    for (const json& row : rows) {
      EXPECT_TRUE(leaves_out(row) || row["result"] == "PASS") << row.dump();
    }
  }
}

TEST_F(ToolsCommand, TimesAndExplainsProgramsAndSaysTheirLineAgain) {
  const std::string mask = "--mask 'doc[q] == doc[k]' --captured 'doc: i64[q+k] 0..3 rising'";
  const json timed = run_json("bench 1x2x64x16 --min-time 1 --warm-up 0 " + mask);
  const std::string line = timed["rows"][0]["problem"];
  EXPECT_EQ(line, "1x2x64x16 --mask 'doc: int; mask = doc[q] == doc[k]' --captured 'doc: i64[q+k] 0..3 rising'");
  const Ran again = run("verify " + line);
  EXPECT_EQ(again.code, 0) << again.out << again.err;
  EXPECT_EQ(run_json("explain 1x2x64x16 " + mask)["rows"][0]["problem"], line);
  const Ran bad = run("run 1x2x64x16 --mask 'doc[q] == doc[k]' --captured 'doc: i64[3]'");
  EXPECT_EQ(bad.code, 2);
  EXPECT_NE(bad.err.find("lies outside; hide the pair or clamp the index"), std::string::npos) << bad.err;
}

}  // namespace
