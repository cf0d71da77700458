#include "model_text.h"

#include "graph/onnx_fields.h"
#include "graph/wire.h"

namespace polyhead::testing {
namespace {

namespace onnx = graph::onnx;
using graph::FieldWriter;

std::string value_text(const std::string& name, const std::vector<int64_t>& dims) {
  FieldWriter shape, tensor, type, value;
  for (int64_t dim : dims) {
    FieldWriter each;
    if (dim >= 0) {
      each.varint(onnx::type::kDimValue, static_cast<uint64_t>(dim));
    } else {
      each.bytes(onnx::type::kDimParameter, "n");
    }
    shape.bytes(onnx::type::kDim, each.text());
  }
  tensor.varint(onnx::type::kElementType, 1);
  tensor.bytes(onnx::type::kShape, shape.text());
  type.bytes(onnx::type::kTensor, tensor.text());
  value.bytes(onnx::value_info::kName, name);
  value.bytes(onnx::value_info::kType, type.text());
  return value.text();
}

std::string node_text(const NodeText& node) {
  FieldWriter writer;
  for (const std::string& name : node.inputs) writer.bytes(onnx::node::kInput, name);
  for (const std::string& name : node.outputs) writer.bytes(onnx::node::kOutput, name);
  writer.bytes(onnx::node::kName, "node_" + node.outputs.at(0));
  writer.bytes(onnx::node::kOpType, node.op_type);
  for (const auto& [name, numbers] : node.lists) {
    FieldWriter attribute;
    attribute.bytes(onnx::attribute::kName, name);
    for (int64_t number : numbers) attribute.varint(onnx::attribute::kInts, static_cast<uint64_t>(number));
    attribute.varint(onnx::attribute::kType, onnx::attribute::kIsInts);
    writer.bytes(onnx::node::kAttribute, attribute.text());
  }
  for (const auto& [name, number] : node.integers) {
    FieldWriter attribute;
    attribute.bytes(onnx::attribute::kName, name);
    attribute.varint(onnx::attribute::kInt, static_cast<uint64_t>(number));
    attribute.varint(onnx::attribute::kType, onnx::attribute::kIsInt);
    writer.bytes(onnx::node::kAttribute, attribute.text());
  }
  for (const auto& [name, body] : node.bodies) {
    FieldWriter attribute;
    attribute.bytes(onnx::attribute::kName, name);
    attribute.bytes(onnx::attribute::kGraph, body);
    attribute.varint(onnx::attribute::kType, 5);
    writer.bytes(onnx::node::kAttribute, attribute.text());
  }
  return writer.text();
}

FieldWriter named_tensor(const std::string& name, const std::vector<int64_t>& dims) {
  FieldWriter writer;
  for (int64_t dim : dims) writer.varint(onnx::tensor::kDims, static_cast<uint64_t>(dim));
  writer.varint(onnx::tensor::kDataType, 1);
  writer.bytes(onnx::tensor::kName, name);
  return writer;
}

}  // namespace

std::string tensor_text(const std::string& name, const std::vector<int64_t>& dims, const std::vector<float>& numbers) {
  FieldWriter writer = named_tensor(name, dims);
  for (float number : numbers) writer.number32(onnx::tensor::kFloatData, number);
  return writer.text();
}

std::string external_tensor_text(const std::string& name, const std::vector<int64_t>& dims,
                                 const std::vector<std::pair<std::string, std::string>>& entries) {
  FieldWriter writer = named_tensor(name, dims);
  for (const auto& [key, value] : entries) {
    FieldWriter entry;
    entry.bytes(onnx::entry::kKey, key);
    entry.bytes(onnx::entry::kValue, value);
    writer.bytes(onnx::tensor::kExternalData, entry.text());
  }
  writer.varint(onnx::tensor::kDataLocation, onnx::tensor::kElsewhere);
  return writer.text();
}

std::string ModelText::graph() const {
  FieldWriter writer;
  writer.bytes(onnx::graph::kName, "graph");
  for (const NodeText& node : nodes) writer.bytes(onnx::graph::kNode, node_text(node));
  for (const std::string& tensor : tensors) writer.bytes(onnx::graph::kInitializer, tensor);
  for (const auto& [name, dims] : inputs) writer.bytes(onnx::graph::kInput, value_text(name, dims));
  for (const auto& [name, dims] : outputs) writer.bytes(onnx::graph::kOutput, value_text(name, dims));
  return writer.text() + more;
}

std::string ModelText::model() const {
  FieldWriter writer, import;
  writer.varint(onnx::model::kIrVersion, 8);
  import.bytes(onnx::opset::kDomain, "");
  import.varint(onnx::opset::kVersion, static_cast<uint64_t>(opset));
  writer.bytes(onnx::model::kOpsetImport, import.text());
  writer.bytes(onnx::model::kGraph, graph());
  return writer.text();
}

ModelText attention_text() {
  ModelText text;
  text.inputs = {{"q", {2, 3, -1, 4}}, {"k", {2, 3, -1, 4}}, {"v", {2, 3, -1, 4}}, {"mask", {2, 1, -1, -1}}};
  text.outputs = {{"out", {2, 3, -1, 4}}};
  text.tensors = {tensor_text("half", {}, {0.5f})};
  text.nodes = {{"Transpose", {"k"}, {"kt"}, {{"perm", {0, 1, 3, 2}}}},
                {"MatMul", {"q", "kt"}, {"product"}},
                {"Mul", {"product", "half"}, {"scaled"}},
                {"Add", {"scaled", "mask"}, {"masked"}},
                {"Softmax", {"masked"}, {"weights"}, {}, {{"axis", -1}}},
                {"MatMul", {"weights", "v"}, {"out"}}};
  return text;
}

}  // namespace polyhead::testing
