// Keys and values in formats with scales: groups of every size, NaN, offsets of more than 32 bits; and what is refused.
// Numbers: attention_test.cc, whose cases have formats too.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "every_kernel.h"
#include "far_rows.h"
#include "small_call.h"
#include "testing/call.h"
#include "testing/judge.h"

namespace polyhead::testing {
namespace {

constexpr DType kFormats[] = {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt4x2};

// Groups of zeros, of numbers of one size, below the normal ones, and of none: as good as the definition on what is stored.
TEST(Formats, GroupsOfAnySize) {
  for (const DType format : kFormats) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t queries : {1, 40}) {
        Problem problem;
        AttentionDesc& d = problem.desc;
        d = AttentionDesc{.batch = 2, .seqlen_q = queries, .seqlen_k = 530, .num_heads = 4, .num_heads_kv = 2};
        d.head_dim = 32, d.head_dim_v = 48, d.dtype = dtype;
        d.key_dtype = d.value_dtype = format, d.key_group = d.value_group = 16;
        Inputs in = random_inputs(problem);
        const bool half = format == DType::kInt4x2;  // has scales of float16
        const double edges[] = {0, half ? 0x1p-24 : 0x1p-149, half ? 0x1p-18 : 0x1p-130, half ? 0x1p-14 : 0x1p-126};
        for (Array* scales : {&in.key_scales, &in.value_scales}) {
          for (int64_t n = 0; n < scales->size(); ++n) {
            if (n % 7 < 4) scales->set(n, edges[n % 7]);
          }
        }
        const std::vector<ForwardDraw> draws = {{d, in, expected(d, in)}};
        for_every_kernel(d, [&](const Kernel& kernel) {
          EXPECT_EQ(mismatch(kernel, problem, draws), "")
              << kernel.name << ", " << dtype_name(format) << ", " << dtype_name(dtype) << ", " << queries;
        });
      }
    }
  }
}

// Tokens and their scales 2^31 elements apart.
TEST(Formats, MayLieBeyond32Bits) {
  for (const DType format : kFormats) {
    AttentionDesc d{.batch = 1, .seqlen_q = 1, .seqlen_k = 3, .num_heads = 4, .num_heads_kv = 1, .head_dim = 32};
    d.head_dim_v = 32, d.key_dtype = d.value_dtype = format, d.key_group = 16;
    const Inputs in = random_inputs({.desc = d});
    const FarRows key(in.key), value(in.value), key_scales(in.key_scales), value_scales(in.value_scales);
    for (const FarRows* rows : {&key, &value, &key_scales, &value_scales}) {
      if (!rows->tensor().data) GTEST_SKIP() << "this machine has no 48 GB of addresses to give";
    }
    for_every_kernel(d, [&](const Kernel& kernel) {
      Array out(DType::kFloat32, {1, 1, 4, 32});
      ForwardArgs args = dense_args(in);
      args.key = key.tensor(), args.value = value.tensor(), args.out = view(out);
      args.key_scales = key_scales.tensor(), args.value_scales = value_scales.tensor();
      const GuardedBytes workspace(kernel.workspace_bytes(d, 1).value(), Guard::kEnd, 0xff);
      args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      ASSERT_EQ(kernel.forward(d, args, executor(1)).message(), "");
      EXPECT_EQ(difference("out", out, run(kernel, d, in).out), "") << kernel.name << ", " << dtype_name(format);
    });
  }
}

