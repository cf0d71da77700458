// Keys and values in pages: the bits that the same keys have one after the other, whatever the pages; and what is refused.
// Numbers: attention_test.cc, whose cases have pages too.
#include "testing/pages.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cases.h"
#include "every_kernel.h"
#include "far_rows.h"
#include "polyhead/cache.h"
#include "small_call.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

AttentionDesc in_pages_of(AttentionDesc desc, int64_t page_size) {
  desc.page_size = page_size;
  desc.num_pages = page_size > 0 ? enough_pages(desc) : 0;
  return desc;
}

// The kernels to test that take a problem; under a sanitizer, of small ones.
std::vector<const Kernel*> kernels_for(const AttentionDesc& d) {
  std::vector<const Kernel*> kernels;
  for (const Kernel* kernel : kernels_to_test()) {
    const bool large = memory_alone() && products(d) > 3e6;
    if (!large && !refuses(kernel->name, kernel->why_not(d))) kernels.push_back(kernel);
  }
  return kernels;
}

TEST(Pages, HaveTheBitsOfTheSameKeysOneAfterTheOther) {
  int tested = 0;
  for (const Problem& problem : cases()) {
    const AttentionDesc& d = problem.desc;
    if (d.page_size == 0 || d.packed) continue;
    const Inputs in = random_inputs(problem);
    for (const Kernel* kernel : kernels_for(d)) {
      set_running(forward_command(kernel->name, problem));
      const Outputs dense = run(*kernel, in_pages_of(d, 0), in);
      const int64_t other =
          d.page_size != d.seqlen_k && d.seqlen_k > 0 ? d.seqlen_k : 1;  // one page, or one key a page
      for (const int64_t page_size : {d.page_size, other}) {
        RunOptions options;
        options.threads = 2;
        options.layout = Layout::kMixed;
        options.layout_seed = problem.seed + static_cast<uint64_t>(page_size);
        const Outputs paged = run(*kernel, in_pages_of(d, page_size), in, options);
        ASSERT_TRUE(paged.faults.empty()) << paged.faults.front();
        ASSERT_EQ(difference(paged, dense), "") << page_size << "\n" << forward_command(kernel->name, problem);
        ++tested;
      }
    }
  }
  EXPECT_GT(tested, 0);
}

// One query for 4 heads, keys and values of 2.
AttentionDesc decoding(int64_t batch, int64_t keys, int64_t page_size) {
  const AttentionDesc d{.batch = batch,
                        .seqlen_q = 1,
                        .seqlen_k = keys,
                        .num_heads = 4,
                        .num_heads_kv = 2,
                        .head_dim = 24,
                        .head_dim_v = 24,
                        .has_seqlens_k = true};
  return in_pages_of(d, page_size);
}

// Two sequences that share their first pages, as a fork does, beside a third whose pages lie in descending order.
TEST(Pages, MayBeSharedAndLieInAnyOrder) {
  const AttentionDesc d = decoding(3, 64, 8);
  const Problem problem{.desc = d};
  Inputs in = random_inputs(problem);
  in.seqlens_k = Array(DType::kInt32, {3});
  for (int64_t b = 0; b < 3; ++b) in.seqlens_k.set(b, static_cast<double>(64 - 7 * b));
  const auto bytes = static_cast<std::ptrdiff_t>(in.key.bytes.size()) / 3;  // of a sequence; half of them are shared
  for (Array* a : {&in.key, &in.value}) std::copy_n(a->bytes.begin(), bytes / 2, a->bytes.begin() + bytes);
  const Pages scattered = in_pages(d, in, 5);
  Array table(DType::kInt64, {3, 8});
  for (int64_t n = 0; n < 24; ++n) table.set(n, scattered.table.at(n >= 8 && n < 12 ? n - 8 : n));
  for (const Kernel* kernel : kernels_for(d)) {
    const Outputs dense = run(*kernel, in_pages_of(d, 0), in);
    Array out(DType::kFloat32, {3, 1, 4, 24});
    ForwardArgs args = dense_args(in);
    args.key = view(scattered.key), args.value = view(scattered.value), args.page_table = view(table);
    args.out = view(out);
    const GuardedBytes workspace(kernel->workspace_bytes(d, 1).value(), Guard::kEnd, 0xff);
    args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
    ASSERT_EQ(kernel->forward(d, args, executor(1)).message(), "");
    EXPECT_EQ(difference("out", out, dense.out), "") << kernel->name;
  }
}

