// Sequences whose page tables name the same pages are decoded together: with the bits that each has with pages of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cases.h"
#include "cpu/attention/call.h"
#include "cpu/attention/shared_chunks.h"
#include "every_kernel.h"
#include "testing/call.h"
#include "testing/pages.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kLengths[] = {1603, 1603, 1500, 1603, 1536, 1024, 1023, 1603, 511};
constexpr int64_t kBatch = std::size(kLengths), kQueries[] = {1, 1, 1, 1, 1, 1, 1, 2, 1};  // the latter where packed

// Whose keys a sequence has from key j on: two prompts, taken by turns, whole, in part, and in the middle.
int64_t owner(int64_t b, int64_t j) {
  switch (b) {
    case 2: return j < 1024 ? 0 : 2;
    case 3: return j >= 512 && j < 1536 ? 0 : 3;
    case 5: return 4;
    case 7: return j < 512 ? 4 : 0;
    default: return b == 1 || b == 6 || b == 8 ? 0 : b;
  }
}

AttentionDesc desc_of(DType dtype, int64_t page_size, int64_t heads, int64_t heads_kv, int64_t dim) {
  AttentionDesc d = problem_of("", dtype, kBatch, heads, 1, pieces(kLengths[0], page_size) * page_size, dim).desc;
  d.num_heads_kv = heads_kv;
  d.has_seqlens_k = true;
  d.page_size = page_size;
  d.num_pages = enough_pages(d);
  return d;
}

struct Case {
  const char* name;
  AttentionDesc desc;
};

std::vector<Case> shared_cases() {
  std::vector<Case> cases = {{"four heads a key/value head", desc_of(DType::kFloat32, 16, 8, 2, 24)},
                             {"one", desc_of(DType::kBFloat16, 256, 5, 5, 40)},
                             {"two, int8, pages of one key", desc_of(DType::kBFloat16, 1, 6, 3, 32)},
                             {"seven, int4, pages across chunks", desc_of(DType::kFloat32, 48, 14, 2, 32)},
                             {"beams", desc_of(DType::kFloat16, 1603, 4, 4, 24)},
                             {"71 heads, more than a task", desc_of(DType::kFloat32, 512, 71, 1, 16)},
                             {"windows, sinks, two queries", desc_of(DType::kFloat32, 512, 3, 3, 24)},
                             {"options, float8", desc_of(DType::kBFloat16, 16, 4, 2, 24)},
                             {"packed", desc_of(DType::kBFloat16, 64, 4, 4, 24)},
                             {"trees of drafts", desc_of(DType::kFloat32, 32, 4, 2, 24)}};
  AttentionDesc& int8 = cases[2].desc;
  int8.key_dtype = int8.value_dtype = DType::kInt8;
  AttentionDesc& int4 = cases[3].desc;
  int4.key_dtype = int4.value_dtype = DType::kInt4x2;
  int4.key_group = 32, int4.value_group = 16;
  AttentionDesc& windows = cases[6].desc;
  windows.seqlen_q = 2, windows.causal = true, windows.align = Align::kBottomRight;
  windows.window_left = 300, windows.sink_keys = 20;
  AttentionDesc& options = cases[7].desc;
  options.key_dtype = options.value_dtype = DType::kFloat8E4M3;
  options.alibi_slopes_ndim = 2, options.align = Align::kBottomRight, options.has_sink_logits = true;
  options.attn_mask = {.given = true, .dtype = DType::kBool, .dims = {kBatch, 1, 1, options.seqlen_k}};
  options.dropout_p = 0.25;
  AttentionDesc& packed = cases[8].desc;
  packed.packed = true, packed.seqlen_q = kBatch + 1;
  AttentionDesc& trees = cases[9].desc;
  trees.seqlen_q = 5, trees.mask_at_end = true;
  trees.attn_mask = {.given = true, .dtype = DType::kBool, .dims = {kBatch, 1, 5, 5}};
  return cases;
}

// Keys and values of each sequence are those of their owners; a value that few rows see is NaN.
Inputs inputs_of(const AttentionDesc& d) {
  Problem problem{.desc = d};
  problem.edges = false;
  Inputs in = random_inputs(problem);
  in.seqlens_k = Array(DType::kInt64, {kBatch});
  for (int64_t b = 0; b < kBatch; ++b) in.seqlens_k.set(b, static_cast<double>(kLengths[b]));
  int64_t end = 0;
  for (int64_t b = 0; d.packed && b < kBatch; ++b) in.cu_seqlens_q.set(b + 1, static_cast<double>(end += kQueries[b]));
  if (d.window_left > 0) in.value.set(in.value.index({0, 1602 - 301, 1, 5}), NAN);  // the first query of two
  for (Array* a : {&in.key, &in.value, &in.key_scales, &in.value_scales}) {
    const auto row = a->given() ? static_cast<std::ptrdiff_t>(a->bytes.size()) / (kBatch * d.seqlen_k) : 0;
    for (int64_t n = 0; row > 0 && n < kBatch * d.seqlen_k; ++n) {
      const int64_t b = n / d.seqlen_k, j = n % d.seqlen_k, first = j / d.page_size * d.page_size;
      const auto from = a->bytes.begin() + (owner(b, first) * d.seqlen_k + j) * row;
      std::copy(from, from + row, a->bytes.begin() + n * row);
    }
  }
  return in;
}

