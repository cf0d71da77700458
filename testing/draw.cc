// The numbers of a problem's operands: a stream of its seed for each.
#include <algorithm>
#include <cmath>

#include "testing/definition.h"
#include "testing/formats.h"
#include "testing/operands.h"
#include "testing/program_words.h"

namespace polyhead::testing {
namespace {

constexpr double kHidden = -HUGE_VAL;

double scale_of(const AttentionDesc& desc) {
  return desc.scale.value_or(1 / std::sqrt(static_cast<double>(desc.head_dim)));
}

// Sets every element along the dims of `repeated` to the first along them.
void repeat(Array& a, unsigned repeated) {
  if (repeated == 0) return;
  for (int64_t n = 0; n < a.size(); ++n) {
    int64_t first = 0, inner = 1, rest = n;
    for (size_t d = a.dims.size(); d-- > 0;) {
      if (!(repeated >> d & 1)) first += rest % a.dims[d] * inner;
      inner *= a.dims[d];
      rest /= a.dims[d];
    }
    a.set(n, a.at(first));
  }
}

Array normal(DType dtype, const std::vector<int64_t>& dims, uint64_t seed, uint64_t stream) {
  Random random(seed, stream);
  Array a(dtype, dims);
  a.fill([&] { return random.normal(); });
  return a;
}

class Generator {
 public:
  Generator(const Problem& problem, const ForwardArgs& given)
      : problem_(problem), desc_(problem_desc(problem)), given_(given) {}

  Inputs inputs() const {
    Inputs in;
    if (!given_.query.given()) in.query = query();
    if (!given_.key.given()) in.key = key();
    if (!given_.value.given()) in.value = value();
    round(key_dtype(desc_), desc_.key_group, in.key, in.key_scales);
    round(value_dtype(desc_), desc_.value_group, in.value, in.value_scales);
    if (desc_.attn_mask.given && !given_.attn_mask.given()) in.attn_mask = mask();
    if (desc_.attn_bias.given && !given_.attn_bias.given()) in.attn_bias = bias();
    if (desc_.alibi_slopes_ndim > 0 && !given_.alibi_slopes.given()) in.alibi_slopes = slopes();
    if (desc_.has_sink_logits && !given_.sink_logits.given()) in.sink_logits = sinks();
    in.captures = draw_captures(problem_, given_.captures);
    lengths(in);
    if (desc_.has_windows && !given_.window_lo.given()) windows(in);
    Random random(problem_.seed, streams::kDropout);
    in.dropout_seed = random.bits();
    in.dropout_offset = static_cast<uint32_t>(random.bits());
    return in;
  }

 private:
  Array operand(bool packed, int64_t rows, int64_t heads, int64_t dim) const {
    return packed ? Array(desc_.dtype, {rows, heads, dim}) : Array(desc_.dtype, {desc_.batch, rows, heads, dim});
  }

  // To a format with scales.
  static void round(DType format, int64_t group, Array& x, Array& scales) {
    if (!has_scales(format) || !x.given()) return;
    Stored rounded = stored(x, format, group);
    x = std::move(rounded.numbers);
    scales = std::move(rounded.scales);
  }

  void fill_numbers(Array& a, Random& random, double large) const {
    switch (problem_.fill) {
      case Fill::kLarge: a.fill([&] { return large * static_cast<double>(random.integer(-8, 8)); }); break;
      case Fill::kOutliers:
        a.fill([&] { return random.normal() + (random.chance(0.001) ? 10 * random.normal() : 0); });
        break;
      default: a.fill([&] { return random.normal(); }); break;
    }
  }

  // Component 0 of query and key moves the logits: 8 * k0 * scale.
  double shift() const {
    if (desc_.head_dim == 0 || scale_of(desc_) == 0) return 0;
    if (problem_.fill == Fill::kShiftUp) return 130;
    if (problem_.fill == Fill::kShiftDown) return -130;
    return problem_.fill == Fill::kUnderflow ? -95 : 0;
  }

  Array query() const {
    Random random(problem_.seed, streams::kQueryData);
    Array a = operand(desc_.packed, desc_.seqlen_q, desc_.num_heads, desc_.head_dim);
    fill_numbers(a, random, 16);
    for (int64_t n = 0; shift() != 0 && n < a.size(); n += desc_.head_dim) a.set(n, 8);
    repeat_some(a, 0, random);
    return a;
  }

  Array key() const {
    Random random(problem_.seed, streams::kKeyData);
    Array a = operand(packs_keys(desc_), desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim);
    fill_numbers(a, random, 4);
    for (int64_t n = 0; shift() != 0 && n < a.size(); n += desc_.head_dim) {
      const bool stays = problem_.fill == Fill::kUnderflow && random.chance(0.5);
      a.set(n, stays ? 0 : shift() / (8 * scale_of(desc_)));
    }
    repeat_some(a, packs_keys(desc_) ? 1 : 2, random);
    return a;
  }