// One token a page, pages 2^31 elements apart: append writes there, and attention reads there.
TEST(Pages, MayLieBeyond32Bits) {
  AttentionDesc d = decoding(1, 3, 1);
  d.num_heads_kv = 1, d.num_pages = 3;
  Inputs in = random_inputs({.desc = d});
  in.seqlens_k.set(0, 3);
  const Array zeros(DType::kFloat32, {1, 3, 1, 24});
  const FarRows key(zeros), value(zeros);
  if (!key.tensor().data || !value.tensor().data) GTEST_SKIP() << "this machine has no 48 GB of addresses to give";
  KvTensors pool{.key = key.tensor(), .value = value.tensor()};
  for (Tensor* t : {&pool.key, &pool.value}) {
    std::swap(t->dims[0], t->dims[1]);
    std::swap(t->strides[0], t->strides[1]);
  }
  const Result<KvCache> cache = kv_cache({.num_pages = 3, .page_size = 1, .head_dim = 24, .head_dim_v = 24});
  const int64_t slots[] = {2, 0, 1};
  const Tensor pages(slots, DType::kInt64, {1, 3});
  KvAppendArgs tokens{.key = view(in.key), .value = view(in.value), .slots = Tensor(slots, DType::kInt64, {3})};
  for (Tensor* t : {&tokens.key, &tokens.value}) *t = Tensor(t->data, DType::kFloat32, {3, 1, 24});
  ASSERT_EQ(cache->append(pool, tokens).message(), "");
  for (const Kernel* kernel : kernels_for(d)) {
    Array out(DType::kFloat32, {1, 1, 4, 24});
    ForwardArgs args = dense_args(in);
    args.key = pool.key, args.value = pool.value, args.page_table = pages, args.out = view(out);
    const GuardedBytes workspace(kernel->workspace_bytes(d, 1).value(), Guard::kEnd, 0xff);
    args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
    ASSERT_EQ(kernel->forward(d, args, executor(1)).message(), "");
    EXPECT_EQ(difference("out", out, run(*kernel, in_pages_of(d, 0), in).out), "") << kernel->name;
  }
}

// Tokens of one sequence are appended while attention reads the pages of another.
TEST(Pages, OthersMayBeWrittenMeanwhile) {
  const AttentionDesc d = decoding(1, 64, 8);
  const Inputs in = random_inputs({.desc = d});
  const Pages pages = in_pages(d, in, 5);
  std::vector<int64_t> slots;  // of a page that the sequence has not
  for (int64_t page = 0; slots.empty(); ++page) {
    bool own = false;
    for (int64_t n = 0; n < 8; ++n) own |= pages.table.at(n) == static_cast<double>(page);
    for (int64_t n = 0; n < 8 && !own; ++n) slots.push_back(page * 8 + n);
  }
  const Result<KvCache> cache =
      kv_cache({.num_pages = d.num_pages, .page_size = 8, .num_heads_kv = 2, .head_dim = 24, .head_dim_v = 24});
  const Tensor rows(in.key.bytes.data(), DType::kFloat32, {8, 2, 24});
  const KvAppendArgs tokens{.key = rows, .value = rows, .slots = Tensor(slots.data(), DType::kInt64, {8})};
  for (const Kernel* kernel : kernels_for(d)) {
    std::atomic<bool> done = false;
    std::thread writer([&] {
      while (!done)
        EXPECT_EQ(cache->append({.key = view(pages.key), .value = view(pages.value)}, tokens).message(), "");
    });
    const Outputs dense = run(*kernel, in_pages_of(d, 0), in);
    const GuardedBytes workspace(kernel->workspace_bytes(d, 1).value(), Guard::kEnd, 0xff);
    for (int n = 0; n < 20; ++n) {
      Array out(DType::kFloat32, {1, 1, 4, 24});
      ForwardArgs args = dense_args(in);
      args.key = view(pages.key), args.value = view(pages.value), args.page_table = view(pages.table);
      args.out = view(out), args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
      EXPECT_EQ(kernel->forward(d, args, executor(1)).message(), "");
      EXPECT_EQ(difference("out", out, dense.out), "") << kernel->name;
    }
    done = true;
    writer.join();
  }
}

// A table of no pages has no entries, so that its strides say nothing.
TEST(Pages, OfNoKeysHaveATableOfAnyStrides) {
  AttentionDesc d = good_desc();  // two sequences
  d.seqlen_k = 0, d.page_size = 2, d.num_pages = 9, d.has_seqlens_k = true;
  for (const Kernel* kernel : kernels_for(d)) {
    const Result<Plan> made = plan(d, {.kernel = kernel->name});
    ASSERT_TRUE(made.ok()) << made.status().message();
    polyhead::Call call(d);
    call.reserve(*made);
    std::vector<float> pool(9 * 2 * 2 * 8);
    call.args.key = Tensor(pool.data(), DType::kFloat32, {9, 2, 2, 8});
    call.args.value = Tensor(pool.data(), DType::kFloat32, {9, 2, 2, 6});
    call.args.page_table = Tensor(pool.data(), DType::kInt64, {2, 0});
    call.args.page_table.strides[0] = kMax / 2 + 1;
    set(call.args.seqlens_k, {0, 0});
    EXPECT_EQ(made->forward(call.args).message(), "") << kernel->name;
  }
}

