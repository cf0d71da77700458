// What no model may be: each fault gets a sentence.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "model_text.h"
#include "polyhead/graph.h"

namespace {

namespace fs = std::filesystem;
using namespace polyhead;
using polyhead::testing::attention_text;
using polyhead::testing::external_tensor_text;
using polyhead::testing::ModelText;
using polyhead::testing::tensor_text;

std::string fault(const std::string& bytes, const std::string& folder = "") {
  const auto model = graph::parse_model(bytes, folder);
  return model.ok() ? "" : model.status().message();
}

#define EXPECT_FAULT(bytes, words) EXPECT_NE(fault(bytes).find(words), std::string::npos) << fault(bytes)

TEST(GraphFile, NoModelAtAll) {
  EXPECT_FAULT("", "has no graph");
  EXPECT_FAULT("polyhead", "truncated or no ONNX file");
  EXPECT_FAULT(std::string(20, '\xff'), "truncated or no ONNX file");
}

TEST(GraphFile, EveryTruncationIsAFault) {
  const std::string bytes = attention_text().model();
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_NE(fault(bytes.substr(0, size)), "") << size;
  EXPECT_EQ(fault(bytes), "");
}

TEST(GraphFile, Opsets) {
  ModelText text = attention_text();
  for (const int64_t opset : {int64_t{0}, int64_t{-1}, int64_t{29}, INT64_MAX}) {
    text.opset = opset;
    EXPECT_FAULT(text.model(), "known are 1 to 28");
  }
}

TEST(GraphFile, NamesThatDoNotAgree) {
  ModelText text = attention_text();
  text.tensors.clear();
  EXPECT_FAULT(text.model(), "node \"node_scaled\" (Mul) reads \"half\", which no input, initializer or node gives");
  text = attention_text();
  std::swap(text.nodes[1], text.nodes[4]);
  EXPECT_FAULT(text.model(),
               "reads \"masked\", which is computed behind it: the nodes are not in order, or form a cycle");
  text = attention_text();
  text.nodes[0].inputs = {"kt"};
  EXPECT_FAULT(text.model(), "form a cycle");
  text = attention_text();
  text.nodes.push_back(text.nodes[1]);
  EXPECT_FAULT(text.model(), "computes \"product\" twice");
  text = attention_text();
  text.outputs.push_back({"nowhere", {1}});
  EXPECT_FAULT(text.model(), "list of outputs reads \"nowhere\"");
  text = attention_text();
  text.nodes[2].op_type.clear();
  EXPECT_FAULT(text.model(), "without an op_type");
}

TEST(GraphFile, TensorsThatAreNotWhatTheySay) {
  const auto with = [](std::string tensor) {
    ModelText text = attention_text();
    text.tensors.push_back(std::move(tensor));
    return text.model();
  };
  EXPECT_FAULT(with(tensor_text("big", {int64_t{1} << 30, int64_t{1} << 30}, {1})),
               "needs 1152921504606846976 numbers, has 1");
  EXPECT_FAULT(with(tensor_text("big", {int64_t{1} << 32, int64_t{1} << 32}, {})), "more than 2^62 elements");
  EXPECT_FAULT(with(tensor_text("few", {3}, {1, 2})), "tensor \"few\" needs 3 numbers, has 2");
  EXPECT_FAULT(with(tensor_text("below", {-1}, {1})), "dims that are negative");
  EXPECT_EQ(fault(with(tensor_text("none", {0, int64_t{1} << 40}, {}))), "");
}

TEST(GraphFile, BodiesInBodies) {
  ModelText text = attention_text();
  for (int depth = 0; depth < 40; ++depth) {
    ModelText outer = attention_text();
    outer.nodes.push_back({"If", {"q"}, {"deep"}, {}, {}, {{"then_branch", text.graph()}}});
    text = outer;
  }
  EXPECT_FAULT(text.model(), "bodies inside bodies, more than 32 deep");
}

class GraphExternalData : public ::testing::Test {
 protected:
  GraphExternalData() : folder_(fs::temp_directory_path() / ("polyhead_graph_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_ / "model" / "inside");
    for (const char* name : {"model/weights", "model/inside/weights", "outside"}) {
      std::ofstream(folder_ / name, std::ios::binary) << std::string(64, '\0');
    }
    fs::create_symlink(folder_ / "outside", folder_ / "model" / "link");
    fs::create_directory_symlink(folder_, folder_ / "model" / "up");
  }
  ~GraphExternalData() override { fs::remove_all(folder_); }

  std::string fault_at(const std::string& location, const std::string& offset = "0", const std::string& length = "16") {
    ModelText text = attention_text();
    text.tensors.push_back(
        external_tensor_text("far", {4}, {{"location", location}, {"offset", offset}, {"length", length}}));
    return fault(text.model(), folder_ / "model");
  }

  fs::path folder_;
};

TEST_F(GraphExternalData, FilesInTheFolderAreRead) {
  for (const char* location : {"weights", "./weights", "inside/weights"}) EXPECT_EQ(fault_at(location), "") << location;
  EXPECT_EQ(fault_at("weights", "48"), "");
}

TEST_F(GraphExternalData, OthersAreNot) {
  for (const char* location : {"../outside", "inside/../../outside", "/etc/passwd", "", "inside//weights", ".", ".."}) {
    EXPECT_NE(fault_at(location).find("must be a path of plain names below the model's folder"), std::string::npos)
        << location << ": " << fault_at(location);
  }
  for (const char* location : {"link", "up/outside"}) {
    EXPECT_NE(fault_at(location).find("a symbolic link or no folder"), std::string::npos) << fault_at(location);
  }
  EXPECT_NE(fault_at("inside").find("is not a regular file"), std::string::npos) << fault_at("inside");
  EXPECT_NE(fault_at("missing").find("cannot be opened: No such file"), std::string::npos) << fault_at("missing");
}

TEST_F(GraphExternalData, PlacesOutsideOfTheFile) {
  for (const char* offset : {"49", "64", "18446744073709551615"}) {
    EXPECT_NE(fault_at("weights", offset).find("; the file has 64"), std::string::npos) << fault_at("weights", offset);
  }
  EXPECT_NE(fault_at("weights", "-1").find("must be a number of bytes"), std::string::npos);
  EXPECT_NE(fault_at("weights", "99999999999999999999").find("must be a number of bytes"), std::string::npos);
  EXPECT_NE(fault_at("weights", "0", "15").find("needs 16 bytes, 15 are told"), std::string::npos);
}

TEST_F(GraphExternalData, FromBytesAloneThereAreNoOtherFiles) {
  ModelText text = attention_text();
  text.tensors.push_back(external_tensor_text("far", {4}, {{"location", "weights"}}));
  EXPECT_FAULT(text.model(), "cannot be found from bytes alone");
}

TEST_F(GraphExternalData, ReadModelNamesTheFile) {
  EXPECT_NE(graph::read_model(folder_ / "nothing").status().message().find("cannot open"), std::string::npos);
  EXPECT_NE(graph::read_model(folder_).status().message().find("is not a regular file"), std::string::npos);
}

}  // namespace
