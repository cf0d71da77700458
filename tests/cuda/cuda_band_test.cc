// The keys that a query sees, to cuda_sm80: those between sinks and a window, and windows that are far away.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda_call.h"

namespace polyhead {
namespace {

// As many queries as leave a block all its keys, all but the first padding. From sinks to window there are 5 tiles and 6.
TEST(CudaBand, LeavesOutKeysBetweenSinksAndWindow) {
  for (const int64_t keys : {340, 400}) {
    AttentionDesc desc = small();
    desc.batch = desc.num_heads = desc.num_heads_kv = 1;
    desc.seqlen_q = 64 * 257;
    desc.has_seqlens_q = desc.has_seqlens_k = true;
    desc.seqlen_k = keys;
    desc.window_left = 10;
    desc.align = Align::kBottomRight;
    AttentionDesc all = desc, paged = desc;
    desc.sink_keys = paged.sink_keys = 3;
    all.sink_keys = keys;
    paged.page_size = 20;
    paged.num_pages = keys / paged.page_size;
    std::vector<uint16_t> bits[3];
    uint64_t products[3] = {};
    const AttentionDesc descs[] = {desc, all, paged};
    for (int n = 0; n < 3; ++n) {
      const AttentionDesc& d = descs[n];
      const Result<Plan> made = plan_on_device(d);
      ASSERT_TRUE(made.ok()) << made.status().message();
      ASSERT_EQ(made->workspace_bytes(), 0u);
      Call call(d);
      for (Tensor* t : {&call.args.query, &call.args.key, &call.args.value}) set_random(*t);
      set_integers(call.args.seqlens_q, {1});
      set_integers(call.args.seqlens_k, {keys});
      std::vector<int64_t> pages(static_cast<size_t>(d.num_pages));
      std::iota(pages.begin(), pages.end(), 0);
      if (d.page_size > 0) set_integers(call.args.page_table, pages);
      cuda_sim::take_counters();
      ASSERT_TRUE(made->forward(call.args).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
      bits[n] = bits_of(call.args.out);
      for (const auto& [opcode, count] : cuda_sim::take_counters().by_opcode) {
        if (opcode.starts_with("mma.")) products[n] += count;
      }
    }
    EXPECT_NE(bits[0], bits[1]);
    EXPECT_EQ(bits[0], bits[2]);
    EXPECT_EQ(products[0], products[1] / (keys == 340 ? 6 : 7) * (keys == 340 ? 2 : 3));  // of so many tiles
    EXPECT_EQ(products[0], products[2]);
  }
}

// Nobody sees a key, as the reference has it; as an int of 32 bits a window that begins or ends 2^32 keys away lies around
// all of them. Many queries, of each kernel that takes them.
TEST(CudaBand, SeesNothingInAWindowFarAway) {
  for (const auto& [dtype, head_dim] :
       {std::pair(DType::kFloat32, 128), {DType::kFloat32, 64}, {DType::kBFloat16, 64}}) {
    for (const int64_t away : {-(int64_t{1} << 32), int64_t{1} << 32}) {
      AttentionDesc desc = small(dtype);
      desc.batch = desc.num_heads = desc.num_heads_kv = 1;
      desc.seqlen_q = 130;
      desc.seqlen_k = 256;
      desc.head_dim = desc.head_dim_v = head_dim;
      desc.window_left = desc.window_right = 1000;
      desc.query_offset = away;
      Call call(desc);
      ASSERT_TRUE(plan_on_device(desc)->forward(call.args).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
      ForwardArgs here = call.args;
      for (Tensor ForwardArgs::*t :
           {&ForwardArgs::query, &ForwardArgs::key, &ForwardArgs::value, &ForwardArgs::out, &ForwardArgs::logsumexp}) {
        (here.*t).device = Device::kCpu;
      }
      std::vector<uint16_t> out(static_cast<size_t>(here.out.num_elements()) * dtype_size_bytes(dtype) / 2);
      std::vector<float> logsumexp(static_cast<size_t>(here.logsumexp.num_elements()));
      here.out.data = out.data();
      here.logsumexp.data = logsumexp.data();
      const Result<Plan> reference = plan(desc, {.kernel = "reference"});
      struct alignas(64) Line {
        char bytes[64];
      };
      std::vector<Line> workspace(reference->workspace_bytes() / sizeof(Line) + 1);
      here.workspace = workspace.data();
      here.workspace_bytes = reference->workspace_bytes();
      const Status status = reference->forward(here);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(std::memcmp(out.data(), call.args.out.data, out.size() * 2), 0) << away;
      EXPECT_EQ(std::memcmp(logsumexp.data(), call.args.logsumexp.data, logsumexp.size() * 4), 0) << away;
      EXPECT_EQ(logsumexp, std::vector<float>(130, -INFINITY));
    }
  }
}

}  // namespace
}  // namespace polyhead
