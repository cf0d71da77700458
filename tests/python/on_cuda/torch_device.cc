// A CUDA device for torch's build for the CPU, as far as polyhead's operators and autograd need one: it has one stream,
// whose handle a test chooses, and memory of tensors that tests make. See device.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

static void* stream_handle = nullptr;

extern "C" void torch_device_set_stream(void* handle) { stream_handle = handle; }

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return {kCuda, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
  void* getStreamNativeHandle(const c10::Stream) const override { return stream_handle; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar registrar(kCuda, new Guard);

struct CUDAHooks final : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) { return kCuda; }
}  // namespace accelerator
}  // namespace at
