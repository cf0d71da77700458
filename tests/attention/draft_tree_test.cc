// A tree of drafted tokens behind a cache in pages, as speculative decoding has it: one call answers each branch as plain
// decoding of it does, and when a branch is accepted (KvCache::copy), what is left is the cache of plain decoding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "every_kernel.h"
#include "polyhead/cache.h"
#include "testing/call.h"
#include "testing/guard.h"
#include "testing/random.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kHeadsKv = 2, kDim = 32;
constexpr int64_t kLengths[kBatch] = {5, 509};  // the second's tree lies across a chunk of 512 keys
constexpr int64_t kPageSize = 8, kPagesOfSequence = 65, kPages = kBatch * kPagesOfSequence;
constexpr int64_t kParents[] = {-1, 0, 0, 1, 2, 2};  // of each node of the tree
constexpr int64_t kNodes = std::size(kParents), kDepth = 3, kTokens = kPagesOfSequence * kPageSize;
constexpr int64_t kBranches[][kDepth] = {{0, 1, 3}, {0, 2, 4}, {0, 2, 5}};

int64_t depth(int64_t node) { return kParents[node] < 0 ? 0 : 1 + depth(kParents[node]); }

Array random_rows(DType dtype, int64_t heads, uint64_t stream) {
  Array a(dtype, {kBatch * kTokens, heads, kDim});
  Random random(1, stream);
  a.fill([&] { return random.normal(); });
  return a;
}

// Token n of sequence b is row b * kTokens + n: its beginning, the nodes of the tree, and one that follows.
struct Text {
  Array key, value, query, cos, sin;

  explicit Text(DType dtype)
      : key(random_rows(dtype, kHeadsKv, 1)),
        value(random_rows(dtype, kHeadsKv, 2)),
        query(random_rows(dtype, kHeads, 3)),
        cos(DType::kFloat32, {kTokens, kDim / 2}),
        sin(DType::kFloat32, {kTokens, kDim / 2}) {
    for (int64_t n = 0; n < cos.size(); ++n) {
      const double angle = static_cast<double>(n / (kDim / 2)) * std::pow(1e4, -double(n % (kDim / 2)) / (kDim / 2));
      cos.set(n, std::cos(angle));
      sin.set(n, std::sin(angle));
    }
  }
};

struct Answer {
  Array out, logsumexp;
};

