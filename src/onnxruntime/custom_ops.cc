// RegisterCustomOps: the operators for sessions that load this library with register_custom_ops_library.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string_view>

#include "core/sentence.h"
#include "operators.h"

namespace polyhead::onnxruntime {
namespace {

struct OurOp : abi::CustomOp {
  const OperatorNames* names;
};
const OperatorNames& names_of(const abi::CustomOp* op) { return *static_cast<const OurOp*>(op)->names; }

struct Kernel {
  Node node;
  Plans plans;
  Arena arena;
};

class KernelAttributes final : public Attributes {
 public:
  explicit KernelAttributes(const OrtKernelInfo* info) : info_(info) {}
  std::optional<int64_t> integer(const char* name) const override {
    int64_t value = 0;
    return call(abi::kKernelInfoGetAttribute_int64, info_, name, &value).ok() ? std::optional(value) : std::nullopt;
  }
  std::optional<float> number(const char* name) const override {
    float value = 0;
    return call(abi::kKernelInfoGetAttribute_float, info_, name, &value).ok() ? std::optional(value) : std::nullopt;
  }
  std::optional<std::string> text(const char* name) const override {
    size_t bytes = 0;  // with the 0 behind it
    if (!call(abi::kKernelInfoGetAttribute_string, info_, name, static_cast<char*>(nullptr), &bytes).ok() || bytes == 0)
      return std::nullopt;
    std::string value(bytes, '\0');
    if (!call(abi::kKernelInfoGetAttribute_string, info_, name, value.data(), &bytes).ok()) return std::nullopt;
    value.resize(bytes - 1);
    return value;
  }

 private:
  const OrtKernelInfo* info_;
};

// Which of the inputs or outputs have a name.
template <class Count, class Name>
uint32_t named(const OrtKernelInfo* info, const Count& count_of, const Name& name_of) {
  size_t count = 0;
  if (!call(count_of, info, &count).ok()) return 0;
  uint32_t bits = 0;
  for (size_t i = 0; i < std::min<size_t>(count, 32); ++i) {
    size_t bytes = 0;
    if (call(name_of, info, i, static_cast<char*>(nullptr), &bytes).ok() && bytes > 1) bits |= uint32_t{1} << i;
  }
  return bits;
}

std::string place(const OrtKernelInfo* info) {
  char name[256] = "";
  size_t bytes = sizeof name;
  return call(abi::kKernelInfo_GetNodeName, info, static_cast<char*>(name), &bytes).ok() ? name : "";
}

// Queries, keys and values are floats.
Status check_types(const OrtKernelInfo* info, uint32_t given) {
  for (size_t i = 0; i < 3; ++i) {
    OwnedType type;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    abi::ElementType element = abi::ElementType::kUnknown;
    if ((given >> i & 1) == 0 || !call(abi::kKernelInfo_GetInputTypeInfo, info, i, type.slot()).ok() ||
        !call(abi::kCastTypeInfoToTensorInfo, static_cast<const OrtTypeInfo*>(type.get()), &tensor).ok() ||
        tensor == nullptr || !call(abi::kGetTensorElementType, tensor, &element).ok()) {
      continue;
    }
    DType dtype;
    if (!dtype_of(element, dtype) || dtype == DType::kBool || dtype == DType::kInt32 || dtype == DType::kInt64) {
      return invalid(sentence("input ", i, " has element type ", static_cast<int32_t>(element),
                              ", must be float32, float16, bfloat16 or float64"));
    }
  }
  return {};
}

class KernelConstants final : public Constants {
 public:
  explicit KernelConstants(const OrtKernelInfo* info) : info_(info) {}
  Status constant(size_t input, Tensor& tensor) const override {
    tensor = {};
    int is_constant = 0;
    const OrtValue* value = nullptr;
    const Status status = call(abi::kKernelInfoGetConstantInput_tensor, info_, input, &is_constant, &value);
    // Beyond the node's inputs it fails.
    return status.ok() && is_constant != 0 && value != nullptr ? tensor_of(value, tensor) : Status();
  }

