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

bool dtype_of(abi::ElementType type, DType& dtype) {
  switch (type) {
    case abi::ElementType::kFloat32: return dtype = DType::kFloat32, true;
    case abi::ElementType::kFloat64: return dtype = DType::kFloat64, true;
    case abi::ElementType::kFloat16: return dtype = DType::kFloat16, true;
    case abi::ElementType::kBFloat16: return dtype = DType::kBFloat16, true;
    case abi::ElementType::kBool: return dtype = DType::kBool, true;
    case abi::ElementType::kInt32: return dtype = DType::kInt32, true;
    case abi::ElementType::kInt64: return dtype = DType::kInt64, true;
    default: return false;
  }
}

}  // namespace polyhead::onnxruntime
