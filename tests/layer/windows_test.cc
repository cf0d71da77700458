// A window for each query, as arrays: the same as a mask that says so, in memory that does not grow with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels_to_test.h"
#include "layer_block.h"
#include "through_c.h"

namespace polyhead::testing {
namespace {

struct Sizes {
  const char* name;
  int64_t seqlen_q, seqlen_k, head_dim;
};
constexpr Sizes kSizes[] = {{"tiles", 150, 700, 40}, {"decode", 3, 1500, 32}, {"tiny", 5, 7, 4}};
constexpr int64_t kBatch = 2, kHeads = 4, kHeadsKv = 2;

// Disjoint ones, far apart in a tile of queries; empty ones; and some that leave the keys.
struct Windows {
  std::vector<int64_t> lo, hi;

  Windows(Random& random, int64_t num_queries, int64_t num_keys) {
    constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
    for (int64_t i = 0; i < num_queries; ++i) {
      int64_t begin = random.integer(-2, num_keys), end = begin + random.integer(0, num_keys / 4 + 1);
      if (i % 7 == 3) begin = kLeast, end = num_keys / 2;
      if (i % 7 == 5) end = kMost;
      if (i % 11 == 2) begin = kMost, end = kLeast;
      lo.push_back(begin);
      hi.push_back(end);
    }
  }
  bool sees(int64_t i, int64_t j) const { return lo[static_cast<size_t>(i)] <= j && j < hi[static_cast<size_t>(i)]; }
  Tensor tensor(std::vector<int64_t>& bounds) const {
    return Tensor(bounds.data(), DType::kInt64, {static_cast<int64_t>(bounds.size())});
  }
};

struct Numbers {
  Array query, key, value, grad_out;
};

// Out, logsumexp and the gradients of a plan of C++ or C.
template <class AnyPlan>
Arrays compute(const AnyPlan& made, const AttentionDesc& desc, ForwardArgs args, const Numbers& in) {
  const Memory workspace(made.workspace_bytes()), backward_workspace(made.backward_workspace_bytes());
  Arrays got;
  got["out"] = unwritten(in.grad_out);
  got["logsumexp"] = Array(DType::kFloat32, {desc.batch, desc.num_heads, desc.seqlen_q});
  got["query"] = unwritten(in.query), got["key"] = unwritten(in.key), got["value"] = unwritten(in.value);
  args.query = view(in.query), args.key = view(in.key), args.value = view(in.value);
  args.out = view(got["out"]), args.logsumexp = view(got["logsumexp"]);
  args.workspace = workspace.data(), args.workspace_bytes = made.workspace_bytes();
  EXPECT_EQ(made.forward(args).message(), "");
  BackwardArgs backward;
  backward.forward = args;
  backward.forward.workspace = backward_workspace.data();
  backward.forward.workspace_bytes = made.backward_workspace_bytes();
  backward.grad_out = view(in.grad_out);
  backward.grad_query = view(got["query"]);
  backward.grad_key = view(got["key"]);
  backward.grad_value = view(got["value"]);
  EXPECT_EQ(made.backward(backward).message(), "");
  return got;
}

Arrays compute(const AttentionDesc& desc, const ForwardArgs& args, const Numbers& in, const std::string& kernel) {
  const Result<Plan> made = plan(desc, options_of(kernel, 2));
  EXPECT_TRUE(made.ok()) << made.status().message();
  return compute(*made, desc, args, in);
}

void expect_same(const Arrays& got, const Arrays& want, double relative) {
  for (const auto& [name, array] : want) {
    Array finite = array, finite_got = got.at(name);
    for (int64_t n = 0; n < array.size(); ++n) {  // L of a query that sees nothing
      if (std::isfinite(array.at(n))) continue;
      EXPECT_EQ(array.at(n), finite_got.at(n)) << name << " [" << n << "]";
      finite.set(n, 0), finite_got.set(n, 0);
    }
    expect_near(finite_got, finite, relative, name);
  }
}

struct Case {
  AttentionDesc desc;
  Numbers in;
  Windows windows;
  Array mask{DType::kBool, {1, 1, 1, 1}};