 private:
  const OrtKernelInfo* info_;
};

OrtStatus* create(const abi::CustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  return guarded([&]() -> Status {
    NodeFacts facts{names_of(op).op};
    facts.given = named(info, abi::kKernelInfo_GetInputCount, abi::kKernelInfo_GetInputName);
    facts.wanted = named(info, abi::kKernelInfo_GetOutputCount, abi::kKernelInfo_GetOutputName);
    Result<Node> node = Node::make(facts, KernelAttributes(info));
    Status status = node.status();
    if (status.ok()) status = check_types(info, facts.given);
    if (status.ok()) status = node->hold(KernelConstants(info));
    if (!status.ok()) {
      return {status.code(), sentence(names_of(op).name, " \"", place(info), "\": ", status.message())};
    }
    auto made = std::make_unique<Kernel>();
    made->node = *node;
    *kernel = made.release();
    return {};
  });
}

OrtStatus* run(void* self, OrtKernelContext* context) {
  return guarded([&] {
    auto* kernel = static_cast<Kernel*>(self);
    Call call(context, kernel->arena);
    return kernel->node.run(call, kernel->plans);
  });
}

class InferenceAttributes final : public Attributes {
 public:
  explicit InferenceAttributes(const OrtShapeInferContext* context) : context_(context) {}
  std::optional<int64_t> integer(const char* name) const override { return read<int64_t>(name, abi::kInt); }
  std::optional<float> number(const char* name) const override { return read<float>(name, abi::kFloat); }
  std::optional<std::string> text(const char*) const override { return std::nullopt; }  // no shape depends on one

 private:
  template <class T>
  std::optional<T> read(const char* name, abi::AttributeType type) const {
    const OrtOpAttr* attribute = nullptr;
    T value = 0;
    size_t needed = 0;
    if (!call(abi::kShapeInferContext_GetAttribute, context_, name, &attribute).ok() || attribute == nullptr)
      return std::nullopt;
    if (!call(abi::kReadOpAttr, attribute, type, static_cast<void*>(&value), sizeof value, &needed).ok())
      return std::nullopt;
    return value;
  }

