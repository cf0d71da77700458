#include "api.h"

#include <atomic>

namespace polyhead::onnxruntime {
namespace {

std::atomic<const OrtApi*> the_api = nullptr;

}  // namespace

bool set_api(const abi::ApiBase* base, uint32_t version) {
  const OrtApi* table = base->get_api(version);
  const OrtApi* before = nullptr;
  return table != nullptr && (the_api.compare_exchange_strong(before, table) || before == table);
}

const OrtApi* api() { return the_api.load(std::memory_order_relaxed); }

Status take(OrtStatus* failure) {
  if (failure == nullptr) return {};
  Status status(StatusCode::kInternal, abi::kGetErrorMessage(api(), failure));
  abi::kReleaseStatus(api(), failure);
  return status;
}

OrtStatus* failure_of(const Status& status) {
  if (status.ok()) return nullptr;
  const abi::Code code = status.code() == StatusCode::kInvalidArgument ? abi::kInvalidArgument
                         : status.code() == StatusCode::kUnsupported   ? abi::kNotImplemented
                                                                       : abi::kFail;
  return abi::kCreateStatus(api(), code, ("polyhead: " + status.message()).c_str());
}

namespace {

constexpr struct {
  abi::ElementType type;
  DType dtype;
} kTypes[] = {
    {abi::ElementType::kFloat32, DType::kFloat32}, {abi::ElementType::kFloat64, DType::kFloat64},
    {abi::ElementType::kFloat16, DType::kFloat16}, {abi::ElementType::kBFloat16, DType::kBFloat16},
    {abi::ElementType::kBool, DType::kBool},       {abi::ElementType::kInt32, DType::kInt32},
    {abi::ElementType::kInt64, DType::kInt64},
};

}  // namespace

bool dtype_of(abi::ElementType type, DType& dtype) {
  for (const auto& each : kTypes) {
    if (each.type == type) return dtype = each.dtype, true;
  }
  return false;
}

abi::ElementType type_of(DType dtype) {
  for (const auto& each : kTypes) {
    if (each.dtype == dtype) return each.type;
  }
  return abi::ElementType::kUnknown;
}

}  // namespace polyhead::onnxruntime