  Case(const Sizes& sizes, DType dtype, Random random) : windows(random, sizes.seqlen_q, sizes.seqlen_k) {
    desc.batch = kBatch, desc.num_heads = kHeads, desc.num_heads_kv = kHeadsKv;
    desc.seqlen_q = sizes.seqlen_q, desc.seqlen_k = sizes.seqlen_k;
    desc.head_dim = desc.head_dim_v = sizes.head_dim;
    desc.dtype = dtype;
    const auto numbers = [&](int64_t seqlen, int64_t heads) {
      return random_array(random, dtype, {kBatch, seqlen, heads, sizes.head_dim}, 0, 1);
    };
    in = {numbers(sizes.seqlen_q, kHeads), numbers(sizes.seqlen_k, kHeadsKv), numbers(sizes.seqlen_k, kHeadsKv),
          numbers(sizes.seqlen_q, kHeads)};
    mask = Array(DType::kBool, {1, 1, sizes.seqlen_q, sizes.seqlen_k});
    for (int64_t i = 0; i < sizes.seqlen_q; ++i) {
      for (int64_t j = 0; j < sizes.seqlen_k; ++j) mask.set(i * sizes.seqlen_k + j, windows.sees(i, j));
    }
  }
};

TEST(Windows, AreAMaskThatIsNeverStored) {
  for (const Sizes& sizes : kSizes) {
    for (const auto& [dtype, relative] : {std::pair{DType::kFloat32, 2e-6}, {DType::kBFloat16, 2e-2}}) {
      Case c(sizes, dtype, Random(5));
      AttentionDesc masked = c.desc, windowed = c.desc;
      masked.attn_mask = {true, DType::kBool, {1, 1, sizes.seqlen_q, sizes.seqlen_k}};
      windowed.has_windows = true;
      ForwardArgs by_mask, by_windows;
      by_mask.attn_mask = view(c.mask);
      by_windows.window_lo = c.windows.tensor(c.windows.lo), by_windows.window_hi = c.windows.tensor(c.windows.hi);
      for (const Kernel* kernel : kernels_to_test()) {
        if (std::string(kernel->name) == "reference" && sizes.seqlen_q * sizes.seqlen_k > 1000) continue;  // slow
        const Result<Plan> made = plan(windowed, options_of(kernel->name, 2));
        if (!made.ok()) continue;
        SCOPED_TRACE(std::string(sizes.name) + " " + dtype_name(dtype) + " on " + kernel->name);
        expect_same(compute(windowed, by_windows, c.in, kernel->name), compute(masked, by_mask, c.in, kernel->name),
                    relative);
        const Result<Plan> open = plan(c.desc, options_of(kernel->name, 2));
        const auto ranges = static_cast<size_t>((sizes.seqlen_q * 16 + 63) / 64 * 64);  // which are read once
        EXPECT_EQ(made->workspace_bytes(), open->workspace_bytes() + ranges);
        EXPECT_EQ(made->backward_workspace_bytes(), open->backward_workspace_bytes() + ranges);
      }
    }
  }
}

// Beside a mask, causal and lengths, which hide more; and bounds in 32 bits with a stride.
TEST(Windows, JoinWhatElseHides) {
  for (const Sizes& sizes : kSizes) {
    Case c(sizes, DType::kFloat32, Random(9));
    AttentionDesc masked = c.desc;
    masked.causal = true, masked.align = Align::kTopLeft;
    masked.has_seqlens_k = masked.has_seqlens_q = true;
    masked.attn_mask = {true, DType::kBool, {1, 1, sizes.seqlen_q, sizes.seqlen_k}};
    AttentionDesc windowed = masked;
    windowed.has_windows = true;
    std::vector<int32_t> lengths_q = {static_cast<int32_t>(sizes.seqlen_q), 2};
    std::vector<int32_t> lengths_k = {2, static_cast<int32_t>(sizes.seqlen_k)};
    std::vector<int32_t> bounds(static_cast<size_t>(3 * sizes.seqlen_q));
    Array own(DType::kBool, {1, 1, sizes.seqlen_q, sizes.seqlen_k}), both = own;
    for (int64_t i = 0; i < sizes.seqlen_q; ++i) {
      const int64_t lo = i % 5, hi = lo + i / 2 + 1;
      bounds[static_cast<size_t>(3 * i)] = static_cast<int32_t>(lo);
      bounds[static_cast<size_t>(3 * i + 1)] = static_cast<int32_t>(hi);
      for (int64_t j = 0; j < sizes.seqlen_k; ++j) {
        own.set(i * sizes.seqlen_k + j, (i + j) % 3 != 0);
        both.set(i * sizes.seqlen_k + j, (i + j) % 3 != 0 && lo <= j && j < hi);
      }
    }
    ForwardArgs by_mask, by_windows;
    by_mask.seqlens_q = by_windows.seqlens_q = Tensor(lengths_q.data(), DType::kInt32, {kBatch});
    by_mask.seqlens_k = by_windows.seqlens_k = Tensor(lengths_k.data(), DType::kInt32, {kBatch});
    by_mask.attn_mask = view(both), by_windows.attn_mask = view(own);
    by_windows.window_lo = Tensor(bounds.data(), DType::kInt32, {sizes.seqlen_q});
    by_windows.window_lo.strides[0] = 3;
    by_windows.window_hi = by_windows.window_lo;
    by_windows.window_hi.data = bounds.data() + 1;
    for (const Kernel* kernel : kernels_to_test()) {
      if (std::string(kernel->name) == "reference" && sizes.seqlen_q * sizes.seqlen_k > 1000) continue;  // slow
      if (!plan(windowed, options_of(kernel->name, 2)).ok()) continue;
      SCOPED_TRACE(std::string(sizes.name) + " on " + kernel->name);
      expect_same(compute(windowed, by_windows, c.in, kernel->name), compute(masked, by_mask, c.in, kernel->name),
                  2e-6);
    }
  }
}

// Keys that no window has may hold anything.
TEST(Windows, HiddenIsHidden) {
  for (const Sizes& sizes : kSizes) {
    Case c(sizes, DType::kFloat32, Random(5));
    const int64_t first = sizes.seqlen_k / 3,
                  end = first + sizes.seqlen_k / 4;  // between those of even and odd queries
    for (size_t i = 0; i < c.windows.lo.size(); ++i) {
      c.windows.lo[i] = i % 2 == 0 ? 0 : end;
      c.windows.hi[i] = i % 2 == 0 ? first : sizes.seqlen_k;
    }
    Numbers hostile = c.in;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t n = first * kHeadsKv * sizes.head_dim; n < end * kHeadsKv * sizes.head_dim; ++n) {
        const int64_t at = b * sizes.seqlen_k * kHeadsKv * sizes.head_dim + n;
        hostile.key.set(at, NAN), hostile.value.set(at, n % 2 == 0 ? NAN : INFINITY);
      }
    }
    c.desc.has_windows = true;
    ForwardArgs args;
    args.window_lo = c.windows.tensor(c.windows.lo), args.window_hi = c.windows.tensor(c.windows.hi);
    for (const Kernel* kernel : kernels_to_test()) {
      if (!plan(c.desc, options_of(kernel->name, 2)).ok()) continue;
      if (std::string(kernel->name) == "reference" && sizes.seqlen_q * sizes.seqlen_k > 1000) continue;  // slow
      SCOPED_TRACE(std::string(sizes.name) + " on " + kernel->name);
      const Arrays want = compute(c.desc, args, c.in, kernel->name), got = compute(c.desc, args, hostile, kernel->name);
      for (const auto& [name, array] : want) EXPECT_EQ(difference(name.c_str(), got.at(name), array), "");
    }
  }
}

