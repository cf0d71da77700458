// What `polyhead bench` leaves for programs: JSON with every sample, cold caches, and `polyhead compare`.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tools_command.h"

namespace {

using nlohmann::json;
using polyhead::testing::Ran;
using polyhead::testing::ToolsCommand;

class ToolsCompare : public ToolsCommand {
 protected:
  static json row(const std::string& problem, const std::vector<double>& samples_ms) {
    return {{"problem", problem}, {"direction", "forward"},  {"kernel", "reference"}, {"threads", 1},
            {"note", ""},         {"samples_ms", samples_ms}};
  }
  template <class... Rows>
  static json rows(const Rows&... each) {
    json list = json::array();
    (list.push_back(each), ...);
    return list;
  }
  std::string write(const std::string& name, const json& rows) const {
    std::ofstream(path(name)) << json{{"facts", json::object()}, {"rows", rows}};
    return path(name);
  }
  json compare(const json& before, const json& after, const std::string& options = "") const {
    const json told =
        run_json("compare '" + write("before.json", before) + "' '" + write("after.json", after) + "' " + options);
    return told;
  }
  std::string verdict(const std::vector<double>& before, const std::vector<double>& after,
                      const std::string& options = "") const {
    return compare(rows(row("1x1x8x8", before)), rows(row("1x1x8x8", after)), options)["rows"][0]["verdict"];
  }
};

TEST_F(ToolsCompare, KeysOfEveryCommandAreSnakeCase) {
  const std::regex snake_case("[a-z][a-z0-9_]*");
  for (const std::string line : {"bench 1x1x8x8 --min-time 0 --warm-up 0", "verify 1x1x8x8 --gradients", "run 1x1x8x8",
                                 "explain 1x1x8x8", "kernels", "info", "mha --q-size 8 --min-time 0 --samples 1",
                                 "mha --q-size 8 --layout", "mha --q-size 8 --verify"}) {
    const Ran ran = run(line + " --json");
    ASSERT_EQ(ran.code, 0) << line << ran.err;
    const json told = json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(told.is_object() && !told["rows"].empty()) << line;
    for (const json& each : told["rows"]) {
      for (const auto& [key, value] : each.items())
        EXPECT_TRUE(std::regex_match(key, snake_case)) << line << ": " << key;
    }
  }
}

TEST_F(ToolsCompare, EverySampleIsInJsonAlone) {
  const std::string line = "bench 1x1x16x8 --kernel reference --threads 1 --min-time 0 --samples 7 --warm-up 0";
  const json told = json::parse(run(line + " --json").out)["rows"][0];
  std::vector<double> samples = told["samples_ms"];
  EXPECT_EQ(samples.size(), 7u);
  EXPECT_EQ(told["num_samples"], 7);
  std::sort(samples.begin(), samples.end());
  EXPECT_EQ(told["median_ms"], samples[3]);
  EXPECT_EQ(told["min_ms"], samples[0]);
  EXPECT_EQ(run(line).out.find("samples_ms"), std::string::npos);
  EXPECT_EQ(run(line + " --format csv").out.find("samples_ms"), std::string::npos);
  const json layer = run_json("mha --q-size 8 --min-time 0 --samples 3")["rows"][0];
  EXPECT_EQ(layer["samples_ms"].size(), 3u);
}

TEST_F(ToolsCompare, AResultSaysWhatItsCachesHeld) {
  const std::string line = "bench 1x1x1/64x64 --threads 1 --min-time 1 --samples 5 ";
  const json warm = run_json(line), cold = run_json(line + "--cold");
  EXPECT_EQ(cold["rows"][0]["samples_ms"].size(), cold["rows"][0]["num_samples"].get<size_t>());
  EXPECT_EQ(warm["facts"]["method"].get<std::string>().rfind("warm caches;", 0), 0u);
  const std::string method = cold["facts"]["method"];
  EXPECT_TRUE(std::regex_search(method, std::regex("^cold caches, [1-9][0-9]* MiB written before each call;")))
      << method;
}

TEST_F(ToolsCompare, ARowDiffersWherePartsOfTheRunsDoNotOverlap) {
  const std::vector<double> base = {1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1};
  const auto times = [&](double factor) {
    std::vector<double> samples = base;
    for (double& sample : samples) sample *= factor;
    return samples;
  };
  EXPECT_EQ(verdict(base, times(1.5)), "slower");
  EXPECT_EQ(verdict(base, times(0.5)), "faster");
  EXPECT_EQ(verdict(base, base), "same");
  EXPECT_EQ(verdict(base, times(1.02)), "same") << "less than 3 percent";
  EXPECT_EQ(verdict(base, times(1.02), "--least 1"), "slower");
  EXPECT_EQ(verdict(base, times(1.5), "--least 60"), "same");
  EXPECT_EQ(verdict(base, {1.0, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5}), "same") << "a fifth is as fast";
  EXPECT_EQ(verdict(base, {2, 2, 2, 2}), "too few samples");
  const json told = compare(rows(row("1x1x8x8", base), row("1x1x9x8", base)),
                            rows(row("1x1x9x8", times(0.5)), row("1x1x8x8", times(2))));
  EXPECT_EQ(told["rows"][0]["problem"], "1x1x8x8");
  EXPECT_NEAR(told["rows"][0]["ratio"].get<double>(), 2, 1e-12);
  EXPECT_NEAR(told["rows"][1]["ratio"].get<double>(), 0.5, 1e-12);
  EXPECT_NEAR(told["rows"][0]["before_ms"].get<double>(), 1.05, 1e-12);
  EXPECT_NEAR(told["rows"][0]["after_spread_percent"].get<double>(), 100 * 0.1 / 1.05, 1e-9);
  EXPECT_EQ(told["facts"]["rows"], "1 faster, 1 slower");
  EXPECT_EQ(told["facts"]["geometric_mean_ratio"], "1.000");
}

TEST_F(ToolsCompare, RowsWithoutAPartnerOrTimesAreNamed) {
  json refused = row("1x1x9x8", {});
  refused["samples_ms"] = nullptr;
  refused["note"] = "cannot";
  const std::vector<double> times = {1, 1, 1, 1, 1};
  const std::string before = write("before.json", rows(row("1x1x8x8", times), refused));
  const std::string after = write("after.json", rows(row("1x1x7x8", times), row("1x1x9x8", times)));
  const json told = run_json("compare '" + before + "' '" + after + "'");
  ASSERT_EQ(told["rows"].size(), 3u);
  EXPECT_EQ(told["rows"][0]["verdict"], "before alone");
  EXPECT_EQ(told["rows"][1]["verdict"], "before: cannot");
  EXPECT_EQ(told["rows"][2]["verdict"], "after alone");
  EXPECT_EQ(told["rows"][2]["problem"], "1x1x7x8");
  for (const json& each : told["rows"]) EXPECT_TRUE(each["ratio"].is_null());
  EXPECT_EQ(told["facts"]["rows"], "none in both");
}

TEST_F(ToolsCompare, TwoRunsOfBenchAreComparedAndSoAreTwoOfMha) {
  for (const std::string line : {"bench 1x1x8,9x8 --kernel reference --direction forward,backward --min-time 0 --json",
                                 "mha --q-size 8 --min-time 0 --json"}) {
    std::ofstream(path("a.json")) << run(line).out;
    const json told = run_json("compare '" + path("a.json") + "' '" + path("a.json") + "'")["rows"];
    EXPECT_GE(told.size(), 3u);
    for (const json& each : told) {
      EXPECT_EQ(each["verdict"], "same");
      EXPECT_EQ(each["ratio"], 1.0);
    }
  }
}

TEST_F(ToolsCompare, OtherFilesAreRefused) {
  const std::string good = write("good.json", rows(row("1x1x8x8", {1, 1, 1, 1, 1})));
  json without = row("1x1x8x8", {}), layer = {{"layer", "--batch 1"}, {"note", "cannot"}};
  const auto refusal = [&](const std::string& file) {
    const Ran ran = run("compare '" + good + "' '" + file + "'");
    EXPECT_EQ(ran.code, 2);
    return ran.err;
  };
  std::ofstream(path("text")) << "| problem |";
  EXPECT_NE(refusal(path("text")).find("must be the output of `polyhead bench`"), std::string::npos);
  EXPECT_NE(refusal(write("a", rows(without))).find("no samples_ms"), std::string::npos);
  EXPECT_NE(refusal(write("b", rows(layer))).find("the other of `polyhead mha`"), std::string::npos);
  EXPECT_NE(refusal(write("c", rows(row("1x1x8x8", {1, -1})))).find("something else than times"), std::string::npos);
  EXPECT_NE(refusal(path("nowhere")).find("nowhere"), std::string::npos);
  EXPECT_EQ(run("compare '" + good + "' '" + good + "' --least -1").code, 2);
}

}  // namespace
