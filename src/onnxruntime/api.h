// ONNX Runtime's functions, with errors as ours, and ours as its.
#pragma once

#include <new>
#include <utility>

#include "abi.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::onnxruntime {

// The table of the ONNX Runtime that loaded us. False: it is too old, or another one loaded us before.
bool set_api(const abi::ApiBase* base, uint32_t version);
const OrtApi* api();
bool api_has(uint32_t version);

// Calls a function of the table that may fail.
Status take(OrtStatus* failure);
template <class... P, class... A>
Status call(const abi::Function<OrtStatus*(P...)>& function, A... arguments) {
  return take(function(api(), arguments...));
}

// A Status for ONNX Runtime; null if it is ok.
OrtStatus* failure_of(const Status& status);

// What ONNX Runtime calls: no exception leaves it, and none but that of memory that runs out is thrown inside.
template <class F>
OrtStatus* guarded(F&& f) {
  try {
    return failure_of(f());
  } catch (const std::bad_alloc&) {
    return failure_of({StatusCode::kOutOfMemory, "out of memory"});
  }
}

// Element types that we know. False for others.
bool dtype_of(abi::ElementType type, DType& dtype);
abi::ElementType type_of(DType dtype);  // kUnknown for others

// What is released by a function of the table.
template <auto Release, class T>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (pointer_ != nullptr) Release(api(), pointer_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T** slot() { return &pointer_; }
  T* get() const { return pointer_; }

 private:
  T* pointer_ = nullptr;
};
using OwnedShape = Owned<abi::kReleaseTensorTypeAndShapeInfo, OrtTensorTypeAndShapeInfo>;
using OwnedType = Owned<abi::kReleaseTypeInfo, OrtTypeInfo>;

}  // namespace polyhead::onnxruntime
