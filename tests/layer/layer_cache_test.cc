// Layers and blocks on a cache: what they give in a few time steps a call is what the whole gives at once, on every kernel.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "kernels_to_test.h"
#include "layer_block.h"
#include "layer_on_cache.h"
#include "left_out.h"
#include "testing/bounds.h"
#include "testing/judge.h"

namespace polyhead::testing {
namespace {

// Of the layers that layer_test computes. tokens_join: causal self-attention, whose tokens come a few at a time.
std::vector<LayerProblem> problems_of(bool tokens_join) {
  static const std::set<std::string> joins = {"causal", "self_with_biases", "self_three_tensors"};
  static const std::set<std::string> others = {"cross_separate",
                                               "no_query_projection",
                                               "no_key_projection",
                                               "no_out_projection_residual",
                                               "no_batch",
                                               "bottom_right_window",
                                               "windows_and_mask",
                                               "mask_bias_alibi",
                                               "sinks",
                                               "none",
                                               "lengths",
                                               "no_keys",
                                               "no_queries"};
  std::vector<LayerProblem> problems;
  for (LayerProblem p : layer_problems()) {
    if ((tokens_join ? joins : others).count(p.name) == 0) continue;
    AttentionDesc& a = p.desc.attention;
    p.desc.beam = p.desc.beam_kv = 1;
    if (tokens_join) a.causal = true;
    if (p.name == "self_with_biases")
      a.window_left = 9, a.sink_keys = 2, a.has_sink_logits = true, p.desc.residual = true;
    problems.push_back(inference(p));
  }
  EXPECT_EQ(problems.size(), (tokens_join ? joins : others).size());
  return problems;
}

// visit(problem, kernel) for every dtype of a cache and kernel that goes together.
template <class Visit>
void for_each_problem(bool tokens_join, const Visit& visit) {
  for (LayerProblem problem : problems_of(tokens_join)) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      problem.desc.dtype = dtype;
      const LayerDesc& d = problem.desc;
      for (const Kernel* kernel : kernels_to_test(device_under_test.device)) {
        const PagesOfBatch pages(format_of(d, 1), d.batch, d.seqlen_k, 1);
        const auto refused = [&](int64_t width) {
          LayerProblem asked = problem;
          asked.desc = on_cache(problem, pages, {.tokens_join = tokens_join}, width);
          return refuses(kernel->name, why_not(asked, kernel->name));
        };
        if (refused(d.seqlen_q) || refused(1)) continue;  // the calls below have few time steps
        SCOPED_TRACE(problem.name + " " + dtype_name(dtype) + " on " + kernel->name);
        visit(problem, kernel->name);
      }
    }
  }
}

TEST(LayerOnCache, ManyCallsGiveWhatTheFormulasGive) {
  for (const bool tokens_join : {true, false}) {
    std::optional<LayerDraws> draws;
    std::string of;
    for_each_problem(tokens_join, [&](const LayerProblem& problem, const char* kernel) {
      const std::string which = problem.name + dtype_name(problem.desc.dtype);
      if (of != which) draws.emplace(problem, false), of = which;
      const Cut cut{kernel, 2, {5, 1, 1, 3}, 4, tokens_join};
      EXPECT_EQ(
          draws->judge([&](const LayerProblem& drawn, const LayerInputs& in) { return run_on_cache(drawn, in, cut); }),
          "");
    });
  }
}

// The bits depend on neither threads nor page size, nor on how many time steps a call has, up to 12 (decoding's most).
TEST(LayerOnCache, SameBitsHoweverItIsCut) {
  for_each_problem(true, [](const LayerProblem& problem, const char* kernel) {
    const LayerInputs in = random_inputs(problem);
    const LayerResults want = run_on_cache(problem, in, {kernel, 1, {1}, 3, true});
    EXPECT_EQ(difference(want, run_on_cache(problem, in, {kernel, 3, {12}, 16, true})), "");
    EXPECT_EQ(difference(want, run_on_cache(problem, in, {kernel, 2, {7, 1, 2}, 1, true})), "");
  });
}

