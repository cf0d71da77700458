// Attention whose keys are split over several calls: merged it is the attention of the whole, and so are its gradients,
// by either way that polyhead/merge.h names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "contract/kernel.h"
#include "polyhead/merge.h"
#include "reference/attention.h"
#include "testing/call.h"

namespace polyhead::testing {
namespace {

// Keys [first, end) of dim `dim`.
Array cut(const Array& a, size_t dim, int64_t first, int64_t end) {
  Array part(a.dtype, a.dims);
  part.dims[dim] = end - first;
  part.bytes.clear();
  int64_t inner = static_cast<int64_t>(dtype_size_bytes(a.dtype)), outer = 1;
  for (size_t n = 0; n < a.dims.size(); ++n) (n < dim ? outer : inner) *= n == dim ? 1 : a.dims[n];
  for (int64_t n = 0; n < outer; ++n) {
    const auto row = a.bytes.begin() + n * a.dims[dim] * inner;
    part.bytes.insert(part.bytes.end(), row + first * inner, row + end * inner);
  }
  return part;
}

bool per_key(const Array& a) { return a.given() && a.dims[3] != 1; }

// The part of a problem that has the keys [first, end).
struct Part {
  AttentionDesc desc;
  Inputs in;

  // One of the parts has the sinks.
  Part(const AttentionDesc& whole, const Inputs& inputs, int64_t first, int64_t end, bool has_sinks)
      : desc(whole), in(inputs) {
    desc.seqlen_k = end - first;
    desc.has_sink_logits = whole.has_sink_logits && has_sinks;
    if (!has_sinks) in.sink_logits = {};
    in.key = cut(inputs.key, 1, first, end);
    in.value = cut(inputs.value, 1, first, end);
    if (per_key(in.attn_mask)) in.attn_mask = cut(in.attn_mask, 3, first, end);
    if (per_key(in.attn_bias)) in.attn_bias = cut(in.attn_bias, 3, first, end);
    if (desc.attn_mask.given) desc.attn_mask.dims[3] = in.attn_mask.dims[3];
    if (desc.attn_bias.given) desc.attn_bias.dims[3] = in.attn_bias.dims[3];
    if (desc.query_offset) *desc.query_offset -= first;
    const auto lower = static_cast<double>(first), count = static_cast<double>(end - first);
    for (int64_t b = 0; b < in.query_offsets.size(); ++b) in.query_offsets.set(b, in.query_offsets.at(b) - lower);
    for (int64_t b = 0; b < in.seqlens_k.size(); ++b) {
      in.seqlens_k.set(b, std::clamp(in.seqlens_k.at(b) - lower, 0.0, count));
    }
  }
};

struct Gradients {
  Array query, key, value, attn_bias, alibi_slopes, sink_logits;
};
struct Name {
  const char* name;
  Array Inputs::*input;
  Array Gradients::*gradient;
  Tensor BackwardArgs::*tensor;
};
constexpr Name kNames[] = {
    {"query", &Inputs::query, &Gradients::query, &BackwardArgs::grad_query},
    {"key", &Inputs::key, &Gradients::key, &BackwardArgs::grad_key},
    {"value", &Inputs::value, &Gradients::value, &BackwardArgs::grad_value},
    {"attn_bias", &Inputs::attn_bias, &Gradients::attn_bias, &BackwardArgs::grad_attn_bias},
    {"alibi_slopes", &Inputs::alibi_slopes, &Gradients::alibi_slopes, &BackwardArgs::grad_alibi_slopes},
    {"sink_logits", &Inputs::sink_logits, &Gradients::sink_logits, &BackwardArgs::grad_sink_logits},
};

// Zeros of the shapes of the inputs; in float64 or in their own dtypes.
Gradients zeros(const Inputs& in, bool wide) {
  Gradients g;
  for (const Name& name : kNames) {
    const Array& input = in.*name.input;
    if (input.given()) g.*name.gradient = Array(wide ? DType::kFloat64 : input.dtype, input.dims);
  }
  return g;
}

struct Pair {
  Array out, logsumexp;
};
Partial views(const Pair& p) { return {view(p.out), view(p.logsumexp)}; }

BackwardArgs backward_args(const Inputs& in, const Pair& result, const Pair& grad, const Gradients& into) {
  BackwardArgs args;
  args.forward = dense_args(in);
  args.forward.out = view(result.out);
  args.forward.logsumexp = view(result.logsumexp);
  args.grad_out = view(grad.out);
  args.grad_logsumexp = view(grad.logsumexp);
  for (const Name& name : kNames) args.*name.tensor = view(into.*name.gradient);
  return args;
}

// Adds to `into` with `kernel`.
void add_gradients(const Kernel& kernel, const AttentionDesc& desc, BackwardArgs args) {
  const Result<Plan> made = plan(desc, {kernel.name, {.executor = &executor(2)}});
  ASSERT_TRUE(made.ok()) << made.status().message();
  const GuardedBytes workspace(made->backward_workspace_bytes(), Guard::kEnd, 0xff);
  args.forward.workspace = workspace.data();
  args.forward.workspace_bytes = workspace.size();
  args.accumulate = true;
  ASSERT_EQ(made->backward(args).message(), "");
}

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 0x1p-52;
    case DType::kFloat16: return 0x1p-10;
    case DType::kBFloat16: return 0x1p-7;
    default: return 0x1p-23;
  }
}

