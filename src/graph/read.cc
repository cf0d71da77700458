// ONNX files -> Model.
#include <cstring>
#include <utility>

#include "core/sentence.h"
#include "graph/checks.h"
#include "graph/external_data.h"
#include "graph/onnx_fields.h"
#include "graph/tensors.h"
#include "graph/wire.h"
#include "polyhead/graph.h"

namespace polyhead::graph {
namespace {

constexpr int kDeepest = 32;  // bodies inside bodies

Status broken(const char* what, const std::string& name) {
  return invalid(sentence("the model is truncated or no ONNX file: ", what, name.empty() ? "" : " \"", name,
                          name.empty() ? "" : "\"", " is not a whole message"));
}

class ModelReader {
 public:
  ModelReader(Model& model, const std::string& folder) : model_(model), folder_(folder) {}

  Status read(std::string_view encoded) {
    model_.encoded = encoded;
    FieldReader reader(encoded);
    bool has_graph = false;
    for (Field field; reader.next(field);) {
      if (field.is(onnx::model::kIrVersion, Wire::kVarint)) model_.ir_version = field.integer();
      if (field.is(onnx::model::kOpsetImport, Wire::kBytes)) {
        if (Status status = opset(field.bytes); !status.ok()) return status;
      }
      model_.num_functions += field.is(onnx::model::kFunctions, Wire::kBytes);
      if (!field.is(onnx::model::kGraph, Wire::kBytes)) continue;
      if (std::exchange(has_graph, true)) return invalid("the model has two graphs, must have one");
      if (Status status = graph(field.bytes, model_.graph, 0); !status.ok()) return status;
    }
    if (reader.broken()) return broken("the file", "");
    if (!has_graph) return invalid("the model has no graph: this is not an ONNX file");
    return {};
  }

 private:
  Status opset(std::string_view encoded) {
    OpsetImport import;
    FieldReader reader(encoded);
    for (Field field; reader.next(field);) {
      if (field.is(onnx::opset::kDomain, Wire::kBytes)) import.domain = field.bytes;
      if (field.is(onnx::opset::kVersion, Wire::kVarint)) import.version = field.integer();
    }
    if (reader.broken()) return broken("an opset import", "");
    if (import.domain == "ai.onnx") import.domain.clear();
    model_.opsets.push_back(std::move(import));
    return {};
  }

  Status graph(std::string_view encoded, Graph& graph, int depth) {
    if (depth > kDeepest) return invalid(sentence("the model has bodies inside bodies, more than ", kDeepest, " deep"));
    graph.encoded = encoded;
    FieldReader reader(encoded);
    for (Field field; reader.next(field);) {
      if (field.wire != Wire::kBytes) continue;
      if (Status status = graph_field(field, graph, depth); !status.ok()) return status;
    }
    return reader.broken() ? broken("the graph", graph.name) : Status();
  }

  Status graph_field(const Field& field, Graph& graph, int depth) {
    switch (field.number) {
      case onnx::graph::kName: graph.name = field.bytes; return {};
      case onnx::graph::kNode: return node(field.bytes, graph.nodes.emplace_back(), depth);
      case onnx::graph::kInput: return value_info(field.bytes, graph.inputs.emplace_back());
      case onnx::graph::kOutput: return value_info(field.bytes, graph.outputs.emplace_back());
      case onnx::graph::kValueInfo: return value_info(field.bytes, graph.values.emplace_back());
      case onnx::graph::kInitializer: return add_tensor(field.bytes, graph.initializers);
      case onnx::graph::kSparseInitializer: return sparse_tensor(field.bytes, &graph);
      default: return {};
    }
  }

  Status add_tensor(std::string_view encoded, std::vector<Constant>& tensors) {
    auto constant = read_tensor(model_, encoded, folder_);
    if (!constant.ok()) return constant.status();
    tensors.push_back(std::move(*constant));
    return {};
  }

  // What it names is a value that is there; its elements are nothing that fusion asks for.
  Status sparse_tensor(std::string_view encoded, Graph* graph) {
    FieldReader reader(encoded);
    for (Field field; reader.next(field);) {
      if (field.wire != Wire::kBytes || field.number > onnx::sparse_tensor::kIndices) continue;
      auto part = read_tensor(model_, field.bytes, folder_);
      if (!part.ok()) return part.status();
      if (field.number != onnx::sparse_tensor::kValues || graph == nullptr) continue;
      graph->initializers.push_back({part->name, part->type, {}, {}, {}});
    }
    return reader.broken() ? broken("a sparse tensor", "") : Status();
  }