// A cache in pages that lie in no order, NaN at first, and what is asked of it.
class Conversation {
 public:
  Conversation(const Text& text, DType stored)
      : text_(text),
        cache_(*kv_cache({.num_pages = kPages,
                          .page_size = kPageSize,
                          .num_heads_kv = kHeadsKv,
                          .head_dim = kDim,
                          .head_dim_v = kDim,
                          .key_dtype = stored,
                          .value_dtype = stored,
                          .rotary_dim = kDim})),
        memory_(cache_.bytes(), Guard::kNone, 0xff),
        pool_(cache_.tensors(memory_.data())),
        table_(DType::kInt32, {kBatch, kPagesOfSequence}) {
    for (int64_t n = 0; n < kPages; ++n) table_.set(n, static_cast<double>(n * 7 % kPages));
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t n = 0; n < kLengths[b]; ++n) append(b, n, n, n);
    }
  }

  // A token to the place that it has in its sequence; its query, turned, as a row of [heads, dim].
  Array append(int64_t b, int64_t token, int64_t place, int64_t position) {
    const auto row = [&](const Array& all) { return rows(all, b * kTokens + token, b * kTokens + token + 1); };
    const Array key = row(text_.key), value = row(text_.value);
    Array query = row(text_.query);
    const Array slots = integers({slot(b, place)}), positions = integers({position});
    KvAppendArgs args{.key = view(key), .value = view(value), .slots = view(slots), .positions = view(positions)};
    args.cos = view(text_.cos), args.sin = view(text_.sin), args.query = args.query_out = view(query);
    EXPECT_EQ(cache_.append(pool_, args).message(), "");
    return query;
  }

  Array append_to_both(int64_t past, int64_t token, int64_t position) {
    return joined(append(0, kLengths[0] + token, kLengths[0] + past, kLengths[0] + position),
                  append(1, kLengths[1] + token, kLengths[1] + past, kLengths[1] + position));
  }

  // Of so many queries and keys behind both beginnings.
  AttentionDesc desc(int64_t queries, bool tree) const {
    AttentionDesc d;
    d.batch = kBatch, d.num_heads = kHeads, d.num_heads_kv = kHeadsKv, d.head_dim = d.head_dim_v = kDim;
    d.seqlen_q = queries, d.seqlen_k = kTokens, d.page_size = kPageSize, d.num_pages = kPages, d.has_seqlens_k = true;
    d.dtype = text_.query.dtype;
    if (cache_.desc().key_dtype != d.dtype) d.key_dtype = d.value_dtype = cache_.desc().key_dtype;
    if (tree)
      d.attn_mask = {.given = true, .dtype = DType::kBool, .dims = {1, 1, kNodes, kNodes}}, d.mask_at_end = true;
    return d;
  }

  Answer attend(const Kernel& kernel, Array query, int64_t past, const Array& mask = {}) const {
    query.dims = {kBatch, query.dims[0] / kBatch, kHeads, kDim};
    const AttentionDesc d = desc(query.dims[1], mask.given());
    Answer answer{Array(d.dtype, query.dims), Array(DType::kFloat32, {kBatch, kHeads, query.dims[1]})};
    const Array lengths = integers({kLengths[0] + past, kLengths[1] + past});
    ForwardArgs args;
    args.query = view(query), args.key = pool_.key, args.value = pool_.value;
    args.key_scales = pool_.key_scales, args.value_scales = pool_.value_scales;
    args.page_table = view(table_), args.seqlens_k = view(lengths);
    if (mask.given()) args.attn_mask = view(mask);
    args.out = view(answer.out), args.logsumexp = view(answer.logsumexp);
    const GuardedBytes workspace(kernel.workspace_bytes(d, 1).value(), Guard::kEnd, 0xff);
    args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
    EXPECT_EQ(kernel.forward(d, args, executor(1)).message(), "") << kernel.name;
    return answer;
  }

  // The nodes of a branch to the places behind the beginnings.
  void accept(const int64_t (&branch)[kDepth]) {
    std::vector<int64_t> from, to;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t n = 0; n < kDepth; ++n) {
        from.push_back(slot(b, kLengths[b] + branch[n]));
        to.push_back(slot(b, kLengths[b] + n));
      }
    }
    EXPECT_EQ(cache_.copy(pool_, view(integers(from)), view(integers(to))).message(), "");
  }

  // NaN in whatever place behind the beginnings.
  void poison(int64_t past) {
    for (const Tensor& t : {pool_.key, pool_.value, pool_.key_scales, pool_.value_scales}) {
      const auto bytes = static_cast<int64_t>(dtype_size_bytes(t.dtype)) * t.strides[1];
      for (int64_t b = 0; t.given() && b < kBatch; ++b) {
        std::memset(static_cast<char*>(t.data) + slot(b, kLengths[b] + past) * bytes, 0xff, static_cast<size_t>(bytes));
      }
    }
  }

  bool holds_the_same(const Conversation& other) const {
    return std::memcmp(memory_.data(), other.memory_.data(), memory_.size()) == 0;
  }

 private:
  static Array integers(const std::vector<int64_t>& values) {
    Array a(DType::kInt64, {static_cast<int64_t>(values.size())});
    for (size_t n = 0; n < values.size(); ++n) a.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
    return a;
  }

  int64_t slot(int64_t b, int64_t place) const {
    const double page = table_.at(b * kPagesOfSequence + place / kPageSize);
    return static_cast<int64_t>(page) * kPageSize + place % kPageSize;
  }

  const Text& text_;
  KvCache cache_;
  GuardedBytes memory_;
  KvTensors pool_;
  Array table_;
};

// Who is whose ancestor, or itself.
Array tree_mask() {
  Array mask(DType::kBool, {1, 1, kNodes, kNodes});
  for (int64_t i = 0; i < kNodes; ++i) {
    for (int64_t j = i; j >= 0; j = kParents[j]) mask.set(i * kNodes + j, 1);
  }
  return mask;
}

// The numbers of one query of a call, of both sequences and all heads: rows of `out`, and logsumexp.
std::vector<double> of_query(const Answer& answer, int64_t query) {
  std::vector<double> numbers;
  const int64_t queries = answer.out.dims[1], row = kHeads * kDim;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t n = 0; n < row; ++n) numbers.push_back(answer.out.at((b * queries + query) * row + n));
    for (int64_t h = 0; h < kHeads; ++h) numbers.push_back(answer.logsumexp.at((b * kHeads + h) * queries + query));
  }
  return numbers;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, DType dtype, const char* kernel) {
  // Numbers of about 1 that differ in the order of their sums, in bfloat16 in the rounding of weights and result too.
  const double most = dtype == DType::kFloat32 ? 4e-6 : 0x1p-6;
  for (size_t n = 0; n < want.size(); ++n) ASSERT_NEAR(got[n], want[n], most * (1 + std::fabs(want[n]))) << kernel << n;
}

