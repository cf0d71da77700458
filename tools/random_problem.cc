#include <initializer_list>

#include "random.h"
#include "verify.h"

namespace polyhead::tools {
namespace {

class Chooser {
 public:
  explicit Chooser(uint64_t seed) : random_(seed, 0x70726f62) {}

  bool chance(double p) { return random_.uniform() < p; }
  int64_t between(int64_t first, int64_t last) { return first + random_.below(last - first + 1); }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random_.below(static_cast<int64_t>(values.size()))];
  }

  // 0 to 130, often beside the edges of tiles and vectors.
  int64_t size() {
    if (chance(0.03)) return 0;
    if (chance(0.3)) return one_of<int64_t>({1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129});
    return chance(0.4) ? between(1, 20) : between(1, 130);
  }

 private:
  Random random_;
};

void choose_sizes(Chooser& choose, AttentionDesc& desc) {
  constexpr double kMaxProducts = 2e6;
  double products = 0;
  do {
    desc.batch = choose.chance(0.02) ? 0 : choose.between(1, 4);
    desc.num_heads_kv = choose.between(1, 3);
    desc.num_heads = desc.num_heads_kv * choose.one_of<int64_t>({1, 1, 1, 2, 3, 4});
    desc.seqlen_q = choose.chance(0.1) ? choose.between(1, 8) : choose.size();
    desc.seqlen_k = choose.chance(0.4) ? desc.seqlen_q : choose.size();
    desc.head_dim = choose.size();
    desc.head_dim_v = choose.chance(0.6) ? desc.head_dim : choose.size();
    products = static_cast<double>(desc.batch * desc.num_heads * desc.seqlen_q * desc.seqlen_k) *
               static_cast<double>(desc.head_dim + desc.head_dim_v);
  } while (products > kMaxProducts);
}

void choose_diagonal(Chooser& choose, AttentionDesc& desc) {
  desc.causal = choose.chance(0.35);
  if (choose.chance(0.25)) {
    desc.window_left = choose.chance(0.3) ? -1 : choose.between(0, choose.one_of<int64_t>({5, 130}));
    desc.window_right = choose.chance(0.3) ? -1 : choose.between(0, choose.one_of<int64_t>({5, 130}));
  }
  if (choose.chance(0.15)) desc.alibi_slopes_ndim = static_cast<int>(choose.between(1, 2));
  switch (choose.between(0, 3)) {
    case 0: desc.align = Align::kTopLeft; break;
    case 1: desc.align = Align::kBottomRight; break;
    case 2: desc.query_offset = choose.between(-desc.seqlen_q - 3, desc.seqlen_k + 3); break;
    default: desc.has_query_offsets = true; break;
  }
}

void choose_operand(Chooser& choose, const AttentionDesc& desc, BroadcastOperand& operand) {
  const int64_t full[4] = {desc.batch, desc.num_heads, desc.seqlen_q, desc.seqlen_k};
  operand.given = true;
  for (int d = 0; d < 4; ++d) operand.dims[d] = choose.chance(0.4) ? 1 : full[d];
}

// Half of the problems ask for all gradients there are.
void choose_gradients(Chooser& choose, Problem& problem) {
  problem.accumulate = choose.chance(0.25);
  const GradientSet there = *needed_gradients(problem);
  if (choose.chance(0.5)) return;
  do {
    problem.needs = static_cast<GradientSet>(choose.between(1, kAllGradients)) & there;
  } while (problem.needs == 0);
  if (problem.needs == there) problem.needs = kAllGradients;
}

// What packed operands exclude.
void choose_unpacked(Chooser& choose, Problem& problem) {
  AttentionDesc& desc = problem.desc;
  if (choose.chance(0.25)) {
    choose_operand(choose, desc, desc.attn_mask);
    desc.attn_mask.dtype = DType::kBool;
    problem.mask_kind = choose.one_of({MaskKind::kRandom, MaskKind::kPadding, MaskKind::kBlocks});
  }
  if (choose.chance(0.25)) {
    choose_operand(choose, desc, desc.attn_bias);
    desc.attn_bias.dtype = choose.one_of({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
    if (desc.dtype == DType::kFloat64 && choose.chance(0.5)) desc.attn_bias.dtype = DType::kFloat64;
  }
  desc.has_seqlens_q = choose.chance(0.15);
  desc.has_seqlens_k = choose.chance(0.2);
  if (choose.chance(0.15)) desc.return_weights = choose.one_of({ReturnWeights::kPerHead, ReturnWeights::kMean});
  desc.return_column_sums = choose.chance(0.1);
}

}  // namespace

Problem random_problem(uint64_t seed) {
  Chooser choose(seed);
  Problem problem;
  problem.seed = seed;
  problem.logsumexp = choose.chance(0.5);
  AttentionDesc& desc = problem.desc;
  desc.dtype = choose.one_of({DType::kFloat32, DType::kFloat32, DType::kFloat32, DType::kBFloat16, DType::kBFloat16,
                              DType::kFloat16, DType::kFloat64});
  choose_sizes(choose, desc);
  choose_diagonal(choose, desc);
  desc.packed = choose.chance(0.15);
  if (!desc.packed) choose_unpacked(choose, problem);
  if (choose.chance(0.25)) desc.scale = choose.one_of({0.0, 1.0, -0.5, 0.01, 0.25});
  if (choose.chance(0.15)) desc.softcap = choose.one_of({0.5, 5.0, 30.0, 50.0});
  if (choose.chance(0.15)) desc.dropout_p = choose.one_of({1e-6, 0.1, 0.5, 0.9, 1.0});
  problem.layout = choose.one_of({Layout::kBshd, Layout::kBhsd, Layout::kSbhd, Layout::kQkv, Layout::kStrided});
  if (problem.layout == Layout::kSbhd && desc.packed) problem.layout = Layout::kBshd;
  if (problem.layout == Layout::kQkv && desc.seqlen_q != desc.seqlen_k) problem.layout = Layout::kStrided;
  choose_gradients(choose, problem);
  return problem;
}

}  // namespace polyhead::tools
