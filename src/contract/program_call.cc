#include "contract/program_call.h"

#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "core/sentence.h"
#include "program/interval.h"
#include "program/schedule.h"

namespace polyhead {
namespace {

using program::Code;
using program::Instruction;
using program::Interval;
using program::Range;
using program::Region;
using program::Seen;

Range offsets(const AttentionDesc& desc, const ForwardArgs& args) {
  if (desc.query_offset) return {*desc.query_offset, *desc.query_offset};
  if (!desc.has_query_offsets) return {-desc.seqlen_q, desc.seqlen_k};
  Range all{INT64_MAX, INT64_MIN};
  for (int64_t b = 0; b < desc.batch; ++b) {
    const int64_t offset = integer_at(args.query_offsets, b);
    all = {std::min(all.low, offset), std::max(all.high, offset)};
  }
  return all;
}

// Of the gathers that are checked, and the mask.
class IndexCheck {
 public:
  IndexCheck(const AttentionDesc& desc, const ForwardArgs& args)
      : desc_(desc), args_(args), call_(program_call(desc, args)), code_(*call_.code), band_(band(desc, args)) {
    for (int i = 0; i < code_.num_instructions; ++i) {
      const Instruction& x = code_.instructions[i];
      bool reads = x.op == Op::kScore;
      for (int n = 0; n < x.num_operands; ++n) reads = reads || reads_score_[x.operands[n]];
      reads_score_[i] = reads;
      needs_head_ = needs_head_ || x.op == Op::kHead;
    }
  }

  Status check(int64_t b, const Sequence& s) {
    const int64_t heads = needs_head_ ? desc_.num_heads : std::min<int64_t>(desc_.num_heads, 1);
    for (int64_t h = 0; h < heads; ++h) {
      if (s.len_q <= 0 || s.len_k <= 0) continue;
      const Region all{{b, b}, {h, h}, {0, s.len_q - 1}, {0, s.len_k - 1}, {s.offset, s.offset}};
      if (Status status = check(all, s); !status.ok()) return status;
    }
    return {};
  }

 private:
  // The first gather whose index may leave its tensor; -1: none.
  int may_leave(const program::Pass& pass, const Region& region) {
    program::find_intervals(code_, pass, call_, region, intervals_);
    for (int i = 0; i < code_.num_instructions; ++i) {
      const Instruction& x = code_.instructions[i];
      if (x.op != Op::kGather || pass.place[i] < 0 || reads_score_[i]) continue;
      for (int n = 0; n < x.num_operands; ++n) {
        const Interval& index = intervals_[x.operands[n]];
        if (index.low < 0 || index.high >= call_.captures[x.capture].dims[n]) return i;
      }
    }
    return -1;
  }

  bool hidden_by_operands(const Sequence& s, int64_t b, int64_t h, int64_t q, int64_t k) const {
    const auto at = [&](const Tensor& t, int64_t column) {
      const int64_t index[4] = {b, h, q, column};
      int64_t offset = 0;
      for (int n = 0; n < 4; ++n) offset += t.dims[n] == 1 ? 0 : index[n] * t.strides[n];
      return offset;
    };
    const Tensor& mask = args_.attn_mask;
    const int64_t column = desc_.mask_at_end ? k - (s.len_k - mask.dims[3]) : k;
    if (desc_.attn_mask.given && column >= 0 && static_cast<const uint8_t*>(mask.data)[at(mask, column)] == 0)
      return true;
    return desc_.attn_bias.given &&
           load_element(args_.attn_bias.data, args_.attn_bias.dtype, at(args_.attn_bias, k)) == -HUGE_VAL;
  }

