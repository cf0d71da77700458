// Bytes of a model changed at random: parsed or refused, fused, written and parsed again; under address sanitizer too.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "model_text.h"
#include "polyhead/graph.h"

namespace {

using namespace polyhead;
using polyhead::testing::attention_text;
using polyhead::testing::ModelText;
using polyhead::testing::tensor_text;

// Most rules of inference, a packed projection, repeated heads, a guard, sinks of a constant, a product with what follows it, and a body: what changed bytes are to run through.
std::string rich_model() {
  ModelText text = attention_text();
  text.tensors.push_back(tensor_text("zero", {1}, {0}));
  text.nodes.insert(text.nodes.begin(), {{"Shape", {"q"}, {"shape"}},
                                         {"Gather", {"shape", "zero"}, {"batch"}},
                                         {"Concat", {"shape", "shape"}, {"twice"}, {}, {{"axis", 0}}},
                                         {"Reshape", {"q", "twice"}, {"r"}},
                                         {"Slice", {"q", "zero", "zero"}, {"slice"}},
                                         {"Expand", {"k", "shape"}, {"e"}},
                                         {"Split", {"v"}, {"first", "second"}, {}, {{"axis", 1}}},
                                         {"Squeeze", {"v"}, {"z"}, {{"axes", {0}}}},
                                         {"Unsqueeze", {"v"}, {"u"}, {{"axes", {0, 2}}}},
                                         {"ReduceMax", {"v"}, {"m"}, {{"axes", {1}}}}});
  text.tensors.push_back(tensor_text("sinks", {2, 3, 1, 1}, {1, 2, 3, 1, 2, 3}));
  const auto softmax = std::find_if(text.nodes.begin(), text.nodes.end(),
                                    [](const polyhead::testing::NodeText& node) { return node.op_type == "Softmax"; });
  softmax->inputs = {"joined"};
  softmax->outputs = {"all"};
  const auto first = text.nodes.insert(softmax, {"Concat", {"masked", "sinks"}, {"joined"}, {}, {{"axis", -1}}});
  text.nodes.insert(first + 2, {{"Constant", {}, {"start"}, {{"value_ints", {0}}}},
                                {"Constant", {}, {"end"}, {{"value_ints", {-1}}}},
                                {"Constant", {}, {"last"}, {{"value_ints", {3}}}},
                                {"Slice", {"all", "start", "end", "last"}, {"weights"}}});
  ModelText body = attention_text();
  for (polyhead::testing::NodeText& node : body.nodes) {
    for (std::string& name : node.outputs) name = "inner_" + name;
    for (std::string& name : node.inputs) name = name.size() > 4 || name == "kt" ? "inner_" + name : name;
  }
  body.inputs.clear();
  body.outputs = {{"inner_out", {2, 3, -1, 4}}};
  body.nodes[3].inputs[1] = "mask";
  body.tensors = {};
  body.nodes[2].inputs[1] = "mask";  // a score program
  text.nodes.push_back({"If", {"batch"}, {"chosen"}, {}, {}, {{"then_branch", body.graph()}}});
  text.tensors.push_back(tensor_text("w", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8}));
  for (const char* name : {"bias", "gamma"}) text.tensors.push_back(tensor_text(name, {2}, {1, 2}));
  const polyhead::testing::NodeText layer[] = {{"MatMul", {"out", "w"}, {"rows"}},
                                               {"Add", {"rows", "bias"}, {"biased"}},
                                               {"Sigmoid", {"biased"}, {"gate"}},
                                               {"Mul", {"biased", "gate"}, {"active"}},
                                               {"LayerNormalization", {"active", "gamma"}, {"normed"}}};
  text.nodes.insert(text.nodes.end(), std::begin(layer), std::end(layer));
  return text.model();
}

