// What calls of cuda_sm80 say of a machine, of memory and of streams that will not do, in C++ and C: nothing is launched.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "polyhead/attention.h"
#include "polyhead/cuda.h"
#include "polyhead/kernels.h"
#include "polyhead/polyhead.h"
#include "sim/cudart.h"

namespace polyhead {
namespace {

const std::vector<cuda_sim::SimulatedDevice> kAsBefore = {{}};

class CudaCall : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(polyhead_attention_desc_init(&desc_, sizeof desc_), POLYHEAD_OK);
    desc_.seqlen_q = 5, desc_.seqlen_k = 70, desc_.head_dim = desc_.head_dim_v = 16;
    ASSERT_EQ(polyhead_plan_options_init(&options_, sizeof options_), POLYHEAD_OK);
    options_.device = POLYHEAD_CUDA;
  }

  void TearDown() override {
    polyhead_attention_plan_destroy(plan_);
    for (void* at : memory_) EXPECT_EQ(cudaFree(at), cudaSuccess);
    cuda_sim::set_devices(kAsBefore);
    cuda_sim::set_driver_version(CUDART_VERSION);
    static_cast<void>(cudaGetLastError());
  }

  // "" or why no plan can be made.
  std::string no_plan() {
    polyhead_attention_plan* made = nullptr;
    if (polyhead_attention_plan_create(&desc_, &options_, &made) != POLYHEAD_OK) return polyhead_last_error();
    polyhead_attention_plan_destroy(made);
    return "";
  }

  polyhead_tensor tensor(std::vector<int64_t> dims) {
    polyhead_tensor t = {};
    t.device = POLYHEAD_CUDA, t.ndim = static_cast<int32_t>(dims.size());
    int64_t stride = 1;
    for (size_t n = dims.size(); n-- > 0; stride *= dims[n]) t.dims[n] = dims[n], t.strides[n] = stride;
    EXPECT_EQ(cudaMalloc(&t.data, static_cast<size_t>(4 * stride)), cudaSuccess);
    memory_.push_back(t.data);
    EXPECT_EQ(cudaMemsetAsync(t.data, 0, static_cast<size_t>(4 * stride), nullptr), cudaSuccess);
    return t;
  }