  Status check(const Region& r, const Sequence& s) {
    if (seen_by_band(band_, s, r.q, r.k) == Seen::kNone || program::seen(call_, r) == Seen::kNone) return {};
    int gather = may_leave(code_.for_mask, r);
    if (gather < 0) gather = may_leave(code_.for_score, r);
    if (gather < 0) return {};
    const bool one_query = r.q.low == r.q.high, one_key = r.k.low == r.k.high;
    if (one_query && one_key) {
      return hidden_by_operands(s, r.b.low, r.h.low, r.q.low, r.k.low) ? Status() : outside(gather, r);
    }
    Region first = r, second = r;
    const bool halve_keys = !one_key && (one_query || r.k.high - r.k.low >= r.q.high - r.q.low);
    Range &low = halve_keys ? first.k : first.q, &high = halve_keys ? second.k : second.q;
    low.high = low.low + (low.high - low.low) / 2;
    high.low = low.high + 1;
    Status status = check(first, s);
    return status.ok() ? check(second, s) : status;
  }

  Status outside(int gather, const Region& r) const {
    const Instruction& x = code_.instructions[gather];
    const Tensor& t = call_.captures[x.capture];
    std::string index, dims;
    for (int n = 0; n < x.num_operands; ++n) {
      index += sentence(n == 0 ? "" : ", ", intervals_[x.operands[n]].low);
      dims += sentence(n == 0 ? "" : ", ", t.dims[n]);
    }
    return invalid(sentence("program: element [", index, "] of ", desc_.program->captures()[x.capture].name, " [", dims,
                            "] is asked for at batch ", r.b.low, ", head ", r.h.low, ", query ", r.q.low, ", key ",
                            r.k.low, ", which lies outside; hide the pair or clamp the index"));
  }

  const AttentionDesc& desc_;
  const ForwardArgs& args_;
  const program::Call call_;
  const Code& code_;
  const Band band_;
  bool needs_head_ = false;
  bool reads_score_[program::kMostInstructions];
  Interval intervals_[program::kMostInstructions];
};

}  // namespace

program::Call program_call(const AttentionDesc& desc, const ForwardArgs& args) {
  program::Call call;
  if (desc.program == nullptr) return call;
  call.code = &program::schedule_of(*desc.program);
  call.captures = args.captures.data();
  program::find_ranges(*desc.program, &call);
  // A block at the end of a sequence may be asked for what lies behind it.
  const int64_t past = program::kCodeKeys;
  const Region all{{0, std::max<int64_t>(desc.batch - 1, 0)},
                   {0, std::max<int64_t>(desc.num_heads - 1, 0)},
                   {0, desc.seqlen_q + past},
                   {0, desc.seqlen_k + past},
                   offsets(desc, args)};
  const Region transposed{all.b, all.h, all.k, all.q, all.offset};
  call.wide =
      !program::fits_int32(*call.code, call, all) || !program::fits_int32(*call.code->transposed, call, transposed);
  return call;
}

Seen seen_by_band(const Band& band, const Sequence& s, const Range& q, const Range& k) {
  bool any = false, all = true;
  // The ends of a band rise with the query: the first and the last tell. Of windows of their own each query is asked.
  const int64_t step = band.window_lo.data == nullptr ? std::max<int64_t>(q.high - q.low, 1) : 1;
  KeyRange first, last;
  for (int64_t i = q.low; i <= q.high; i += step) {
    const KeyRange range = key_range(band, s, i);
    if (i == q.low) first = range;
    last = range;
    const int64_t sinks = sinks_end(band, range);
    any = any || k.low < sinks || (range.begin < range.end && range.begin <= k.high && range.end > k.low);
    all = all && range.end > k.high && (range.begin <= k.low || range.begin <= sinks || k.high < sinks);
  }
  if (step > 1) any = any || (last.end > k.low && first.begin <= k.high);  // some query between
  return all ? Seen::kAll : any ? Seen::kSome : Seen::kNone;
}

Status check_program_indices(const AttentionDesc& desc, const ForwardArgs& args, const Sequences& sequences) {
  if (desc.program == nullptr || desc.captures.empty()) return {};
  IndexCheck check(desc, args);
  for (int64_t b = 0; b < desc.batch; ++b) {
    if (Status status = check.check(b, sequences[b]); !status.ok()) return status;
  }
  return {};
}

}  // namespace polyhead