// A training step of scores that a tensor of heads multiplies, beside sinks.
std::string training_model() {
  ModelText text;
  for (const char* name : {"q", "k", "v", "g"}) text.inputs.push_back({name, {2, 3, 5, 4}});
  text.inputs.push_back({"factor", {3, 1, 1}});
  text.tensors = {tensor_text("sinks", {1, 3, 1, 1}, {1, 2, 3})};
  text.nodes = {{"Transpose", {"k"}, {"kt"}, {{"perm", {0, 1, 3, 2}}}},
                {"MatMul", {"q", "kt"}, {"m"}},
                {"Mul", {"m", "factor"}, {"s"}},
                {"Constant", {}, {"sizes"}, {{"value_ints", {2, 3, 5, 1}}}},
                {"Expand", {"sinks", "sizes"}, {"sink"}},
                {"Concat", {"s", "sink"}, {"joined"}, {}, {{"axis", -1}}},
                {"Softmax", {"joined"}, {"all"}, {}, {{"axis", -1}}},
                {"Constant", {}, {"zero"}, {{"value_ints", {0}}}},
                {"Constant", {}, {"five"}, {{"value_ints", {5}}}},
                {"Constant", {}, {"six"}, {{"value_ints", {6}}}},
                {"Constant", {}, {"last"}, {{"value_ints", {3}}}},
                {"Slice", {"all", "zero", "five", "last"}, {"w"}},
                {"MatMul", {"w", "v"}, {"out"}},
                {"Transpose", {"v"}, {"vt"}, {{"perm", {0, 1, 3, 2}}}},
                {"MatMul", {"g", "vt"}, {"dp"}},
                {"Transpose", {"w"}, {"wt"}, {{"perm", {0, 1, 3, 2}}}},
                {"MatMul", {"wt", "g"}, {"dv"}},
                {"Constant", {}, {"pads"}, {{"value_ints", {0, 0, 0, 0, 0, 0, 0, 1}}}},
                {"Pad", {"dp", "pads"}, {"dpj"}},
                {"Mul", {"dpj", "all"}, {"e"}},
                {"ReduceSum", {"e", "last"}, {"r"}},
                {"Mul", {"all", "r"}, {"f"}},
                {"Sub", {"e", "f"}, {"dj"}},
                {"Slice", {"dj", "zero", "five", "last"}, {"ds"}},
                {"Slice", {"dj", "five", "six", "last"}, {"dsink"}},
                {"Constant", {}, {"rows"}, {{"value_ints", {0, 2}}}},
                {"ReduceSum", {"dsink", "rows"}, {"dsinks"}},
                {"Mul", {"ds", "factor"}, {"dm"}},
                {"Mul", {"ds", "m"}, {"df"}},
                {"Constant", {}, {"others"}, {{"value_ints", {0, 2, 3}}}},
                {"ReduceSum", {"df", "others"}, {"dfactor"}},
                {"MatMul", {"dm", "k"}, {"dq"}},
                {"Transpose", {"dm"}, {"dmt"}, {{"perm", {0, 1, 3, 2}}}},
                {"MatMul", {"dmt", "q"}, {"dk"}}};
  for (const char* name : {"out", "dq", "dk", "dv"}) text.outputs.push_back({name, {2, 3, 5, 4}});
  text.outputs.push_back({"dsinks", {1, 3, 1, 1}});
  text.outputs.push_back({"dfactor", {1, 3, 1, 1}});
  return text.model();
}