  Array value() const {
    Random random(problem_.seed, streams::kValueData);
    Array a = operand(packs_keys(desc_), desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim_v);
    a.fill([&] { return random.normal(); });
    repeat_some(a, 0, random);
    return a;
  }

  // Sometimes makes all of a dim alike, so that the expanded layout has a stride of 0 to use.
  void repeat_some(Array& a, unsigned dim, Random& random) const {
    const bool asked = problem_.layout == Layout::kExpanded;
    if (asked || (problem_.layout == Layout::kMixed && random.chance(0.15))) repeat(a, 1U << dim);
  }

  // Calls set(n, hidden) for each element of a [B, H, Sq, Sk] array: single places, rows, a tail and blocks are hidden.
  template <class Set>
  static void hide(const Array& a, double p, Random& random, Set set) {
    const int64_t queries = a.dims[2], keys = a.dims[3];
    for (int64_t head = 0; head < a.dims[0] * a.dims[1]; ++head) {
      const int64_t tail = random.chance(0.3) ? random.integer(0, keys) : keys;
      const uint64_t blocks = random.bits();
      for (int64_t i = 0; i < queries; ++i) {
        const bool row = random.chance(0.05);
        for (int64_t j = 0; j < keys; ++j) {
          const uint64_t block = static_cast<uint64_t>(i / 64 * 5 + j / 64) % 64;
          const bool blocked = queries > 64 && (blocks >> block & 1);
          set((head * queries + i) * keys + j, row || blocked || j >= tail || random.chance(p));
        }
      }
    }
  }

  Array mask() const {
    Random random(problem_.seed, streams::kMask);
    const int64_t* d = desc_.attn_mask.dims;
    Array a(DType::kBool, {d[0], d[1], d[2], d[3]});
    if (problem_.edges) {
      hide(a, 0.2, random, [&](int64_t n, bool hidden) { a.set(n, !hidden); });
      return a;
    }
    const uint64_t block_seed = random.bits();
    int64_t visible_keys = 0;
    for (int64_t n = 0; n < a.size(); ++n) {
      const int64_t j = n % d[3], i = n / d[3] % d[2], plane = n / d[3] / d[2];
      if (problem_.mask_kind == MaskKind::kPadding) {
        if (j == 0) visible_keys = random.below(d[3] + 1);
        a.set(n, j < visible_keys);
        continue;
      }
      const auto block = static_cast<uint64_t>((plane << 40) + (i / 64 << 20) + j / 64);
      const bool blocked = problem_.mask_kind == MaskKind::kBlocks && Random(block_seed, block).below(2) == 0;
      a.set(n, !blocked && random.below(8) != 0);
    }
    return a;
  }

  // N(0, 1), and -inf in 1 of 64 places: a bias may hide keys.
  Array bias() const {
    Random random(problem_.seed, streams::kBias);
    const int64_t* d = desc_.attn_bias.dims;
    Array a(desc_.attn_bias.dtype, {d[0], d[1], d[2], d[3]});
    if (problem_.edges) {
      hide(a, 0.1, random, [&](int64_t n, bool hidden) { a.set(n, hidden ? kHidden : random.normal()); });
    } else {
      a.fill([&] { return random.below(64) == 0 ? kHidden : random.normal(); });
    }
    return a;
  }

  // 2^(-8 (h + 1) / H), as Press et al. (arXiv:2108.12409) for powers of two; per sequence a little different.
  Array slopes() const {
    Random random(problem_.seed, streams::kSlopes);
    Array a = desc_.alibi_slopes_ndim == 2 ? Array(DType::kFloat32, {desc_.batch, desc_.num_heads})
                                           : Array(DType::kFloat32, {desc_.num_heads});
    for (int64_t n = 0; n < a.size(); ++n) {
      const auto h = static_cast<double>(n % desc_.num_heads + 1);
      const double factor = n < desc_.num_heads ? 1 : 0.5 + random.uniform();
      const double edge = random.chance(0.1) ? 0 : std::exp2(-static_cast<double>(random.integer(1, 8)));
      a.set(n, problem_.edges ? edge : factor * std::exp2(-8 * h / static_cast<double>(desc_.num_heads)));
    }
    return a;
  }

