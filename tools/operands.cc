#include "operands.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "contract/sequences.h"
#include "layouter.h"

namespace polyhead::tools {
namespace {

void fill_mask(const Tensor& mask, const Problem& problem) {
  Random random(problem.seed, kMask);
  int64_t index = 0, visible_keys = 0;
  const int64_t keys = mask.dims[3], rows = mask.dims[2];
  const uint64_t block_seed = random.next();
  fill(mask, [&]() -> double {
    const int64_t j = index % keys, i = index / keys % rows, plane = index / keys / rows;
    ++index;
    if (problem.mask_kind == MaskKind::kPadding) {
      if (j == 0) visible_keys = random.below(keys + 1);
      return j < visible_keys;
    }
    if (problem.mask_kind == MaskKind::kBlocks) {
      const auto block = static_cast<uint64_t>((plane << 40) + (i / 64 << 20) + j / 64);
      if (Random(block_seed, block).below(2) == 0) return 0;
    }
    return random.below(8) != 0;
  });
}

// N(0, 1), and -inf in 1 of 64 places: a bias may hide keys.
void fill_bias(const Tensor& bias, uint64_t seed) {
  Random random(seed, kBias);
  fill(bias, [&] { return random.below(64) == 0 ? -INFINITY : random.normal(); });
}

// 2^(-8 (h + 1) / H), as Press et al. (arXiv:2108.12409) for powers of two; per sequence a little different.
void fill_slopes(const Tensor& slopes, const AttentionDesc& desc, uint64_t seed) {
  Random random(seed, kSlopes);
  int64_t index = 0;
  fill(slopes, [&] {
    const auto h = static_cast<double>(index % desc.num_heads + 1);
    const double factor = index < desc.num_heads ? 1 : 0.5 + random.uniform();
    ++index;
    return factor * std::exp2(-8 * h / static_cast<double>(desc.num_heads));
  });
}

class Drawing {
 public:
  Drawing(const Problem& problem, Inputs& inputs)
      : problem_(problem),
        inputs_(inputs),
        layouter_(problem.layout, problem.seed, inputs.buffers),
        index_dtype_(Random(problem.seed, kIndexDType).below(2) == 0 ? DType::kInt32 : DType::kInt64) {}

  Status draw() {
    if (Status s = draw_heads(); !s.ok()) return s;
    if (Status s = draw_scores(); !s.ok()) return s;
    return draw_lengths();
  }

 private:
  Status draw_heads() {
    const AttentionDesc& desc = inputs_.desc;
    ForwardArgs& args = inputs_.args;
    const bool has_query = args.query.given(), has_key = args.key.given(), has_value = args.value.given();
    if (problem_.layout == Layout::kQkv && !has_query && !has_key && !has_value) {
      if (Status s = layouter_.add_qkv(desc, args.query, args.key, args.value); !s.ok()) return s;
    }
    const auto add = [&](int64_t seqlen, int64_t heads, int64_t dim, Tensor& tensor) {
      return tensor.given() ? Status() : layouter_.add_heads(desc, seqlen, heads, dim, tensor);
    };
    if (Status s = add(desc.seqlen_q, desc.num_heads, desc.head_dim, args.query); !s.ok()) return s;
    if (Status s = add(desc.seqlen_k, desc.num_heads_kv, desc.head_dim, args.key); !s.ok()) return s;
    if (Status s = add(desc.seqlen_k, desc.num_heads_kv, desc.head_dim_v, args.value); !s.ok()) return s;
    if (!has_query) fill_normal(args.query, problem_.seed, kQueryData);
    if (!has_key) fill_normal(args.key, problem_.seed, kKeyData);
    if (!has_value) fill_normal(args.value, problem_.seed, kValueData);
    return {};
  }

