// Hostile calls of backward and merge, as capi_fuzz_test.cc makes them of forward.
#include "fuzz.h"

namespace polyhead::testing {
namespace {

std::vector<Operand> operands_of(const polyhead_attention_desc& d, polyhead_forward_args& forward,
                                 polyhead_backward_args& args) {
  const Shapes shapes(d);
  std::vector<Operand> operands = input_operands(shapes, forward);
  const auto add = [&](const char* name, polyhead_tensor* t, const Shape& shape, Role role, bool optional) {
    operands.push_back({name, t, shape, role, optional});
  };
  add("out", &forward.out, shapes.out, Role::kInput, true);  // optional with delta
  add("logsumexp", &forward.logsumexp, shapes.logsumexp, Role::kInput, false);
  add("attn_weights", &forward.attn_weights, {}, Role::kInput, false);
  add("column_sums", &forward.column_sums, {}, Role::kInput, false);
  add("grad_out", &args.grad_out, shapes.out, Role::kInput, false);
  add("grad_logsumexp", &args.grad_logsumexp, shapes.logsumexp, Role::kInput, true);
  add("delta", &args.delta, shapes.logsumexp, Role::kInput, true);
  add("grad_query", &args.grad_query, shapes.grad_query, Role::kOutput, true);
  add("grad_key", &args.grad_key, shapes.grad_key, Role::kOutput, true);
  add("grad_value", &args.grad_value, shapes.grad_value, Role::kOutput, true);
  add("grad_attn_bias", &args.grad_attn_bias, shapes.attn_bias, Role::kOutput, true);
  add("grad_alibi_slopes", &args.grad_alibi_slopes, shapes.alibi_slopes, Role::kOutput, true);
  add("grad_sink_logits", &args.grad_sink_logits, shapes.sink_logits, Role::kOutput, true);
  return operands;
}

// One backward call with mostly right, sometimes hostile arguments.
void call_backward(Hostile& random, const polyhead_attention_plan* plan, const polyhead_attention_desc& d,
                   Surroundings& s) {
  const size_t needed = polyhead_attention_plan_backward_workspace_bytes(plan);
  polyhead_forward_args forward;
  polyhead_backward_args args;
  ASSERT_EQ(polyhead_forward_args_init(&forward, sizeof forward), POLYHEAD_OK);
  ASSERT_EQ(polyhead_backward_args_init(&args, sizeof args), POLYHEAD_OK);
  const std::vector<Operand> operands = operands_of(d, forward, args);
  make_right(random, d, operands, s.arena);
  args.forward = &forward;
  args.accumulate = random.chance(50);
  forward.dropout_seed = random.next();
  forward.dropout_offset = static_cast<uint32_t>(random.next());
  give_workspace(s.workspace, needed, &forward);
  const int64_t num_spoiled = random.chance(40) ? 0 : random.between(1, 3);
  for (int64_t i = 0; i < num_spoiled; ++i) {
    if (random.chance(85)) {
      spoil(random, operands, s.arena);
      continue;
    }
    switch (random.below(5)) {
      case 0: args.forward = nullptr; break;
      case 1: random.spoil_word(&args, 16); break;
      case 2: args.accumulate = static_cast<int32_t>(random.hostile_integer()); break;
      case 3: args.reserved = static_cast<int32_t>(random.below(2)); break;
      case 4: spoil_header(random, needed, &forward); break;
    }
  }
  std::string wrong = wrong_header(forward, needed) + wrong_ones(operands);
  if (args.struct_size != sizeof args || args.flags != 0 || args.reserved != 0) wrong += " header of backward";
  if (args.forward == nullptr) wrong += " forward";
  if (args.accumulate != 0 && args.accumulate != 1) wrong += " accumulate";
  const bool softmax = d.normalizer == POLYHEAD_NORMALIZER_SOFTMAX;
  if (softmax && forward.out.ndim == 0 && args.delta.ndim == 0) wrong += " out and delta";
  if (args.grad_query.ndim == 0 && args.grad_key.ndim == 0 && args.grad_value.ndim == 0 &&
      args.grad_attn_bias.ndim == 0 && args.grad_alibi_slopes.ndim == 0 && args.grad_sink_logits.ndim == 0) {
    wrong += " no gradient";
  }
  const polyhead_status status = polyhead_attention_backward(plan, &args);
  if (status == POLYHEAD_UNSUPPORTED && kept_in_cache(d)) {
    EXPECT_EQ(s.arena.count_damage({}), 0) << "refused, but wrote: " << polyhead_last_error();
    return;
  }
  if (kept_in_cache(d)) wrong += " what a cache holds";
  judge(status, wrong, operands, &s);
}

TEST(BackwardFuzz, Attention) {
  Surroundings s;
  repeat("backward_fuzz_test", 10000, [&](Hostile& random) {
    polyhead_attention_desc d;
    polyhead_plan_options options;
    random_question(random, s, &d, &options);
    polyhead_attention_plan* plan = nullptr;
    if (polyhead_attention_plan_create(&d, &options, &plan) != POLYHEAD_OK) return;
    if (small(d)) {
      for (int calls = 0; calls < 2; ++calls) call_backward(random, plan, d, s);
    }
    polyhead_attention_plan_destroy(plan);
  });
  expect_balanced("backward", s);
}

constexpr size_t kMaxParts = 4;

TEST(BackwardFuzz, Merge) {
  Surroundings s;
  repeat("backward_fuzz_test", 20000, [&](Hostile& random) {
    polyhead_attention_desc d;
    ASSERT_EQ(polyhead_attention_desc_init(&d, sizeof d), POLYHEAD_OK);
    for (int64_t* size : {&d.batch, &d.seqlen_q, &d.num_heads, &d.head_dim_v}) {
      *size = random.between(random.chance(5) ? 0 : 1, 6);
    }
    d.dtype = static_cast<int32_t>(random.below(4));
    d.packed = random.chance(30);
    Shapes shapes(d);
    shapes.out.any_width = d.dtype != POLYHEAD_FLOAT64;
    const bool is_backward = random.chance(50);
    auto num_parts = static_cast<size_t>(random.between(1, kMaxParts));
    polyhead_partial parts[kMaxParts], grad_parts[kMaxParts], merged, grad_merged;
    std::vector<Operand> operands;
    const auto add = [&](polyhead_partial& p, Role role, bool out_optional, bool logsumexp_optional) {
      operands.push_back({"out", &p.out, shapes.out, role, out_optional});
      operands.push_back({"logsumexp", &p.logsumexp, shapes.logsumexp, role, logsumexp_optional});
    };
    for (size_t i = 0; i < num_parts; ++i) add(parts[i], Role::kInput, false, false);
    add(merged, is_backward ? Role::kInput : Role::kOutput, false, !is_backward);
    if (is_backward) add(grad_merged, Role::kInput, false, true);
    for (size_t i = 0; i < num_parts && is_backward; ++i) add(grad_parts[i], Role::kOutput, true, true);
    make_right(random, d, operands, s.arena);
    if (!is_backward && random.chance(20)) merged = parts[random.below(static_cast<int64_t>(num_parts))];
    const int64_t num_spoiled = random.chance(40) ? 0 : random.between(1, 3);
    for (int64_t i = 0; i < num_spoiled; ++i) spoil(random, operands, s.arena);

    std::string wrong = wrong_ones(operands);
    bool asked = !is_backward;
    for (size_t i = 0; i < num_parts && is_backward; ++i) {
      asked = asked || grad_parts[i].out.ndim != 0 || grad_parts[i].logsumexp.ndim != 0;
    }
    if (!asked) wrong += " no gradient";
    const polyhead_partial* given = parts;
    if (random.chance(3)) given = nullptr, wrong += " null";
    if (random.chance(3)) {
      constexpr size_t kHostile[] = {0, SIZE_MAX, size_t{1} << 63, 65537};
      num_parts = random.pick(kHostile);
      wrong += " num_parts";
    }
    polyhead_executor* executor = s.executors[static_cast<size_t>(random.below(3))];
    const polyhead_status status =
        is_backward ? polyhead_merge_backward(given, num_parts, &merged, &grad_merged, grad_parts, executor)
                    : polyhead_merge(given, num_parts, &merged, executor);
    judge(status, wrong, operands, &s);
  });
  expect_balanced("merge", s);
}

}  // namespace
}  // namespace polyhead::testing