  // About as large as the logits, which are shifted likewise; some heads have none.
  Array sinks() const {
    Random random(problem_.seed, streams::kSinks);
    const bool shifted = problem_.fill == Fill::kShiftUp || problem_.fill == Fill::kShiftDown;
    Array a(desc_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, {desc_.num_heads});
    a.fill([&] {
      return problem_.edges && random.chance(0.15) ? kHidden : 2 * random.normal() + (shifted ? shift() : 0);
    });
    return a;
  }

  static Array integers(const std::vector<int64_t>& values, Random& random) {
    Array a(random.chance(0.5) ? DType::kInt32 : DType::kInt64, {static_cast<int64_t>(values.size())});
    for (size_t n = 0; n < values.size(); ++n) a.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
    return a;
  }

  // Where sequences begin, and the end of the last.
  Array cuts(Side side) const {
    Random random(problem_.seed, side == Side::kQuery ? streams::kLengthsQ : streams::kLengthsK);
    std::vector<int64_t> at = {0};
    if (problem_.cuts_rows) {
      const int64_t total = side == Side::kQuery ? desc_.seqlen_q : desc_.seqlen_k;
      for (int64_t b = 0; b < desc_.batch; ++b) at.push_back(random.integer(0, total));
      std::sort(at.begin(), at.end());
      if (desc_.batch > 0 && random.chance(0.5)) at.back() = total;
    } else {
      for (const int64_t length : random_lengths(problem_, side)) at.push_back(at.back() + length);
    }
    return integers(at, random);
  }

  void lengths(Inputs& in) const {
    Random random(problem_.seed, streams::kOffsets);
    if (desc_.packed && !given_.cu_seqlens_q.given()) in.cu_seqlens_q = cuts(Side::kQuery);
    if (packs_keys(desc_) && !given_.cu_seqlens_k.given()) in.cu_seqlens_k = cuts(Side::kKey);
    if (desc_.has_seqlens_q && !given_.seqlens_q.given()) {
      in.seqlens_q = integers(random_lengths(problem_, Side::kQuery), random);
    }
    if (desc_.has_seqlens_k && !given_.seqlens_k.given()) {
      in.seqlens_k = integers(random_lengths(problem_, Side::kKey), random);
    }
    if (!desc_.has_query_offsets || given_.query_offsets.given()) return;
    std::vector<int64_t> offsets;
    for (int64_t b = 0; b < desc_.batch; ++b) {
      offsets.push_back(random.integer(-desc_.seqlen_q - 3, desc_.seqlen_k + 3));
    }
    in.query_offsets = integers(offsets, random);
  }

  // Also windows that are empty or reach beyond the keys, which are legal.
  void windows(Inputs& in) const {
    Random random(problem_.seed, streams::kWindows);
    std::vector<int64_t> lo, hi;
    for (int64_t i = 0; i < desc_.seqlen_q; ++i) {
      lo.push_back(random.integer(-3, desc_.seqlen_k));
      hi.push_back(lo.back() + random.integer(0, desc_.seqlen_k + 4));
    }
    in.window_lo = integers(lo, random);
    in.window_hi = integers(hi, random);
  }

  const Problem& problem_;
  const AttentionDesc desc_;
  const ForwardArgs& given_;
};

// The sum over Dv of grad_out * out for each row, in the order of logsumexp.
Array rowsum(const AttentionDesc& d, const BackwardInputs& in) {
  Array sums(in.logsumexp.dtype, in.logsumexp.dims);
  const int64_t heads = d.num_heads, queries = d.seqlen_q, batch = d.packed ? 1 : d.batch;
  for (int64_t row = 0; row < batch * queries * heads; ++row) {
    double sum = 0;
    for (int64_t n = row * d.head_dim_v; n < (row + 1) * d.head_dim_v; ++n) sum += in.grad_out.at(n) * in.out.at(n);
    const int64_t b = row / heads / queries, i = row / heads % queries, h = row % heads;
    sums.set((b * heads + h) * queries + i, sum);
  }
  return sums;
}

// Rows of all sequences, and a few behind them that belong to none.
int64_t packed_rows(const Problem& problem, Side side) {
  auto rows = static_cast<int64_t>(problem.seed % 3);
  for (const int64_t length : random_lengths(problem, side)) rows += length;
  return rows;
}

}  // namespace

Inputs random_inputs(const Problem& problem, const ForwardArgs& given) { return Generator(problem, given).inputs(); }

std::vector<int64_t> random_lengths(const Problem& problem, Side side) {
  const AttentionDesc& desc = problem.desc;
  const bool as_query = side == Side::kQuery || (desc.seqlen_q == desc.seqlen_k && !problem.edges);
  Random random(problem.seed, as_query ? streams::kLengthsQ : streams::kLengthsK);
  const int64_t longest = as_query ? desc.seqlen_q : desc.seqlen_k;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const bool none = problem.edges && random.chance(0.15);
    const bool full = random.chance(0.25);
    const int64_t some = random.integer(0, longest);
    lengths.push_back(none ? 0 : full ? longest : some);
  }
  return lengths;
}

