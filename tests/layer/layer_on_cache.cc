#include "layer_on_cache.h"

#include <cmath>

#include "../cuda/reach.h"
#include "core/layout.h"

namespace polyhead::testing {
namespace {

int64_t length_of(const Array& lengths, int64_t b, int64_t whole) {
  return lengths.given() ? static_cast<int64_t>(lengths.at(b)) : whole;
}

// Where query 0 of a sequence stands among its keys.
int64_t offset_of(const LayerProblem& problem, const LayerInputs& in, int64_t b) {
  const LayerDesc& d = problem.desc;
  if (in.query_offsets.given()) return static_cast<int64_t>(in.query_offsets.at(b));
  if (d.attention.query_offset) return *d.attention.query_offset;
  if (d.attention.align != Align::kBottomRight) return 0;
  return length_of(in.seqlens_k, b, d.seqlen_k) - length_of(in.seqlens_q, b, d.seqlen_q);
}

}  // namespace

void LentCall::lend(Tensor* t, bool written) {
  if (!t->given()) return;
  for (const auto& [before, there] : lent_) {
    if (same_view(before, *t)) return void(*t = there);
  }
  const Tensor before = *t;
  if (written && on_device_ && t->num_elements() > 0) {  // what a copy holds, for inputs may be parts of one array
    const Reach reach = reach_of(*t);
    char* const first = static_cast<char*>(t->data) + reach.first;
    t->data = copies_.emplace_back(first, first + reach.bytes()).data() - reach.first;
  }
  loan_->lend(*t, written);
  lent_.emplace_back(before, *t);
}

void LentCall::lend(LayerForwardArgs* args) {
  LayerForwardArgs& a = *args;
  for (Tensor* t : {&a.query, &a.key, &a.value, &a.residual, &a.attn_mask, &a.attn_bias, &a.alibi_slopes,
                    &a.sink_logits, &a.seqlens_q, &a.seqlens_k, &a.query_offsets, &a.window_lo, &a.window_hi,
                    &a.cache.page_table, &a.cache.slots, &a.cache.positions, &a.cache.cos, &a.cache.sin}) {
    lend(t, true);
  }
  for (size_t n = 0; n < kNumWeightKinds; ++n) lend(&a.weights[static_cast<WeightKind>(n)], true);
  for (Tensor* t : {&a.out, &a.attn_weights}) lend(t, false);
  a.workspace = loan_->lend_scratch(a.workspace, a.workspace_bytes);
}

OneCall::OneCall(const LayerProblem& problem, const LayerInputs& in, const PagesOfBatch& pages, const Cut& cut,
                 int64_t first, int64_t width) {
  const LayerDesc& d = problem.desc;
  const int64_t new_keys = cut.tokens_join ? width : d.seqlen_k;
  std::vector<int64_t> of_q, of_k, at, to;
  for (int64_t b = 0; b < d.batch; ++b) {
    const int64_t all_k = length_of(in.seqlens_k, b, d.seqlen_k);
    of_q.push_back(std::clamp<int64_t>(length_of(in.seqlens_q, b, d.seqlen_q) - first, 0, width));
    of_k.push_back(cut.tokens_join ? std::min(all_k, first + width) : all_k);
    at.push_back(offset_of(problem, in, b) + first);
    for (int64_t t = 0; t < new_keys; ++t) {
      const int64_t token = (cut.tokens_join ? first : 0) + t;
      to.push_back(token < all_k ? pages.slot(b, token) : -1);
    }
  }
  seqlens_q = integers_of(of_q, {d.batch});
  seqlens_k = integers_of(of_k, {d.batch});
  offsets = integers_of(at, {d.batch});
  slots = integers_of(to, {d.batch, new_keys});
  table = pages.table_for(seqlens_k);
}

bool may_join(const LayerProblem& problem) {
  const LayerDesc& d = problem.desc;
  const AttentionDesc& a = d.attention;
  const bool square = d.seqlen_q == d.seqlen_k && !a.has_seqlens_q && !a.has_seqlens_k;
  return square && a.causal && !a.has_query_offsets && a.query_offset.value_or(0) == 0;
}

// The layer of `width` time steps that computes a part of the problem.
LayerDesc on_cache(const LayerProblem& problem, const PagesOfBatch& pages, const Cut& cut, int64_t width) {
  LayerDesc d = problem.desc;
  AttentionDesc& a = d.attention;
  d.cache = pages.desc;
  d.seqlen_new = cut.tokens_join ? 0 : std::max<int64_t>(d.seqlen_k, 1);
  d.seqlen_q = width;
  d.seqlen_k = pages.capacity;
  a.align = Align::kUnset;
  a.query_offset.reset();
  a.has_query_offsets = a.causal || a.window_left >= 0 || a.window_right >= 0 || a.alibi_slopes_ndim > 0;
  a.has_seqlens_q = a.has_seqlens_k = true;
  for (BroadcastOperand* operand : {&a.attn_mask, &a.attn_bias}) {
    if (operand->dims[2] > 1) operand->dims[2] = width;
  }
  return d;
}

LayerResults run_on_cache(const LayerProblem& problem, const LayerInputs& in, const Cut& cut) {
  const LayerDesc& whole = problem.desc;
  const AttentionDesc& attention = whole.attention;
  const bool gives_weights = attention.return_weights != ReturnWeights::kNone;
  const bool by_key = attention.attn_mask.dims[3] > 1 || attention.attn_bias.dims[3] > 1 || gives_weights;
  const int64_t page_size = by_key ? 1 : cut.page_size;  // masks are as long as all pages
  PagesOfBatch pages(format_of(whole, page_size), whole.batch, whole.seqlen_k, problem.seed);
  const std::unique_ptr<Loan> loan = new_loan(cut.kernel);
  const KvTensors pool = lend(*loan, pages.pool);
  LayerResults results;
  const auto unwritten = [&](std::vector<int64_t> dims) {
    Array array(whole.dtype, std::move(dims));
    std::fill(array.bytes.begin(), array.bytes.end(), uint8_t{0xff});
    return array;
  };
  results.out = unwritten(in.grad_out.dims);
  const bool per_head = attention.return_weights == ReturnWeights::kPerHead;
  if (per_head) results.attn_weights = unwritten({whole.batch, 1, whole.num_heads, whole.seqlen_q, whole.seqlen_k});
  if (gives_weights && !per_head) results.attn_weights = unwritten({whole.batch, 1, whole.seqlen_q, whole.seqlen_k});
  size_t call = 0;
  for (int64_t first = 0, width = 0; call == 0 || first < whole.seqlen_q; first += width, ++call) {
    const size_t n = std::min(call, cut.widths.size() - 1);
    width = cut.widths.empty() ? whole.seqlen_q : std::min(cut.widths[n], whole.seqlen_q - first);
    const LayerDesc d = on_cache(problem, pages, cut, width);
    const Result<Layer> made = layer(d, options_of(cut.kernel, cut.threads));
    if (!made.ok()) return results.faults.push_back(made.status().message()), results;
    const OneCall numbers(problem, in, pages, cut, first, width);
    LayerForwardArgs args;
    const auto steps = [&](const Array& a) { return a.given() ? part(view(a), 2, first, width) : Tensor(); };
    args.query = steps(in.query), args.residual = steps(in.residual);
    if (cut.tokens_join || (call == 0 && whole.seqlen_k > 0)) {
      const Array& key = problem.key_is_query ? in.query : in.key;
      const Array& value = problem.value_is_key ? key : in.value;
      args.key = cut.tokens_join ? steps(key) : view(key);
      args.value = cut.tokens_join ? steps(value) : view(value);
      args.cache.slots = view(numbers.slots);
    }
    args.weights = weights_of(in.weights);
    const auto option = [&](const Array& a, int dim) {
      return a.given() ? part_of_option(view(a), dim, first, width) : Tensor();
    };
    args.attn_mask = option(in.attn_mask, 2), args.attn_bias = option(in.attn_bias, 2);
    args.window_lo = option(in.window_lo, 0), args.window_hi = option(in.window_hi, 0);
    if (in.alibi_slopes.given()) args.alibi_slopes = view(in.alibi_slopes);
    if (in.sink_logits.given()) args.sink_logits = view(in.sink_logits);
    args.seqlens_q = view(numbers.seqlens_q), args.seqlens_k = view(numbers.seqlens_k);
    if (d.attention.has_query_offsets) args.query_offsets = view(numbers.offsets);
    args.cache.pool = pool;
    args.cache.page_table = view(numbers.table);
    args.out = part(view(results.out), 2, first, width);
    if (gives_weights) args.attn_weights = part(view(results.attn_weights), per_head ? 3 : 2, first, width);
    const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
    args.workspace = workspace.data(), args.workspace_bytes = made->workspace_bytes();
    LentCall lent(cut.kernel);
    lent.lend(&args);
    if (const Status status = made->forward(args); !status.ok()) results.faults.push_back(status.message());
    if (const std::string fault = lent.finish(); !fault.empty()) results.faults.push_back(fault);
    if (!results.faults.empty()) break;
  }
  return results;
}

}  // namespace polyhead::testing