// A block whose tokens join a cache a few at a time, or whose keys one call stores, against the block of all, in float64.
TEST(AttentionBlockOnCache, GivesWhatTheBlockOfAllGives) {
  for (const bool cross : {false, true}) {
    for (const bool pre : {true, false}) {
      LayerProblem problem = problems_of(true).back();
      problem.desc.residual = true;
      if (cross) problem.desc.key_size = 5, problem.desc.value_size = 7, problem.desc.seqlen_k = 9;
      if (cross) problem.desc.attention.causal = false;
      problem.key_is_query = problem.value_is_key = !cross;
      const LayerInputs in = random_inputs(problem);
      const LayerDesc& whole = problem.desc;
      LayerInputs in64 = in;
      for (Array* a : {&in64.query, &in64.key, &in64.value, &in64.grad_out}) *a = to_dtype(*a, DType::kFloat64);
      for (Array& weight : in64.weights) weight = to_dtype(weight, DType::kFloat64);
      Random random(9);
      const Array gamma = random_array(random, DType::kFloat32, {whole.query_size}, 1, 0.3);
      const Array beta = random_array(random, DType::kFloat32, {whole.query_size}, 0, 0.3);
      const Array gamma64 = to_dtype(gamma, DType::kFloat64), beta64 = to_dtype(beta, DType::kFloat64);
      const std::string kernel = device_under_test.kernel;
      const auto call = [&](const AttentionBlockDesc& desc, const LayerInputs& from, AttentionBlockForwardArgs args) {
        const std::string on = desc.layer.cache ? kernel : "";
        const Result<AttentionBlock> block = attention_block(desc, options_of(on, 1));
        ASSERT_TRUE(block.ok()) << block.status().message();
        args.layer.weights = weights_of(from.weights);
        args.norm = {view(desc.layer.dtype == DType::kFloat64 ? gamma64 : gamma),
                     view(desc.layer.dtype == DType::kFloat64 ? beta64 : beta)};
        const GuardedBytes workspace(block->workspace_bytes(), Guard::kEnd, 0xff);
        args.layer.workspace = workspace.data(), args.layer.workspace_bytes = block->workspace_bytes();
        LentCall lent(on);
        lent.lend(&args.layer);
        for (Tensor* t : {&args.norm.gamma, &args.norm.beta}) lent.lend(t, true);
        EXPECT_EQ(block->forward(args).message(), "");
        EXPECT_EQ(lent.finish(), "");
      };
      AttentionBlockDesc desc;
      desc.norm.pre = pre;
      desc.layer = whole;
      desc.layer.dtype = DType::kFloat64;
      AttentionBlockForwardArgs args;
      args.layer.query = view(in64.query);
      if (cross) args.layer.key = view(in64.key), args.layer.value = view(in64.value);
      Array want = in64.grad_out, got = in.grad_out;
      args.layer.out = view(want);
      call(desc, in64, args);

      const Cut cut{.tokens_join = !cross};
      const PagesOfBatch pages(format_of(whole, 4), whole.batch, whole.seqlen_k, 1);
      const std::unique_ptr<Loan> loan = new_loan(kernel);
      const KvTensors pool = lend(*loan, pages.pool);
      for (int64_t first = 0, width = 5; first < whole.seqlen_q; first += width, width = 2) {
        width = std::min(width, whole.seqlen_q - first);
        desc.layer = on_cache(problem, pages, cut, width);
        const OneCall numbers(problem, in, pages, cut, first, width);
        args.layer = {};
        args.layer.query = part(view(in.query), 2, first, width);
        if (cross && first == 0) args.layer.key = view(in.key), args.layer.value = view(in.value);
        args.layer.seqlens_q = view(numbers.seqlens_q), args.layer.seqlens_k = view(numbers.seqlens_k);
        if (whole.attention.causal) args.layer.query_offsets = view(numbers.offsets);
        args.layer.cache.pool = pool;
        args.layer.cache.page_table = view(numbers.table);
        if (!cross || first == 0) args.layer.cache.slots = view(numbers.slots);
        args.layer.out = part(view(got), 2, first, width);
        call(desc, in, args);
      }
      for (int64_t n = 0; n < want.size(); ++n) ASSERT_NEAR(got.at(n), want.at(n), 3e-6) << cross << pre << " " << n;
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
