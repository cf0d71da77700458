// Attention in a graph becomes one node. The many ways to say it are in tests/python/onnx_fuse_cases.py, with numbers.
#include <gtest/gtest.h>

#include "graph/net.h"
#include "model_text.h"
#include "polyhead/graph.h"

namespace {

using namespace polyhead;
using polyhead::testing::attention_text;
using polyhead::testing::ModelText;

graph::Model parsed(const std::string& bytes) {
  auto model = graph::parse_model(bytes, "");
  EXPECT_TRUE(model.ok()) << model.status().message();
  return model.ok() ? std::move(*model) : graph::Model();
}

TEST(GraphFuse, OneNodeIsLeft) {
  graph::Model model = parsed(attention_text().model());
  const graph::Report report = graph::fuse(model);
  ASSERT_EQ(report.candidates.size(), 1u);
  EXPECT_TRUE(report.candidates[0].fused) << report.candidates[0].reason;
  EXPECT_EQ(report.candidates[0].place, "node_weights");
  EXPECT_EQ(report.candidates[0].pattern, "scale 0.5, added mask");
  EXPECT_EQ(report.num_nodes_before, 6);
  EXPECT_EQ(report.num_nodes_after, 1);
  EXPECT_EQ(report.opset_before, 17);
  EXPECT_EQ(report.opset_after, 23);

  const graph::Model again = parsed(graph::encode_model(model));
  ASSERT_EQ(again.graph.nodes.size(), 1u);
  const graph::Node& node = again.graph.nodes[0];
  EXPECT_EQ(node.op_type, "Attention");
  EXPECT_EQ(node.inputs, (std::vector<std::string>{"q", "k", "v", "mask"}));
  EXPECT_EQ(node.outputs, std::vector<std::string>{"out"});
  EXPECT_EQ(graph::attribute_of(node, "scale")->number, 0.5f);
  EXPECT_TRUE(again.graph.initializers.empty());  // nobody reads the 0.5 any more
  EXPECT_EQ(again.opsets, (std::vector<graph::OpsetImport>{{"", 23}}));
}

TEST(GraphFuse, OurDomainKeepsTheOpset) {
  graph::Model model = parsed(attention_text().model());
  graph::fuse(model, {graph::Target::kPolyhead});
  EXPECT_EQ(model.graph.nodes.at(0).domain, "polyhead");
  EXPECT_EQ(model.opsets, (std::vector<graph::OpsetImport>{{"", 17}, {"polyhead", 1}}));
}

TEST(GraphFuse, WhatOthersReadStays) {
  ModelText text = attention_text();
  text.nodes.push_back({"Relu", {"product"}, {"other"}});
  text.outputs.push_back({"other", {2, 3, -1, -1}});
  graph::Model model = parsed(text.model());
  const graph::Report report = graph::fuse(model);
  EXPECT_EQ(report.candidates.at(0).reason,
            "\"product\", of \"node_product\" (MatMul), is also read by \"node_other\" (Relu)");
  EXPECT_EQ(graph::encode_model(model), text.model());
}

TEST(GraphFuse, AValueThatABodyReadsStays) {
  ModelText body, text = attention_text();
  body.nodes = {{"Relu", {"product"}, {"inner"}}};
  body.outputs = {{"inner", {2, 3, -1, -1}}};
  text.inputs.push_back({"which", {}});
  text.nodes.push_back(
      {"If", {"which"}, {"other"}, {}, {}, {{"then_branch", body.graph()}, {"else_branch", body.graph()}}});
  graph::Model model = parsed(text.model());
  const graph::Report report = graph::fuse(model);
  EXPECT_NE(report.candidates.at(0).reason.find("is also read by \"node_other\" (If)"), std::string::npos);
}

// Fields that nobody here knows, of the model, its graph, a node that stays and one in a body, are carried along.
TEST(GraphFuse, UnknownFieldsSurvive) {
  ModelText text = attention_text();
  text.nodes.push_back({"Relu", {"out"}, {"last"}});
  text.outputs.push_back({"last", {2, 3, -1, 4}});
  const std::string unknown = "\xfa\x3f\x07strange";  // field 1023
  text.more = unknown;
  const std::string bytes = text.model() + unknown;
  graph::Model model = parsed(bytes);
  EXPECT_EQ(graph::encode_model(model), bytes);
  graph::fuse(model);
  const std::string fused = graph::encode_model(model);
  const size_t first = fused.find(unknown);
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(fused.find(unknown, first + 1), std::string::npos);
  EXPECT_EQ(parsed(fused).graph.nodes.size(), 2u);
}

}  // namespace