// Products with the past's keys and values, and with new ones.
std::string apart_model() {
  ModelText text;
  text.inputs = {
      {"q", {2, 3, 5, 4}}, {"k", {2, 3, 5, 4}}, {"v", {2, 3, 5, 4}}, {"old_k", {2, 3, 7, 4}}, {"old_v", {2, 3, 7, 4}}};
  text.nodes = {{"Transpose", {"old_k"}, {"old_t"}, {{"perm", {0, 1, 3, 2}}}},
                {"Transpose", {"k"}, {"kt"}, {{"perm", {0, 1, 3, 2}}}},
                {"MatMul", {"q", "old_t"}, {"s1"}},
                {"MatMul", {"q", "kt"}, {"s2"}},
                {"Concat", {"s1", "s2"}, {"s"}, {}, {{"axis", -1}}},
                {"Softmax", {"s"}, {"w"}, {}, {{"axis", -1}}},
                {"Constant", {}, {"sizes"}, {{"value_ints", {7, 5}}}},
                {"Split", {"w", "sizes"}, {"w1", "w2"}, {}, {{"axis", -1}}},
                {"MatMul", {"w1", "old_v"}, {"o1"}},
                {"MatMul", {"w2", "v"}, {"o2"}},
                {"Add", {"o1", "o2"}, {"out"}}};
  text.outputs = {{"out", {2, 3, 5, 4}}};
  return text.model();
}

void run(const std::string& bytes, int& good) {
  auto model = graph::parse_model(bytes, "");
  if (!model.ok()) {
    EXPECT_FALSE(model.status().message().empty());
    return;
  }
  ++good;
  for (const graph::Target target : {graph::Target::kOnnx, graph::Target::kPolyhead}) {
    graph::Model copy = *model;
    graph::FuseOptions options = {target};
    options.layers = target == graph::Target::kPolyhead;
    const graph::Report report = graph::fuse(copy, options);
    const auto again = graph::parse_model(graph::encode_model(copy), "");
    ASSERT_TRUE(again.ok()) << again.status().message();
    ASSERT_EQ(static_cast<int64_t>(again->graph.nodes.size() > 0), static_cast<int64_t>(report.num_nodes_after > 0));
  }
}

TEST(GraphFuzz, TheModelItselfFuses) {
  auto model = graph::parse_model(rich_model(), "");
  ASSERT_TRUE(model.ok()) << model.status().message();
  graph::FuseOptions options = {graph::Target::kPolyhead};
  options.layers = true;
  const graph::Report report = graph::fuse(*model, options);
  ASSERT_EQ(report.candidates.size(), 2u);
  for (const graph::Candidate& each : report.candidates) EXPECT_TRUE(each.fused) << each.reason;
  ASSERT_EQ(report.products.size(), 1u);
  EXPECT_EQ(report.products[0].pattern, "a product, bias, silu, layer norm") << report.products[0].reason;
}

TEST(GraphFuzz, TheOtherModelsFuse) {
  for (const std::string& bytes : {training_model(), apart_model()}) {
    auto model = graph::parse_model(bytes, "");
    ASSERT_TRUE(model.ok()) << model.status().message();
    const graph::Report report = graph::fuse(*model, {graph::Target::kPolyhead});
    ASSERT_EQ(report.candidates.size(), 1u);
    EXPECT_TRUE(report.candidates[0].fused) << report.candidates[0].reason;
  }
}

TEST(GraphFuzz, ChangedBytes) {
  const std::string models[] = {rich_model(), training_model(), apart_model()};
  // --gtest_shuffle --gtest_repeat=N draws others each time.
  std::mt19937_64 random(1 + static_cast<uint64_t>(::testing::UnitTest::GetInstance()->random_seed()));
  int good = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string changed = models[round % 3];
    for (uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
      char& byte = changed[random() % changed.size()];
      byte = static_cast<char>(random() % 4 == 0 ? random() : byte ^ (1 << random() % 8));
    }
    run(changed, good);
    if (HasFatalFailure()) FAIL() << "round " << round;
  }
  RecordProperty("good", good);
  EXPECT_GT(good, 300);  // else it would be the parser alone that is tested
}

TEST(GraphFuzz, Truncations) {
  int good = 0;
  for (const std::string& bytes : {rich_model(), training_model(), apart_model()}) {
    for (size_t size = 0; size < bytes.size(); ++size) run(bytes.substr(0, size), good);
  }
}

}  // namespace