// A row that holds NaN is stored with the scale NaN: queries that see it get NaN, of the others it changes no bit.
TEST(Formats, NanReachesWhoSeesIt) {
  for (const DType format : kFormats) {
    const AttentionDesc d{.batch = 1,
                          .seqlen_q = 5,
                          .seqlen_k = 600,
                          .num_heads = 4,
                          .num_heads_kv = 1,
                          .head_dim = 24,
                          .head_dim_v = 72,
                          .dtype = DType::kBFloat16,
                          .key_dtype = format,
                          .value_dtype = format,
                          .causal = true,
                          .query_offset = 595};
    Inputs in = random_inputs({.desc = d}), poisoned = in;
    for (Array* a : {&poisoned.key_scales, &poisoned.value_scales}) a->set(a->index({0, 598, 0, 0}), NAN);
    for_every_kernel(d, [&](const Kernel& kernel) {
      const Outputs clean = run(kernel, d, in), got = run(kernel, d, poisoned);
      for (int64_t at = 0; at < got.out.size(); ++at) {
        const int64_t query = at / (4 * 72);
        ASSERT_TRUE(query < 3 ? got.out.at(at) == clean.out.at(at) : std::isnan(got.out.at(at)))
            << kernel.name << ", query " << query << ", element " << at;
      }
      Inputs value_alone = in;
      value_alone.value_scales = poisoned.value_scales;
      const Outputs weighed = run(kernel, d, value_alone);
      EXPECT_EQ(difference("logsumexp", weighed.logsumexp, clean.logsumexp), "") << kernel.name;
      for (int64_t at = 0; at < got.out.size(); ++at) {
        ASSERT_TRUE(at < 3 * 4 * 72 ? weighed.out.at(at) == clean.out.at(at) : std::isnan(weighed.out.at(at)))
            << kernel.name << ", element " << at;
      }
    });
  }
}

TEST(Formats, WhatIsRefusedNamesItAndNoOutputIsTouched) {
  const std::pair<void (*)(AttentionDesc&), const char*> cases[] = {
      {[](auto& d) { d.key_dtype = DType::kBFloat16; },
       "key_dtype is bfloat16, must be float32 as dtype, or int8, float8_e4m3, float8_e5m2 or int4x2"},
      {[](auto& d) { d.head_dim_v = 7, d.value_dtype = DType::kInt4x2; },
       "head_dim_v is 7, must be even where value_dtype is int4x2"},
      {[](auto& d) { d.key_group = 16; }, "key_group is 16, but float32 has no scales: leave it 0"},
      {[](auto& d) { d.value_dtype = DType::kInt8, d.value_group = -16; },
       "value_group is -16, must be 0 (one scale for a row), or a multiple of 16 that divides head_dim_v 6"}};
  for (const auto& [change, message] : cases) {
    AttentionDesc d = good_desc();
    change(d);
    EXPECT_EQ(plan(d).status().message(), message);
  }
  AttentionDesc d = good_desc();
  d.key_dtype = DType::kInt8;
  const std::pair<void (*)(ForwardArgs&), const char*> calls[] = {
      {[](auto& a) { a.key_scales = {}; }, "key_scales is missing"},
      {[](auto& a) { a.key_scales.dtype = DType::kFloat16; }, "key_scales is float16, expected float32"},
      {[](auto& a) { a.key_scales.dims[3] = 2; }, "key_scales dim 3 is 2, expected head_dim / key_group 1"},
      {[](auto& a) { a.value_scales = a.key_scales; }, "value_scales is given, but the plan was made without"}};
  for (const char* kernel : {"", "reference"}) {
    const Result<Plan> made = plan(d, {.kernel = kernel});
    ASSERT_TRUE(made.ok()) << made.status().message();
    for (const auto& [change, message] : calls) {
      polyhead::Call call(d);
      call.reserve(*made);
      const std::vector<float> scales(20, 1.0f);
      call.args.key.dtype = DType::kInt8;
      call.args.key_scales = Tensor(scales.data(), DType::kFloat32, {2, 5, 2, 1});
      change(call.args);
      EXPECT_EQ(made->forward(call.args).message(), message);
      EXPECT_TRUE(call.outputs_untouched());
    }
    EXPECT_EQ(made->backward({}).message(), "key is int8: backward takes query, key and value of one dtype");
  }
}

}  // namespace
}  // namespace polyhead::testing
