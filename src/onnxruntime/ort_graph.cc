#include "ort_graph.h"

#include <algorithm>
#include <unordered_set>

#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

class Reader {
 public:
  explicit Reader(const OrtGraph* graph) : graph_(graph) {}

  Result<OrtModel> read() {
    Status status = read_opsets();
    if (status.ok()) status = read_nodes();
    if (status.ok()) status = read_outputs();
    if (!status.ok()) return status;
    return std::move(out_);
  }

 private:
  Status read_opsets() {
    size_t count = 0;
    Status status = call(abi::kGraph_GetNumOperatorSets, graph_, &count);
    std::vector<const char*> domains(count);
    std::vector<int64_t> versions(count);
    if (status.ok() && count > 0) {
      status = call(abi::kGraph_GetOperatorSets, graph_, domains.data(), versions.data(), count);
    }
    for (size_t i = 0; status.ok() && i < count; ++i) out_.model.opsets.push_back({domains[i], versions[i]});
    constexpr int64_t kInitializersMayBeInputs = 4;
    out_.model.ir_version = kInitializersMayBeInputs;
    return status;
  }

  Status read_nodes() {
    auto nodes = list_of<const OrtNode*>(graph_, abi::kGraph_GetNumNodes, abi::kGraph_GetNodes);
    if (!nodes.ok()) return nodes.status();
    for (const OrtNode* node : *nodes) {
      auto outputs = list_of<const OrtValueInfo*>(node, abi::kNode_GetNumOutputs, abi::kNode_GetOutputs);
      if (!outputs.ok()) return outputs.status();
      for (const OrtValueInfo* output : *outputs) {
        if (output == nullptr) continue;
        const Result<std::string> name = name_of(output);
        if (!name.ok()) return name.status();
        declared_.insert(*name);
        if (Status status = describe(output, *name, out_.model.graph.values); !status.ok()) return status;
      }
    }
    for (const OrtNode* node : *nodes) {
      if (Status status = read_node(node); !status.ok()) return status;
    }
    return {};
  }

  Status read_node(const OrtNode* from) {
    graph::Node node;
    const char *type = "", *domain = "", *name = "";
    Status status = call(abi::kNode_GetOperatorType, from, &type);
    if (status.ok()) status = call(abi::kNode_GetDomain, from, &domain);
    if (status.ok()) status = call(abi::kNode_GetName, from, &name);
    if (!status.ok()) return status;
    node.name = name;
    if (node.name.empty() || !names_.insert(node.name).second) node.name = fresh_name();
    node.op_type = type;
    node.domain = domain;
    auto inputs = list_of<const OrtValueInfo*>(from, abi::kNode_GetNumInputs, abi::kNode_GetInputs);
    auto outputs = list_of<const OrtValueInfo*>(from, abi::kNode_GetNumOutputs, abi::kNode_GetOutputs);
    auto implicit = list_of<const OrtValueInfo*>(from, abi::kNode_GetNumImplicitInputs, abi::kNode_GetImplicitInputs);
    if (!inputs.ok() || !outputs.ok() || !implicit.ok()) return {StatusCode::kInternal, "a node cannot be read"};
    if (!implicit->empty()) {
      node.domain = "polyhead.not_entered";  // nothing is known of what it does with them
      inputs->insert(inputs->end(), implicit->begin(), implicit->end());
    }
    if (status = add_names(*inputs, node.inputs, true); !status.ok()) return status;
    if (status = add_names(*outputs, node.outputs, false); !status.ok()) return status;
    if (status = read_attributes(from, node); !status.ok()) return status;
    out_.nodes.push_back(from);
    out_.model.graph.nodes.push_back(std::move(node));
    return {};
  }

  std::string fresh_name() {
    std::string name = sentence("node ", out_.nodes.size());
    while (!names_.insert(name).second) name += "'";
    return name;
  }

  Status add_names(const std::vector<const OrtValueInfo*>& values, std::vector<std::string>& names, bool are_read) {
    for (const OrtValueInfo* value : values) {
      if (value == nullptr) {
        names.emplace_back();
        continue;
      }
      const Result<std::string> name = name_of(value);
      if (!name.ok()) return name.status();
      names.push_back(*name);
      if (!are_read || name->empty() || !declared_.insert(*name).second) continue;
      if (Status status = declare(value, *name); !status.ok()) return status;
    }
    return {};
  }

  // A value that no node of the graph computes.
  Status declare(const OrtValueInfo* value, const std::string& name) {
    std::vector<graph::ValueInfo> told;
    bool is_constant = false;
    Status status = describe(value, name, told);
    if (status.ok()) status = call(abi::kValueInfo_IsConstantInitializer, value, &is_constant);
    if (!status.ok()) return status;
    graph::Constant constant;
    constant.name = name;
    constant.type = told[0].type;
    int64_t count = 1;
    if (told[0].shape) {
      for (const graph::Dim& dim : *told[0].shape) {
        constant.dims.push_back(dim.size);
        is_constant = is_constant && dim.size >= 0 && !__builtin_mul_overflow(count, dim.size, &count);
      }
    }
    if (!is_constant) {
      out_.model.graph.inputs.push_back(std::move(told[0]));
      return {};
    }
    const size_t bytes = bytes_of(constant.type);
    if (bytes > 0) {  // its data is looked at where it lies: scales, shapes, masks
      const OrtValue* data = nullptr;
      void* elements = nullptr;
      status = call(abi::kValueInfo_GetInitializerValue, value, &data);
      if (status.ok() && data != nullptr)
        status = call(abi::kGetTensorMutableData, const_cast<OrtValue*>(data), &elements);
      if (!status.ok()) return status;
      if (elements != nullptr) constant.data = {static_cast<const char*>(elements), static_cast<size_t>(count) * bytes};
    }
    out_.model.graph.initializers.push_back(std::move(constant));
    return {};
  }