double largest_error(const Array& got, const Array& exact) {
  double error = 0;
  for (int64_t n = 0; n < got.size(); ++n) {
    if (got.at(n) == exact.at(n)) continue;  // -inf too
    const double e = std::fabs(got.at(n) - exact.at(n));
    error = e <= error ? error : e;  // NaN stays
  }
  return error;
}

// As good as the naive formula on the whole, but for `roundings` more to the dtype of the result.
void expect_as_good(const char* name, const Array& got, const Array& exact, const Array& naive, int roundings) {
  ASSERT_EQ(got.dims, exact.dims) << name;
  double largest = 0;
  for (int64_t n = 0; n < exact.size(); ++n) {
    if (std::isfinite(exact.at(n))) largest = std::max(largest, std::fabs(exact.at(n)));
  }
  // In float64 the naive formula is what `exact` was computed by.
  const double allowed = got.dtype == DType::kFloat64 ? 1e-13 : 3 * largest_error(naive, exact);
  EXPECT_LE(largest_error(got, exact), allowed + roundings * epsilon(got.dtype) * largest) << name;
}

struct Split {
  std::vector<double> cuts;  // fractions of the keys
  std::vector<int64_t> of(int64_t seqlen_k) const {
    std::vector<int64_t> keys{0};
    for (const double cut : cuts) keys.push_back(static_cast<int64_t>(cut * static_cast<double>(seqlen_k)));
    keys.push_back(seqlen_k);
    return keys;
  }
};
const Split kSplits[] = {{{0.5}}, {{0, 0.6}}, {{0.03, 0.3, 0.3, 0.9}}};  // 2, 3 and 5 parts, some without keys

Array random_like(const Array& a, uint64_t seed) {
  Array r(a.dtype, a.dims);
  Random random(seed);
  for (int64_t n = 0; n < r.size(); ++n) r.set(n, random.normal());
  return r;
}

// One problem on one kernel, split in all ways.
class SplitProblem {
 public:
  SplitProblem(const Kernel& kernel, const AttentionDesc& desc, uint64_t seed) : kernel_(kernel), desc_(desc) {
    Problem p;
    p.desc = desc;
    p.seed = seed;
    in_ = random_inputs(p);
    exact_ = reference_outputs<double>(desc, in_, true);
    naive_ = reference_outputs<float>(desc, in_, false);
    if (desc.dtype == DType::kFloat64) naive_ = exact_;
  }

  void expect_all() {
    for (const Split& split : kSplits) {
      const std::vector<int64_t> cuts = split.of(desc_.seqlen_k);
      SCOPED_TRACE(std::string(kernel_.name) + " " + dtype_name(desc_.dtype) + " in " +
                   std::to_string(cuts.size() - 1) + " parts");
      parts_.clear();
      results_.clear();
      for (size_t k = 0; k + 1 < cuts.size(); ++k) {
        parts_.emplace_back(desc_, in_, cuts[k], cuts[k + 1], k == 0);
        const Outputs o = run(kernel_, parts_[k].desc, parts_[k].in, {.threads = 2, .through_plan = true});
        ASSERT_EQ(o.faults, std::vector<std::string>());
        results_.push_back({o.out, o.logsumexp});
      }
      expect_forward();
      expect_backward();
    }
  }

