// Lengths, boundaries, offsets and windows are read once: who writes to the caller's arrays while a call runs changes nothing.
#include "contract/sequences.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels_to_test.h"
#include "small_call.h"

namespace polyhead::testing {
namespace {

// Fills the integers of a call with nonsense before each run of tasks, when a kernel has begun.
class Saboteur final : public Executor {
 public:
  int num_threads() const override { return 3; }
  void parallel_for(int count, void (*body)(void*, int), void* context) override {
    for (const Tensor* t : integers) {
      std::memset(t->data, 0x7f, static_cast<size_t>(t->num_elements()) * dtype_size_bytes(t->dtype));
    }
    for (int i = 0; i < count; ++i) body(context, i);
  }
  std::vector<const Tensor*> integers;
};

void fill(const Tensor& t, int seed) {
  auto* data = static_cast<float*>(t.data);
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    data[i] = static_cast<float>((i * 7919 + seed * 104729) % 2048) / 1024 - 1;
  }
}

// Bits of all results of a forward and a backward call; `sabotage`: the integers change under way.
std::string results(const Kernel& kernel, const AttentionDesc& desc, bool sabotage) {
  Saboteur executor;
  const Result<Plan> made = plan(desc, {kernel.name, {.executor = &executor}});
  if (!made.ok()) return made.status().message();
  BackwardCall call(desc);
  call.reserve(*made);
  BackwardArgs& b = call.backward;
  b.delta = b.grad_logsumexp = {};
  int n = 1;
  for (const Tensor* t : {&b.forward.query, &b.forward.key, &b.forward.value, &b.grad_out}) fill(*t, n++);
  const auto set_integers = [&] {
    if (desc.packed) set(b.forward.cu_seqlens_q, {0, 37, 37, 60}), set(b.forward.cu_seqlens_k, {0, 100, 150, 290});
    if (desc.has_seqlens_q) set(b.forward.seqlens_q, {61, 0, 40});
    if (desc.has_seqlens_k) set(b.forward.seqlens_k, {250, 300, 7});
    if (desc.has_query_offsets) set(b.forward.query_offsets, {5, -3, 200});
    for (int64_t i = 0; desc.has_windows && i < desc.seqlen_q; ++i) {
      static_cast<int32_t*>(b.forward.window_lo.data)[i] = static_cast<int32_t>(3 * i - 20);
      static_cast<int64_t*>(b.forward.window_hi.data)[i] = 4 * i + 30;
    }
  };
  if (sabotage) {
    for (const Tensor* t :
         {&b.forward.cu_seqlens_q, &b.forward.cu_seqlens_k, &b.forward.seqlens_q, &b.forward.seqlens_k,
          &b.forward.query_offsets, &b.forward.window_lo, &b.forward.window_hi}) {
      if (t->given()) executor.integers.push_back(t);
    }
  }
  set_integers();
  Status status = made->forward(b.forward);
  if (!status.ok()) return status.message();
  set_integers();
  status = made->backward(b);
  if (!status.ok()) return status.message();
  std::string all;
  for (const Tensor* t :
       {&b.forward.out, &b.forward.logsumexp, &b.grad_query, &b.grad_key, &b.grad_value, &b.grad_alibi_slopes}) {
    if (t->given()) all.append(static_cast<const char*>(t->data), static_cast<size_t>(t->num_elements()) * 4);
  }
  return all;
}

TEST(Sequences, NobodyChangesThemUnderWay) {
  AttentionDesc padded = good_desc();
  padded.batch = 3, padded.seqlen_q = 61, padded.seqlen_k = 300, padded.align = Align::kBottomRight,
  padded.causal = true;
  padded.has_seqlens_q = padded.has_seqlens_k = true;
  padded.alibi_slopes_ndim = 1;
  AttentionDesc few_keys = padded;  // few heads: chunks of keys in backward
  few_keys.num_heads = few_keys.num_heads_kv = 1;
  AttentionDesc decoding = padded;
  decoding.seqlen_q = 3, decoding.seqlen_k = 1200, decoding.has_seqlens_q = false;
  AttentionDesc offsets = padded;
  offsets.align = Align::kUnset, offsets.has_query_offsets = true;
  AttentionDesc windows = padded, windows_alone = good_desc(), windows_decoding = decoding;
  windows_alone.batch = 3, windows_alone.seqlen_q = 61, windows_alone.seqlen_k = 300;
  windows.has_windows = windows_alone.has_windows = windows_decoding.has_windows = true;
  AttentionDesc packed = padded;
  packed.packed = true, packed.has_seqlens_q = packed.has_seqlens_k = false;
  for (const Kernel* kernel : kernels_to_test()) {
    for (const AttentionDesc& desc :
         {padded, few_keys, decoding, offsets, packed, windows, windows_alone, windows_decoding}) {
      if (!kernel->why_not(desc).empty()) continue;
      const std::string honest = results(*kernel, desc, false);
      ASSERT_GT(honest.size(), 1000u) << honest;
      EXPECT_EQ(results(*kernel, desc, true) == honest, true) << kernel->name;
    }
  }
}

TEST(Sequences, ATableHoldsWhatWasRead) {
  AttentionDesc desc = good_desc();
  desc.batch = 3, desc.seqlen_q = 61, desc.seqlen_k = 300, desc.packed = true, desc.align = Align::kBottomRight;
  BackwardCall call(desc);
  set(call.args.cu_seqlens_q, {0, 37, 37, 60});
  set(call.args.cu_seqlens_k, {0, 100, 150, 290});
  alignas(64) Sequence table[4];
  ASSERT_LE(Sequences::table_bytes(desc).value(), sizeof table);
  Sequences sequences;
  ASSERT_TRUE(sequences.read(desc, call.args, table).ok());
  for (int64_t b = 0; b < desc.batch; ++b) {
    const Sequence want = sequence(desc, call.args, b), &got = sequences[b];
    EXPECT_EQ(got.first_q, want.first_q);
    EXPECT_EQ(got.first_k, want.first_k);
    EXPECT_EQ(got.len_q, want.len_q);
    EXPECT_EQ(got.len_k, want.len_k);
    EXPECT_EQ(got.offset, want.offset);
  }
  EXPECT_EQ(sequences.end_q(), 60);
  EXPECT_EQ(sequences.end_k(), 290);
}

}  // namespace
}  // namespace polyhead::testing
