// CreateEpFactories: the execution provider "polyhead" for sessions that add it to a device, the CPU. It is shown each
// graph when a session loads its model, claims what find_claims() finds, and computes that; all else stays with ONNX
// Runtime.
#include <algorithm>
#include <memory>
#include <unordered_map>

#include "claims.h"
#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

constexpr const char* kName = "polyhead";
constexpr int32_t kInformation = 1;  // ORT_LOGGING_LEVEL_INFO
constexpr int32_t kIsCpu = 0;        // OrtHardwareDeviceType_CPU

struct Compiled : abi::NodeComputeInfo {
  Node node;
  Wiring wiring;
  Plans plans;
  Arena arena;
};

OrtStatus* compute(abi::NodeComputeInfo* self, void*, OrtKernelContext* context) {
  return guarded([&] {
    auto* compiled = static_cast<Compiled*>(self);
    Call call(context, compiled->arena, &compiled->wiring);
    if (Status status = call.tell_shapes(); !status.ok()) return status;
    return compiled->node.run(call, compiled->plans);
  });
}

// What the nodes of a group read and is known when the session is made.
class GroupConstants final : public Constants {
 public:
  GroupConstants(const OrtGraph* group, const std::vector<std::string>& names) : group_(group), names_(names) {}

  Status constant(size_t input, Tensor& tensor) const override {
    tensor = {};
    if (input >= names_.size() || names_[input].empty()) return {};
    const auto nodes = list_of<const OrtNode*>(group_, abi::kGraph_GetNumNodes, abi::kGraph_GetNodes);
    if (!nodes.ok()) return nodes.status();
    for (const OrtNode* node : *nodes) {
      const auto values = list_of<const OrtValueInfo*>(node, abi::kNode_GetNumInputs, abi::kNode_GetInputs);
      if (!values.ok()) return values.status();
      for (const OrtValueInfo* value : *values) {
        const Result<std::string> name = value == nullptr ? Result<std::string>(std::string()) : name_of(value);
        if (!name.ok() || *name != names_[input]) continue;
        const OrtValue* data = nullptr;
        const Status status = call(abi::kValueInfo_GetInitializerValue, value, &data);
        if (status.ok() && data != nullptr) return tensor_of(data, tensor);
      }
    }
    return {StatusCode::kInternal, sentence("a group has no constant ", names_[input])};
  }

 private:
  const OrtGraph* group_;
  const std::vector<std::string>& names_;
};

// The provider's option `layers`: "0" or "1"; without it, those that pay.
Status read_layers(const OrtSessionOptions* options, Layers& layers) {
  char text[8] = "";
  size_t bytes = sizeof text;
  if (options == nullptr ||
      !call(abi::kGetSessionConfigEntry, options, "ep.polyhead.layers", static_cast<char*>(text), &bytes).ok())
    return {};
  const std::string_view told = text;
  if (told != "0" && told != "1") return invalid(sentence("layers is \"", told, "\", must be 0 or 1"));
  layers = told == "1" ? Layers::kAll : Layers::kNone;
  return {};
}

class SessionProvider : public abi::Provider {
 public:
  SessionProvider(const OrtLogger* logger, Layers layers) : abi::Provider(), logger_(logger), layers_(layers) {
    version = abi::kOldestWithProviders;
    get_name = [](const abi::Provider*) { return kName; };
    get_capability = [](abi::Provider* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info) {
      return guarded([&] { return static_cast<SessionProvider*>(self)->claim(graph, info); });
    };
    compile = [](abi::Provider* self, const OrtGraph** groups, const OrtNode** nodes, size_t count,
                 abi::NodeComputeInfo** infos, OrtNode**) {
      return guarded([&]() -> Status {
        for (size_t i = 0; i < count; ++i) {
          Status status = static_cast<SessionProvider*>(self)->compile_node(groups[i], nodes[i], infos[i]);
          if (!status.ok()) return status;
        }
        return {};
      });
    };
    release_compute_infos = [](abi::Provider*, abi::NodeComputeInfo** infos, size_t count) {
      for (size_t i = 0; i < count; ++i) delete static_cast<Compiled*>(infos[i]);
    };
  }