  static size_t bytes_of(graph::ElementType type) {
    DType dtype;
    return dtype_of(type, dtype) ? dtype_size_bytes(dtype) : 0;
  }

  // Adds what is told of a value, if it is a tensor.
  Status describe(const OrtValueInfo* value, const std::string& name, std::vector<graph::ValueInfo>& to) {
    graph::ValueInfo told;
    told.name = name;
    const OrtTypeInfo* type = nullptr;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    Status status = call(abi::kGetValueInfoTypeInfo, value, &type);
    if (status.ok() && type != nullptr) status = call(abi::kCastTypeInfoToTensorInfo, type, &tensor);
    if (status.ok() && tensor != nullptr) {
      abi::ElementType element = abi::ElementType::kUnknown;
      size_t ndim = 0;
      status = call(abi::kGetTensorElementType, tensor, &element);
      if (status.ok()) status = call(abi::kGetDimensionsCount, tensor, &ndim);
      std::vector<int64_t> sizes(ndim);
      std::vector<const char*> names(ndim);
      if (status.ok() && ndim > 0) status = call(abi::kGetDimensions, tensor, sizes.data(), ndim);
      if (status.ok() && ndim > 0) status = call(abi::kGetSymbolicDimensions, tensor, names.data(), ndim);
      if (!status.ok()) return status;
      told.type = element;
      out_.types[name] = told.type;
      // No dims stand for a scalar, and for a shape that is not known.
      if (ndim > 0) told.shape.emplace(ndim);
      for (size_t i = 0; i < ndim; ++i)
        (*told.shape)[i] = {std::max<int64_t>(sizes[i], -1), names[i] == nullptr ? "" : names[i]};
    }
    to.push_back(std::move(told));
    return status;
  }

  Status read_attributes(const OrtNode* from, graph::Node& node) {
    auto attributes = list_of<const OrtOpAttr*>(from, abi::kNode_GetNumAttributes, abi::kNode_GetAttributes);
    if (!attributes.ok()) return attributes.status();
    for (const OrtOpAttr* each : *attributes) {
      if (each == nullptr) continue;
      graph::Attribute attribute;
      const char* name = "";
      abi::AttributeType type = {};
      // A type that the interface has no word for, as a graph: it is left out.
      if (!call(abi::kOpAttr_GetName, each, &name).ok() || !call(abi::kOpAttr_GetType, each, &type).ok()) continue;
      attribute.name = name;
      if (read_value(each, type, attribute)) node.attributes.push_back(std::move(attribute));
    }
    return {};
  }

  template <class T>
  static bool read_list(const OrtOpAttr* from, abi::AttributeType type, std::vector<T>& to) {
    size_t bytes = 0;
    (void)call(abi::kReadOpAttr, from, type, static_cast<void*>(nullptr), size_t{0}, &bytes).ok();  // tells the size
    to.resize(bytes / sizeof(T));
    return to.empty() || call(abi::kReadOpAttr, from, type, static_cast<void*>(to.data()), bytes, &bytes).ok();
  }

  static bool read_value(const OrtOpAttr* from, abi::AttributeType type, graph::Attribute& to) {
    int64_t integer = 0;
    float number = 0;
    size_t bytes = 0;
    std::vector<char> text;
    switch (type) {
      case abi::kInt:
        if (!call(abi::kReadOpAttr, from, type, static_cast<void*>(&integer), sizeof integer, &bytes).ok())
          return false;
        to.integer = integer;
        return true;
      case abi::kFloat:
        if (!call(abi::kReadOpAttr, from, type, static_cast<void*>(&number), sizeof number, &bytes).ok()) return false;
        to.number = number;
        return true;
      case abi::kInts: return read_list(from, type, to.integers);
      case abi::kFloats: return read_list(from, type, to.numbers);
      case abi::kString:
        if (!read_list(from, type, text)) return false;
        to.text = std::string(text.begin(), text.end());
        if (!to.text->empty() && to.text->back() == '\0') to.text->pop_back();
        return true;
    }
    return false;
  }

  Status read_outputs() {
    auto outputs = list_of<const OrtValueInfo*>(graph_, abi::kGraph_GetNumOutputs, abi::kGraph_GetOutputs);
    if (!outputs.ok()) return outputs.status();
    for (const OrtValueInfo* output : *outputs) {
      const Result<std::string> name = name_of(output);
      if (!name.ok()) return name.status();
      if (Status status = describe(output, *name, out_.model.graph.outputs); !status.ok()) return status;
    }
    return {};
  }

  const OrtGraph* graph_;
  OrtModel out_;
  std::unordered_set<std::string> declared_, names_;
};

}  // namespace

Result<std::string> name_of(const OrtValueInfo* value) {
  const char* name = "";
  if (Status status = call(abi::kGetValueInfoName, value, &name); !status.ok()) return status;
  return std::string(name);
}

Result<OrtModel> read_graph(const OrtGraph* graph) { return Reader(graph).read(); }

}  // namespace polyhead::onnxruntime