// The table with the pages of owners in place of their copies.
Array shared_table(const AttentionDesc& d, const Array& own) {
  Array table = own;
  const int64_t per_sequence = d.seqlen_k / d.page_size;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t p = 0; p < pieces(kLengths[b], d.page_size); ++p) {
      const int64_t at = owner(b, p * d.page_size) * per_sequence + p;
      table.set(b * per_sequence + p, own.at(at));
    }
  }
  return table;
}

struct Results {
  Array out, logsumexp;
};

Results attend(const Kernel& kernel, const AttentionDesc& d, const Inputs& in, const Pages& pages, const Array& table,
               int threads) {
  const auto like = [&](Tensor ForwardArgs::*tensor) {
    const Tensor t = expected_tensor(d, tensor);
    return Array(t.dtype, std::vector<int64_t>(t.dims, t.dims + t.ndim));
  };
  Results results{like(&ForwardArgs::out), like(&ForwardArgs::logsumexp)};
  ForwardArgs args = dense_args(in);
  args.key = view(pages.key), args.value = view(pages.value), args.page_table = view(table);
  if (pages.key_scales.given()) args.key_scales = view(pages.key_scales);
  if (pages.value_scales.given()) args.value_scales = view(pages.value_scales);
  args.out = view(results.out), args.logsumexp = view(results.logsumexp);
  Executor& threads_of_call = executor(threads);
  const GuardedBytes workspace(kernel.workspace_bytes(d, threads_of_call.num_threads()).value(), Guard::kEnd, 0xff);
  args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
  EXPECT_EQ(kernel.forward(d, args, threads_of_call).message(), "");
  return results;
}

TEST(SharedPages, HaveTheBitsOfPagesOfTheirOwn) {
  for (const Case& c : shared_cases()) {
    const Inputs in = inputs_of(c.desc);
    const Pages own = in_pages(c.desc, in, 3);
    const Array shared = shared_table(c.desc, own.table);
    for_every_kernel(c.desc, [&](const Kernel& kernel) {
      const Results want = attend(kernel, c.desc, in, own, own.table, 1);
      for (const int threads : {0, 1, 3}) {
        const Results got = attend(kernel, c.desc, in, own, shared, threads);
        EXPECT_EQ(difference("out", got.out, want.out), "") << c.name << ", " << kernel.name << ", " << threads;
        EXPECT_EQ(difference("logsumexp", got.logsumexp, want.logsumexp), "") << c.name << ", " << kernel.name;
      }
    });
  }
}

// Who shares which chunk: nobody one that ends behind a length, or with other numbers of queries.
TEST(SharedPages, AreFoundChunkByChunk) {
  AttentionDesc d = desc_of(DType::kFloat32, 64, 1, 1, 8);
  const Inputs in = inputs_of(d);
  const Pages own = in_pages(d, in, 3);
  const Array table = shared_table(d, own.table);
  ForwardArgs args = dense_args(in);
  args.key = view(own.key), args.value = view(own.value), args.page_table = view(table);
  std::vector<int64_t> memory(cpu::SharedChunks::bytes(d).value() / 8 + Sequences::table_bytes(d).value() / 8 + 16);
  Sequences sequences;
  ASSERT_EQ(sequences.read(d, args, memory.data()).message(), "");
  sequences.replace_arrays(&args);
  const cpu::Problem problem = cpu::problem(d, args);
  cpu::SharedChunks chunks(d, problem, sequences, memory.data() + Sequences::table_bytes(d).value() / 8);
  const auto found = [&](int64_t b, int64_t chunk) {
    std::string text;
    for (const int32_t other : chunks.with(b, chunk)) text += std::to_string(other);
    return text;
  };
  chunks.find(0, d.batch, [](int64_t, int64_t) { return true; });
  for (const int64_t b : {0, 1, 2, 6}) EXPECT_EQ(found(b, 0), "0126");
  for (const int64_t b : {4, 5, 7}) EXPECT_EQ(found(b, 0), "457");
  for (const int64_t b : {0, 1, 2, 3, 7}) EXPECT_EQ(found(b, 1), "01237");
  EXPECT_EQ(found(4, 1), "45");
  EXPECT_EQ(found(0, 2), "0137");
  EXPECT_EQ(found(8, 0) + found(3, 0) + found(6, 1) + found(2, 2) + found(4, 2) + found(5, 2) + found(0, 3), "");
  chunks.find(1, 7, [](int64_t b, int64_t) { return b != 2; });
  EXPECT_EQ(found(1, 0), "16");
  EXPECT_EQ(found(1, 1), "13");
  EXPECT_EQ(found(3, 2), "13");
}

}  // namespace
}  // namespace polyhead::testing