void test_branch(const Kernel& kernel, const Text& text, DType stored, const int64_t (&branch)[kDepth]) {
  Conversation drafted(text, stored), plain(text, stored);
  Array queries[kBatch];
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t node = 0; node < kNodes; ++node) {
      const int64_t token = kLengths[b] + node;
      const Array query = drafted.append(b, token, token, kLengths[b] + depth(node));
      queries[b] = node == 0 ? query : joined(queries[b], query);
    }
  }
  const Array asked = joined(queries[0], queries[1]), mask = tree_mask();
  const Answer tree = drafted.attend(kernel, asked, kNodes, mask);
  for (int64_t n = 0; n < kDepth; ++n) {
    const Array query = plain.append_to_both(n, branch[n], n);
    expect_near(of_query(tree, branch[n]), of_query(plain.attend(kernel, query, n + 1), 0), text.query.dtype,
                kernel.name);
  }

  // What no node of the branch sees may hold anything.
  for (int64_t node = 0; node < kNodes; ++node) {
    if (std::find(std::begin(branch), std::end(branch), node) == std::end(branch)) drafted.poison(node);
  }
  const Answer poisoned = drafted.attend(kernel, asked, kNodes, mask);
  for (const int64_t node : branch) EXPECT_EQ(of_query(poisoned, node), of_query(tree, node)) << kernel.name << node;

  drafted.accept(branch);
  for (int64_t past = kDepth; past < kNodes; ++past) drafted.poison(past);
  EXPECT_TRUE(drafted.holds_the_same(plain));
  const Answer got = drafted.attend(kernel, drafted.append_to_both(kDepth, kNodes, kDepth), kDepth + 1);
  const Answer want = plain.attend(kernel, plain.append_to_both(kDepth, kNodes, kDepth), kDepth + 1);
  EXPECT_EQ(difference("out", got.out, want.out), "") << kernel.name;
  EXPECT_EQ(difference("logsumexp", got.logsumexp, want.logsumexp), "") << kernel.name;
  for (int64_t n = 0; n < got.out.size(); ++n) ASSERT_TRUE(std::isfinite(got.out.at(n))) << kernel.name;
}

TEST(DraftTree, AcceptedAndRolledBackIsPlainDecoding) {
  constexpr DType kDTypes[][2] = {{DType::kFloat32, DType::kFloat32},
                                  {DType::kBFloat16, DType::kBFloat16},
                                  {DType::kFloat32, DType::kInt8}};  // of the call, of the cache
  for (const auto& [dtype, stored] : kDTypes) {
    const Text text(dtype);
    const AttentionDesc d = Conversation(text, stored).desc(kNodes, true);
    for_every_kernel(d, [&, stored = stored](const Kernel& kernel) {
      for (const auto& branch : kBranches) test_branch(kernel, text, stored, branch);
    });
  }
}

// A mask of no keys has no memory, or some of which nothing is read: the bits of none.
TEST(DraftTree, MaskOfNoKeysIsNone) {
  for (const int64_t queries : {1, 40}) {
    AttentionDesc d = problem_of("", DType::kFloat32, 2, 4, queries, 600, 24).desc, without = d;
    d.attn_mask = {.given = true, .dtype = DType::kBool, .dims = {1, 1, queries, 0}}, d.mask_at_end = true;
    const Inputs in = random_inputs({.desc = without});
    for_every_kernel(d, [&](const Kernel& kernel) {
      const Outputs want = run(kernel, without, in);
      for (const bool somewhere : {false, true}) {
        Array out(DType::kFloat32, {2, queries, 4, 24});
        ForwardArgs args = dense_args(in);
        args.attn_mask = Tensor(somewhere ? &out : nullptr, DType::kBool, {1, 1, queries, 0});
        args.out = view(out);
        const GuardedBytes workspace(kernel.workspace_bytes(d, 1).value(), Guard::kEnd, 0xff);
        args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
        ASSERT_EQ(kernel.forward(d, args, executor(1)).message(), "");
        EXPECT_EQ(difference("out", out, want.out), "") << kernel.name << ", " << queries << ", " << somewhere;
      }
    });
  }
}

}  // namespace
}  // namespace polyhead::testing
