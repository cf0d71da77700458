// Every call of the C interface with its first, second, third ... allocation failing: the status says so, nothing is
// thrown or leaked (the sanitizer builds see leaks), and the same call then succeeds. Forward and backward allocate
// nothing.
#include <gtest/gtest.h>
#include <polyhead/polyhead.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>

#include "left_out.h"

namespace {

thread_local int64_t num_allocations = 0;  // since arm()
thread_local int64_t failing = 0;          // which of them fails; 0 = none

void arm(int64_t which) {
  num_allocations = 0;
  failing = which;
}

void* allocate(size_t bytes, size_t alignment) {
  if (++num_allocations == failing) throw std::bad_alloc();
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment + alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return ::operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return ::operator new(bytes, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

// Fails each allocation of `call` in turn, until a run needs no more. `status` is what it returns when all goes well.
void fail_every_allocation(const char* name, polyhead_status status, const std::function<polyhead_status()>& call) {
  SCOPED_TRACE(name);
  for (int64_t n = 1;; ++n) {
    arm(n);
    const polyhead_status got = call();
    const bool failed = num_allocations >= n;
    arm(0);
    if (!failed) {
      EXPECT_EQ(got, status) << polyhead_last_error();
      EXPECT_GT(n, 1) << "needs no memory: this test shows nothing";
      return;
    }
    ASSERT_TRUE(got == POLYHEAD_OUT_OF_MEMORY || got == status) << "allocation " << n << ": " << polyhead_last_error();
    EXPECT_TRUE(got == status || std::strstr(polyhead_last_error(), "memory") != nullptr) << polyhead_last_error();
    ASSERT_LT(n, 10000);
  }
}

polyhead_attention_desc small_desc() {
  polyhead_attention_desc desc;
  EXPECT_EQ(polyhead_attention_desc_init(&desc, sizeof desc), POLYHEAD_OK);
  desc.seqlen_q = desc.seqlen_k = desc.head_dim = desc.head_dim_v = 8;
  return desc;
}

void count(void*, int num_bodies, void (*body)(void* context, int index), void* context) {
  for (int i = 0; i < num_bodies; ++i) body(context, i);
}

// First, while what these two keep has not been made.
TEST(OutOfMemory, Lists) {
  fail_every_allocation("kernels", POLYHEAD_OK,
                        [] { return polyhead_kernels()[0] != nullptr ? POLYHEAD_OK : POLYHEAD_OUT_OF_MEMORY; });
  arm(1);
  polyhead_cpu_features();
  arm(0);
  const bool has_features = std::strcmp(polyhead_kernels()[0], "cpu_generic") != 0;
  EXPECT_EQ(polyhead_cpu_features()[0] != '\0', has_features) << "an answer without memory was kept";
}

TEST(OutOfMemory, PlansAndExplanations) {
  polyhead_attention_desc desc = small_desc();
  const auto create = [&] {
    polyhead_attention_plan* plan = nullptr;
    const polyhead_status status = polyhead_attention_plan_create(&desc, nullptr, &plan);
    EXPECT_EQ(plan != nullptr, status == POLYHEAD_OK);
    polyhead_attention_plan_destroy(plan);
    return status;
  };
  const auto explain = [&] {
    polyhead_explanation* explanation = nullptr;
    polyhead_status status = polyhead_attention_explain(&desc, nullptr, &explanation);
    EXPECT_EQ(explanation != nullptr, status == POLYHEAD_OK);
    if (explanation != nullptr && explanation->status == POLYHEAD_OUT_OF_MEMORY) status = POLYHEAD_OUT_OF_MEMORY;
    polyhead_explanation_destroy(explanation);
    return status;
  };
  fail_every_allocation("plan_create", POLYHEAD_OK, create);
  fail_every_allocation("explain", POLYHEAD_OK, explain);
  desc.num_heads_kv = 5;
  fail_every_allocation("plan_create of a bad desc", POLYHEAD_INVALID_ARGUMENT, create);
  desc.packed = 2;
  fail_every_allocation("plan_create of a worse desc", POLYHEAD_INVALID_ARGUMENT, create);
}

TEST(OutOfMemory, Executors) {
  const auto create = [] {
    polyhead_executor* executor = nullptr;
    const polyhead_status status = polyhead_executor_create(3, &executor);
    EXPECT_EQ(executor != nullptr, status == POLYHEAD_OK);
    EXPECT_EQ(executor == nullptr ? 3 : polyhead_executor_num_threads(executor), 3);
    polyhead_executor_destroy(executor);
    return status;
  };
  const auto create_host = [] {
    polyhead_executor* executor = nullptr;
    const polyhead_status status = polyhead_executor_create_host(3, count, nullptr, &executor);
    EXPECT_EQ(executor != nullptr, status == POLYHEAD_OK);
    polyhead_executor_destroy(executor);
    return status;
  };
  fail_every_allocation("executor_create", POLYHEAD_OK, create);
  fail_every_allocation("executor_create_host", POLYHEAD_OK, create_host);
}

TEST(OutOfMemory, Sentences) {
  fail_every_allocation("check_abi", POLYHEAD_UNSUPPORTED, [] { return polyhead_check_abi(-1); });
  fail_every_allocation("dropout_mask", POLYHEAD_INVALID_ARGUMENT, [] {
    const int64_t dims[] = {1, 1, 1, 1};
    const polyhead_tensor kept = polyhead_tensor_contiguous(nullptr, POLYHEAD_BOOL, 4, dims);
    return polyhead_dropout_mask(7, 1, 2, &kept);
  });
  fail_every_allocation("forward without a plan", POLYHEAD_INVALID_ARGUMENT,
                        [] { return polyhead_attention_forward(nullptr, nullptr); });
}

TEST(OutOfMemory, Merge) {
  float out[8] = {}, logsumexp[8] = {}, merged_out[8], merged_logsumexp[8];
  const int64_t out_dims[] = {1, 4, 2, 1}, dims[] = {1, 2, 4};
  const polyhead_partial part = {polyhead_tensor_contiguous(out, POLYHEAD_FLOAT32, 4, out_dims),
                                 polyhead_tensor_contiguous(logsumexp, POLYHEAD_FLOAT32, 3, dims)};
  const polyhead_partial parts[] = {part, part, part};
  const polyhead_partial merged = {polyhead_tensor_contiguous(merged_out, POLYHEAD_FLOAT32, 4, out_dims),
                                   polyhead_tensor_contiguous(merged_logsumexp, POLYHEAD_FLOAT32, 3, dims)};
  fail_every_allocation("merge", POLYHEAD_OK, [&] { return polyhead_merge(parts, 3, &merged, nullptr); });
  fail_every_allocation("merge_backward", POLYHEAD_OK,
                        [&] { return polyhead_merge_backward(parts, 1, &part, &part, &merged, nullptr); });
  fail_every_allocation("merge over an input", POLYHEAD_INVALID_ARGUMENT, [&] {
    polyhead_partial bad = merged;
    bad.out.data = out + 1;
    return polyhead_merge(parts, 3, &bad, nullptr);
  });
}

TEST(OutOfMemory, ForwardAndBackwardAllocateNothing) {
  const polyhead_attention_desc desc = small_desc();
  for (const char* const* kernel = polyhead_kernels(); *kernel != nullptr; ++kernel) {
    polyhead_plan_options options;
    polyhead_forward_args args;
    polyhead_backward_args backward;
    polyhead_attention_plan* plan = nullptr;
    ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
    ASSERT_EQ(polyhead_forward_args_init(&args, sizeof args), POLYHEAD_OK);
    ASSERT_EQ(polyhead_backward_args_init(&backward, sizeof backward), POLYHEAD_OK);
    options.kernel = *kernel;
    const polyhead_status made = polyhead_attention_plan_create(&desc, &options, &plan);
    if (made == POLYHEAD_UNSUPPORTED) {
      polyhead::testing::left_out().add(polyhead_last_error());
      continue;
    }
    ASSERT_EQ(made, POLYHEAD_OK);
    float query[64] = {}, out[64], logsumexp[8], grads[3][64];
    const int64_t dims[] = {1, 8, 1, 8}, statistic_dims[] = {1, 1, 8};
    args.query = args.key = args.value = polyhead_tensor_contiguous(query, POLYHEAD_FLOAT32, 4, dims);
    args.out = polyhead_tensor_contiguous(out, POLYHEAD_FLOAT32, 4, dims);
    args.logsumexp = polyhead_tensor_contiguous(logsumexp, POLYHEAD_FLOAT32, 3, statistic_dims);
    args.workspace_bytes =
        std::max(polyhead_attention_plan_workspace_bytes(plan), polyhead_attention_plan_backward_workspace_bytes(plan));
    args.workspace = ::operator new (args.workspace_bytes, std::align_val_t{64});
    backward.forward = &args;
    backward.grad_out = args.query;
    backward.grad_query = polyhead_tensor_contiguous(grads[0], POLYHEAD_FLOAT32, 4, dims);
    backward.grad_key = polyhead_tensor_contiguous(grads[1], POLYHEAD_FLOAT32, 4, dims);
    backward.grad_value = polyhead_tensor_contiguous(grads[2], POLYHEAD_FLOAT32, 4, dims);
    arm(0);
    EXPECT_EQ(polyhead_attention_forward(plan, &args), POLYHEAD_OK) << polyhead_last_error();
    EXPECT_EQ(polyhead_attention_backward(plan, &backward), POLYHEAD_OK) << polyhead_last_error();
    EXPECT_EQ(num_allocations, 0) << *kernel;
    ::operator delete (args.workspace, std::align_val_t{64});
    polyhead_attention_plan_destroy(plan);
  }
}

}  // namespace