AttentionDesc problem_desc(const Problem& problem) {
  AttentionDesc desc = problem.desc;
  if (desc.packed && !problem.cuts_rows) {
    desc.seqlen_q = packed_rows(problem, Side::kQuery);
    if (desc.page_size == 0) desc.seqlen_k = packed_rows(problem, Side::kKey);
  }
  return desc;
}

double input_bytes(const Problem& problem) {
  const AttentionDesc& d = problem.desc;
  const auto product = [](std::initializer_list<int64_t> sizes) {
    double count = 1;
    for (const int64_t size : sizes) count *= static_cast<double>(size);
    return count;
  };
  const auto bytes = [&](DType dtype, double count) { return count * static_cast<double>(dtype_size_bytes(dtype)); };
  const int64_t batch = d.packed && problem.cuts_rows ? 1 : d.batch;
  double sum = bytes(d.dtype, product({batch, d.seqlen_q, d.num_heads, d.head_dim}) +
                                  product({batch, d.seqlen_k, d.num_heads_kv}) *
                                      (static_cast<double>(d.head_dim) + static_cast<double>(d.head_dim_v)));
  for (const BroadcastOperand* operand : {&d.attn_mask, &d.attn_bias}) {
    const int64_t* n = operand->dims;
    if (operand->given) sum += bytes(operand->dtype, product({n[0], n[1], n[2], n[3]}));
  }
  for (const CaptureShape& shape : d.captures) {
    double count = 1;
    for (int n = 0; n < shape.ndim; ++n) count *= static_cast<double>(shape.dims[n]);
    sum += bytes(shape.dtype, count);
  }
  return sum;
}

void draw_incoming(const Problem& problem, const AttentionDesc& d, BackwardInputs& in) {
  std::vector<int64_t> out_dims = d.packed ? std::vector<int64_t>{d.seqlen_q, d.num_heads, d.head_dim_v}
                                           : std::vector<int64_t>{d.batch, d.seqlen_q, d.num_heads, d.head_dim_v};
  in.grad_out = normal(out_dtype(d), out_dims, problem.seed, streams::kGradOutData);
  repeat(in.grad_out, problem.repeated_grad_out);
  in.repeated_grad_out = problem.repeated_grad_out != 0;
  if (problem.logsumexp) {
    const std::vector<int64_t> dims = d.packed ? std::vector<int64_t>{d.num_heads, d.seqlen_q}
                                               : std::vector<int64_t>{d.batch, d.num_heads, d.seqlen_q};
    const DType statistics = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    in.grad_logsumexp = normal(statistics, dims, problem.seed, streams::kGradLogsumexpData);
  }
  in.accumulate = problem.accumulate;
  for (uint64_t n = 0; in.accumulate && n < kNumGradients; ++n) {
    const Array& input = in.forward.*kGradients[n].input;
    if (!input.given()) continue;
    in.before.*kGradients[n].gradient = normal(gradient_dtype(d, static_cast<int>(n), input.dtype), input.dims,
                                               problem.seed, streams::kGradientsData + n);
  }
  for (uint64_t n = 0; in.accumulate && n < d.captures.size(); ++n) {
    const CaptureShape& shape = d.captures[n];
    const std::vector<int64_t> dims(shape.dims, shape.dims + shape.ndim);
    in.before.captures.push_back(
        has_gradient(shape.dtype) ? normal(shape.dtype, dims, problem.seed, streams::kGradCapturesData + n) : Array());
  }
}

BackwardInputs random_backward_inputs(const Problem& problem) {
  BackwardInputs in;
  in.forward = random_inputs(problem);
  draw_incoming(problem, problem_desc(problem), in);
  if (problem.delta) in.delta = Array(DType::kFloat32, {1});  // asks for one
  compute_forward(problem_desc(problem), in);
  return in;
}

void compute_forward(const AttentionDesc& desc, BackwardInputs& in) {
  const bool delta = in.delta.given();
  AttentionDesc plain = desc;
  plain.return_weights = ReturnWeights::kNone;
  plain.return_column_sums = false;
  Outputs o = defined_outputs<double>(plain, in.forward, Visibility(plain, in.forward), false);
  in.out = std::move(o.out);
  if (desc.normalizer == Normalizer::kNone) return;
  in.logsumexp = std::move(o.logsumexp);
  if (!delta) return;
  in.delta = rowsum(desc, in);
  in.out = Array();
}

}  // namespace polyhead::testing
