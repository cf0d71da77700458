// Model -> ONNX files. What was not changed, and what is not understood, is copied as it stood.
#include "graph/onnx_fields.h"
#include "graph/wire.h"
#include "polyhead/graph.h"

namespace polyhead::graph {
namespace {

std::string encode(const Graph& graph);

std::string encode(const Attribute& attribute) {
  namespace fields = onnx::attribute;
  FieldWriter writer;
  if (!attribute.encoded.empty()) {  // of a changed one, its graphs alone are others
    size_t index = 0;
    FieldReader reader(attribute.encoded);
    for (Field field; reader.next(field);) {
      if (field.is(fields::kGraph, Wire::kBytes) || field.is(fields::kGraphs, Wire::kBytes)) {
        writer.bytes(field.number, encode(attribute.graphs[index++]));
      } else {
        writer.copy(field.whole);
      }
    }
    return writer.text();
  }
  writer.bytes(fields::kName, attribute.name);
  if (attribute.integer) {
    writer.varint(fields::kInt, static_cast<uint64_t>(*attribute.integer));
    writer.varint(fields::kType, fields::kIsInt);
  } else if (attribute.number) {
    writer.number32(fields::kFloat, *attribute.number);
    writer.varint(fields::kType, fields::kIsFloat);
  } else if (attribute.text) {
    writer.bytes(fields::kString, *attribute.text);
    writer.varint(fields::kType, fields::kIsString);
  } else {
    for (int64_t each : attribute.integers) writer.varint(fields::kInts, static_cast<uint64_t>(each));
    writer.varint(fields::kType, fields::kIsInts);
  }
  return writer.text();
}

std::string encode(const Node& node) {
  namespace fields = onnx::node;
  FieldWriter writer;
  for (const std::string& name : node.inputs) writer.bytes(fields::kInput, name);
  for (const std::string& name : node.outputs) writer.bytes(fields::kOutput, name);
  if (!node.name.empty()) writer.bytes(fields::kName, node.name);
  writer.bytes(fields::kOpType, node.op_type);
  for (const Attribute& attribute : node.attributes) {
    const bool as_it_was = !attribute.encoded.empty() && !attribute.changed;
    writer.bytes(fields::kAttribute, as_it_was ? std::string(attribute.encoded) : encode(attribute));
  }
  if (!node.domain.empty()) writer.bytes(fields::kDomain, node.domain);
  FieldReader reader(node.encoded);
  for (Field field; reader.next(field);) {
    const bool known =
        field.wire == Wire::kBytes && (field.number <= fields::kAttribute || field.number == fields::kDomain);
    if (!known) writer.copy(field.whole);
  }
  return writer.text();
}

std::string encode(const ValueInfo& value) {
  if (!value.encoded.empty()) return std::string(value.encoded);
  FieldWriter shape, tensor, type, writer;
  for (const Dim& dim : value.shape.value_or(std::vector<Dim>())) {
    FieldWriter size;
    if (dim.size >= 0) size.varint(onnx::type::kDimValue, static_cast<uint64_t>(dim.size));
    shape.bytes(onnx::type::kDim, size.text());
  }
  tensor.varint(onnx::type::kElementType, static_cast<uint64_t>(value.type));
  if (value.shape) tensor.bytes(onnx::type::kShape, shape.text());
  type.bytes(onnx::type::kTensor, tensor.text());
  writer.bytes(onnx::value_info::kName, value.name);
  writer.bytes(onnx::value_info::kType, type.text());
  return writer.text();
}

std::string encode(const Graph& graph) {
  namespace fields = onnx::graph;
  FieldWriter writer;
  for (const Node& node : graph.nodes) {
    const bool as_it_was = !node.encoded.empty() && !node.changed;
    writer.bytes(fields::kNode, as_it_was ? std::string(node.encoded) : encode(node));
  }
  for (const Constant& constant : graph.initializers) {
    if (!constant.encoded.empty()) writer.bytes(fields::kInitializer, constant.encoded);
  }
  for (const ValueInfo& value : graph.values) writer.bytes(fields::kValueInfo, encode(value));
  FieldReader reader(graph.encoded);
  for (Field field; reader.next(field);) {
    const bool ours = field.is(fields::kNode, Wire::kBytes) || field.is(fields::kInitializer, Wire::kBytes) ||
                      field.is(fields::kValueInfo, Wire::kBytes);
    if (!ours) writer.copy(field.whole);
  }
  return writer.text();
}

bool changed(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    if (node.changed || node.encoded.empty()) return true;
  }
  return false;
}

}  // namespace

std::string encode_model(const Model& model) {
  namespace fields = onnx::model;
  if (!changed(model.graph)) return std::string(model.encoded);
  FieldWriter writer;
  writer.varint(fields::kIrVersion, static_cast<uint64_t>(model.ir_version));
  FieldReader reader(model.encoded);
  for (Field field; reader.next(field);) {
    const bool ours = field.is(fields::kIrVersion, Wire::kVarint) || field.is(fields::kGraph, Wire::kBytes) ||
                      field.is(fields::kOpsetImport, Wire::kBytes);
    if (!ours) writer.copy(field.whole);
  }
  for (const OpsetImport& opset : model.opsets) {
    FieldWriter import;
    import.bytes(onnx::opset::kDomain, opset.domain);
    import.varint(onnx::opset::kVersion, static_cast<uint64_t>(opset.version));
    writer.bytes(fields::kOpsetImport, import.text());
  }
  writer.bytes(fields::kGraph, encode(model.graph));
  return writer.text();
}

}  // namespace polyhead::graph
