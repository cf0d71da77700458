// Random numbers for a problem, and random problems.
#include <algorithm>
#include <cmath>

#include "problem.h"

namespace polyhead::testing {
namespace {

constexpr double kHidden = -HUGE_VAL;

double scale_of(const AttentionDesc& desc) {
  return desc.scale.value_or(1 / std::sqrt(static_cast<double>(desc.head_dim)));
}

class Generator {
 public:
  explicit Generator(const Problem& problem)
      : desc_(problem.desc), problem_(problem), random_(problem.seed * 0x2545F4914F6CDD1D + 1) {}

  Inputs inputs() {
    Inputs in;
    lengths(in);
    query_and_key(in);
    in.value = operand(desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim_v);
    fill(in.value, [&] { return random_.normal(); });
    repeat(in.value, 0);
    if (desc_.attn_mask.given) in.attn_mask = mask();
    if (desc_.attn_bias.given) in.attn_bias = bias();
    if (desc_.alibi_slopes_ndim > 0) in.alibi_slopes = slopes();
    if (desc_.dropout_p > 0) {
      in.dropout_seed = random_.bits();
      in.dropout_offset = static_cast<uint32_t>(random_.bits());
    }
    return in;
  }

 private:
  Array operand(int64_t rows, int64_t heads, int64_t dim) const {
    return desc_.packed ? Array(desc_.dtype, {rows, heads, dim}) : Array(desc_.dtype, {desc_.batch, rows, heads, dim});
  }

  template <class Next>
  static void fill(Array& a, Next next) {
    for (int64_t n = 0, size = a.size(); n < size; ++n) a.set(n, next());
  }

  double number() {
    if (problem_.fill == Fill::kOutliers) return random_.normal() + (random_.chance(0.001) ? 10 * random_.normal() : 0);
    return random_.normal();
  }

  void query_and_key(Inputs& in) {
    in.query = operand(desc_.seqlen_q, desc_.num_heads, desc_.head_dim);
    in.key = operand(desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim);
    if (problem_.fill == Fill::kLarge) {
      fill(in.query, [&] { return static_cast<double>(16 * random_.integer(-8, 8)); });
      fill(in.key, [&] { return static_cast<double>(4 * random_.integer(-8, 8)); });
    } else {
      fill(in.query, [&] { return number(); });
      fill(in.key, [&] { return number(); });
      shift_logits(in);
    }
    repeat(in.query, 0);
    repeat(in.key, desc_.packed ? 1 : 2);
  }

  // Component 0 of query and key moves the logits: 8 * k0 * scale.
  void shift_logits(Inputs& in) {
    const double scale = scale_of(desc_);
    if (desc_.head_dim == 0 || scale == 0) return;
    double shift = 0;
    if (problem_.fill == Fill::kShiftUp) shift = 130;
    if (problem_.fill == Fill::kShiftDown) shift = -130;
    if (problem_.fill == Fill::kUnderflow) shift = -95;
    if (shift == 0) return;
    const int64_t dim = desc_.head_dim;
    for (int64_t n = 0; n < in.query.size(); n += dim) in.query.set(n, 8);
    for (int64_t n = 0; n < in.key.size(); n += dim) {
      const bool stays = problem_.fill == Fill::kUnderflow && random_.chance(0.5);
      in.key.set(n, stays ? 0 : shift / (8 * scale));
    }
  }

  // Sometimes makes all of a dim alike, so that the expanded layout has a stride of 0 to use.
  void repeat(Array& a, size_t dim) {
    const bool asked = problem_.layout == Layout::kExpanded;
    if (!asked && !(problem_.layout == Layout::kMixed && random_.chance(0.15))) return;
    int64_t inner = 1;
    for (size_t d = dim + 1; d < a.dims.size(); ++d) inner *= a.dims[d];
    for (int64_t n = 0; n < a.size(); ++n) a.set(n, a.at(n - n / inner % a.dims[dim] * inner));
  }

