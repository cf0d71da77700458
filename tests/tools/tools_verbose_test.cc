// POLYHEAD_VERBOSE=1: the line that a plan or a layer prints says all of it, in the command's own words.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "polyhead/attention.h"
#include "polyhead/block.h"
#include "polyhead/executor.h"
#include "polyhead/layer.h"
#include "tools/mha_problem.h"
#include "tools/problem.h"
#include "tools_command.h"

namespace {

using polyhead::testing::Ran;
using polyhead::testing::ToolsCommand;
namespace tools = polyhead::tools;

// Read once, when the first plan is made: before any test.
const int kVerbose = setenv("POLYHEAD_VERBOSE", "1", 1);

// The words of the only line on stderr behind `command`, up to where the line says how it is run.
std::vector<std::string> words_behind(const std::string& command, const std::string& printed) {
  EXPECT_EQ(printed.rfind(command, 0), 0u) << printed;
  EXPECT_EQ(printed.find('\n'), printed.size() - 1) << printed;
  const size_t how = printed.find(" --kernel ");
  EXPECT_NE(printed.find(" --threads ", how), std::string::npos) << printed;
  if (printed.rfind(command, 0) != 0 || how == std::string::npos) return {};
  return tools::split_words(printed.substr(command.size(), how - command.size()));
}

TEST(Verbose, TheLineOfAPlanIsItsWholeDesc) {
  int checked = 0;
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    const polyhead::AttentionDesc desc = tools::problem_desc(tools::random_problem(seed));
    ::testing::internal::CaptureStderr();
    const auto made = polyhead::plan(desc);
    const std::string printed = ::testing::internal::GetCapturedStderr();
    if (!made.ok()) {
      EXPECT_EQ(printed, "");
      continue;
    }
    const auto problems = tools::parse_problems(words_behind("polyhead bench ", printed));
    ASSERT_TRUE(problems.ok()) << printed << problems.status().message();
    ASSERT_EQ(problems->size(), 1u) << printed;
    EXPECT_TRUE(tools::problem_desc(problems->front()) == desc) << printed;
    ++checked;
  }
  EXPECT_GT(checked, 900);
}

TEST(Verbose, TheLineOfALayerIsItsWholeDesc) {
  int checked = 0;
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    const polyhead::LayerDesc desc = tools::layer_desc(tools::random_mha(seed));
    ::testing::internal::CaptureStderr();
    const auto made = polyhead::layer(desc);
    const std::string printed = ::testing::internal::GetCapturedStderr();
    if (!made.ok()) {
      EXPECT_EQ(printed, "");
      continue;
    }
    const auto problem = tools::parse_mha(words_behind("polyhead mha ", printed));
    ASSERT_TRUE(problem.ok()) << printed << problem.status().message();
    EXPECT_TRUE(tools::layer_desc(*problem) == desc) << printed;
    ++checked;
  }
  EXPECT_GT(checked, 450);
}

TEST(Verbose, ABlockPrintsItsLayerAndExplainNothing) {
  polyhead::AttentionBlockDesc desc;
  desc.layer.seqlen_q = desc.layer.seqlen_k = 16;
  desc.layer.query_size = desc.layer.key_size = desc.layer.value_size = desc.layer.out_proj_size = 8;
  desc.layer.query_proj_size = desc.layer.key_proj_size = desc.layer.value_proj_size = 8;
  desc.layer.residual = true;
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(polyhead::attention_block(desc).ok());
  const auto problem = tools::parse_mha(words_behind("polyhead mha ", ::testing::internal::GetCapturedStderr()));
  ASSERT_TRUE(problem.ok());
  EXPECT_TRUE(tools::layer_desc(*problem) == desc.layer);
  ::testing::internal::CaptureStderr();
  polyhead::explain(tools::problem_desc(tools::random_problem(1)));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

// What is printed, run as it stands, prints itself.
TEST_F(ToolsCommand, APrintedLineIsACommand) {
  for (const std::string line :
       {"bench 2x4/2x9/17x8/16 --dtype bf16 --causal --align bottom_right --kernel reference --threads 2",
        "mha --batch 2 --heads 4 --seqlen-q 9 --q-size 16 --biases=qo --causal --kernel reference --threads 1"}) {
    const Ran first = run(line + " --min-time 0 --samples 1", "POLYHEAD_VERBOSE=1");
    ASSERT_EQ(first.code, 0) << first.err;
    EXPECT_EQ(first.err, "polyhead " + line + "\n");
  }
  EXPECT_EQ(run("bench 1x1x8x8 --min-time 0", "POLYHEAD_VERBOSE=0").err, "");
  EXPECT_EQ(run("bench 1x1x8x8 --min-time 0", "POLYHEAD_VERBOSE=").err, "");
  EXPECT_EQ(run("bench 1x1x8x8 --min-time 0", "env -u POLYHEAD_VERBOSE").err, "");
}

}  // namespace