  Status draw_scores() {
    const AttentionDesc& desc = inputs_.desc;
    ForwardArgs& args = inputs_.args;
    if (desc.attn_mask.given && !args.attn_mask.given()) {
      const int64_t* n = desc.attn_mask.dims;
      if (Status s = layouter_.add(DType::kBool, {n[0], n[1], n[2], n[3]}, args.attn_mask); !s.ok()) return s;
      fill_mask(args.attn_mask, problem_);
    }
    if (desc.attn_bias.given && !args.attn_bias.given()) {
      const int64_t* n = desc.attn_bias.dims;
      if (Status s = layouter_.add(desc.attn_bias.dtype, {n[0], n[1], n[2], n[3]}, args.attn_bias); !s.ok()) return s;
      fill_bias(args.attn_bias, problem_.seed);
    }
    if (desc.alibi_slopes_ndim > 0 && !args.alibi_slopes.given()) {
      const Status s = desc.alibi_slopes_ndim == 1
                           ? layouter_.add(DType::kFloat32, {desc.num_heads}, args.alibi_slopes)
                           : layouter_.add(DType::kFloat32, {desc.batch, desc.num_heads}, args.alibi_slopes);
      if (!s.ok()) return s;
      fill_slopes(args.alibi_slopes, desc, problem_.seed);
    }
    return {};
  }

  Status draw_lengths() {
    const AttentionDesc& desc = inputs_.desc;
    ForwardArgs& args = inputs_.args;
    if (desc.packed) {
      if (Status s = add_sums(Side::kQuery, args.cu_seqlens_q); !s.ok()) return s;
      if (Status s = add_sums(Side::kKey, args.cu_seqlens_k); !s.ok()) return s;
    }
    if (desc.has_seqlens_q) {
      if (Status s = add_integers(random_lengths(problem_, Side::kQuery), args.seqlens_q); !s.ok()) return s;
    }
    if (desc.has_seqlens_k) {
      if (Status s = add_integers(random_lengths(problem_, Side::kKey), args.seqlens_k); !s.ok()) return s;
    }
    if (!desc.has_query_offsets) return {};
    Random random(problem_.seed, kOffsets);
    std::vector<int64_t> offsets;
    for (int64_t b = 0; b < desc.batch; ++b) {
      offsets.push_back(random.below(desc.seqlen_q + desc.seqlen_k + 1) - desc.seqlen_q);
    }
    return add_integers(offsets, args.query_offsets);
  }

  Status add_integers(const std::vector<int64_t>& values, Tensor& tensor) {
    if (tensor.given()) return {};
    if (Status s = layouter_.add(index_dtype_, {static_cast<int64_t>(values.size())}, tensor); !s.ok()) return s;
    size_t i = 0;
    fill(tensor, [&] { return static_cast<double>(values[i++]); });
    return {};
  }

  Status add_sums(Side side, Tensor& tensor) {
    std::vector<int64_t> sums = {0};
    for (int64_t length : random_lengths(problem_, side)) sums.push_back(sums.back() + length);
    return add_integers(sums, tensor);
  }

  const Problem& problem_;
  Inputs& inputs_;
  Layouter layouter_;
  DType index_dtype_;
};

// Rows of all sequences, and a few behind them that belong to none.
int64_t packed_rows(const Problem& problem, Side side) {
  int64_t rows = static_cast<int64_t>(problem.seed % 3);
  for (int64_t length : random_lengths(problem, side)) rows += length;
  return rows;
}

}  // namespace

std::vector<int64_t> random_lengths(const Problem& problem, Side side) {
  const AttentionDesc& desc = problem.desc;
  const bool as_query = side == Side::kQuery || desc.seqlen_q == desc.seqlen_k;
  Random random(problem.seed, as_query ? kLengthsQ : kLengthsK);
  const int64_t longest = as_query ? desc.seqlen_q : desc.seqlen_k;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const bool full = random.below(4) == 0;
    lengths.push_back(full ? longest : random.below(longest + 1));
  }
  return lengths;
}

AttentionDesc problem_desc(const Problem& problem) {
  AttentionDesc desc = problem.desc;
  if (desc.packed) {
    desc.seqlen_q = packed_rows(problem, Side::kQuery);
    desc.seqlen_k = packed_rows(problem, Side::kKey);
  }
  return desc;
}