  // Calls set(n, hidden) for each element of a [B, H, Sq, Sk] array: single places, rows, a tail and blocks are hidden.
  template <class Set>
  void hide(const Array& a, double p, Set set) {
    const int64_t queries = a.dims[2], keys = a.dims[3];
    for (int64_t head = 0; head < a.dims[0] * a.dims[1]; ++head) {
      const int64_t tail = random_.chance(0.3) ? random_.integer(0, keys) : keys;
      const uint64_t blocks = random_.bits();
      for (int64_t i = 0; i < queries; ++i) {
        const bool row = random_.chance(0.05);
        for (int64_t j = 0; j < keys; ++j) {
          const uint64_t block = static_cast<uint64_t>(i / 64 * 5 + j / 64) % 64;
          const bool blocked = queries > 64 && (blocks >> block & 1);
          set((head * queries + i) * keys + j, row || blocked || j >= tail || random_.chance(p));
        }
      }
    }
  }

  Array mask() {
    const int64_t* d = desc_.attn_mask.dims;
    Array a(DType::kBool, {d[0], d[1], d[2], d[3]});
    hide(a, 0.2, [&](int64_t n, bool hidden) { a.set(n, !hidden); });
    return a;
  }

  Array bias() {
    const int64_t* d = desc_.attn_bias.dims;
    Array a(desc_.attn_bias.dtype, {d[0], d[1], d[2], d[3]});
    hide(a, 0.1, [&](int64_t n, bool hidden) { a.set(n, hidden ? kHidden : random_.normal()); });
    return a;
  }

  Array slopes() {
    Array a = desc_.alibi_slopes_ndim == 2 ? Array(DType::kFloat32, {desc_.batch, desc_.num_heads})
                                           : Array(DType::kFloat32, {desc_.num_heads});
    fill(a, [&] { return random_.chance(0.1) ? 0 : std::exp2(-static_cast<double>(random_.integer(1, 8))); });
    return a;
  }

  Array integers(int64_t count) { return Array(random_.chance(0.5) ? DType::kInt32 : DType::kInt64, {count}); }

  Array some_lengths(int64_t full) {
    Array a = integers(desc_.batch);
    fill(a, [&] {
      if (random_.chance(0.15)) return 0.0;
      return static_cast<double>(random_.chance(0.2) ? full : random_.integer(0, full));
    });
    return a;
  }

  Array cuts(int64_t total) {
    Array a = integers(desc_.batch + 1);
    std::vector<int64_t> at(static_cast<size_t>(desc_.batch) + 1, 0);
    for (size_t n = 1; n < at.size(); ++n) at[n] = random_.integer(0, total);
    std::sort(at.begin(), at.end());
    if (desc_.batch > 0 && random_.chance(0.5)) at.back() = total;
    for (size_t n = 0; n < at.size(); ++n) a.set(static_cast<int64_t>(n), static_cast<double>(at[n]));
    return a;
  }

  void lengths(Inputs& in) {
    if (desc_.packed) {
      in.cu_seqlens_q = cuts(desc_.seqlen_q);
      in.cu_seqlens_k = cuts(desc_.seqlen_k);
    }
    if (desc_.has_seqlens_q) in.seqlens_q = some_lengths(desc_.seqlen_q);
    if (desc_.has_seqlens_k) in.seqlens_k = some_lengths(desc_.seqlen_k);
    if (desc_.has_query_offsets) {
      in.query_offsets = integers(desc_.batch);
      fill(in.query_offsets,
           [&] { return static_cast<double>(random_.integer(-desc_.seqlen_q - 3, desc_.seqlen_k + 3)); });
    }
  }

  const AttentionDesc& desc_;
  const Problem& problem_;
  Random random_;
};

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
}

std::string dtype_flag(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return "bf16";
    case DType::kFloat16: return "f16";
    case DType::kFloat64: return "f64";
    default: return "f32";
  }
}

