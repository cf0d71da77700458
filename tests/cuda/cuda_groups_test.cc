// Which problems cuda_sm80 computes by warpgroups, on GPUs of compute capability 9.0, and which keys are shared by blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string_view>
#include <utility>

#include "core/dtype.h"
#include "cuda_call.h"

namespace polyhead {
namespace {

class CudaGroups : public ::testing::Test {
 protected:
  ~CudaGroups() override { simulate(8, 0, 163); }

  static void simulate(int major, int minor, int shared_kilobytes) {
    cuda_sim::set_devices({{"simulated", major, minor}});
    cuda_sim::set_most_shared(shared_kilobytes * 1024);
  }

  // What a forward call counts.
  static cuda_sim::Counters computed(const AttentionDesc& desc, ForwardArgs args) {
    const Result<Plan> made = plan_on_device(desc);
    EXPECT_TRUE(made.ok()) << made.status().message();
    EXPECT_EQ(cudaMalloc(&args.workspace, made->workspace_bytes()), cudaSuccess);
    args.workspace_bytes = made->workspace_bytes();
    cuda_sim::take_counters();
    const Status status = made->forward(args);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
    EXPECT_EQ(cudaFree(args.workspace), cudaSuccess);
    return cuda_sim::take_counters();
  }

  static cuda_sim::Counters computed(const AttentionDesc& desc) {
    Call call(desc);
    if (desc.packed) set_integers(call.args.cu_seqlens_q, {0, 3, desc.seqlen_q});
    if (desc.packed && desc.page_size == 0) set_integers(call.args.cu_seqlens_k, {0, 40, desc.seqlen_k});
    if (desc.has_seqlens_k) set_integers(call.args.seqlens_k, {40, desc.seqlen_k});
    if (desc.page_size > 0) set_integers(call.args.page_table, {0, 1, 1, 0});
    if (desc.dropout_p > 0) call.args.dropout_seed = 1;
    return computed(desc, call.args);
  }