 private:
  Status claim(const OrtGraph* graph, OrtEpGraphSupportInfo* info) {
    Result<OrtModel> model = read_graph(graph);
    if (!model.ok()) return model.status();
    Claims found = find_claims(*model, layers_);
    for (const std::string& line : found.told) {
      const std::string text = sentence("polyhead: ", line);
      (void)call(abi::kLogger_LogMessage, logger_, kInformation, text.c_str(), __FILE__, __LINE__, __func__).ok();
    }
    const OrtEpApi* providers = abi::kGetEpApi(api());
    for (Claim& each : found.claims) {
      std::vector<const OrtNode*> nodes;
      for (size_t at : each.nodes) nodes.push_back(model->nodes[at]);
      const abi::FusionOptions options = {abi::kOldestWithProviders, !each.constants.empty()};
      Status status =
          take(abi::kEpGraphSupportInfo_AddNodesToFuse(providers, info, nodes.data(), nodes.size(), &options));
      if (!status.ok()) return status;
      auto shared = std::make_shared<Claim>(std::move(each));
      for (const auto& output : shared->wiring.outputs) {
        if (output) claims_[output->name] = shared;
      }
    }
    return {};
  }

  // The claim that became this node: it is told by a value that it computes.
  Status compile_node(const OrtGraph* group, const OrtNode* node, abi::NodeComputeInfo*& info) {
    auto inputs = list_of<const OrtValueInfo*>(node, abi::kNode_GetNumInputs, abi::kNode_GetInputs);
    auto outputs = list_of<const OrtValueInfo*>(node, abi::kNode_GetNumOutputs, abi::kNode_GetOutputs);
    if (!inputs.ok() || !outputs.ok()) return {StatusCode::kInternal, "a group of nodes cannot be read"};
    auto made = std::make_unique<Compiled>();
    made->version = abi::kOldestWithProviders;
    made->create_state = [](abi::NodeComputeInfo*, OrtNodeComputeContext*, void** state) -> OrtStatus* {
      *state = nullptr;
      return nullptr;
    };
    made->compute = compute;
    made->release_state = [](abi::NodeComputeInfo*, void*) {};
    std::unordered_map<std::string, size_t> places, places_out;
    for (size_t i = 0; i < inputs->size(); ++i) {
      if ((*inputs)[i] == nullptr) continue;
      const Result<std::string> name = name_of((*inputs)[i]);
      if (name.ok()) places.emplace(*name, i);
    }
    std::shared_ptr<Claim> claim;
    for (size_t i = 0; i < outputs->size(); ++i) {
      if ((*outputs)[i] == nullptr) continue;
      const Result<std::string> name = name_of((*outputs)[i]);
      if (!name.ok()) continue;
      places_out.emplace(*name, i);
      if (const auto at = claims_.find(*name); at != claims_.end()) claim = at->second;
    }
    if (!claim) return {StatusCode::kInternal, "a group of nodes was not claimed"};
    made->node = claim->node;
    made->wiring = std::move(claim->wiring);
    if (Status status = made->node.hold(GroupConstants(group, claim->constants)); !status.ok()) return status;
    for (const auto& input : made->wiring.inputs) {
      if (input && !find_places(places, *input))
        return {StatusCode::kInternal, sentence("a group does not read ", input->name)};
    }
    for (const auto& output : made->wiring.outputs) {
      if (!output) continue;
      const auto at = places_out.find(output->name);
      if (at == places_out.end()) return {StatusCode::kInternal, sentence("a group does not give ", output->name)};
      output->index = at->second;
    }
    for (ToldShape& shape : made->wiring.shapes) {
      const auto at = places_out.find(shape.name);
      if (at == places_out.end()) return {StatusCode::kInternal, sentence("a group does not give ", shape.name)};
      shape.index = at->second;
      for (ToldShape::Size& each : shape.sizes) {
        for (ToldShape::Part& part : each.parts) {
          const auto from = places.find(part.of);
          if (from == places.end()) return {StatusCode::kInternal, sentence("a group does not read ", part.of)};
          part.index = from->second;
        }
      }
    }
    info = made.release();
    return {};
  }

