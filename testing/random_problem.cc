// Random problems, of every combination of options.
#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "testing/operands.h"
#include "testing/pages.h"
#include "testing/problem_words.h"
#include "testing/program_words.h"

namespace polyhead::testing {
namespace {

int64_t random_size(Random& random) {
  constexpr int64_t kEdges[] = {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  if (random.chance(0.25)) return kEdges[random.integer(0, 15)];
  if (random.chance(0.03)) return 0;
  return random.chance(0.5) ? random.integer(1, 20) : random.integer(1, 130);
}

int64_t random_dim(Random& random) {
  if (random.chance(0.02)) return 0;
  if (random.chance(0.35)) return random.integer(1, 16);
  if (random.chance(0.3)) return 8 * random.integer(1, 16);
  return random.chance(0.1) ? random.integer(129, 512) : random.integer(1, 130);
}

void random_sizes(Random& random, AttentionDesc& d) {
  constexpr double kMaxWork = 2e6;  // multiplications
  for (;;) {
    d.batch = random.chance(0.02) ? 0 : random.integer(1, 4);
    d.num_heads_kv = random.integer(1, 3);
    d.num_heads = d.num_heads_kv * random.integer(1, random.chance(0.5) ? 1 : 4);
    if (random.chance(0.01)) d.num_heads = d.num_heads_kv = 0;
    d.seqlen_q = random_size(random);
    d.seqlen_k = random.chance(0.3) ? d.seqlen_q : random_size(random);
    if (random.chance(0.1)) d.seqlen_q = random.integer(1, 8);
    if (random.chance(0.03)) d.seqlen_k = random.integer(131, 1100);
    d.head_dim = random_dim(random);
    d.head_dim_v = random.chance(0.6) ? d.head_dim : random_dim(random);
    double work = static_cast<double>(d.head_dim + d.head_dim_v);
    for (int64_t size : {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k}) work *= static_cast<double>(size);
    if (work <= kMaxWork) return;
  }
}

void random_operand(Random& random, const AttentionDesc& d, BroadcastOperand& operand) {
  const int64_t full[4] = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  operand.given = true;
  for (int n = 0; n < 4; ++n) operand.dims[n] = random.chance(0.4) ? 1 : full[n];
}

void random_diagonal(Random& random, AttentionDesc& d) {
  d.causal = random.chance(0.35);
  if (random.chance(0.25)) {
    d.window_left = random.chance(0.3) ? -1 : random.integer(0, random.chance(0.5) ? 10 : 130);
    d.window_right = random.chance(0.3) ? -1 : random.integer(0, random.chance(0.5) ? 10 : 130);
    if (random.chance(0.03)) d.window_left = INT64_MAX;
  }
  if (random.chance(0.15)) d.alibi_slopes_ndim = static_cast<int>(random.integer(1, 2));
  switch (random.integer(0, 3)) {
    case 0: d.align = Align::kTopLeft; break;
    case 1: d.align = Align::kBottomRight; break;
    case 2: d.query_offset = random.integer(-d.seqlen_q - 3, d.seqlen_k + 3); break;
    default: d.has_query_offsets = true; break;
  }
}

void random_masks(Random& random, AttentionDesc& d) {
  constexpr DType kBiasTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  d.packed = random.chance(0.15);
  if (d.packed) return;
  if (random.chance(0.2)) random_operand(random, d, d.attn_mask);
  d.attn_mask.dtype = DType::kBool;
  if (random.chance(0.25)) {
    random_operand(random, d, d.attn_bias);
    d.attn_bias.dtype = kBiasTypes[random.integer(0, d.dtype == DType::kFloat64 ? 3 : 2)];
  }
  d.has_seqlens_q = random.chance(0.15);
  d.has_seqlens_k = random.chance(0.2);
  if (random.chance(0.15)) d.return_weights = random.chance(0.5) ? ReturnWeights::kPerHead : ReturnWeights::kMean;
  d.return_column_sums = random.chance(0.1);
  d.has_windows = random.chance(0.1);
}

// Of any size that divides the keys.
void random_pages(Random& random, AttentionDesc& d) {
  d.has_seqlens_k = true;
  d.page_size = random.integer(1, std::max<int64_t>(1, std::min<int64_t>(d.seqlen_k, 64)));
  while (d.seqlen_k % d.page_size != 0) --d.page_size;
  d.num_pages = enough_pages(d);
}

// Keys, values or both as a cache stores them.
void random_formats(Random& random, AttentionDesc& d) {
  constexpr DType kFormats[] = {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt4x2};
  const auto draw = [&](int64_t dim, std::optional<DType>& dtype, int64_t& group) {
    dtype = kFormats[random.integer(0, dim % 2 == 0 ? 3 : 2)];
    const int64_t most = 16 * random.integer(1, 4);
    if (dim > 0 && dim % most == 0 && random.chance(0.5)) group = most;
  };
  const int64_t sides = random.integer(1, 4);  // 3 and 4: both
  if (sides != 2) draw(d.head_dim, d.key_dtype, d.key_group);
  if (sides != 1) draw(d.head_dim_v, d.value_dtype, d.value_group);
}

// What backward alone asks. 3 of 10 problems ask for all gradients there are.
void random_gradients(Random& random, Problem& p) {
  if (random.chance(0.7)) {
    const GradientSet there = gradients_there(p.desc) & ~kCapturedGradients;  // add_random_program() tells of these
    do {
      p.needs = static_cast<GradientSet>(random.integer(1, 31)) & there;
    } while (p.needs == 0);
    if (p.desc.has_sink_logits && random.chance(0.5)) p.needs |= 32U;
    if (p.needs == there) p.needs = kAllGradients;
  }
  const bool softmax = p.desc.normalizer == Normalizer::kSoftmax;  // which alone has a logsumexp
  p.accumulate = random.chance(0.4);
  p.logsumexp = random.chance(0.4) && softmax;
  p.delta = random.chance(0.1) && softmax;
  if (random.chance(0.15)) p.repeated_grad_out = random.chance(0.5) ? 15 : static_cast<unsigned>(random.integer(1, 14));
}

// With captures: their words.
struct ProgramWords {
  std::string text, captured;
};

ProgramWords random_mask(Random& random) {
  const std::string n = std::to_string(random.integer(1, random.chance(0.5) ? 8 : 70));
  switch (random.integer(0, 6)) {
    case 0: return {"0 <= q - k and q - k < " + n, ""};
    case 1: return {"k < " + n + " or abs(q - k) <= 9", ""};
    case 2: return {"(q - k) % " + n + " != 1", ""};
    case 3: return {"q // " + n + " == k // " + n, ""};
    case 4: return {"k <= q or k < prefix[b]", "prefix: i32[b]"};
    case 5: return {"doc[b, q] == doc[b, k]", "doc: i64[b, q+k] 0.." + n + " rising"};
    default: return {"shown[h, q % 3, k // " + n + "]", "shown: bool[h, 3, k]"};
  }
}

// Scores grow with what came in, so that a NaN stays one.
ProgramWords random_score(Random& random, const AttentionDesc& d) {
  constexpr const char* kTypes[] = {"f32", "bf16", "f16"};
  const std::string type = d.dtype == DType::kFloat64 ? "f64" : kTypes[random.integer(0, 2)];
  switch (random.integer(0, 5)) {
    case 0: return {"score - slope[h] * abs(q - k)", "slope: " + type + "[h] 0..0.25"};
    case 1: return {"score + table[clamp(q - k, -16, 16) + 16, h]", "table: " + type + "[33, h]"};
    case 2: return {"score * tau[]", "tau: " + type + "[] 0.5..2"};
    case 3: return {"score + left[b, h, q] * right[k]", "left: f32[b, h, q]; right: " + type + "[k] -1..1"};
    case 4: return {"where(k < 3, score - gate[k, q % 2] * 2, score + 0.5)", "gate: " + type + "[k, 2]"};
    default: return {"score * (1 + 0.25 * sin(phase[h] + float(q)))", "phase: " + type + "[h]"};
  }
}

// Weights, where there is no softmax.
ProgramWords random_weight(Random& random) {
  switch (random.integer(0, 2)) {
    case 0: return {"sigmoid(score + shift[h])", "shift: f32[h] -4..0"};
    case 1: return {"score * max(score, 0) * part[h, k % 2]", "part: f32[h, 2] 0..0.5"};
    default: return {"tanh(score) * gate[q, h]", "gate: f32[q, h] -1..1"};
  }
}

}  // namespace

void add_random_program(Problem& problem, uint64_t seed) {
  Random random(seed, streams::kProgram + 1);
  const bool masks = random.chance(0.6);
  ProgramWords mask, score;
  if (masks) mask = random_mask(random);
  if (!masks || random.chance(0.6)) score = random_score(random, problem.desc);
  if (problem.desc.normalizer == Normalizer::kNone && random.chance(0.7)) score = random_weight(random);
  problem.mask_text = mask.text;
  problem.score_text = score.text;
  problem.captured = *parse_captured(mask.captured + "; " + score.captured);
  if (!complete_program(problem).ok()) std::abort();  // the words above are programs
  if (problem.needs != kAllGradients && random.chance(0.5)) {
    problem.needs |= gradients_there(problem.desc) & kCapturedGradients;
  }
}

Problem random_problem(uint64_t seed) {
  constexpr DType kTypes[] = {DType::kFloat32,  DType::kFloat32,  DType::kFloat32, DType::kFloat32, DType::kBFloat16,
                              DType::kBFloat16, DType::kBFloat16, DType::kFloat16, DType::kFloat16, DType::kFloat64};
  constexpr double kScales[] = {0, 1, -0.5, 0.01, 0.25};
  constexpr double kSoftcaps[] = {0.5, 5, 30, 50};
  constexpr double kDropouts[] = {1e-6, 0.1, 0.5, 0.9, 1};
  Random random(seed);
  Problem p;
  const bool softmax = !Random(seed, streams::kNormalizer).chance(0.06);
  p.desc.normalizer = softmax ? Normalizer::kSoftmax : Normalizer::kNone;
  p.desc.has_sink_logits = softmax && Random(seed, streams::kSinks).chance(0.15);
  p.name = "random_" + std::to_string(seed);
  p.seed = seed;
  p.fill = random.chance(0.6) ? Fill::kNormal : static_cast<Fill>(random.integer(1, 5));
  AttentionDesc& d = p.desc;
  d.dtype = kTypes[random.integer(0, 9)];
  random_sizes(random, d);
  random_diagonal(random, d);
  random_masks(random, d);
  if (random.chance(0.25)) d.scale = kScales[random.integer(0, 4)];
  if (random.chance(0.15)) d.softcap = kSoftcaps[random.integer(0, 3)];
  if (random.chance(0.15)) d.dropout_p = kDropouts[random.integer(0, 4)];
  p.layout = random.chance(0.5) ? Layout::kMixed : static_cast<Layout>(random.integer(0, kNumLayouts - 1));
  p.edges = random.chance(0.8);
  p.mask_kind = static_cast<MaskKind>(random.integer(0, 2));
  p.cuts_rows = !d.packed || random.chance(0.7);
  random_gradients(random, p);
  if (d.dropout_p > 0 && random.chance(0.4)) {
    d.dropout_origin = {random.integer(0, 50), d.num_heads + random.integer(0, 5), random.integer(0, 300),
                        8 * random.integer(0, 40)};
  }
  const bool half = d.dtype == DType::kBFloat16 || d.dtype == DType::kFloat16;
  if (half && random.chance(0.25)) d.out_dtype = DType::kFloat32;
  if (half && random.chance(0.25)) d.grad_dtype = DType::kFloat32;
  if (Random(seed, streams::kProgram).chance(softmax ? 0.06 : 0.6)) add_random_program(p, seed);
  if (random.chance(d.has_seqlens_k ? 0.5 : 0.1)) random_pages(random, d);
  Random sinks(seed, streams::kSinkKeys);
  if ((d.window_left >= 0 || d.has_windows) && sinks.chance(0.4))
    d.sink_keys = sinks.integer(1, sinks.chance(0.7) ? 9 : 150);
  Random ends(seed, streams::kMaskAtEnd);
  if (d.attn_mask.given && ends.chance(0.3)) {
    d.mask_at_end = true;
    d.attn_mask.dims[3] = ends.integer(0, ends.chance(0.5) ? std::min<int64_t>(d.seqlen_k, 12) : d.seqlen_k);
  }
  Random formats(seed, streams::kFormats);
  if (formats.chance(d.page_size > 0 ? 0.4 : 0.05)) random_formats(formats, d);
  return p;
}

Problem without_cache(const Problem& problem) {
  Problem p = problem;
  p.desc.key_dtype = p.desc.value_dtype = {};
  p.desc.key_group = p.desc.value_group = 0;
  if (p.desc.page_size == 0) return p;
  p.desc.page_size = p.desc.num_pages = 0;
  if (p.desc.packed) p.desc.has_seqlens_k = false;
  return p;
}

Problem with_random_gradients(const Problem& forward) {
  Random random(forward.seed, streams::kGradientsData);
  Problem p = without_cache(forward);
  random_gradients(random, p);
  return p;
}

}  // namespace polyhead::testing
