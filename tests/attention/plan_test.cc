// What plan() and explain() refuse, in which words, and which kernel they choose.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "core/choose.h"
#include "small_call.h"

namespace polyhead {
namespace {

struct BadDesc {
  void (*change)(AttentionDesc& desc);
  std::string message;
};

const BadDesc kBadDescs[] = {
    {[](auto& d) { d.batch = -1; }, "batch is -1, must not be negative"},
    {[](auto& d) { d.seqlen_q = -2; }, "seqlen_q is -2, must not be negative"},
    {[](auto& d) { d.seqlen_k = -3; }, "seqlen_k is -3, must not be negative"},
    {[](auto& d) { d.num_heads = -4; }, "num_heads is -4, must not be negative"},
    {[](auto& d) { d.num_heads_kv = -5; }, "num_heads_kv is -5, must not be negative"},
    {[](auto& d) { d.head_dim = -6; }, "head_dim is -6, must not be negative"},
    {[](auto& d) { d.head_dim_v = -kMax - 1; }, "head_dim_v is -9223372036854775808, must not be negative"},
    {[](auto& d) { d.num_heads_kv = 3; }, "num_heads_kv is 3, must divide num_heads 4"},
    {[](auto& d) { d.num_heads_kv = 8; }, "num_heads_kv is 8, must divide num_heads 4"},
    {[](auto& d) { d.num_heads_kv = 0; }, "num_heads_kv is 0, must divide num_heads 4"},
    {[](auto& d) { d.dtype = DType::kInt32; }, "dtype is int32, takes float32, bfloat16, float16 or float64"},
    {[](auto& d) { d.dtype = DType{77}; }, "dtype is an unknown dtype, takes float32, bfloat16, float16 or float64"},
    {[](auto& d) { d.scale = kNan; }, "scale is nan, must be a finite number"},
    {[](auto& d) { d.scale = -kInf; }, "scale is -inf, must be a finite number"},
    {[](auto& d) { d.softcap = -1.5; }, "softcap is -1.5, must be 0 (off) or a positive finite number"},
    {[](auto& d) { d.softcap = kNan; }, "softcap is nan, must be 0 (off) or a positive finite number"},
    {[](auto& d) { d.softcap = kInf; }, "softcap is inf, must be 0 (off) or a positive finite number"},
    {[](auto& d) { d.window_left = -2; }, "window_left is -2, must be -1 (open) or at least 0"},
    {[](auto& d) { d.sink_keys = -1; }, "sink_keys is -1, must be at least 0"},
    {[](auto& d) { d.mask_at_end = true; }, "mask_at_end needs attn_mask"},
    {[](auto& d) {
       d.mask_at_end = true, d.attn_mask = {.given = true, .dtype = DType::kBool, .dims = {1, 1, 1, 7}};
     },
     "attn_mask dim 3 is 7, with mask_at_end must be 0 to seqlen_k 5"},
    {[](auto& d) { d.window_right = -kMax; }, "window_right is -9223372036854775807, must be -1 (open) or at least 0"},
    {[](auto& d) { d.align = Align{3}; }, "align is 3, must be 0 (unset), 1 (top_left) or 2 (bottom_right)"},
    {[](auto& d) { d.query_offset = 0, d.has_query_offsets = true; },
     "query_offset and query_offsets are both given, give one"},
    {[](auto& d) { d.query_offset = 0, d.align = Align::kTopLeft; },
     "align is top_left and query_offset is given too, give one"},
    {[](auto& d) { d.has_query_offsets = true, d.align = Align::kBottomRight; },
     "align is bottom_right and query_offsets are given too, give one"},
    {[](auto& d) { d.causal = true; }, std::string("causal needs align: seqlen_q 3 is not seqlen_k 5") + kAlignChoices},
    {[](auto& d) { d.window_left = 0; },
     std::string("window needs align: seqlen_q 3 is not seqlen_k 5") + kAlignChoices},
    {[](auto& d) { d.window_right = 9; },
     std::string("window needs align: seqlen_q 3 is not seqlen_k 5") + kAlignChoices},
    {[](auto& d) { d.alibi_slopes_ndim = 1; },
     std::string("alibi_slopes needs align: seqlen_q 3 is not seqlen_k 5") + kAlignChoices},
    {[](auto& d) { d.alibi_slopes_ndim = 3; },
     "alibi_slopes_ndim is 3, must be 0 (none), 1 [num_heads] or 2 [batch, num_heads]"},
    {[](auto& d) { d.alibi_slopes_ndim = -1; },
     "alibi_slopes_ndim is -1, must be 0 (none), 1 [num_heads] or 2 [batch, num_heads]"},
    {[](auto& d) { d.dropout_p = -0.25; }, "dropout_p is -0.25, must be 0 to 1"},
    {[](auto& d) { d.dropout_p = 1.25; }, "dropout_p is 1.25, must be 0 to 1"},
    {[](auto& d) { d.dropout_p = kNan; }, "dropout_p is nan, must be 0 to 1"},
    {[](auto& d) { d.dropout_p = 0.5, d.batch = int64_t{1} << 31; },
     "batch * num_heads is 8589934592, dropout counts it in 32 bits"},
    {[](auto& d) { d.dropout_p = 0.5, d.seqlen_q = int64_t{1} << 33; },
     "seqlen_q is 8589934592, dropout counts it in 32 bits"},
    {[](auto& d) { d.dropout_p = 0.5, d.seqlen_k = int64_t{1} << 36; },
     "seqlen_k / 8 is 8589934592, dropout counts it in 32 bits"},
    {[](auto& d) { d.return_weights = ReturnWeights{-1}; },
     "return_weights is -1, must be 0 (none), 1 (per head) or 2 (mean)"},
    {[](auto& d) { d.normalizer = Normalizer{2}; }, "normalizer is 2, must be 0 (softmax) or 1 (none)"},
    {[](auto& d) { d.normalizer = Normalizer::kNone, d.has_sink_logits = true; },
     "sink_logits are given, but normalizer is none: a sink is one more logit of the softmax"},
    {[](auto& d) { d.attn_mask = operand(DType::kFloat32, 1, 1, 1, 1); }, "attn_mask is float32, expected bool"},
    {[](auto& d) { d.attn_mask = operand(DType::kBool, 3, 1, 1, 1); }, "attn_mask dim 0 is 3, must be 1 or batch 2"},
    {[](auto& d) { d.attn_mask = operand(DType::kBool, 1, 2, 1, 1); },
     "attn_mask dim 1 is 2, must be 1 or num_heads 4"},
    {[](auto& d) { d.attn_mask = operand(DType::kBool, 2, 4, 0, 5); }, "attn_mask dim 2 is 0, must be 1 or seqlen_q 3"},
    {[](auto& d) { d.attn_mask = operand(DType::kBool, 2, 4, 3, -5); },
     "attn_mask dim 3 is -5, must be 1 or seqlen_k 5"},
    {[](auto& d) { d.attn_bias = operand(DType::kFloat16, 2, 4, 5, 5); },
     "attn_bias dim 2 is 5, must be 1 or seqlen_q 3"},
    {[](auto& d) { d.attn_bias = operand(DType::kBool, 1, 1, 1, 1); },
     "attn_bias is bool, takes float32, bfloat16, float16 or float64"},
    {[](auto& d) { d.attn_bias = operand(DType::kFloat64, 1, 1, 1, 1); },
     "attn_bias is float64, which needs float64 inputs; dtype is float32"},
    {[](auto& d) { d.packed = true, d.attn_mask = operand(DType::kBool, 1, 1, 1, 1); },
     "attn_mask cannot be given with packed sequences (cu_seqlens)"},
    {[](auto& d) { d.packed = true, d.attn_bias = operand(DType::kFloat32, 1, 1, 1, 1); },
     "attn_bias cannot be given with packed sequences (cu_seqlens)"},
    {[](auto& d) { d.packed = true, d.return_weights = ReturnWeights::kMean; },
     "return_weights cannot be given with packed sequences (cu_seqlens)"},
    {[](auto& d) { d.packed = true, d.return_column_sums = true; },
     "return_column_sums cannot be given with packed sequences (cu_seqlens)"},
    {[](auto& d) { d.packed = true, d.has_seqlens_q = true; },
     "seqlens_q cannot be given with packed sequences (cu_seqlens)"},
    {[](auto& d) { d.packed = true, d.has_seqlens_k = true; },
     "seqlens_k cannot be given with packed sequences (cu_seqlens)"},
    {[](auto& d) { d.batch = kMax; },
     "query is too large: batch 9223372036854775807 * seqlen_q 3 * num_heads 4 * head_dim 8 elements pass the address "
     "space"},
    {[](auto& d) { d.seqlen_k = kMax / 4, d.batch = 0; },
     "key is too large: batch 0 * seqlen_k 2305843009213693951 * num_heads_kv 2 * head_dim 8 elements pass the address "
     "space"},
    {[](auto& d) { d.head_dim_v = kMax; },
     "value is too large: batch 2 * seqlen_k 5 * num_heads_kv 2 * head_dim_v 9223372036854775807 elements pass the "
     "address space"},
    {[](auto& d) { d.return_weights = ReturnWeights::kPerHead, d.seqlen_q = d.seqlen_k = int64_t{1} << 30; },
     "attn_weights is too large: batch 2 * num_heads 4 * seqlen_q 1073741824 * seqlen_k 1073741824 elements pass the "
     "address space"},
    {[](auto& d) { d.packed = true, d.batch = kMax; },
     "the list of heads is too large: batch 9223372036854775807 * num_heads 4 elements pass the address space"},
};

TEST(PlanErrors, EachNamesTheFieldAndTheNumbers) {
  ASSERT_TRUE(plan(good_desc()).ok());
  for (const BadDesc& bad : kBadDescs) {
    AttentionDesc desc = good_desc();
    bad.change(desc);
    const Result<Plan> made = plan(desc);
    EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(made.status().message(), bad.message);
    const Explanation explanation = explain(desc);
    EXPECT_EQ(explanation.status.message(), bad.message);
    EXPECT_EQ(explanation.kernel, "");
  }
}

TEST(PlanErrors, WhatLooksOddButIsLegal) {
  void (*const changes[])(AttentionDesc&) = {
      [](AttentionDesc& d) { d.scale = -1e300; },
      [](AttentionDesc& d) { d.scale = 0; },
      [](AttentionDesc& d) { d.causal = true, d.align = Align::kTopLeft; },
      [](AttentionDesc& d) { d.causal = true, d.query_offset = -kMax - 1; },
      [](AttentionDesc& d) { d.window_left = kMax, d.window_right = kMax, d.query_offset = kMax; },
      [](AttentionDesc& d) { d.causal = true, d.seqlen_q = d.seqlen_k; },
      [](AttentionDesc& d) { d.causal = true, d.batch = 0; },
      [](AttentionDesc& d) { d.causal = true, d.has_seqlens_k = true; },
      [](AttentionDesc& d) { d.causal = true, d.packed = true; },
      [](AttentionDesc& d) { d.window_left = d.window_right = -1; },
      [](AttentionDesc& d) { d.align = Align::kBottomRight; },
      [](AttentionDesc& d) { d.dropout_p = 1; },
      [](AttentionDesc& d) { d.num_heads = d.num_heads_kv = 0; },
      [](AttentionDesc& d) { d.head_dim = 0; },
      [](AttentionDesc& d) { d.dtype = DType::kFloat64, d.attn_bias = operand(DType::kFloat64, 2, 1, 3, 1); },
      [](AttentionDesc& d) { d.attn_bias = operand(DType::kBFloat16, 1, 4, 1, 5); },
      [](AttentionDesc& d) {
        d.attn_bias = {false, DType::kBool, {-7, -7, -7, -7}};
      },
      [](AttentionDesc& d) { d.seqlen_q = 0, d.attn_mask = operand(DType::kBool, 1, 1, 1, 5); },
      [](AttentionDesc& d) { d.seqlen_q = 0, d.attn_mask = operand(DType::kBool, 1, 1, 0, 5); },
  };
  for (const auto& change : changes) {
    AttentionDesc desc = good_desc();
    change(desc);
    const Result<Plan> made = plan(desc);
    EXPECT_TRUE(made.ok()) << made.status().message() << " (case " << &change - changes << ")";
  }
}

// Kernels that stand for a build and a machine that this test does not have.
const Kernel kBroken{
    "cpu_broken", Device::kCpu, [](const AttentionDesc&) { return std::string("this CPU has no such thing"); },
    nullptr,      nullptr,      nullptr,
    nullptr};
const Kernel kNarrow{"cpu_narrow",
                     Device::kCpu,
                     [](const AttentionDesc& desc) {
                       return desc.head_dim <= 64 ? std::string()
                                                  : "head_dim is " + std::to_string(desc.head_dim) + ", takes 1 to 64";
                     },
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr};
const Kernel kWide{"cpu_wide",
                   Device::kCpu,
                   [](const AttentionDesc& desc) {
                     return desc.head_dim <= 128 ? std::string()
                                                 : "head_dim is " + std::to_string(desc.head_dim) + ", takes 1 to 128";
                   },
                   nullptr,
                   nullptr,
                   nullptr,
                   nullptr};

TEST(ChooseKernel, TheFirstThatCan) {
  const Kernel* const list[] = {&kBroken, &kNarrow, &kWide};
  AttentionDesc desc = good_desc();
  auto chosen = [&](std::string_view name) {
    const auto kernel = choose_among(list, desc, name, "kernel");
    return kernel.ok() ? std::string((*kernel)->name) : kernel.status().message();
  };
  EXPECT_EQ(chosen(""), "cpu_narrow");
  EXPECT_EQ(chosen("cpu_wide"), "cpu_wide");
  EXPECT_EQ(
      chosen("cpu_broken"),
      "kernel is cpu_broken, which cannot compute this: this CPU has no such thing; these can: cpu_narrow, cpu_wide");
  EXPECT_EQ(chosen("cpu"), "kernel is cpu, known are cpu_broken, cpu_narrow, cpu_wide");
  desc.head_dim = 100;
  EXPECT_EQ(chosen(""), "cpu_wide");
  EXPECT_EQ(chosen("cpu_narrow"),
            "kernel is cpu_narrow, which cannot compute this: head_dim is 100, takes 1 to 64; these can: cpu_wide");
  desc.head_dim = 200;
  EXPECT_EQ(
      chosen(""),
      "no kernel can compute this: cpu_broken (this CPU has no such thing), cpu_narrow (head_dim is 200, takes 1 to "
      "64), cpu_wide (head_dim is 200, takes 1 to 128)");
  EXPECT_EQ(chosen("cpu_wide"),
            "kernel is cpu_wide, which cannot compute this: head_dim is 200, takes 1 to 128; no other can");
  EXPECT_EQ(choose_among(list, desc, "", "kernel").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(choose_among(list, desc, "cpu_wide", "kernel").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(choose_among(list, desc, "none", "POLYHEAD_KERNEL").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(choose_among(list, desc, "none", "POLYHEAD_KERNEL").status().message(),
            "POLYHEAD_KERNEL is none, known are cpu_broken, cpu_narrow, cpu_wide");
}

TEST(ChooseKernel, APlanOptionForcesOne) {
  const Result<Plan> made = plan(good_desc(), {.kernel = "reference"});
  ASSERT_TRUE(made.ok());
  EXPECT_STREQ(made->kernel_name(), "reference");
  const Status unknown = plan(good_desc(), {.kernel = "cpu_avx1024"}).status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  std::string known;  // of those that compute where the call's tensors are
  for (const Kernel* kernel : kernel_list()) {
    if (kernel->device == Device::kCpu) known += (known.empty() ? "" : ", ") + std::string(kernel->name);
  }
  EXPECT_EQ(unknown.message(), "kernel is cpu_avx1024, known are " + known);
}

// In a new process, since the environment is read once.
TEST(ChooseKernelDeathTest, TheEnvironmentForcesOneAndAPlanOptionOverrulesIt) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  auto outcome = [](const PlanOptions& options) {
    const Result<Plan> made = plan(good_desc(), options);
    return made.ok() ? std::string(made->kernel_name()) : made.status().message();
  };
  ASSERT_EQ(setenv("POLYHEAD_KERNEL", "reference", 1), 0);
  EXPECT_EXIT(_exit(outcome({}) == "reference" ? 0 : 1), testing::ExitedWithCode(0), "");
  ASSERT_EQ(setenv("POLYHEAD_KERNEL", "none", 1), 0);
  EXPECT_EXIT(_exit(outcome({}).rfind("POLYHEAD_KERNEL is none, known are ", 0) == 0 ? 0 : 1),
              testing::ExitedWithCode(0), "");
  EXPECT_EXIT(_exit(outcome({.kernel = "reference"}) == "reference" ? 0 : 1), testing::ExitedWithCode(0), "");
  ASSERT_EQ(unsetenv("POLYHEAD_KERNEL"), 0);
}

// (query, key) pairs that a desc leaves, counted one row at a time.
double counted_pairs(const AttentionDesc& desc) {
  const Sequence s = sequence(desc, {}, 0);
  double pairs = 0;
  for (int64_t i = 0; i < desc.seqlen_q; ++i) {
    const KeyRange keys = key_range(desc, {}, s, i);
    pairs += static_cast<double>(std::max<int64_t>(keys.end - keys.begin, 0));
  }
  return pairs * static_cast<double>(desc.batch);
}

TEST(Explain, FlopsCountVisiblePairs) {
  int cases = 0;
  for (const int64_t left : {-1, 0, 2, 9}) {
    for (const int64_t right : {-1, 0, 1, 7}) {
      for (const bool causal : {false, true}) {
        for (const int64_t offset : {-9, -2, 0, 1, 4, 20}) {
          for (const int64_t seqlen_k : {1, 4, 7, 12}) {
            AttentionDesc desc = good_desc();
            desc.seqlen_q = 7;
            desc.seqlen_k = seqlen_k;
            desc.causal = causal;
            desc.window_left = left;
            desc.window_right = right;
            desc.query_offset = offset;
            const double per_pair = 2.0 * (8 + 6) * 4;
            const double backward_per_pair = 2.0 * (3 * 8 + 2 * 6) * 4;
            ASSERT_EQ(explain(desc).backward_flops, backward_per_pair * counted_pairs(desc));
            ASSERT_EQ(explain(desc).flops, per_pair * counted_pairs(desc))
                << "left " << left << " right " << right << " causal " << causal << " offset " << offset << " Sk "
                << seqlen_k;
            desc.query_offset.reset();
            for (const Align align : {Align::kTopLeft, Align::kBottomRight}) {
              desc.align = align;
              ASSERT_EQ(explain(desc).flops, per_pair * counted_pairs(desc));
            }
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 4 * 4 * 2 * 6 * 4);
}

TEST(Explain, ListsEveryKernelAndAgreesWithPlan) {
  const Explanation explanation = explain(good_desc());
  ASSERT_TRUE(explanation.status.ok());
  ASSERT_EQ(explanation.reasons.size(), kernel_list().size());
  const Result<Plan> made = plan(good_desc());
  EXPECT_EQ(explanation.kernel, made->kernel_name());
  EXPECT_EQ(explanation.workspace_bytes, made->workspace_bytes());
  EXPECT_EQ(explanation.backward_workspace_bytes, made->backward_workspace_bytes());
  bool found = false;
  for (size_t i = 0; i < explanation.reasons.size(); ++i) {
    EXPECT_STREQ(explanation.reasons[i].kernel, kernel_list()[i]->name);
    if (found || !explanation.reasons[i].reason.empty()) continue;
    EXPECT_EQ(explanation.kernel, explanation.reasons[i].kernel);
    found = true;
  }
  const Explanation forced = explain(good_desc(), {.kernel = "cpu_avx1024"});
  EXPECT_EQ(forced.status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(forced.kernel, "");
  EXPECT_EQ(forced.reasons.size(), kernel_list().size());
}

}  // namespace
}  // namespace polyhead