std::string operand_flag(const AttentionDesc& d, const BroadcastOperand& operand) {
  const int64_t full[4] = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  const char* letters[4] = {"b", "h", "q", "k"};
  std::string text;
  for (int n = 0; n < 4; ++n) {
    text += n == 0 ? "" : ",";
    text += operand.dims[n] == 1 && full[n] != 1 ? "1" : letters[n];
  }
  return text;
}

}  // namespace

Inputs random_inputs(const Problem& problem) { return Generator(problem).inputs(); }

Problem random_problem(uint64_t seed) {
  constexpr DType kTypes[] = {DType::kFloat32,  DType::kFloat32,  DType::kFloat32, DType::kFloat32, DType::kBFloat16,
                              DType::kBFloat16, DType::kBFloat16, DType::kFloat16, DType::kFloat16, DType::kFloat64};
  constexpr double kScales[] = {0, 1, -0.5, 0.01, 0.25};
  constexpr double kSoftcaps[] = {0.5, 5, 30, 50};
  constexpr double kDropouts[] = {1e-6, 0.1, 0.5, 0.9, 1};
  Random random(seed);
  Problem p;
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
  return p;
}

std::string problem_line(const std::string& kernel, const Problem& problem) {
  constexpr const char* kFills[] = {"normal", "shift_up", "shift_down", "large", "underflow", "outliers"};
  const AttentionDesc& d = problem.desc;
  auto num = [](auto value) { return std::to_string(value); };
  std::string line = "polyhead verify " + num(d.batch) + "x" + num(d.num_heads) + "/" + num(d.num_heads_kv) + "x" +
                     num(d.seqlen_q) + "/" + num(d.seqlen_k) + "x" + num(d.head_dim) + "/" + num(d.head_dim_v) +
                     " --kernel " + kernel + " --dtype " + dtype_flag(d.dtype);
  if (d.scale) line += " --scale " + num(*d.scale);
  if (d.softcap > 0) line += " --softcap " + num(d.softcap);
  if (d.causal) line += " --causal";
  if (d.window_left >= 0 || d.window_right >= 0) line += " --window " + num(d.window_left) + "," + num(d.window_right);
  if (d.alibi_slopes_ndim > 0) line += d.alibi_slopes_ndim == 2 ? " --alibi=batch" : " --alibi";
  if (d.align == Align::kTopLeft) line += " --align top_left";
  if (d.align == Align::kBottomRight) line += " --align bottom_right";
  if (d.query_offset) line += " --query-offset " + num(*d.query_offset);
  if (d.has_query_offsets) line += " --query-offset random";
  if (d.attn_mask.given) line += " --mask " + operand_flag(d, d.attn_mask);
  if (d.attn_bias.given) {
    line += " --bias " + operand_flag(d, d.attn_bias) + " --bias-dtype " + dtype_flag(d.attn_bias.dtype);
  }
  if (d.has_seqlens_q || d.has_seqlens_k) {
    line += d.has_seqlens_q && d.has_seqlens_k ? " --lengths=both" : d.has_seqlens_q ? " --lengths=q" : " --lengths=k";
  }
  if (d.packed) line += " --packed";
  if (d.dropout_p > 0) line += " --dropout " + num(d.dropout_p);
  if (d.return_weights == ReturnWeights::kPerHead) line += " --weights head";
  if (d.return_weights == ReturnWeights::kMean) line += " --weights mean";
  if (d.return_column_sums) line += " --column-sums";
  const bool known = problem.layout <= Layout::kQkv;
  return line + " --seed " + num(problem.seed) + " --layout " + (known ? layout_name(problem.layout) : "strided") +
         "  # " + problem.name + ": numbers " + kFills[static_cast<int>(problem.fill)] + ", layout " +
         layout_name(problem.layout);
}

}  // namespace polyhead::testing