  static bool is_by_groups(const cuda_sim::Counters& counters) {
    for (const auto& [opcode, count] : counters.by_opcode) {
      if (opcode.starts_with("wgmma.mma_async") && count > 0) return true;
    }
    return false;
  }
};

AttentionDesc many() {
  AttentionDesc desc = small();
  desc.seqlen_q = 80;
  return desc;
}

TEST_F(CudaGroups, ComputeOn90Alone) {
  for (const auto& [major, minor] : {std::pair(8, 0), {8, 9}, {9, 0}, {10, 0}, {12, 0}}) {
    simulate(major, minor, major == 8 ? 163 : 227);
    EXPECT_EQ(is_by_groups(computed(many())), major == 9) << major << "." << minor;
  }
}

TEST_F(CudaGroups, TakeProblemsOfManyQueriesIn16Bits) {
  simulate(9, 0, 227);
  const struct {
    const char* what;
    std::function<void(AttentionDesc&)> change;
    bool taken;
  } kCases[] = {{"float16", [](auto& d) { d.dtype = DType::kFloat16; }, true},
                {"float32", [](auto& d) { d.dtype = DType::kFloat32; }, false},
                {"float32 out", [](auto& d) { d.out_dtype = DType::kFloat32; }, true},
                {"few queries", [](auto& d) { d.seqlen_q = 64; }, false},
                {"few queries and many keys", [](auto& d) { d.seqlen_q = 64, d.seqlen_k = 600; }, false},
                {"keys that blocks share", [](auto& d) { d.seqlen_k = 600; }, false},
                {"head_dim 128", [](auto& d) { d.head_dim = 128; }, true},
                {"head_dim_v 129", [](auto& d) { d.head_dim_v = 129; }, false},
                {"a window", [](auto& d) { d.window_left = 9, d.align = Align::kBottomRight; }, true},
                {"softcap", [](auto& d) { d.softcap = 30; }, true},
                {"dropout", [](auto& d) { d.dropout_p = 0.5; }, true},
                {"sinks in front of a window",
                 [](auto& d) { d.window_left = 9, d.sink_keys = 2, d.align = Align::kBottomRight; }, false},
                {"scores as weights", [](auto& d) { d.normalizer = Normalizer::kNone; }, false},
                {"an infinite scale", [](auto& d) { d.scale = 1e39; }, false},
                {"a negative scale", [](auto& d) { d.scale = -1; }, true},
                {"scale 0", [](auto& d) { d.scale = 0; }, true},
                {"packed", [](auto& d) { d.packed = true; }, true},
                {"packed, of few queries", [](auto& d) { d.packed = true, d.seqlen_q = 64; }, false},
                {"packed, of many keys", [](auto& d) { d.packed = true, d.seqlen_k = 900; }, true},
                {"pages", [](auto& d) { d.page_size = 35, d.num_pages = 2, d.has_seqlens_k = true; }, true},
                {"packed, keys in pages",
                 [](auto& d) { d.packed = true, d.page_size = 35, d.num_pages = 2, d.has_seqlens_k = true; }, true}};
  for (const auto& [what, change, taken] : kCases) {
    AttentionDesc desc = many();
    change(desc);
    EXPECT_EQ(is_by_groups(computed(desc)), taken) << what;
  }
}

// Of packed sequences the long ones go by groups, the others beside them by few queries, whose keys blocks share where there are
// many: a sequence has the bits that it has alone, and what is behind the last one is written, too.
TEST_F(CudaGroups, GivePackedSequencesTheBitsThatTheyHaveAlone) {
  simulate(9, 0, 227);
  std::vector<int64_t> one_long(40, 1);
  one_long[17] = 130;
  const struct {
    std::vector<int64_t> lengths;
    int64_t behind;
    double softcap = 0;
    bool causal = false;
  } kCases[] = {{{0, 65, 3, 64, 192, 193, 0, 1, 66, 0}, 70},  // too long on average for shared keys
                {{0, 0, 0, 65, 3, 64, 0, 192, 193, 0, 0, 1, 66, 0, 0}, 3},
                {one_long, 0},  // heads share tiles
                {std::vector<int64_t>(5, 65), 64},
                {std::vector<int64_t>(3, 64), 1},
                {{0, 65, 3, 64, 192, 193, 0, 1, 66, 0}, 70, 3, true},
                {one_long, 0, 3, true}};
  for (const auto& [lengths, behind, softcap, causal] : kCases) {
    AttentionDesc desc = small();
    desc.packed = true;
    desc.softcap = softcap;
    desc.causal = causal;
    desc.align = Align::kBottomRight;
    desc.batch = static_cast<int64_t>(lengths.size());
    std::vector<int64_t> starts(1, 0);
    for (const int64_t length : lengths) starts.push_back(starts.back() + length);
    desc.seqlen_q = desc.seqlen_k = starts.back() + behind;
    Call call(desc);
    for (Tensor* t : {&call.args.query, &call.args.key, &call.args.value}) set_random(*t);
    set_integers(call.args.cu_seqlens_q, starts);
    set_integers(call.args.cu_seqlens_k, starts);
    EXPECT_EQ(is_by_groups(computed(desc, call.args)), *std::max_element(lengths.begin(), lengths.end()) > 64);
    const std::vector<uint16_t> out = bits_of(call.args.out);
    const size_t row = static_cast<size_t>(desc.num_heads * desc.head_dim_v);
    for (size_t n = 0; n < lengths.size(); ++n) {
      if (lengths[n] == 0) continue;
      AttentionDesc alone = desc;
      alone.packed = false;
      alone.batch = 1;
      alone.seqlen_q = alone.seqlen_k = lengths[n];
      Call of_alone(alone);
      for (Tensor ForwardArgs::*input : {&ForwardArgs::query, &ForwardArgs::key, &ForwardArgs::value}) {
        of_alone.args.*input = rows_alone(call.args.*input, starts[n], lengths[n]);
      }
      EXPECT_EQ(is_by_groups(computed(alone, of_alone.args)), lengths[n] > 64);
      const auto* const first = out.data() + static_cast<size_t>(starts[n]) * row;
      EXPECT_EQ(bits_of(of_alone.args.out), std::vector<uint16_t>(first, first + static_cast<size_t>(lengths[n]) * row))
          << "sequence " << n;
    }
    for (size_t at = static_cast<size_t>(starts.back()) * row; at < out.size(); ++at) EXPECT_EQ(out[at], 0);
  }
}

float number_of_bits(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// More keys than a block has room for at once, and some that nobody of a block sees; one value is NaN.
TEST_F(CudaGroups, AgreeWithOtherGpusOnManyKeys) {
  for (const auto& [dim, in_pages] : {std::pair(64, false), {64, true}, {72, false}, {72, true}}) {
    AttentionDesc desc = small();
    desc.packed = desc.causal = true;
    desc.align = Align::kBottomRight;
    desc.window_left = 400;
    desc.num_heads_kv = 1;
    desc.num_heads = 2;
    desc.seqlen_q = 200;
    desc.seqlen_k = in_pages ? 600 : 1100;  // 500 and 600
    desc.head_dim = desc.head_dim_v = dim;
    if (in_pages) desc.page_size = 50, desc.num_pages = 24, desc.has_seqlens_k = true;
    Call call(desc);
    for (Tensor* t : {&call.args.query, &call.args.key, &call.args.value}) set_random(*t);
    static_cast<uint16_t*>(call.args.value.data)[450 * dim + 1] = 0x7fc0;
    set_integers(call.args.cu_seqlens_q, {0, 70, 200});
    if (in_pages) {
      std::vector<int64_t> pages(24);
      std::iota(pages.begin(), pages.end(), 0);
      std::shuffle(pages.begin() + 10, pages.end(), std::mt19937(1));
      set_integers(call.args.page_table, pages);
      set_integers(call.args.seqlens_k, {500, 600});
    } else {
      set_integers(call.args.cu_seqlens_k, {0, 500, 1100});
    }
    simulate(8, 0, 163);
    EXPECT_FALSE(is_by_groups(computed(desc, call.args)));
    const std::vector<uint16_t> want = bits_of(call.args.out);
    simulate(9, 0, 227);
    EXPECT_TRUE(is_by_groups(computed(desc, call.args)));
    const std::vector<uint16_t> got = bits_of(call.args.out);
    int nans = 0;
    for (size_t n = 0; n < want.size(); ++n) {
      const float x = number_of_bits(want[n]), y = number_of_bits(got[n]);
      EXPECT_EQ(std::isnan(x), std::isnan(y)) << n;
      if (std::isnan(x)) {
        ++nans;
      } else {
        EXPECT_NEAR(x, y, 0x1p-7f * std::fabs(x) + 0x1p-9f) << n;
      }
    }
    EXPECT_EQ(nans, 2 * 50);  // of the first 70 queries those from 20 on
  }
}

// Rows whose bias leaves no digits to their scores, as masks of finite numbers make them: all weights of a row are alike there,
// however far its scores are from 0.
TEST_F(CudaGroups, TakeRowsOfLargeBias) {
  constexpr float kBiases[] = {0, -1e9f, -3e9f, -1e10f, -1e12f, 3e30f, -3.4028235e38f, 700};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    AttentionDesc desc = many();
    desc.batch = desc.num_heads = desc.num_heads_kv = 1;
    desc.dtype = dtype;
    desc.attn_bias = {true, DType::kFloat32, {1, 1, desc.seqlen_q, desc.seqlen_k}};
    std::vector<float> biases;
    for (int64_t n = 0; n < desc.seqlen_q * desc.seqlen_k; ++n) biases.push_back(kBiases[n / desc.seqlen_k % 8]);
    const auto change = [&](ForwardArgs& args) {
      ASSERT_EQ(cudaMemcpy(args.attn_bias.data, biases.data(), biases.size() * 4, cudaMemcpyHostToDevice), cudaSuccess);
    };
    std::vector<float> want;  // of a GPU without warpgroups
    for (const bool by_groups : {false, true}) {
      by_groups ? simulate(9, 0, 227) : simulate(8, 0, 163);
      const Result<Plan> made = plan_on_device(desc);
      ASSERT_TRUE(made.ok()) << made.status().message();
      cuda_sim::take_counters();
      BackwardCall call(desc, *made, [&](ForwardArgs& args) {
        for (const Tensor* t : {&args.query, &args.key, &args.value}) set_random(*t);
        change(args);
      });
      EXPECT_EQ(is_by_groups(cuda_sim::take_counters()), by_groups);
      EXPECT_EQ(made->backward(call.args).message(), "");
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cuda_sim::take_fault();
      std::vector<float> got;
      for (const Tensor* t :
           {&call.args.forward.out, &call.args.grad_query, &call.args.grad_key, &call.args.grad_value}) {
        for (const uint16_t bits : bits_of(*t))
          got.push_back(dtype == DType::kFloat16 ? to_float(Float16{bits}) : number_of_bits(bits));
      }
      if (by_groups) {
        for (size_t n = 0; n < want.size(); ++n)
          EXPECT_NEAR(got[n], want[n], 0x1p-6f * std::fabs(want[n]) + 0x1p-5f) << n;
      }
      want = got;
    }
  }
}

// What warps read and write of shared memory themselves; copies and stores are whole pieces of a row.
TEST_F(CudaGroups, HaveNoBankConflicts) {
  simulate(9, 0, 227);
  for (const int64_t dim : {64, 128}) {
    AttentionDesc desc = many();
    desc.head_dim = desc.head_dim_v = dim;
    desc.seqlen_q = desc.seqlen_k = 192;
    const cuda_sim::Counters counters = computed(desc);
    EXPECT_GT(counters.bank_phases, 1000u);
    EXPECT_EQ(counters.bank_waves, counters.bank_phases) << dim;
  }
}

// Of many queries, which are merged at a price, blocks share keys only where those of one sequence would leave a GPU idle.
TEST_F(CudaGroups, ShareKeysWhereBlocksAreFew) {
  const struct {
    int64_t queries, heads, keys, parts;
  } kCases[] = {{512, 16, 512, 1},     // 64 blocks
                {512, 8, 512, 2},      // 32, and two parts of 256 keys
                {512, 8, 8192, 4},     // 132 / 32
                {129, 1, 65536, 66},   // 132 / 2
                {65, 1, 8192, 32},     // all keys have
                {8192, 1, 8192, 1},    // 64
                {1, 16, 65536, 32},    // few: 512 / 16
                {64, 1, 65536, 256}};  // 512 / 1, and all keys have
  for (const auto& [queries, heads, keys, parts] : kCases) {
    AttentionDesc desc;
    desc.dtype = DType::kBFloat16;
    desc.batch = 3;
    desc.num_heads = desc.num_heads_kv = heads;
    desc.seqlen_q = queries, desc.seqlen_k = keys;
    desc.head_dim = desc.head_dim_v = 64;
    const size_t rows = parts == 1 ? 0 : static_cast<size_t>(3 * heads * queries * parts);
    const size_t statistics = (rows * 4 * sizeof(float) + 63) / 64 * 64;
    EXPECT_EQ(plan_on_device(desc)->workspace_bytes(), statistics + rows * 64 * sizeof(float))
        << queries << "x" << heads;
  }
}

}  // namespace
}  // namespace polyhead