  Status node(std::string_view encoded, Node& node, int depth) {
    node.encoded = encoded;
    FieldReader reader(encoded);
    for (Field field; reader.next(field);) {
      if (field.wire != Wire::kBytes) continue;
      switch (field.number) {
        case onnx::node::kInput: node.inputs.emplace_back(field.bytes); break;
        case onnx::node::kOutput: node.outputs.emplace_back(field.bytes); break;
        case onnx::node::kName: node.name = field.bytes; break;
        case onnx::node::kOpType: node.op_type = field.bytes; break;
        case onnx::node::kDomain: node.domain = field.bytes == "ai.onnx" ? "" : field.bytes; break;
        case onnx::node::kAttribute:
          if (Status status = attribute(field.bytes, node.attributes.emplace_back(), depth); !status.ok())
            return status;
          break;
        default: break;
      }
    }
    return reader.broken() ? broken("node", node.name) : Status();
  }

  Status attribute(std::string_view encoded, Attribute& attribute, int depth) {
    attribute.encoded = encoded;
    FieldReader reader(encoded);
    for (Field field; reader.next(field);) {
      Status status;
      switch (field.number) {
        case onnx::attribute::kName: attribute.name = field.bytes; break;
        case onnx::attribute::kFloat: attribute.number = field.number32(); break;
        case onnx::attribute::kInt: attribute.integer = field.integer(); break;
        case onnx::attribute::kString: attribute.text = std::string(field.bytes); break;
        case onnx::attribute::kInts: add_integers(attribute.integers, field); break;
        case onnx::attribute::kFloats: add_floats(attribute.numbers, field); break;
        case onnx::attribute::kTensor:
        case onnx::attribute::kTensors: status = add_tensor(field.bytes, attribute.tensors); break;
        case onnx::attribute::kSparseTensor:
        case onnx::attribute::kSparseTensors: status = sparse_tensor(field.bytes, nullptr); break;
        case onnx::attribute::kGraph:
        case onnx::attribute::kGraphs: status = graph(field.bytes, attribute.graphs.emplace_back(), depth + 1); break;
        default: break;
      }
      if (!status.ok()) return status;
    }
    return reader.broken() ? broken("attribute", attribute.name) : Status();
  }

  static void add_integers(std::vector<int64_t>& list, const Field& field) {
    if (field.wire == Wire::kVarint) list.push_back(field.integer());
    if (field.wire != Wire::kBytes) return;
    std::string_view rest = field.bytes;
    for (uint64_t value = 0; take_varint(rest, value);) list.push_back(static_cast<int64_t>(value));
  }

  static void add_floats(std::vector<float>& list, const Field& field) {
    if (field.wire == Wire::kFixed32) list.push_back(field.number32());
    for (size_t at = 0; at + 4 <= field.bytes.size(); at += 4) {
      float value;
      std::memcpy(&value, field.bytes.data() + at, sizeof value);
      list.push_back(value);
    }
  }

  Status value_info(std::string_view encoded, ValueInfo& value) {
    value.encoded = encoded;
    FieldReader reader(encoded);
    std::string_view type;
    for (Field field; reader.next(field);) {
      if (field.is(onnx::value_info::kName, Wire::kBytes)) value.name = field.bytes;
      if (field.is(onnx::value_info::kType, Wire::kBytes)) type = field.bytes;
    }
    bool good = !reader.broken();
    FieldReader types(type);
    for (Field field; types.next(field);) {
      if (field.is(onnx::type::kTensor, Wire::kBytes)) good = tensor_type(field.bytes, value) && good;
    }
    return good && !types.broken() ? Status() : broken("value", value.name);
  }

  static bool tensor_type(std::string_view encoded, ValueInfo& value) {
    FieldReader reader(encoded);
    bool good = true;
    for (Field field; reader.next(field);) {
      if (field.is(onnx::type::kElementType, Wire::kVarint)) {
        value.type = static_cast<ElementType>(static_cast<int32_t>(field.value));
      }
      if (!field.is(onnx::type::kShape, Wire::kBytes)) continue;
      value.shape.emplace();
      FieldReader dims(field.bytes);
      for (Field dim; dims.next(dim);) {
        if (dim.is(onnx::type::kDim, Wire::kBytes)) good = read_dim(dim.bytes, value.shape->emplace_back()) && good;
      }
      good = good && !dims.broken();
    }
    return good && !reader.broken();
  }

  static bool read_dim(std::string_view encoded, Dim& dim) {
    FieldReader reader(encoded);
    for (Field field; reader.next(field);) {
      if (field.is(onnx::type::kDimValue, Wire::kVarint)) dim.size = field.integer() >= 0 ? field.integer() : -1;
      if (field.is(onnx::type::kDimParameter, Wire::kBytes)) dim.name = field.bytes;
    }
    return !reader.broken();
  }

  Model& model_;
  const std::string& folder_;
};

}  // namespace

Result<Model> parse_model(std::string bytes, const std::string& folder) {
  Model model;
  const std::string_view encoded = keep(model, std::move(bytes));
  if (Status status = ModelReader(model, folder).read(encoded); !status.ok()) return status;
  if (Status status = check_model(model); !status.ok()) return status;
  return model;
}

Result<Model> read_model(const std::string& path) {
  auto bytes = read_file(path);
  if (!bytes.ok()) return bytes.status();
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  return parse_model(std::move(*bytes), folder);
}

}  // namespace polyhead::graph
