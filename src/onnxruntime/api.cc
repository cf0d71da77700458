#include "api.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace polyhead::onnxruntime {
namespace {

std::atomic<const OrtApi*> the_api = nullptr;
std::atomic<uint32_t> newest_version = 0;  // of its tables

// 32 of "1.32.0". To ask for a table that it does not have would make it write to stderr.
uint32_t minor_of(const char* version) {
  const char* dot = std::strchr(version, '.');
  return dot == nullptr ? 0 : static_cast<uint32_t>(std::strtoul(dot + 1, nullptr, 10));
}

}  // namespace

bool set_api(const abi::ApiBase* base, uint32_t version) {
  const OrtApi* table = base->get_api(version);
  const OrtApi* before = nullptr;
  newest_version = minor_of(base->get_version());
  return table != nullptr && (the_api.compare_exchange_strong(before, table) || before == table);
}

bool api_has(uint32_t version) { return newest_version.load(std::memory_order_relaxed) >= version; }

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
