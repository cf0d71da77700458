#include "cuda/sums.h"

#include <algorithm>
#include <bit>

#include "core/threads.h"
#include "cuda/call.h"

namespace polyhead::cuda {
namespace {

// How the sums are cut of a result that is [1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k].
PairSums pair_sums(const AttentionDesc& desc, Summed summed, const int64_t (&dims)[4]) {
  constexpr int64_t kBlocks = 512;  // enough for every GPU
  const int64_t all[4] = {desc.batch, desc.num_heads, pieces(desc.seqlen_q, kBlockRows),
                          pieces(desc.seqlen_k, kBlockRows)};
  PairSums sums;
  sums.summed = summed;
  sums.by_query = dims[2] != 1;
  sums.by_key = dims[3] != 1;
  sums.tiles = sums.pairs = 1;
  for (int n = 0; n < 4; ++n) {
    sums.own[n] = dims[n] != 1 ? all[n] : 1;
    sums.others[n] = dims[n] != 1 ? 1 : all[n];
    sums.tiles *= sums.own[n];
    sums.pairs *= sums.others[n];
  }
  const int64_t of_sequence = sums.own[0] > 0 ? sums.tiles / sums.own[0] : 0;  // so that it has the same bits alone
  if (of_sequence > 0) {
    sums.parts = std::clamp<int64_t>(pieces(kBlocks, of_sequence), 1, std::max<int64_t>(sums.pairs, 1));
  }
  if (desc.packed && sums.own[0] == 1) sums.sequences = std::max<int64_t>(desc.batch, 1);
  sums.parts = pieces(sums.parts, sums.sequences) * sums.sequences;
  return sums;
}

// Elements of captures that may have gradients, before capture `last`.
MemorySize capture_elements(const AttentionDesc& desc, size_t last) {
  MemorySize sum = 0;
  for (size_t i = 0; i < last; ++i) {
    if (desc.program->captures()[i].type != ValueType::kFloat) continue;
    MemorySize elements = 1;
    for (int n = 0; n < desc.captures[i].ndim; ++n) elements = elements * MemorySize(desc.captures[i].dims[n]);
    sum = sum + elements;
  }
  return sum;
}

}  // namespace

Cuts gradient_cuts(const AttentionDesc& desc) {
  Cuts cuts;
  if (desc.attn_bias.given) cuts.sums[0] = pair_sums(desc, Summed::kGradient, desc.attn_bias.dims);
  if (desc.alibi_slopes_ndim > 0) {
    const int64_t dims[4] = {desc.alibi_slopes_ndim == 2 ? desc.batch : 1, desc.num_heads, 1, 1};
    cuts.sums[1] = pair_sums(desc, Summed::kSlopeGradient, dims);
  }
  return cuts;
}
Cuts weight_cuts(const AttentionDesc& desc) {
  Cuts cuts;
  if (desc.return_weights != ReturnWeights::kNone) {
    const bool mean = desc.return_weights == ReturnWeights::kMean;
    cuts.sums[0] =
        pair_sums(desc, Summed::kWeights, {desc.batch, mean ? 1 : desc.num_heads, desc.seqlen_q, desc.seqlen_k});
    if (mean) cuts.sums[0].divisor = static_cast<float>(std::max<int64_t>(desc.num_heads, 1));
  }
  if (desc.return_column_sums) {
    cuts.sums[1] = pair_sums(desc, Summed::kWeightsBeforeDropout, {desc.batch, desc.num_heads, 1, desc.seqlen_k});
  }
  return cuts;
}

MemorySize partial_bytes(const Cuts& cuts) {
  MemorySize most = 0;
  for (const PairSums& sums : cuts.sums) {
    if (sums.parts == 1) continue;
    most = std::max(most, MemorySize(4) * sums.parts * sums.tiles * sums.rows() * sums.columns());
  }
  return most.rounded_up(64);
}

void set_sums(const PairSums& cut, const Broadcast& result, void* partial, PairSums* sums) {
  if (result.data == nullptr) return;
  *sums = cut;
  sums->result = result;
  if (sums->parts > 1) sums->partial = static_cast<float*>(partial);
}

Broadcast weights_of(const Tensor& t) {
  if (!t.given()) return {};
  if (t.ndim == 4) return {t.data, t.strides[0], t.strides[1], t.strides[2], t.strides[3], number_of(t.dtype)};
  return {t.data, t.strides[0], 0, t.strides[1], t.strides[2], number_of(t.dtype)};
}
Broadcast column_sums_of(const Tensor& t) {
  if (!t.given()) return {};
  return {t.data, t.strides[0], t.strides[1], 0, t.strides[2]};
}

// The largest, sums, and what is not finite.
MemorySize capture_bytes(const AttentionDesc& desc) {
  if (desc.program == nullptr || desc.captures.empty()) return 0;
  const MemorySize elements = capture_elements(desc, desc.captures.size());
  return MemorySize(64) + elements * MemorySize(sizeof(unsigned long long) + sizeof(unsigned));
}

CaptureSums capture_sums(const AttentionDesc& desc, const BackwardArgs& args, void* memory) {
  CaptureSums sums;
  bool wanted = false;
  for (size_t i = 0; i < args.grad_captures.size(); ++i) {
    sums.gradients[i] = captured(args.grad_captures[i]);
    sums.numbers[i] = number_of(args.grad_captures[i].dtype);
    wanted |= sums.gradients[i].data != nullptr;
  }
  if (!wanted) return {};
  for (size_t i = 0; i <= kMostCaptures; ++i) {
    sums.first[i] = static_cast<int64_t>(capture_elements(desc, std::min(i, desc.captures.size())).value());
  }
  // Each pair adds to an element once for each time that the program reads it.
  const MemorySize terms = MemorySize(desc.batch) * MemorySize(desc.num_heads) * MemorySize(desc.seqlen_q) *
                           MemorySize(desc.seqlen_k) * MemorySize(desc.program->steps().size());
  sums.log2_terms = static_cast<int>(std::bit_width(terms.value()));
  sums.largest = static_cast<unsigned*>(memory);
  sums.sums = reinterpret_cast<unsigned long long*>(static_cast<char*>(memory) + 64);
  sums.not_finite = reinterpret_cast<unsigned*>(sums.sums + sums.first[kMostCaptures]);
  return sums;
}

}  // namespace polyhead::cuda
