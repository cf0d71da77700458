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

TEST(GraphFuzz, ChangedBytes) {
  const std::string bytes = rich_model();
  // --gtest_shuffle --gtest_repeat=N draws others each time.
  std::mt19937_64 random(1 + static_cast<uint64_t>(::testing::UnitTest::GetInstance()->random_seed()));
  int good = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string changed = bytes;
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
  const std::string bytes = rich_model();
  int good = 0;
  for (size_t size = 0; size < bytes.size(); ++size) run(bytes.substr(0, size), good);
}

}  // namespace
