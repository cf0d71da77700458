// Layers and blocks whole on the simulated device, or, where that is linked, a real one (lent.h), on a stream of their own:
// the tests of the CPU's are run on it (tests/layer/device_under_test.h).
#include <cuda_runtime_api.h>

#include "device_under_test.h"
#include "lent.h"

namespace polyhead::testing {
namespace {

void* stream() {
  static cudaStream_t made = nullptr;
  if (made == nullptr) static_cast<void>(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return made;
}

class LoanToCuda : public Loan {
 public:
  void lend(Tensor& t, bool written) override { lent_->lend(t, written); }
  void* lend(void* memory, size_t bytes, bool written) override {
    if (bytes == 0) return memory;
    Tensor view(memory, DType::kBool, {static_cast<int64_t>(bytes)});
    lent_->lend(view, written);
    return view.data;
  }
  void* lend_scratch(void* memory, size_t bytes) override {
    lent_->lend(memory, bytes);
    return memory;
  }
  std::string finish() override {
    const cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream()));
    lent_ = nullptr;
    const std::string fault = take_fault();
    if (error == cudaSuccess) return fault;
    static_cast<void>(cudaGetLastError());
    return std::string(cudaGetErrorString(error)) + ": " + fault;
  }

 private:
  std::unique_ptr<Lent> lent_ = std::make_unique<Lent>();
};

const bool kUnderTest = [] {
  device_under_test = {Device::kCuda, "cuda_sm80", stream, [] { return std::unique_ptr<Loan>(new LoanToCuda); }};
  return true;
}();

}  // namespace
}  // namespace polyhead::testing
