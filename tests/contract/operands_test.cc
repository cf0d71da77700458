// The table of the tensors of a call, and the checker that counts them.
#include "contract/operands.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "contract/attention_operands.h"
#include "small_call.h"

namespace polyhead {
namespace {

TEST(AttentionOperands, EveryTensorOfACallHasOneRow) {
  BackwardArgs args;
  // Taken apart by name: a new field does not compile before it stands here.
  auto& [query, key, value, key_scales, value_scales, attn_mask, attn_bias, alibi_slopes, sinks, seqlens_q, seqlens_k,
         cu_seqlens_q, cu_seqlens_k, page_table, query_offsets, window_lo, window_hi, captures, dropout_seed,
         dropout_offset, out, logsumexp, weights, column_sums, workspace, workspace_bytes, where] = args.forward;
  auto& [forward, grad_out, grad_logsumexp, delta, grad_query, grad_key, grad_value, grad_attn_bias, grad_alibi_slopes,
         grad_sinks, grad_captures, accumulate] = args;
  std::vector<const Tensor*> tensors = {
      &query,      &key,          &value,          &attn_mask,         &attn_bias,      &alibi_slopes, &seqlens_q,
      &seqlens_k,  &cu_seqlens_q, &cu_seqlens_k,   &query_offsets,     &window_lo,      &window_hi,    &out,
      &logsumexp,  &weights,      &column_sums,    &grad_out,          &grad_logsumexp, &delta,        &grad_query,
      &grad_key,   &grad_value,   &grad_attn_bias, &grad_alibi_slopes, &sinks,          &grad_sinks,   &page_table,
      &key_scales, &value_scales};
  std::vector<const Tensor*> rows;
  for (const AttentionOperand& row : attention_operands()) {
    rows.push_back(&row.of(args));
    EXPECT_NE(row.in_forward == nullptr, row.in_backward == nullptr) << row.name;
    EXPECT_EQ(row.forward == Use::kNone, row.in_forward == nullptr) << row.name;
  }
  std::sort(tensors.begin(), tensors.end());
  std::sort(rows.begin(), rows.end());
  EXPECT_EQ(rows, tensors);
}

AttentionDesc with_options() {
  AttentionDesc desc = good_desc();
  desc.causal = desc.has_seqlens_q = desc.has_seqlens_k = desc.has_query_offsets = desc.return_column_sums = true;
  desc.attn_mask = operand(DType::kBool, 2, 1, 3, 5);
  desc.attn_bias = operand(DType::kFloat16, 1, 4, 3, 1);
  desc.alibi_slopes_ndim = 2;
  desc.has_sink_logits = true;
  desc.return_weights = ReturnWeights::kMean;
  return desc;
}

// Memory for what expected_tensor() says, and nothing else, makes a call that is taken.
TEST(AttentionOperands, WhatIsExpectedIsTaken) {
  AttentionDesc packed = good_desc(), windows = good_desc(), doubles = with_options(), pages = good_desc(),
                stored = good_desc();
  stored.key_dtype = DType::kInt4x2;
  stored.value_dtype = DType::kFloat8E4M3;
  packed.packed = windows.has_windows = pages.has_seqlens_k = true;
  pages.page_size = 1;
  pages.num_pages = 3;
  doubles.dtype = DType::kFloat64;
  doubles.return_weights = ReturnWeights::kPerHead;
  for (const AttentionDesc& desc : {good_desc(), with_options(), packed, windows, doubles, pages, stored}) {
    const Result<Plan> made = plan(desc, {.kernel = "reference"});
    ASSERT_TRUE(made.ok()) << made.status().message();
    std::vector<std::vector<double>> memory;
    ForwardArgs args;
    for (const AttentionOperand& row : attention_operands()) {
      if (row.in_forward == nullptr) continue;
      Tensor& t = args.*row.in_forward;
      t = expected_tensor(desc, row.in_forward);
      EXPECT_EQ(t.given(), row.shape(desc).ndim > 0) << row.name;
      t.data = memory.emplace_back(static_cast<size_t>(t.num_elements())).data();
    }
    args.workspace_bytes = made->workspace_bytes();
    args.workspace = std::aligned_alloc(64, (args.workspace_bytes + 127) / 64 * 64);
    EXPECT_EQ(made->forward(args).message(), "");
    std::free(args.workspace);
  }
}

TEST(Operands, AnOperandTooManyIsRefused) {
  const float element = 0;
  const Tensor t(&element, DType::kFloat32, {1});
  const OperandShape shape(DType::kFloat32, {{"size", 1}});
  Operands operands;
  for (int i = 0; i < Operands::kMost; ++i) EXPECT_TRUE(operands.add(Role::kInput, "x", t, shape).ok()) << i;
  const Status status = operands.add(Role::kInput, "x", t, shape);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message(), "a call has more than 48 tensors");
}

TEST(Operands, LieOnTheDeviceOfTheCall) {
  const float element = 0;
  Tensor t(&element, DType::kFloat32, {1});
  const OperandShape shape(DType::kFloat32, {{"size", 1}});
  EXPECT_EQ(Operands(Device::kCuda).add(Role::kInput, "x", t, shape).message(),
            "x is not on cuda, where this call computes");
  t.device = Device::kCuda;
  EXPECT_TRUE(Operands(Device::kCuda).add(Role::kInput, "x", t, shape).ok());
  EXPECT_EQ(Operands().add(Role::kInput, "x", t, shape).message(), "x is not on the CPU, where this call computes");
}

}  // namespace
}  // namespace polyhead