 private:
  void expect_forward() {
    merged_ = {Array(desc_.dtype, exact_.out.dims), Array(results_[0].logsumexp.dtype, exact_.logsumexp.dims)};
    std::vector<Partial> partials;
    for (const Pair& result : results_) partials.push_back(views(result));
    ASSERT_EQ(merge(partials, views(merged_), &executor(3)).message(), "");
    expect_as_good("out", merged_.out, exact_.out, naive_.out, 3);
    expect_as_good("logsumexp", merged_.logsumexp, exact_.logsumexp, naive_.logsumexp, 4);
  }

  void expect_backward() {
    const Pair grad{random_like(merged_.out, 77), random_like(merged_.logsumexp, 78)};
    Gradients exact = zeros(in_, true), naive = zeros(in_, desc_.dtype == DType::kFloat64);
    reference::backward<double>(desc_, backward_args(in_, merged_, grad, exact));
    naive = desc_.dtype == DType::kFloat64 ? exact : naive;
    if (desc_.dtype != DType::kFloat64) reference::backward<float>(desc_, backward_args(in_, merged_, grad, naive));

    // The parts with the merged results.
    expect_gradients("merged", exact, naive, [&](size_t k, const Gradients& into) {
      add_gradients(kernel_, parts_[k].desc, backward_args(parts_[k].in, merged_, grad, into));
    });

    // The same with sum dO * O told.
    Array delta(merged_.logsumexp.dtype, merged_.logsumexp.dims);
    for (int64_t n = 0; n < merged_.out.size(); ++n) {
      const int64_t dim = desc_.head_dim_v, h = n / dim % desc_.num_heads, i = n / dim / desc_.num_heads;
      const int64_t row = (i / desc_.seqlen_q * desc_.num_heads + h) * desc_.seqlen_q + i % desc_.seqlen_q;
      delta.set(row, delta.at(row) + merged_.out.at(n) * grad.out.at(n));
    }
    expect_gradients("delta", exact, naive, [&](size_t k, const Gradients& into) {
      BackwardArgs args = backward_args(parts_[k].in, merged_, grad, into);
      args.forward.out = {};
      args.delta = view(delta);
      add_gradients(kernel_, parts_[k].desc, args);
    });

    // merge_backward, then each part with its own results. In half precision dO_i is rounded once more.
    if (desc_.dtype == DType::kBFloat16 || desc_.dtype == DType::kFloat16) return;
    std::vector<Pair> grads = results_;
    std::vector<Partial> partials, grad_partials;
    for (const Pair& result : results_) partials.push_back(views(result));
    for (const Pair& g : grads) grad_partials.push_back(views(g));
    ASSERT_EQ(merge_backward(partials, views(merged_), views(grad), grad_partials).message(), "");
    expect_gradients("merge_backward", exact, naive, [&](size_t k, const Gradients& into) {
      add_gradients(kernel_, parts_[k].desc, backward_args(parts_[k].in, results_[k], grads[k], into));
    });
  }