TEST(Windows, HaveTheSameBitsThroughC) {
  for (const Sizes& sizes : kSizes) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      Case c(sizes, dtype, Random(5));
      c.desc.has_windows = true;
      ForwardArgs args;
      args.window_lo = c.windows.tensor(c.windows.lo), args.window_hi = c.windows.tensor(c.windows.hi);
      for (const Kernel* kernel : kernels_to_test()) {
        if (!plan(c.desc, options_of(kernel->name, 2)).ok()) continue;
        if (std::string(kernel->name) == "reference" && sizes.seqlen_q * sizes.seqlen_k > 1000) continue;  // slow
        SCOPED_TRACE(std::string(sizes.name) + " " + dtype_name(dtype) + " on " + kernel->name);
        const Arrays want = compute(c.desc, args, c.in, kernel->name);
        const PlanThroughC through_c(c.desc, kernel->name);
        ASSERT_EQ(through_c.made.message(), "");
        const Arrays got = compute(through_c, c.desc, args, c.in);
        for (const auto& [name, array] : want) EXPECT_EQ(difference(name.c_str(), got.at(name), array), "");
      }
    }
  }
}

TEST(Windows, ErrorsNameTheArgument) {
  Case c(kSizes[2], DType::kFloat32, Random(5));
  AttentionDesc packed = c.desc;
  packed.batch = 1, packed.packed = packed.has_windows = true;
  EXPECT_EQ(plan(packed).status().message(), "window_lo cannot be given with packed sequences (cu_seqlens)");
  c.desc.has_windows = true;
  const Result<Plan> made = plan(c.desc);
  ASSERT_TRUE(made.ok());
  ForwardArgs args;
  args.query = view(c.in.query), args.key = view(c.in.key), args.value = view(c.in.value);
  EXPECT_EQ(made->forward(args).message(), "window_lo is missing");
  args.window_lo = args.window_hi = c.windows.tensor(c.windows.lo);
  args.window_hi.dims[0] = 4;
  EXPECT_EQ(made->forward(args).message(), "window_hi dim 0 is 4, expected seqlen_q 5");
  args.window_hi.dtype = DType::kFloat32;
  EXPECT_EQ(made->forward(args).message(), "window_hi is float32, expected int32 or int64");
}

}  // namespace
}  // namespace polyhead::testing