  static bool find_places(const std::unordered_map<std::string, size_t>& places, Source& source) {
    if (source.kind == Source::kTensor) {
      const auto at = places.find(source.name);
      if (at == places.end()) return false;
      source.index = at->second;
    }
    return std::all_of(source.of.begin(), source.of.end(), [&](Source& each) { return find_places(places, each); });
  }

  const OrtLogger* logger_;
  Layers layers_;
  std::unordered_map<std::string, std::shared_ptr<Claim>> claims_;
};

abi::ProviderFactory factory() {
  abi::ProviderFactory made = {};
  made.version = abi::kOldestWithProviders;
  made.get_name = [](const abi::ProviderFactory*) { return kName; };
  made.get_vendor = made.get_name;
  made.get_version = [](const abi::ProviderFactory*) { return POLYHEAD_VERSION; };
  made.get_vendor_id = [](const abi::ProviderFactory*) { return uint32_t{0}; };
  made.get_supported_devices = [](abi::ProviderFactory* self, const OrtHardwareDevice* const* devices, size_t count,
                                  OrtEpDevice** ours, size_t most, size_t* num_ours) -> OrtStatus* {
    *num_ours = 0;
    const OrtKeyValuePairs* nothing = nullptr;
    for (size_t i = 0; i < count && *num_ours < most; ++i) {
      if (abi::kHardwareDevice_Type(api(), devices[i]) != kIsCpu) continue;
      OrtStatus* failure =
          abi::kCreateEpDevice(abi::kGetEpApi(api()), self, devices[i], nothing, nothing, &ours[*num_ours]);
      if (failure != nullptr) return failure;
      ++*num_ours;
    }
    return nullptr;
  };
  made.create = [](abi::ProviderFactory*, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, size_t,
                   const OrtSessionOptions* options, const OrtLogger* logger, abi::Provider** provider) {
    return guarded([&]() -> Status {
      Layers layers = Layers::kPaying;
      Status status = read_layers(options, layers);
      if (status.ok()) *provider = new SessionProvider(logger, layers);
      return status;
    });
  };
  made.release = [](abi::ProviderFactory*, abi::Provider* provider) { delete static_cast<SessionProvider*>(provider); };
  made.create_allocator = [](abi::ProviderFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                             abi::Allocator** allocator) -> OrtStatus* {
    *allocator = nullptr;  // the CPU's own
    return nullptr;
  };
  made.release_allocator = [](abi::ProviderFactory*, abi::Allocator*) {};
  made.create_data_transfer = [](abi::ProviderFactory*, void** transfer) -> OrtStatus* {
    *transfer = nullptr;
    return nullptr;
  };
  made.is_stream_aware = [](const abi::ProviderFactory*) { return false; };
  return made;
}

}  // namespace
}  // namespace polyhead::onnxruntime

extern "C" {

POLYHEAD_API OrtStatus* CreateEpFactories(const char*, const polyhead::onnxruntime::abi::ApiBase* base,
                                          const OrtLogger*, polyhead::onnxruntime::abi::ProviderFactory** factories,
                                          size_t most, size_t* count) {
  using namespace polyhead::onnxruntime;
  *count = 0;
  if (!set_api(base, abi::kOldestWithProviders)) {
    return abi::kCreateStatus(base->get_api(1), abi::kFail,
                              "polyhead: ONNX Runtime is older than 1.23, or loaded twice");
  }
  if (most < 1)
    return abi::kCreateStatus(api(), abi::kInvalidArgument, "polyhead: there is no room for an execution provider");
  static abi::ProviderFactory the_factory = factory();
  factories[(*count)++] = &the_factory;
  return nullptr;
}

POLYHEAD_API OrtStatus* ReleaseEpFactory(polyhead::onnxruntime::abi::ProviderFactory*) { return nullptr; }
}
