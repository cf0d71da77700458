// ONNX files -> Model.
#include <algorithm>
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

// The first fault stays; what is read behind it is thrown away.
class ModelReader {
 public:
  ModelReader(Model& model, const std::string& folder) : model_(model), folder_(folder) {}

  Status read(std::string_view encoded) {
    model_.encoded = encoded;
    bool has_graph = false;
    each_field("the file", "", encoded, [&](const Field& field) {
      if (field.is(onnx::model::kIrVersion, Wire::kVarint)) model_.ir_version = field.integer();
      if (field.is(onnx::model::kOpsetImport, Wire::kBytes)) opset(field.bytes);
      model_.num_functions += field.is(onnx::model::kFunctions, Wire::kBytes);
      if (!field.is(onnx::model::kGraph, Wire::kBytes)) return;
      if (std::exchange(has_graph, true)) return refuse(invalid("the model has two graphs, must have one"));
      graph(field.bytes, model_.graph, 0);
    });
    if (!has_graph) refuse(invalid("the model has no graph: this is not an ONNX file"));
    return status_;
  }

 private:
  void refuse(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  // Calls visit(field) for the fields of a message, up to the first fault; `name` may be among them.
  template <class Visit>
  void each_field(const char* what, const std::string& name, std::string_view encoded, const Visit& visit) {
    FieldReader reader(encoded);
    for (Field field; status_.ok() && reader.next(field);) visit(field);
    if (!reader.broken()) return;
    refuse(invalid(sentence("the model is truncated or no ONNX file: ", what, name.empty() ? "" : " \"", name,
                            name.empty() ? "" : "\"", " is not a whole message")));
  }

  void opset(std::string_view encoded) {
    OpsetImport import;
    each_field("an opset import", "", encoded, [&](const Field& field) {
      if (field.is(onnx::opset::kDomain, Wire::kBytes)) import.domain = field.bytes;
      if (field.is(onnx::opset::kVersion, Wire::kVarint)) import.version = field.integer();
    });
    if (import.domain == "ai.onnx") import.domain.clear();
    model_.opsets.push_back(std::move(import));
  }

  void graph(std::string_view encoded, Graph& graph, int depth) {
    if (depth > kDeepest)
      return refuse(invalid(sentence("the model has bodies inside bodies, more than ", kDeepest, " deep")));
    graph.encoded = encoded;
    each_field("the graph", graph.name, encoded, [&](const Field& field) {
      if (field.wire != Wire::kBytes) return;
      switch (field.number) {
        case onnx::graph::kName: graph.name = field.bytes; break;
        case onnx::graph::kNode: node(field.bytes, graph.nodes.emplace_back(), depth); break;
        case onnx::graph::kInput: value_info(field.bytes, graph.inputs.emplace_back()); break;
        case onnx::graph::kOutput: value_info(field.bytes, graph.outputs.emplace_back()); break;
        case onnx::graph::kValueInfo: value_info(field.bytes, graph.values.emplace_back()); break;
        case onnx::graph::kInitializer: tensor(field.bytes, graph.initializers); break;
        case onnx::graph::kSparseInitializer: sparse_tensor(field.bytes, &graph); break;
        default: break;
      }
    });
  }

  void tensor(std::string_view encoded, std::vector<Constant>& tensors) {
    auto constant = read_tensor(model_, encoded, folder_);
    if (!constant.ok()) return refuse(constant.status());
    tensors.push_back(std::move(*constant));
  }

  // What it names is a value that is there; its elements are nothing that fusion asks for.
  void sparse_tensor(std::string_view encoded, Graph* graph) {
    each_field("a sparse tensor", "", encoded, [&](const Field& field) {
      if (field.wire != Wire::kBytes || field.number > onnx::sparse_tensor::kIndices) return;
      std::vector<Constant> parts;
      tensor(field.bytes, parts);
      if (field.number != onnx::sparse_tensor::kValues || graph == nullptr || parts.empty()) return;
      graph->initializers.push_back({parts[0].name, parts[0].type, {}, {}, {}});
    });
  }

  void node(std::string_view encoded, Node& node, int depth) {
    node.encoded = encoded;
    each_field("node", node.name, encoded, [&](const Field& field) {
      if (field.wire != Wire::kBytes) return;
      switch (field.number) {
        case onnx::node::kInput: node.inputs.emplace_back(field.bytes); break;
        case onnx::node::kOutput: node.outputs.emplace_back(field.bytes); break;
        case onnx::node::kName: node.name = field.bytes; break;
        case onnx::node::kOpType: node.op_type = field.bytes; break;
        case onnx::node::kDomain: node.domain = field.bytes == "ai.onnx" ? "" : field.bytes; break;
        case onnx::node::kAttribute: attribute(field.bytes, node.attributes.emplace_back(), depth); break;
        default: break;
      }
    });
  }

  void attribute(std::string_view encoded, Attribute& attribute, int depth) {
    attribute.encoded = encoded;
    each_field("attribute", attribute.name, encoded, [&](const Field& field) {
      switch (field.number) {
        case onnx::attribute::kName: attribute.name = field.bytes; break;
        case onnx::attribute::kFloat: attribute.number = field.number32(); break;
        case onnx::attribute::kInt: attribute.integer = field.integer(); break;
        case onnx::attribute::kString: attribute.text = std::string(field.bytes); break;
        case onnx::attribute::kInts: add_integers(field, attribute.integers); break;
        case onnx::attribute::kFloats: add_floats(field, attribute.numbers); break;
        case onnx::attribute::kTensor:
        case onnx::attribute::kTensors: tensor(field.bytes, attribute.tensors); break;
        case onnx::attribute::kSparseTensor:
        case onnx::attribute::kSparseTensors: sparse_tensor(field.bytes, nullptr); break;
        case onnx::attribute::kGraph:
        case onnx::attribute::kGraphs: graph(field.bytes, attribute.graphs.emplace_back(), depth + 1); break;
        default: break;
      }
    });
  }

  static void add_floats(const Field& field, std::vector<float>& list) {
    if (field.wire == Wire::kFixed32) list.push_back(field.number32());
    for (size_t at = 0; at + 4 <= field.bytes.size(); at += 4) {
      float value;
      std::memcpy(&value, field.bytes.data() + at, sizeof value);
      list.push_back(value);
    }
  }

  void value_info(std::string_view encoded, ValueInfo& value) {
    value.encoded = encoded;
    const auto within = [&](std::string_view message, const auto& visit) {
      each_field("value", value.name, message, visit);
    };
    const auto dim = [&](const Field& field) {
      Dim& last = value.shape->back();
      if (field.is(onnx::type::kDimValue, Wire::kVarint)) last.size = std::max<int64_t>(field.integer(), -1);
      if (field.is(onnx::type::kDimParameter, Wire::kBytes)) last.name = field.bytes;
    };
    const auto dims = [&](const Field& field) {
      if (!field.is(onnx::type::kDim, Wire::kBytes)) return;
      value.shape->emplace_back();
      within(field.bytes, dim);
    };
    const auto tensor_type = [&](const Field& field) {
      if (field.is(onnx::type::kElementType, Wire::kVarint)) {
        value.type = static_cast<ElementType>(static_cast<int32_t>(field.value));
      }
      if (!field.is(onnx::type::kShape, Wire::kBytes)) return;
      value.shape.emplace();
      within(field.bytes, dims);
    };
    const auto type = [&](const Field& field) {
      if (field.is(onnx::type::kTensor, Wire::kBytes)) within(field.bytes, tensor_type);
    };
    within(encoded, [&](const Field& field) {
      if (field.is(onnx::value_info::kName, Wire::kBytes)) value.name = field.bytes;
      if (field.is(onnx::value_info::kType, Wire::kBytes)) within(field.bytes, type);
    });
  }

  Model& model_;
  const std::string& folder_;
  Status status_;
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