  // A plan, and the tensors of a forward and a backward call.
  void prepare() {
    ASSERT_EQ(polyhead_attention_plan_create(&desc_, &options_, &plan_), POLYHEAD_OK) << polyhead_last_error();
    ASSERT_EQ(polyhead_backward_args_init(&backward_, sizeof backward_), POLYHEAD_OK);
    ASSERT_EQ(polyhead_forward_args_init(&args_, sizeof args_), POLYHEAD_OK);
    args_.query = tensor({1, 5, 1, 16});
    args_.key = tensor({1, 70, 1, 16}), args_.value = tensor({1, 70, 1, 16});
    args_.out = tensor({1, 5, 1, 16}), args_.logsumexp = tensor({1, 1, 5});
    backward_.grad_out = tensor({1, 5, 1, 16}), backward_.grad_key = tensor({1, 70, 1, 16});
    const auto bytes = static_cast<int64_t>(polyhead_attention_plan_backward_workspace_bytes(plan_));
    args_.workspace = tensor({bytes / 4}).data;
    args_.workspace_bytes = static_cast<size_t>(bytes);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  std::string forward() {
    return polyhead_attention_forward(plan_, &args_) == POLYHEAD_OK ? "" : polyhead_last_error();
  }
  std::string backward() {
    backward_.forward = &args_;
    return polyhead_attention_backward(plan_, &backward_) == POLYHEAD_OK ? "" : polyhead_last_error();
  }

  polyhead_attention_desc desc_;
  polyhead_plan_options options_;
  polyhead_attention_plan* plan_ = nullptr;
  polyhead_forward_args args_;
  polyhead_backward_args backward_;
  std::vector<void*> memory_;
};

TEST_F(CudaCall, SaysWhatTheMachineLacks) {
  const auto expect = [&](const std::string& reason) {
    EXPECT_EQ(no_plan(), "no kernel can compute this: cuda_sm80 (" + reason + ")");
    AttentionDesc desc;
    desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 16;
    std::string told;
    for (const KernelReason& each : explain(desc).reasons) {
      if (std::string(each.kernel) == "cuda_sm80") told = each.reason;
    }
    EXPECT_EQ(told, reason);
    EXPECT_EQ(cuda_machine().why_not, reason);
    for (const std::string& name : kernels()) EXPECT_NE(name, "cuda_sm80");
  };
  const int newest = CUDART_VERSION / 1000;
  cuda_sim::set_driver_version(0);
  expect("no NVIDIA driver is installed here");
  cuda_sim::set_driver_version(1000 * (newest - 1) + 40);
  expect("the NVIDIA driver serves CUDA " + std::to_string(newest - 1) +
         ".4 at most, these kernels were built with CUDA " + std::to_string(newest) + "." +
         std::to_string(CUDART_VERSION % 1000 / 10));
  cuda_sim::set_driver_version(CUDART_VERSION);
  cuda_sim::set_devices({});
  expect("the NVIDIA driver finds no GPU here");
  cuda_sim::set_devices({{"old", 7, 5}});
  expect("the GPU's compute capability is 7.5, takes 8.0 and up");
  cuda_sim::set_devices(kAsBefore);
  EXPECT_EQ(no_plan(), "");
  EXPECT_EQ(cuda_machine().why_not, "");
}

TEST_F(CudaCall, AsksTheCurrentDevice) {
  cuda_sim::set_devices({{"old", 7, 5, size_t{8} << 30}, {"new", 9, 0, size_t{80} << 30}});
  const CudaMachine machine = cuda_machine();
  EXPECT_EQ(machine.why_not, "");
  ASSERT_EQ(machine.devices.size(), 2u);
  EXPECT_EQ(machine.devices[0].why_not, "the GPU's compute capability is 7.5, takes 8.0 and up");
  EXPECT_EQ(machine.devices[1].why_not, "");
  EXPECT_EQ(machine.devices[1].name, "new");
  EXPECT_EQ(machine.devices[1].capability_major, 9);
  EXPECT_EQ(machine.devices[0].memory_bytes, size_t{8} << 30);
  EXPECT_NE(no_plan(), "");
  ASSERT_EQ(*set_cuda_device(1), 0);
  EXPECT_EQ(no_plan(), "");
  EXPECT_EQ(set_cuda_device(2).status().message(), "CUDA device 2 cannot be used: no such device");
  ASSERT_EQ(*set_cuda_device(0), 1);
}

TEST_F(CudaCall, SaysWhyAnotherDevicesKernelIsNotTaken) {
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 16;
  for (const auto& [device, kernel, reason] :
       {std::tuple{Device::kCpu, "cuda_sm80", "computes on cuda, the call's tensors are on cpu"},
        {Device::kCuda, "reference", "computes on cpu, the call's tensors are on cuda"},
        {Device::kCuda, "cuda_sm80", ""},
        {Device::kCpu, "reference", ""}}) {
    for (const KernelReason& told : explain(desc, {.kernel = {}, .where = {.device = device}}).reasons) {
      if (std::string(told.kernel) == kernel) {
        EXPECT_EQ(told.reason, reason);
      }
    }
  }
}

TEST_F(CudaCall, RefusesMemoryThatIsNotItsDevices) {
  cuda_sim::set_devices({{}, {}});
  prepare();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const polyhead_tensor other = tensor({1, 70, 1, 16});
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(*cuda_device_of(static_cast<char*>(other.data) + 8), 1);
  EXPECT_EQ(*cuda_device_of(args_.key.data), 0);
  alignas(64) static float host[5 * 70 * 16] = {};
  EXPECT_EQ(cuda_device_of(host).status().message(), "the pointer leads to no memory of CUDA");
  const polyhead_forward_args good = args_;
  const std::pair<std::function<void()>, const char*> kBad[] = {
      {[&] { args_.key.data = other.data; }, "key lies on CUDA device 1, this call runs on device 0"},
      {[&] { args_.value.data = host; }, "value lies in the host's memory, must lie on CUDA device 0"},
      {[&] { args_.out.data = host; }, "out lies in the host's memory, must lie on CUDA device 0"},
      {[&] { args_.query.data = nullptr; }, "query is null, has 80 elements"},
      {[&] { args_.query.data = static_cast<char*>(args_.query.data) + 2; },
       "query is not aligned to its elements of 4 bytes"},
      {[&] { args_.key.device = POLYHEAD_CPU; }, "key is not on cuda, where this call computes"}};
  for (const auto& [change, message] : kBad) {
    args_ = good;
    change();
    EXPECT_EQ(forward(), message);
    EXPECT_EQ(backward(), message);
  }
  args_ = good;
  args_.workspace = host;
  EXPECT_EQ(backward(), "workspace lies in the host's memory, must lie on CUDA device 0");
  args_.workspace = static_cast<char*>(good.workspace) + 4;
  EXPECT_EQ(backward(), "workspace is not aligned to 64 bytes");
  args_ = good;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(forward(), "query lies on CUDA device 0, this call runs on device 1");
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(forward(), "");
  EXPECT_EQ(backward(), "");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
}

TEST_F(CudaCall, RefusesStreamsThatAreNotItsDevices) {
  cuda_sim::set_devices({{}, {}});
  prepare();
  cudaStream_t own = nullptr, other = nullptr, gone = nullptr;
  ASSERT_EQ(cudaStreamCreate(&own), cudaSuccess);
  ASSERT_EQ(cudaStreamCreate(&gone), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(gone), cudaSuccess);
  const std::pair<cudaStream_t, const char*> kStreams[] = {
      {nullptr, ""},
      {own, ""},
      {cudaStreamLegacy, ""},
      {cudaStreamPerThread, ""},
      {other, "stream is of CUDA device 1, this call runs on device 0"},
      {gone, "stream is not a stream of CUDA here: no such stream, or it is of another device"}};
  for (const auto& [stream, message] : kStreams) {
    args_.stream = stream;
    EXPECT_EQ(forward(), message);
    EXPECT_EQ(backward(), message);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  }
  EXPECT_EQ(cudaStreamDestroy(own), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(CudaCall, HandsOutMemoryInTheOrderOfStreams) {
  cudaStream_t first = nullptr, second = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  const Result<void*> made = allocate_cuda(400, first), later = allocate_cuda(400, first);
  ASSERT_TRUE(made.ok()) << made.status().message();
  ASSERT_EQ(cudaMemsetAsync(*made, 1, 400, first), cudaSuccess);
  ASSERT_TRUE(order_cuda_streams(first, second).ok());
  int there = 0;
  ASSERT_EQ(cudaMemcpyAsync(&there, *made, 4, cudaMemcpyDeviceToHost, second), cudaSuccess);
  ASSERT_TRUE(free_cuda(*made, second).ok());
  ASSERT_EQ(cudaMemsetAsync(*later, 2, 400, first), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess) << cuda_sim::take_fault();
  EXPECT_EQ(there, 0x01010101);
  EXPECT_FALSE(cuda_sim::is_written(*later, 400)) << "waited for what was put there afterwards";
  EXPECT_EQ(cuda_device_of(*made).ok(), false);
  EXPECT_EQ(order_cuda_streams(nullptr, cudaStreamLegacy).message(), "");
  int no_stream = 0;
  EXPECT_EQ(order_cuda_streams(&no_stream, second).message(),
            "streams cannot be ordered: no such stream, or it is of another device");
  EXPECT_EQ(allocate_cuda(400, &no_stream).status().message(),
            "no memory on the GPU for 400 bytes: no such stream, or it is of another device");
  EXPECT_EQ(allocate_cuda(size_t{1} << 50, first).status().code(), StatusCode::kOutOfMemory);
  ASSERT_TRUE(free_cuda(*later, first).ok());
  EXPECT_EQ(cudaStreamDestroy(first), cudaSuccess) << cuda_sim::take_fault();
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

}  // namespace
}  // namespace polyhead