Result<Inputs> random_inputs(const Problem& problem, const ForwardArgs& preset) {
  if (problem.desc.packed && problem.layout == Layout::kSbhd) {
    return Status(
        StatusCode::kInvalidArgument,
        "--layout sbhd with --packed: packed operands are [rows, heads, dim]; use bshd, bhsd, qkv or strided");
  }
  Inputs inputs;
  inputs.desc = preset.query.given() && problem.desc.packed ? problem.desc : problem_desc(problem);
  inputs.args = preset;
  inputs.args.dropout_seed = problem.seed;
  if (Status s = Drawing(problem, inputs).draw(); !s.ok()) return s;
  return inputs;
}

void Outputs::give_to(ForwardArgs& args) const {
  args.out = out;
  args.logsumexp = logsumexp;
  args.weights = weights;
  args.column_sums = column_sums;
}

Result<Outputs> new_outputs(const AttentionDesc& problem_desc, bool logsumexp, Layout layout, uint64_t seed,
                            Precision precision) {
  Outputs outputs;
  Layouter layouter(layout == Layout::kQkv ? Layout::kBshd : layout, seed + 1, outputs.buffers);
  AttentionDesc desc = problem_desc;
  if (precision == Precision::kFloat64) desc.dtype = DType::kFloat64;
  const DType statistics = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const int64_t B = desc.batch, H = desc.num_heads, Sq = desc.seqlen_q, Sk = desc.seqlen_k;
  Status s = layouter.add_heads(desc, Sq, H, desc.head_dim_v, outputs.out, true);
  if (s.ok() && logsumexp) {
    s = layouter.add_statistics(desc, statistics, outputs.logsumexp, true);
  }
  if (s.ok() && desc.return_weights == ReturnWeights::kPerHead) {
    s = layouter.add(desc.dtype, {B, H, Sq, Sk}, {0, 1, 2, 3}, outputs.weights, true);
  }
  if (s.ok() && desc.return_weights == ReturnWeights::kMean) {
    s = layouter.add(desc.dtype, {B, Sq, Sk}, {0, 1, 2}, outputs.weights, true);
  }
  if (s.ok() && desc.return_column_sums) {
    s = layouter.add(statistics, {B, H, Sk}, {0, 1, 2}, outputs.column_sums, true);
  }
  if (!s.ok()) return s;
  for (const Tensor* t : {&outputs.out, &outputs.logsumexp, &outputs.weights, &outputs.column_sums}) {
    fill(*t, [] { return NAN; });
  }
  return outputs;
}

Result<Buffer> give_workspace(size_t size_bytes, ForwardArgs& args) {
  Buffer buffer = new_buffer(size_bytes);
  if (buffer == nullptr) return too_large(static_cast<double>(size_bytes));
  args.workspace = buffer.get();
  args.workspace_bytes = size_bytes;
  return buffer;
}

double visible_pairs(const Inputs& inputs) {
  double pairs = 0;
  for (int64_t b = 0; b < inputs.desc.batch; ++b) {
    const Sequence s = sequence(inputs.desc, inputs.args, b);
    for (int64_t i = 0; i < s.len_q; ++i) {
      const KeyRange range = key_range(inputs.desc, inputs.args, s, i);
      pairs += static_cast<double>(std::max<int64_t>(range.end - range.begin, 0));
    }
  }
  return pairs * static_cast<double>(inputs.desc.num_heads);
}

double traffic_bytes(const ForwardArgs& args) {
  double total = 0;
  for (const Tensor* t : {&args.query, &args.key, &args.value, &args.attn_mask, &args.attn_bias, &args.alibi_slopes,
                          &args.out, &args.logsumexp, &args.weights, &args.column_sums}) {
    total += static_cast<double>(t->num_elements()) * static_cast<double>(dtype_size_bytes(t->dtype));
  }
  return total;
}

}  // namespace polyhead::tools
