// Calls of cuda_sm80 through plans, on tensors of the simulated device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "contract/kernel.h"
#include "sim/cudart.h"

namespace polyhead {

inline AttentionDesc small(DType dtype = DType::kBFloat16) {
  AttentionDesc desc;
  desc.batch = 2;
  desc.num_heads = 4;
  desc.num_heads_kv = 2;
  desc.seqlen_q = 5;
  desc.seqlen_k = 70;
  desc.head_dim = desc.head_dim_v = 16;
  desc.dtype = dtype;
  return desc;
}

inline Result<Plan> plan_on_device(const AttentionDesc& desc) {
  return plan(desc, {.where = {.device = Device::kCuda}});
}

// Of a tensor [n], int32 or int64.
inline void set_integers(const Tensor& t, std::vector<int64_t> wide) {
  const std::vector<int32_t> narrow(wide.begin(), wide.end());
  const void* data = t.dtype == DType::kInt64 ? static_cast<const void*>(wide.data()) : narrow.data();
  ASSERT_EQ(cudaMemcpy(t.data, data, wide.size() * dtype_size_bytes(t.dtype), cudaMemcpyHostToDevice), cudaSuccess);
}

// bfloat16 from -2 to 2
inline void set_random(const Tensor& t) {
  std::mt19937 random;
  std::vector<uint16_t> bits(static_cast<size_t>(t.num_elements()));
  for (uint16_t& x : bits) x = static_cast<uint16_t>((random() & 0x8000) | (0x3e00 + random() % 0x200));
  ASSERT_EQ(cudaMemcpy(t.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
}

// `count` rows of a packed tensor of 16 bits an element, as a batch of one sequence.
inline Tensor rows_alone(const Tensor& packed, int64_t first, int64_t count) {
  Tensor t(static_cast<uint16_t*>(packed.data) + first * packed.strides[0], packed.dtype,
           {1, count, packed.dims[1], packed.dims[2]});
  t.device = packed.device;
  return t;
}

// Of contiguous tensors of 16 bits an element.
inline std::vector<uint16_t> bits_of(const Tensor& t) {
  const auto* data = static_cast<const uint16_t*>(t.data);
  return {data, data + t.num_elements()};
}

// Tensors of a call on the simulated device: inputs all 1, outputs that nobody has written.
class Call {
 public:
  explicit Call(const AttentionDesc& desc) {
    for (Tensor ForwardArgs::*input : {&ForwardArgs::query, &ForwardArgs::key, &ForwardArgs::value})
      add(desc, input, true);
    for (Tensor ForwardArgs::*output : {&ForwardArgs::out, &ForwardArgs::logsumexp}) add(desc, output, false);
    if (desc.has_seqlens_q) add(desc, &ForwardArgs::seqlens_q, true);
    if (desc.has_seqlens_k) add(desc, &ForwardArgs::seqlens_k, true);
    if (desc.page_size > 0) add(desc, &ForwardArgs::page_table, true);
    if (desc.attn_bias.given) add(desc, &ForwardArgs::attn_bias, true);
    if (!desc.packed) return;
    for (Tensor ForwardArgs::*starts : {&ForwardArgs::cu_seqlens_q, &ForwardArgs::cu_seqlens_k})
      add(desc, starts, true);
  }
  ~Call() {
    for (void* at : memory_) EXPECT_EQ(cudaFree(at), cudaSuccess);
  }

  ForwardArgs args;

 protected:
  void add(const AttentionDesc& desc, Tensor ForwardArgs::*tensor, bool written) {
    args.*tensor = expected_tensor(desc, tensor);
    allocate(args.*tensor, written);
  }

  void allocate(Tensor& t, bool written) {
    const size_t bytes = static_cast<size_t>(t.num_elements()) * dtype_size_bytes(t.dtype);
    EXPECT_EQ(cudaMalloc(&t.data, bytes), cudaSuccess);
    t.device = Device::kCuda;
    memory_.push_back(t.data);
    const std::vector<uint16_t> ones(bytes / 2, 0x3f80);
    if (written) {
      EXPECT_EQ(cudaMemcpy(t.data, ones.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
  }

  std::vector<void*> memory_;
};

// The gradients after a forward call.
class BackwardCall : private Call {
 public:
  // `change` is made to the tensors before the forward call.
  BackwardCall(const AttentionDesc& desc, const Plan& plan, const std::function<void(ForwardArgs&)>& change = {})
      : Call(desc) {
    if (desc.dropout_p > 0) Call::args.dropout_seed = 1;
    if (change) change(Call::args);
    const Status status = plan.forward(Call::args);
    EXPECT_TRUE(status.ok()) << status.message();
    args.forward = Call::args;
    args.grad_out = Call::args.out;
    allocate(args.grad_out, true);
    const std::pair<Tensor*, const Tensor*> kGradients[] = {{&args.grad_query, &Call::args.query},
                                                            {&args.grad_key, &Call::args.key},
                                                            {&args.grad_value, &Call::args.value}};
    for (const auto& [gradient, input] : kGradients) {
      *gradient = *input;
      gradient->dtype = grad_dtype(desc);
      allocate(*gradient, false);
    }
    Tensor workspace(nullptr, DType::kFloat32, {static_cast<int64_t>(plan.backward_workspace_bytes() / 4)});
    allocate(workspace, false);
    args.forward.workspace = workspace.data;
    args.forward.workspace_bytes = plan.backward_workspace_bytes();
  }

  BackwardArgs args;
};

}  // namespace polyhead