  const OrtShapeInferContext* context_;
};

std::optional<Shape> shape_of(const OrtTensorTypeAndShapeInfo* info) {
  size_t ndim = 0;
  if (!call(abi::kGetDimensionsCount, info, &ndim).ok() || ndim == 0) return std::nullopt;
  std::vector<int64_t> sizes(ndim);
  std::vector<const char*> symbols(ndim);
  if (!call(abi::kGetDimensions, info, sizes.data(), ndim).ok()) return std::nullopt;
  if (!call(abi::kGetSymbolicDimensions, info, symbols.data(), ndim).ok()) return std::nullopt;
  Shape shape(ndim);
  for (size_t i = 0; i < ndim; ++i) shape[i] = {sizes[i], symbols[i] == nullptr ? "" : symbols[i]};
  return shape;
}

// ONNX Runtime wants a name for each dim that is not known; one that has none gets one that nobody else uses.
Status set_shape(OrtShapeInferContext* context, size_t index, abi::ElementType type, const Shape& shape) {
  OwnedShape info;
  Status status = call(abi::kCreateTensorTypeAndShapeInfo, info.slot());
  if (status.ok()) status = call(abi::kSetTensorElementType, info.get(), type);
  std::vector<int64_t> sizes;
  std::vector<const char*> symbols;
  std::vector<std::string> names;
  static std::atomic<int64_t> num_named = 0;
  for (const Dim& dim : shape) {
    sizes.push_back(dim.size);
    names.push_back(dim.size >= 0 || !dim.name.empty() ? dim.name : sentence("polyhead_dim_", num_named.fetch_add(1)));
  }
  for (const std::string& name : names) symbols.push_back(name.c_str());
  if (status.ok()) status = call(abi::kSetDimensions, info.get(), sizes.data(), sizes.size());
  if (status.ok()) status = call(abi::kSetSymbolicDimensions, info.get(), symbols.data(), symbols.size());
  const OrtTensorTypeAndShapeInfo* made = info.get();
  if (status.ok()) status = call(abi::kShapeInferContext_SetOutputTypeShape, context, index, made);
  return status;
}

OrtStatus* infer_shapes(const abi::CustomOp* op, OrtShapeInferContext* context) {
  return guarded([&]() -> Status {
    size_t count = 0;
    Status status = call(abi::kShapeInferContext_GetInputCount, context, &count);
    std::vector<std::optional<Shape>> inputs(count);
    abi::ElementType type = abi::ElementType::kUnknown;
    for (size_t i = 0; status.ok() && i < count; ++i) {
      OrtTensorTypeAndShapeInfo* info = nullptr;  // the context's
      if (!call(abi::kShapeInferContext_GetInputTypeShape, context, i, &info).ok() || info == nullptr) continue;
      inputs[i] = shape_of(info);
      if (i == 0) status = call(abi::kGetTensorElementType, info, &type);
    }
    if (!status.ok()) return status;
    const auto shapes = output_shapes(names_of(op).op, inputs, InferenceAttributes(context));
    for (size_t i = 0; i < shapes.size(); ++i) {
      const bool is_attention = names_of(op).op == Operator::kAttention;
      const abi::ElementType told = is_attention && i == kDropout ? abi::ElementType::kInt64
                                    : is_attention && i == kLogsumexp && type != abi::ElementType::kFloat64
                                        ? abi::ElementType::kFloat32
                                        : type;
      if (shapes[i].empty()) continue;
      (void)set_shape(context, i, told, shapes[i]).ok();  // fails for outputs that the node does not have
    }
    return {};
  });
}

constexpr OurOp op_of(const OperatorNames& names) {
  OurOp op = {};
  op.version = abi::kOldest;
  op.get_name = [](const abi::CustomOp* self) { return names_of(self).name; };
  op.get_execution_provider = [](const abi::CustomOp*) -> const char* { return nullptr; };
  op.get_input_type = [](const abi::CustomOp*, size_t) {
    return abi::ElementType::kUnknown;
  };                                       // any: Node and runs look
  op.get_output_type = op.get_input_type;  // that of the first input
  op.get_input_count = [](const abi::CustomOp* self) { return names_of(self).num_inputs; };
  op.get_output_count = [](const abi::CustomOp* self) { return names_of(self).num_outputs; };
  op.get_input_presence = [](const abi::CustomOp* self, size_t index) {
    return index < names_of(self).required_inputs ? abi::kRequired : abi::kOptional;
  };
  op.get_output_presence = [](const abi::CustomOp* self, size_t index) {
    return index < names_of(self).required_outputs ? abi::kRequired : abi::kOptional;
  };
  op.get_input_memory = [](const abi::CustomOp*, size_t) { return abi::kDefaultMemory; };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.create = create;
  op.run = run;
  op.infer_shapes = infer_shapes;
  op.get_start_version = [](const abi::CustomOp* self) { return names_of(self).first_version; };
  op.get_end_version = [](const abi::CustomOp* self) { return names_of(self).last_version; };
  op.names = &names;
  return op;
}

constexpr size_t kNumOps = std::size(kOperators);
constexpr std::array<OurOp, kNumOps> kOps = {op_of(kOperators[0]), op_of(kOperators[1]), op_of(kOperators[2]),
                                             op_of(kOperators[3]), op_of(kOperators[4]), op_of(kOperators[5])};

// Made once and kept: a session holds on to them.
Status domain_of(size_t first, OrtCustomOpDomain*& domain) {
  Status status = call(abi::kCreateCustomOpDomain, kOperators[first].domain, &domain);
  for (size_t i = first; status.ok() && i < kNumOps; ++i) {
    if (std::strcmp(kOperators[i].domain, kOperators[first].domain) != 0) continue;
    status = call(abi::kCustomOpDomain_Add, domain, static_cast<const abi::CustomOp*>(&kOps[i]));
  }
  return status;
}

bool is_first_of_domain(size_t at) {
  return std::none_of(kOperators, kOperators + at, [&](const OperatorNames& other) {
    return std::strcmp(other.domain, kOperators[at].domain) == 0;
  });
}

Status register_ops(OrtSessionOptions* options) {
  struct Domains {
    Status status;
    OrtCustomOpDomain* of[kNumOps] = {};
  };
  static const Domains domains = [] {
    Domains made;
    for (size_t i = 0; made.status.ok() && i < kNumOps; ++i) {
      if (is_first_of_domain(i)) made.status = domain_of(i, made.of[i]);
    }
    return made;
  }();
  // "polyhead": our own domain alone, beside the execution provider, which leaves to ONNX Runtime what it cannot do. "all":
  // com.microsoft too, where ONNX Runtime then misses operators of its own that its optimizer puts in, as FusedMatMul.
  char entry[32] = "";
  size_t bytes = sizeof entry;
  if (!call(abi::kGetSessionConfigEntry, options, "polyhead.domains", static_cast<char*>(entry), &bytes).ok())
    entry[0] = '\0';
  const std::string_view asked = entry;
  const auto is_asked = [&](std::string_view domain) {
    return asked.empty() ? domain != "com.microsoft" : asked == "all" || asked == domain;
  };
  Status status = domains.status;
  for (size_t i = 0; status.ok() && i < kNumOps; ++i) {
    if (domains.of[i] == nullptr || !is_asked(kOperators[i].domain)) continue;
    status = call(abi::kAddCustomOpDomain, options, domains.of[i]);
  }
  return status;
}

}  // namespace
}  // namespace polyhead::onnxruntime

extern "C" POLYHEAD_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                     const polyhead::onnxruntime::abi::ApiBase* base) {
  using namespace polyhead::onnxruntime;
  if (!set_api(base, abi::kOldest)) {
    // Its first function has been at its place since the first version.
    const OrtApi* oldest = base->get_api(1);
    return oldest == nullptr ? nullptr
                             : abi::kCreateStatus(oldest, abi::kFail, "polyhead: ONNX Runtime is older than 1.19");
  }
  return guarded([&] { return register_ops(options); });
}
