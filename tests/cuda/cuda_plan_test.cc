// cuda_sm80 behind a plan: what it refuses, where it runs, and lengths that lie.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <numeric>
#include <vector>

#include "cuda_call.h"

namespace polyhead {
namespace {

TEST(CudaPlan, IsChosenOnTheDeviceAlone) {
  const Result<Plan> there = plan_on_device(small());
  ASSERT_TRUE(there.ok()) << there.status().message();
  EXPECT_STREQ(there->kernel_name(), "cuda_sm80");
  const Result<Plan> here = plan(small());
  ASSERT_TRUE(here.ok());
  EXPECT_NE(std::string(here->kernel_name()), "cuda_sm80");
}

TEST(CudaPlan, RefusesBySentence) {
  const std::pair<std::function<void(AttentionDesc&)>, const char*> kRefused[] = {
      {[](auto& d) { d.dtype = DType::kFloat64; }, "dtype is float64, takes float32, bfloat16 or float16"},
      {[](auto& d) { d.head_dim = 1025; }, "head_dim is 1025, takes 0 to 1024"},
      {[](auto& d) { d.head_dim_v = 1025, d.dtype = DType::kFloat32; }, "head_dim_v is 1025, takes 0 to 1024"},
      {[](auto& d) { d.page_size = 7, d.num_pages = int64_t{1} << 31, d.has_seqlens_k = true; },
       "num_pages is 2147483648, takes 0 to 2^31 - 1"},
      {[](auto& d) { d.batch = int64_t{1} << 30; }, "batch * num_heads * tiles of 64 queries is above 2^31 - 1"},
      {[](auto& d) { d.batch = int64_t{1} << 28, d.attn_bias.given = true; },
       "batch * num_heads * tiles of 64 x 64 pairs is above 2^31 - 1"}};
  for (const auto& [change, reason] : kRefused) {
    AttentionDesc desc = small();
    change(desc);
    const Result<Plan> made = plan_on_device(desc);
    ASSERT_FALSE(made.ok()) << reason;
    EXPECT_EQ(made.status().code(), StatusCode::kUnsupported) << made.status().message();
    EXPECT_NE(made.status().message().find(reason), std::string::npos)
        << made.status().message() << "\nlacks " << reason;
  }
}

TEST(CudaPlan, StoredKeysHaveNoBackward) {
  AttentionDesc desc = small();
  desc.value_dtype = DType::kInt4x2;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  EXPECT_EQ(made->backward({}).message(), "value is int4x2: backward takes query, key and value of one dtype");
}

// Forward fits in the shared memory of every GPU; backward of wide heads wants more than some have, but in slices, or in chunks.
TEST(CudaPlan, NeedsLittleSharedMemoryForForward) {
  const struct {
    DType dtype;
    int64_t head_dim;
    const char* refused;
  } kHeads[] = {{DType::kBFloat16, 129, "backward of bfloat16 with head dims above 128 needs 137216"},
                {DType::kFloat32, 129, "backward of float32 with head dims above 64 needs 137216"},
                {DType::kFloat32, 128, ""},
                {DType::kBFloat16, 257, ""}};
  cuda_sim::set_most_shared(99 * 1024);  // of 8.9
  for (const auto& [dtype, head_dim, refused] : kHeads) {
    AttentionDesc desc = small(dtype);
    desc.batch = desc.num_heads = desc.num_heads_kv = 1, desc.head_dim = desc.head_dim_v = head_dim;
    const Result<Plan> made = plan_on_device(desc);
    ASSERT_TRUE(made.ok()) << made.status().message();
    BackwardCall call(desc, *made);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
    const Status status = made->backward(call.args);
    EXPECT_EQ(status.code(), *refused == 0 ? StatusCode::kOk : StatusCode::kUnsupported);
    EXPECT_EQ(status.message(),
              *refused == 0 ? "" : refused + std::string(" bytes of shared memory, the GPU has 101376"));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  }
  cuda_sim::set_most_shared(163 * 1024);  // of 8.0
}

TEST(CudaPlan, RunsOnTheStreamOfTheCall) {
  const AttentionDesc desc = small();
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok());
  Call call(desc);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  call.args.where.stream = stream;
  ASSERT_TRUE(made->forward(call.args).ok());
  const size_t bytes = static_cast<size_t>(call.args.out.num_elements()) * 2;
  EXPECT_FALSE(cuda_sim::is_written(call.args.out.data, bytes)) << "the call waited";
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << cuda_sim::take_fault();
  ASSERT_TRUE(cuda_sim::is_written(call.args.out.data, bytes));
  for (int64_t n = 0; n < call.args.out.num_elements(); ++n) {
    EXPECT_EQ(static_cast<const uint16_t*>(call.args.out.data)[n], 0x3f80);  // the mean of ones
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// No two lanes of a phase want the same bank of shared memory.
TEST(CudaPlan, HasNoBankConflicts) {
  for (const auto& [dim, options, float32] : {std::tuple(64, 0, 0), {128, 0, 0}, {64, 1, 0}, {64, 0, 1}}) {
    AttentionDesc desc = small(float32 ? DType::kFloat32 : DType::kBFloat16);
    desc.seqlen_q = desc.seqlen_k = 128;
    desc.head_dim = desc.head_dim_v = dim;
    if (options) desc.softcap = 30, desc.dropout_p = 0.1;
    const Result<Plan> made = plan_on_device(desc);
    ASSERT_TRUE(made.ok());
    cuda_sim::take_counters();
    BackwardCall call(desc, *made);
    ASSERT_TRUE(made->backward(call.args).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
    const cuda_sim::Counters counters = cuda_sim::take_counters();
    EXPECT_GT(counters.bank_phases, 10000u);
    EXPECT_EQ(counters.bank_waves, counters.bank_phases);
  }
}

// Query and key are 0, so that all weights are alike, and value is the unit matrix: out shows which weights are kept.
TEST(CudaPlan, DropsTheWeightsThatDropoutMaskTells) {
  AttentionDesc desc = small();
  desc.seqlen_q = 70;
  desc.seqlen_k = desc.head_dim_v = 128;
  desc.dropout_p = 0.5;
  desc.scale = 0;
  desc.dropout_origin = {.first_head = 5, .num_heads = 9, .first_query = 3, .first_key = 16};
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok());
  Call call(desc);
  call.args.dropout_seed = 0x123456789abcdef;
  call.args.dropout_offset = 77;
  const Tensor& value = call.args.value;
  std::vector<uint16_t> unit(static_cast<size_t>(value.num_elements()));
  for (int64_t b = 0; b < value.dims[0]; ++b) {
    for (int64_t j = 0; j < value.dims[1]; ++j) {
      for (int64_t h = 0; h < value.dims[2]; ++h) {
        unit[static_cast<size_t>(b * value.strides[0] + j * value.strides[1] + h * value.strides[2] + j)] = 0x3f80;
      }
    }
  }
  ASSERT_EQ(cudaMemcpy(value.data, unit.data(), unit.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_TRUE(made->forward(call.args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  Tensor kept(nullptr, DType::kBool, {desc.batch, desc.num_heads, desc.seqlen_q, desc.seqlen_k});
  std::vector<uint8_t> mask(static_cast<size_t>(kept.num_elements()));
  kept.data = mask.data();
  ASSERT_TRUE(dropout_mask(desc.dropout_p, *call.args.dropout_seed, 77, kept, desc.dropout_origin).ok());
  const Tensor& out = call.args.out;
  for (int64_t n = 0; n < kept.num_elements(); ++n) {
    const int64_t j = n % 128, i = n / 128 % 70, h = n / 128 / 70 % 4, b = n / 128 / 70 / 4;
    const int64_t at = b * out.strides[0] + i * out.strides[1] + h * out.strides[2] + j;
    const uint16_t want = mask[static_cast<size_t>(n)] != 0 ? 0x3c80 : 0;  // 2 / 128
    ASSERT_EQ(static_cast<const uint16_t*>(out.data)[at], want) << b << " " << h << " " << i << " " << j;
  }
}

// Nobody waits for lengths that lie on the device, so nobody checks them: they are cut off at the sizes.
TEST(CudaPlan, BoundsLengthsThatLie) {
  AttentionDesc desc = small();
  desc.has_seqlens_k = true;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok());
  Call call(desc);
  const Tensor& lengths = call.args.seqlens_k;
  const int64_t wide[] = {-5, int64_t{1} << 40};
  const int32_t narrow[] = {-5, 1 << 30};
  const void* lies = lengths.dtype == DType::kInt64 ? static_cast<const void*>(wide) : narrow;
  ASSERT_EQ(cudaMemcpy(lengths.data, lies, 2 * dtype_size_bytes(lengths.dtype), cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_TRUE(made->forward(call.args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  const auto* out = static_cast<const uint16_t*>(call.args.out.data);
  const int64_t half = call.args.out.num_elements() / 2;
  for (int64_t n = 0; n < half; ++n) {
    EXPECT_EQ(out[n], 0);
    EXPECT_EQ(out[half + n], 0x3f80);
  }
}

// Pages that do not exist hold zeros.
TEST(CudaPlan, BoundsPageTablesThatLie) {
  AttentionDesc desc = small();
  desc.has_seqlens_k = true;
  desc.page_size = 7;
  desc.num_pages = 4;
  desc.scale = 0;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Call call(desc);
  set_integers(call.args.seqlens_k, {28, 71});
  std::vector<int64_t> pages = {3, 0, 0, 1, -9, 99, -9, 99, -9, 99};  // of the first sequence four are used
  for (int64_t n = 0; n < 5; ++n) pages.insert(pages.end(), {n % 2 == 0 ? -1 : 4, 2});
  pages[11] = int64_t{1} << 40;  // as int32 it is page 0
  set_integers(call.args.page_table, pages);
  ASSERT_TRUE(made->forward(call.args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  const bool wide = call.args.page_table.dtype == DType::kInt64;
  const std::vector<uint16_t> out = bits_of(call.args.out);
  const uint16_t of_second = wide ? 0x3ecd : 0x3f00;  // 28, or 35, of 70 keys
  for (size_t n = 0; n < out.size(); ++n) EXPECT_EQ(out[n], n < out.size() / 2 ? 0x3f80 : of_second);
}

// An infinity among values is looked for where it lies, also while the places of later keys are found.
TEST(CudaPlan, FindsInfinitiesInPages) {
  AttentionDesc desc = small();
  desc.batch = desc.num_heads = desc.num_heads_kv = 1;
  desc.seqlen_q = 130, desc.seqlen_k = 192, desc.page_size = 64, desc.num_pages = 3;
  desc.has_seqlens_k = desc.causal = true;
  desc.align = Align::kTopLeft;
  Call call(desc);
  set_integers(call.args.seqlens_k, {192});
  set_integers(call.args.page_table, {2, 0, 1});
  static_cast<uint16_t*>(call.args.value.data)[(2 * 64 + 5) * 16] = 0x7f80;  // of key 5
  const Status status = plan_on_device(desc)->forward(call.args);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  const std::vector<uint16_t> out = bits_of(call.args.out);
  for (size_t i = 0; i < 130; ++i) EXPECT_EQ(out[i * 16], i < 5 ? 0x3f80 : 0x7f80) << "query " << i;
}

// Few queries and many keys: blocks share these, and what they leave lies in the caller's workspace.
TEST(CudaPlan, SharesManyKeysAmongBlocks) {
  AttentionDesc desc = small();
  EXPECT_EQ(plan_on_device(desc)->workspace_bytes(), 0u);
  desc.seqlen_k = 600;
  desc.has_seqlens_k = desc.causal = true;
  desc.align = Align::kBottomRight;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  const size_t rows = 2 * 4 * 5 * 3;  // three parts
  ASSERT_EQ(made->workspace_bytes(), rows * 4 * 4 + rows * 16 * 4);
  AttentionDesc many = desc;
  many.batch = 300;  // a sequence has as many parts in a batch as alone, and so the same bits
  EXPECT_EQ(plan_on_device(many)->workspace_bytes(), 150 * made->workspace_bytes());
  Call call(desc);
  set_integers(call.args.seqlens_k, {600, 3});  // the first two queries of the second one see nothing
  EXPECT_FALSE(made->forward(call.args).ok());
  void* workspace = nullptr;
  ASSERT_EQ(cudaMalloc(&workspace, made->workspace_bytes()), cudaSuccess);
  call.args.workspace = workspace;
  call.args.workspace_bytes = made->workspace_bytes();
  const Status status = made->forward(call.args);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  const std::vector<uint16_t> out = bits_of(call.args.out);
  for (size_t n = 0; n < out.size(); ++n) EXPECT_EQ(out[n], n / (4 * 16) == 5 || n / (4 * 16) == 6 ? 0 : 0x3f80) << n;
  EXPECT_EQ(cudaFree(workspace), cudaSuccess);
}

// Few queries: the heads of a group share a tile, whose keys are read once. A head has the bits that it has alone, which
// its own sinks show to be its own.
TEST(CudaPlan, ReadsKeysOnceForTheHeadsOfAGroup) {
  AttentionDesc desc = small();
  desc.batch = 1;
  desc.num_heads = 12;
  desc.seqlen_k = 600;
  desc.has_sink_logits = true;
  const auto computed = [](const AttentionDesc& d, const std::function<void(ForwardArgs&)>& change) {
    const Result<Plan> made = plan_on_device(d);
    EXPECT_TRUE(made.ok()) << made.status().message();
    Call call(d);
    void* workspace = nullptr;
    EXPECT_EQ(cudaMalloc(&workspace, made->workspace_bytes()), cudaSuccess);
    call.args.workspace = workspace;
    call.args.workspace_bytes = made->workspace_bytes();
    change(call.args);
    cuda_sim::take_counters();
    const Status status = made->forward(call.args);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
    EXPECT_EQ(cudaFree(workspace), cudaSuccess);
    return std::pair(bits_of(call.args.out), cuda_sim::take_counters().by_opcode);
  };
  const auto copies = [](const auto& opcodes) { return opcodes.at("cp.async.cg.shared.global/4"); };
  Call shared(desc);  // its tensors: what each call reads
  for (Tensor* t : {&shared.args.query, &shared.args.key, &shared.args.value}) set_random(*t);
  void* sinks = nullptr;
  ASSERT_EQ(cudaMalloc(&sinks, 12 * sizeof(float)), cudaSuccess);
  float of_heads[12];
  std::iota(std::begin(of_heads), std::end(of_heads), -3.f);
  ASSERT_EQ(cudaMemcpy(sinks, of_heads, sizeof of_heads, cudaMemcpyHostToDevice), cudaSuccess);
  const auto heads_from = [&](int64_t h, int64_t heads, int64_t heads_kv) {
    return [&, h, heads, heads_kv](ForwardArgs& args) {
      const auto part = [](Tensor all, int64_t first, int64_t count) {
        all.data = static_cast<uint16_t*>(all.data) + first * all.strides[2];
        all.dims[2] = count;
        return all;
      };
      args.query = part(shared.args.query, h, heads);
      args.key = part(shared.args.key, h / 6, heads_kv);
      args.value = part(shared.args.value, h / 6, heads_kv);
      args.sink_logits = Tensor(static_cast<float*>(sinks) + h, DType::kFloat32, {heads});
      args.sink_logits.device = Device::kCuda;
    };
  };
  const auto [bits, opcodes] = computed(desc, heads_from(0, 12, 2));
  uint64_t copies_alone = 0;
  for (int64_t h = 0; h < 12; ++h) {
    AttentionDesc alone = desc;
    alone.num_heads = alone.num_heads_kv = 1;
    const auto [bits_alone, opcodes_alone] = computed(alone, heads_from(h, 1, 1));
    for (size_t i = 0; i < 5; ++i) {
      for (size_t c = 0; c < 16; ++c) {
        EXPECT_EQ(bits[(i * 12 + static_cast<size_t>(h)) * 16 + c], bits_alone[i * 16 + c]) << h << ", " << i;
      }
    }
    copies_alone = copies(opcodes_alone);
  }
  EXPECT_EQ(copies(opcodes), 2 * copies_alone);  // two groups of six
  EXPECT_EQ(cudaFree(sinks), cudaSuccess);
}

// Keys enough for several blocks, whose parts would be merged, and no query.
TEST(CudaPlan, TakesPackedSequencesWithoutAQuery) {
  AttentionDesc desc = small();
  desc.packed = true;
  desc.batch = 3;
  desc.seqlen_q = 0;
  desc.seqlen_k = 700;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Call call(desc);
  for (Tensor* t : {&call.args.key, &call.args.value}) set_random(*t);
  set_integers(call.args.cu_seqlens_q, {0, 0, 0, 0});
  set_integers(call.args.cu_seqlens_k, {0, 100, 100, 700});
  const Status status = made->forward(call.args);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
}

// What packed sequences say is cut off at the rows there are.
TEST(CudaPlan, BoundsPackedSequencesThatLie) {
  AttentionDesc desc = small();
  desc.packed = true;
  desc.batch = 3;
  desc.seqlen_q = 70;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  constexpr int64_t kFar = int64_t{1} << 40;
  const auto lie = [](ForwardArgs& args) {
    set_integers(args.cu_seqlens_q, {-5, 40, kFar, 2 * kFar});        // 40 queries, 30, none
    set_integers(args.cu_seqlens_k, {-3, 2 * kFar, kFar, 2 * kFar});  // 70 keys, none
  };
  BackwardCall call(desc, *made, lie);
  const auto* out = static_cast<const uint16_t*>(call.args.forward.out.data);
  ASSERT_TRUE(made->backward(call.args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  for (int64_t n = 0; n < call.args.forward.out.num_elements(); ++n) {
    EXPECT_EQ(out[n], n / (desc.num_heads * desc.head_dim_v) < 40 ? 0x3f80 : 0);
  }
}

// A sequence has the bits that it has alone, in both directions.
TEST(CudaPlan, ComputesPackedSequencesAsEachAlone) {
  const int64_t queries[] = {0, 66, 1, 3}, keys[] = {5, 70, 0, 65};
  AttentionDesc desc = small();
  desc.packed = desc.causal = true;
  desc.align = Align::kBottomRight;
  desc.batch = std::ssize(queries);
  desc.seqlen_q = 75;  // five rows behind the last sequence
  desc.seqlen_k = 141;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  BackwardCall call(desc, *made, [](ForwardArgs& args) {
    set_integers(args.cu_seqlens_q, {0, 0, 66, 67, 70});
    set_integers(args.cu_seqlens_k, {0, 5, 75, 75, 140});
    for (Tensor* t : {&args.query, &args.key, &args.value}) set_random(*t);
  });
  ASSERT_TRUE(made->backward(call.args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  int64_t first_q = 0, first_k = 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    AttentionDesc alone = desc;
    alone.packed = false;
    alone.batch = 1;
    alone.seqlen_q = queries[b];
    alone.seqlen_k = keys[b];
    const Result<Plan> plan = plan_on_device(alone);
    ASSERT_TRUE(plan.ok());
    const ForwardArgs& all = call.args.forward;
    BackwardCall one(alone, *plan, [&](ForwardArgs& args) {
      args.query = rows_alone(all.query, first_q, queries[b]);
      args.key = rows_alone(all.key, first_k, keys[b]);
      args.value = rows_alone(all.value, first_k, keys[b]);
    });
    ASSERT_TRUE(plan->backward(one.args).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
    EXPECT_EQ(bits_of(one.args.forward.out), bits_of(rows_alone(all.out, first_q, queries[b]))) << b;
    EXPECT_EQ(bits_of(one.args.grad_query), bits_of(rows_alone(call.args.grad_query, first_q, queries[b]))) << b;
    EXPECT_EQ(bits_of(one.args.grad_key), bits_of(rows_alone(call.args.grad_key, first_k, keys[b]))) << b;
    EXPECT_EQ(bits_of(one.args.grad_value), bits_of(rows_alone(call.args.grad_value, first_k, keys[b]))) << b;
    first_q += queries[b], first_k += keys[b];
  }
  EXPECT_EQ(bits_of(rows_alone(call.args.forward.out, 70, 5)), std::vector<uint16_t>(5 * 4 * 16));
  EXPECT_EQ(bits_of(rows_alone(call.args.grad_query, 70, 5)), std::vector<uint16_t>(5 * 4 * 16));
  EXPECT_EQ(bits_of(rows_alone(call.args.grad_key, 140, 1)), std::vector<uint16_t>(2 * 16));
  EXPECT_EQ(bits_of(rows_alone(call.args.grad_value, 140, 1)), std::vector<uint16_t>(2 * 16));
}

// Operands of ones: every weight is 1 / keys, dS is 0, and a value gets of 2 heads what its weights let through.
TEST(CudaPlan, ComputesGradientsOnTheStreamOfTheCall) {
  const AttentionDesc desc = small();
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok());
  BackwardCall call(desc, *made);
  ASSERT_TRUE(made->backward(call.args).ok());
  const Tensor& grad = call.args.grad_value;
  const size_t bytes = static_cast<size_t>(grad.num_elements()) * 2;
  EXPECT_FALSE(cuda_sim::is_written(grad.data, bytes)) << "the call waited";
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  ASSERT_TRUE(cuda_sim::is_written(grad.data, bytes));
  const float want = 2.0f * static_cast<float>(desc.seqlen_q) / static_cast<float>(desc.seqlen_k);
  for (int64_t n = 0; n < grad.num_elements(); ++n) {
    const uint32_t bits = uint32_t{static_cast<const uint16_t*>(grad.data)[n]} << 16;
    EXPECT_NEAR(std::bit_cast<float>(bits), want, want * 0x1p-7);
  }
}

// As float32 they lack the rounding of 1 / 70 to bfloat16, which is 2^-12 of it.
TEST(CudaPlan, ComputesWideGradientsWithWeightsOfMoreBits) {
  AttentionDesc desc = small();
  desc.grad_dtype = DType::kFloat32;
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok());
  BackwardCall call(desc, *made);
  ASSERT_TRUE(made->backward(call.args).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
  const auto* grad = static_cast<const float*>(call.args.grad_value.data);
  const float want = 2.0f * static_cast<float>(desc.seqlen_q) / static_cast<float>(desc.seqlen_k);
  for (int64_t n = 0; n < call.args.grad_value.num_elements(); ++n) EXPECT_NEAR(grad[n], want, want * 0x1p-16);
}

// A float32 grad_out is not rounded to the inputs' 16 bits on the way in: here 1 and 2^-9 of it.
TEST(CudaPlan, ReadsGradOutOfMoreBits) {
  for (const int64_t head_dim : {16, 200}) {
    AttentionDesc desc = small();
    desc.out_dtype = desc.grad_dtype = DType::kFloat32;
    desc.batch = desc.num_heads_kv = 1;
    desc.num_heads = 2;
    desc.head_dim = desc.head_dim_v = head_dim;
    desc.scale = 4.0 / static_cast<double>(head_dim);  // no larger logsumexp, whose rounding the bound is
    const Result<Plan> made = plan_on_device(desc);
    ASSERT_TRUE(made.ok()) << made.status().message();
    BackwardCall call(desc, *made);
    ASSERT_TRUE(made->backward(call.args).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
    const auto* out = static_cast<const float*>(call.args.forward.out.data);
    for (int64_t n = 0; n < call.args.forward.out.num_elements(); ++n) EXPECT_EQ(out[n], 1);
    const float grad_out = *static_cast<const float*>(call.args.grad_out.data);
    EXPECT_NEAR(grad_out, 1 + 0x1p-9f, 0x1p-14f);
    const auto* grad = static_cast<const float*>(call.args.grad_value.data);
    const float want = grad_out * 2 * static_cast<float>(desc.seqlen_q) / static_cast<float>(desc.seqlen_k);
    for (int64_t n = 0; n < call.args.grad_value.num_elements(); ++n) EXPECT_NEAR(grad[n], want, want * 0x1p-21);
  }
}

// This test runs without NVRTC and without its twin.
TEST(CudaPlan, NeedsNvrtcForPrograms) {
  AttentionDesc desc = small();
  desc.program = *parse_program("mask = k <= q");
  const Result<Plan> made = plan_on_device(desc);
  if (made.ok()) GTEST_SKIP() << "a libnvrtc is here";
  EXPECT_NE(made.status().message().find("a program needs NVRTC, and no libnvrtc of CUDA 12 or 13 can be opened"),
            std::string::npos)
      << made.status().message();
}

TEST(CudaPlan, TakesTensorsOfTheDeviceAlone) {
  const AttentionDesc desc = small();
  const Result<Plan> made = plan_on_device(desc);
  ASSERT_TRUE(made.ok());
  Call call(desc);
  call.args.key.device = Device::kCpu;
  EXPECT_EQ(made->forward(call.args).message(), "key is not on cuda, where this call computes");
}

}  // namespace
}  // namespace polyhead
