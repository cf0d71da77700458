// Hostile calls of the C interface: every one must end in a status, with a sentence if it failed; a refused call must
// leave all memory as it was, and an accepted one may write its outputs and workspace only. A signal ends the run and
// prints the line that repeats it. More runs: POLYHEAD_FUZZ_RUNS; others: POLYHEAD_FUZZ_SEED.
#include "fuzz.h"
#include "left_out.h"

namespace polyhead::testing {
namespace {

std::vector<Operand> operands_of(const polyhead_attention_desc& d, polyhead_forward_args& args) {
  const Shapes shapes(d);
  std::vector<Operand> operands = input_operands(shapes, args);
  operands.push_back({"out", &args.out, shapes.out, Role::kOutput});
  operands.push_back({"logsumexp", &args.logsumexp, shapes.logsumexp, Role::kOutput, true});
  operands.push_back({"attn_weights", &args.attn_weights, shapes.attn_weights, Role::kOutput});
  operands.push_back({"column_sums", &args.column_sums, shapes.column_sums, Role::kOutput});
  return operands;
}

// One forward call with mostly right, sometimes hostile arguments.
void call_forward(Hostile& random, const polyhead_attention_plan* plan, const polyhead_attention_desc& d,
                  Surroundings& s) {
  const size_t needed = polyhead_attention_plan_workspace_bytes(plan);
  polyhead_forward_args args;
  ASSERT_EQ(polyhead_forward_args_init(&args, sizeof args), POLYHEAD_OK);
  const std::vector<Operand> operands = operands_of(d, args);
  make_right(random, d, operands, s.arena);
  args.dropout_seed = random.next();
  args.dropout_offset = static_cast<uint32_t>(random.next());
  give_workspace(s.workspace, needed, &args);
  const int64_t num_spoiled = random.chance(40) ? 0 : random.between(1, 3);
  for (int64_t i = 0; i < num_spoiled; ++i) {
    if (random.chance(85)) {
      spoil(random, operands, s.arena);
    } else {
      spoil_header(random, needed, &args);
    }
  }
  const std::string wrong = wrong_header(args, needed) + wrong_ones(operands);
  judge(polyhead_attention_forward(plan, &args), wrong, operands, &s);
}

void expect_explained(const polyhead_attention_desc& d, const polyhead_plan_options& options, polyhead_status status,
                      const std::string& sentence) {
  polyhead_explanation* e = nullptr;
  ASSERT_EQ(polyhead_attention_explain(&d, &options, &e), POLYHEAD_OK) << polyhead_last_error();
  EXPECT_EQ(e->status, status);
  EXPECT_EQ(e->message, status == POLYHEAD_OK ? "" : sentence);
  polyhead_explanation_destroy(e);
}

TEST(CapiFuzz, Attention) {
  Surroundings s;
  repeat("capi_fuzz_test", 20000, [&](Hostile& random) {
    polyhead_attention_desc d;
    polyhead_plan_options options;
    random_question(random, s, &d, &options);
    polyhead_attention_plan* plan = nullptr;
    const polyhead_status status = polyhead_attention_plan_create(&d, &options, &plan);
    const std::string sentence = polyhead_last_error();
    ASSERT_EQ(plan != nullptr, status == POLYHEAD_OK);
    if (random.chance(10)) expect_explained(d, options, status, sentence);
    if (status != POLYHEAD_OK) {
      EXPECT_TRUE(status == POLYHEAD_INVALID_ARGUMENT || status == POLYHEAD_UNSUPPORTED) << sentence;
      EXPECT_NE(sentence, "");
      return;
    }
    if (small(d)) {
      for (int calls = 0; calls < 2; ++calls) call_forward(random, plan, d, s);
    }
    polyhead_attention_plan_destroy(plan);
  });
  expect_balanced("forward", s);
}

TEST(CapiFuzz, DropoutMask) {
  Arena arena(2, 3);
  repeat("capi_fuzz_test", 20000, [&](Hostile& random) {
    int64_t dims[4];
    for (int64_t& dim : dims) dim = random.between(random.chance(5) ? 0 : 1, 10);
    polyhead_tensor kept = polyhead_tensor_contiguous(nullptr, POLYHEAD_BOOL, 4, dims);
    kept.data = arena.place(0, dims[0] * dims[1] * dims[2] * dims[3], random.chance(50));
    const polyhead_tensor before = kept;
    for (int64_t i = random.chance(50) ? 0 : random.between(1, 3); i > 0; --i) {
      const int64_t which = random.below(4);
      if (which == 0) kept.data = moved(kept.data, random.between(-3, 3));
      if (which == 1) kept.data = nullptr;
      if (which > 1) random.spoil_word(&kept.dtype, sizeof kept - sizeof kept.data);
    }
    const Shape own{POLYHEAD_BOOL, {kept.dims[0], kept.dims[1], kept.dims[2], kept.dims[3]}};
    if (undetectable_lie(kept, own, Role::kOutput, arena)) kept = before;
    const double p = random.chance(20) ? random.hostile_number() : 0.4;
    const auto offset = static_cast<uint32_t>(random.next());
    const polyhead_status status = polyhead_dropout_mask(p, random.next(), offset, &kept);
    if (status == POLYHEAD_OK) {
      EXPECT_TRUE(p >= 0 && p <= 1);
      EXPECT_EQ(arena.count_damage({reach(kept)}), 0);
    } else {
      EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
      EXPECT_EQ(arena.count_damage({}), 0) << polyhead_last_error();
    }
  });
}

// Every combination of sizes 0, 1 and 3: legal unless the heads do not go together, and without queries' keys O = 0 and
// L = -inf.
TEST(CapiFuzz, ZeroSizes) {
  Surroundings s;
  Hostile random(5);
  for (const char* const* kernel = polyhead_kernels(); *kernel != nullptr; ++kernel) {
    for (int code = 0; code < 2187; ++code) {
      polyhead_attention_desc d;
      polyhead_plan_options options;
      polyhead_forward_args args;
      ASSERT_EQ(polyhead_attention_desc_init(&d, sizeof d), POLYHEAD_OK);
      ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
      ASSERT_EQ(polyhead_forward_args_init(&args, sizeof args), POLYHEAD_OK);
      int rest = code;
      for (int64_t* size :
           {&d.batch, &d.seqlen_q, &d.seqlen_k, &d.num_heads, &d.num_heads_kv, &d.head_dim, &d.head_dim_v}) {
        *size = rest % 3 == 2 ? 3 : rest % 3;
        rest /= 3;
      }
      options.kernel = *kernel;
      const std::string line = std::string(*kernel) + ", sizes code " + std::to_string(code);
      set_running(line);
      SCOPED_TRACE(line);
      polyhead_attention_plan* plan = nullptr;
      const polyhead_status status = polyhead_attention_plan_create(&d, &options, &plan);
      if (status == POLYHEAD_UNSUPPORTED) {
        left_out().add(polyhead_last_error());
        continue;
      }
      const bool legal = d.num_heads == 0 || (d.num_heads_kv > 0 && d.num_heads % d.num_heads_kv == 0);
      ASSERT_EQ(status, legal ? POLYHEAD_OK : POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
      if (!legal) continue;
      make_right(random, d, operands_of(d, args), s.arena);
      ASSERT_LE(polyhead_attention_plan_workspace_bytes(plan), s.workspace.size());
      give_workspace(s.workspace, polyhead_attention_plan_workspace_bytes(plan), &args);
      ASSERT_EQ(polyhead_attention_forward(plan, &args), POLYHEAD_OK) << polyhead_last_error();
      if (d.seqlen_k == 0) {
        const int64_t rows = d.batch * d.seqlen_q * d.num_heads;
        for (int64_t i = 0; i < rows * d.head_dim_v; ++i) EXPECT_EQ(static_cast<float*>(args.out.data)[i], 0);
        for (int64_t i = 0; i < rows && args.logsumexp.ndim > 0; ++i) {
          EXPECT_EQ(static_cast<float*>(args.logsumexp.data)[i], -INFINITY);
        }
      }
      EXPECT_EQ(s.arena.count_damage({reach(args.out), reach(args.logsumexp)}), 0);
      polyhead_attention_plan_destroy(plan);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