  template <class AddPart>
  void expect_gradients(const char* way, const Gradients& exact, const Gradients& naive, const AddPart& add_part) {
    SCOPED_TRACE(way);
    Gradients sums = zeros(in_, false);
    int64_t first = 0;
    for (size_t k = 0; k < parts_.size(); ++k) {
      const int64_t end = first + parts_[k].desc.seqlen_k;
      Gradients got = zeros(parts_[k].in, false);
      got.query = sums.query;
      got.alibi_slopes = sums.alibi_slopes;
      if (!per_key(in_.attn_bias)) got.attn_bias = sums.attn_bias;
      add_part(k, got);
      sums.query = got.query;
      sums.alibi_slopes = got.alibi_slopes;
      if (k == 0) sums.sink_logits = got.sink_logits;
      const auto expect_keys = [&](const char* name, Array Gradients::*gradient, size_t dim) {
        expect_as_good(name, got.*gradient, cut(exact.*gradient, dim, first, end),
                       cut(naive.*gradient, dim, first, end), 4);
      };
      expect_keys("key", &Gradients::key, 1);
      expect_keys("value", &Gradients::value, 1);
      if (per_key(in_.attn_bias)) {
        expect_keys("attn_bias", &Gradients::attn_bias, 3);
      } else {
        sums.attn_bias = got.attn_bias;
      }
      first = end;
    }
    const int roundings = 4 + static_cast<int>(parts_.size());
    expect_as_good("query", sums.query, exact.query, naive.query, roundings);
    expect_as_good("alibi_slopes", sums.alibi_slopes, exact.alibi_slopes, naive.alibi_slopes, roundings);
    expect_as_good("sink_logits", sums.sink_logits, exact.sink_logits, naive.sink_logits, roundings);
    if (!per_key(in_.attn_bias)) {
      expect_as_good("attn_bias", sums.attn_bias, exact.attn_bias, naive.attn_bias, roundings);
    }
  }

  const Kernel& kernel_;
  AttentionDesc desc_;
  Inputs in_;
  Outputs exact_, naive_;
  std::vector<Part> parts_;
  std::vector<Pair> results_;
  Pair merged_;
};

AttentionDesc sizes(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v) {
  AttentionDesc d;
  d.batch = 2;
  d.num_heads = 4;
  d.num_heads_kv = 2;
  d.seqlen_q = seqlen_q;
  d.seqlen_k = seqlen_k;
  d.head_dim = head_dim;
  d.head_dim_v = head_dim_v;
  return d;
}

void expect_splits(const AttentionDesc& desc, uint64_t seed, std::initializer_list<DType> dtypes) {
  for (const DType dtype : dtypes) {
    AttentionDesc d = desc;
    d.dtype = dtype;
    if (dtype == DType::kFloat64 && d.attn_bias.given) d.attn_bias.dtype = dtype;
    int tested = 0;
    for (const Kernel* kernel : kernel_list()) {
      if (!kernel->why_not(d).empty()) continue;
      SplitProblem(*kernel, d, seed).expect_all();
      ++tested;
    }
    EXPECT_GE(tested, dtype == DType::kFloat64 ? 1 : 2);
  }
}

TEST(MergedAttention, EachOption) {
  void (*const changes[])(AttentionDesc&) = {
      [](auto&) {},
      [](auto& d) { d.causal = true, d.query_offset = 3; },
      [](auto& d) { d.causal = true, d.query_offset = -4; },  // rows that see no key in any part
      [](auto& d) { d.window_left = 9, d.window_right = 2, d.query_offset = 11; },
      [](auto& d) { d.causal = d.has_query_offsets = true; },
      [](auto& d) {
        d.attn_mask = {true, DType::kBool, {2, 1, 9, 37}};
      },
      [](auto& d) {
        d.attn_bias = {true, DType::kFloat32, {1, 4, 1, 37}};
      },
      [](auto& d) {
        d.attn_bias = {true, DType::kFloat32, {2, 4, 9, 1}};
      },
      [](auto& d) { d.alibi_slopes_ndim = 2, d.query_offset = 28; },
      [](auto& d) { d.softcap = 2, d.scale = -0.3; },
      [](auto& d) { d.has_seqlens_q = d.has_seqlens_k = true; },
      [](auto& d) { d.has_sink_logits = true; },
      [](auto& d) { d.has_sink_logits = d.causal = true, d.query_offset = -4; },
  };
  for (const auto& change : changes) {
    SCOPED_TRACE(&change - changes);
    AttentionDesc d = sizes(9, 37, 16, 8);
    change(d);
    expect_splits(d, 3, {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64});
  }
}

TEST(MergedAttention, AcrossTilesAndInDecoding) {
  AttentionDesc tiles = sizes(70, 200, 32, 40);
  tiles.batch = 1;
  tiles.causal = true;
  tiles.query_offset = 110;
  expect_splits(tiles, 4, {DType::kFloat32, DType::kBFloat16});
  expect_splits(sizes(1, 700, 32, 40), 5, {DType::kFloat32, DType::kBFloat16});
}

}  // namespace
}  // namespace polyhead::testing