struct Refused {
  void (*change)(ForwardArgs& args, int64_t* entries);
  const char* message;
};

TEST(Pages, WhatIsRefusedNamesItAndNoOutputIsTouched) {
  AttentionDesc d = good_desc();  // two sequences, 5 keys
  d.seqlen_k = 6, d.page_size = 2, d.num_pages = 9, d.has_seqlens_k = true;
  const Refused cases[] = {
      {[](auto& a, int64_t*) { a.page_table = {}; }, "page_table is missing"},
      {[](auto& a, int64_t*) { a.page_table.ndim = 1; },
       "page_table has 1 dims, expected 2: [batch, seqlen_k / page_size]"},
      {[](auto& a, int64_t*) { a.page_table.dims[1] = 2; }, "page_table dim 1 is 2, expected seqlen_k / page_size 3"},
      {[](auto& a, int64_t*) { a.page_table.dtype = DType::kFloat32; },
       "page_table is float32, expected int32 or int64"},
      {[](auto& a, int64_t*) { a.seqlens_k = {}; }, "seqlens_k is missing"},
      {[](auto& a, int64_t*) { a.key.dims[0] = 8; }, "key dim 0 is 8, expected num_pages 9"},
      {[](auto& a, int64_t*) { a.value.dims[1] = 3; }, "value dim 1 is 3, expected page_size 2"},
      {[](auto&, int64_t* entries) { entries[1] = 9; },
       "page_table[0, 1] is 9, must be 0 to num_pages - 1 = 8: seqlens_k[0] reaches into it"},
      {[](auto&, int64_t* entries) { entries[3] = -1; },
       "page_table[1, 0] is -1, must be 0 to num_pages - 1 = 8: seqlens_k[1] reaches into it"},
  };
  for (const char* kernel : {"", "reference"}) {
    const Result<Plan> made = plan(d, {.kernel = kernel});
    ASSERT_TRUE(made.ok()) << made.status().message();
    for (const Refused& bad : cases) {
      polyhead::Call call(d);
      call.reserve(*made);
      std::vector<int64_t> entries = {3, 8, kMax, 0, -5, -6};  // behind the lengths any
      call.args.page_table = Tensor(entries.data(), DType::kInt64, {2, 3});
      set(call.args.seqlens_k, {4, 1});
      std::vector<float> pool(9 * 2 * 2 * 8);
      call.args.key = Tensor(pool.data(), DType::kFloat32, {9, 2, 2, 8});
      call.args.value = Tensor(pool.data(), DType::kFloat32, {9, 2, 2, 6});
      bad.change(call.args, entries.data());
      EXPECT_EQ(made->forward(call.args).message(), bad.message);
      EXPECT_TRUE(call.outputs_untouched());
    }
  }
}

TEST(Pages, DescsThatMakeNoSense) {
  const std::pair<void (*)(AttentionDesc&), const char*> cases[] = {
      {[](auto& d) { d.page_size = -1; }, "page_size is -1, must be 0 (none) or more"},
      {[](auto& d) { d.num_pages = 4; }, "num_pages is 4, but page_size is 0 (none)"},
      {[](auto& d) { d.page_size = 1, d.num_pages = -4; }, "num_pages is -4, must not be negative"},
      {[](auto& d) { d.page_size = 1; }, "page_table needs seqlens_k: how many keys of its pages each sequence has"},
      {[](auto& d) { d.page_size = 2, d.has_seqlens_k = true; }, "seqlen_k is 5, must be a multiple of page_size 2"},
      {[](auto& d) { d.page_size = 5, d.num_pages = kMax, d.has_seqlens_k = true; },
       "key is too large: num_pages 9223372036854775807 * page_size 5 * num_heads_kv 2 * head_dim 8 elements pass the "
       "address space"}};
  for (const auto& [change, message] : cases) {
    AttentionDesc d = good_desc();
    change(d);
    EXPECT_EQ(plan(d).status().message(), message);
  }
  AttentionDesc d = good_desc();
  d.page_size = 5, d.num_pages = 2, d.has_seqlens_k = true;
  const Result<Plan> made = plan(d);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made->backward({}).message(),
            "page_table: backward does not take paged keys, give key and value without pages");
}

}  // namespace
}  // namespace polyhead::testing
