#include <algorithm>
#include <new>

#include "attention/checks.h"
#include "contract/program_call.h"
#include "core/memory_size.h"
#include "core/sentence.h"
#include "polyhead/program_explanation.h"

namespace polyhead {
namespace {

using program::Range;
using program::Seen;

constexpr int64_t kQueries = program::kCodeQueries, kKeys = program::kCodeKeys;

// Of the tensors of a call those that say what is seen.
bool tells_what_is_seen(const AttentionOperand& row) {
  if (row.in_forward == nullptr) return row.in_backward == nullptr && !row.grad_capture;
  constexpr Tensor ForwardArgs::*kTold[] = {
      &ForwardArgs::seqlens_q,     &ForwardArgs::seqlens_k, &ForwardArgs::cu_seqlens_q, &ForwardArgs::cu_seqlens_k,
      &ForwardArgs::query_offsets, &ForwardArgs::window_lo, &ForwardArgs::window_hi};
  return std::find(std::begin(kTold), std::end(kTold), row.in_forward) != std::end(kTold);
}

Status check_told(const AttentionDesc& desc, const ForwardArgs& args) {
  for (const PlannedOperand& operand : planned_operands(desc)) {
    if (operand.shape.ndim == 0 || !tells_what_is_seen(operand.row)) continue;
    MemoryRange range;
    Status status = check_tensor(operand.row.name, operand.row.of(args), operand.shape, Device::kCpu, &range);
    if (!status.ok()) return status;
  }
  return check_sequences(desc, args);
}

// The blocks of one head of one sequence.
class HeadBlocks {
 public:
  HeadBlocks(const AttentionDesc& desc, const ForwardArgs& args, const program::Call& call)
      : band_(band(desc, args)), call_(call) {}

  MaskBlocks count(int64_t b, int64_t h, const Sequence& s) {
    counts_ = {};
    b_ = b, h_ = h, sequence_ = &s;
    const Range q{0, pieces(s.len_q, kQueries) - 1}, k{0, pieces(s.len_k, kKeys) - 1};
    if (q.high >= 0 && k.high >= 0) count(q, k);
    return counts_;
  }

 private:
  // Of ranges of blocks: told at once, or halved.
  void count(const Range& q, const Range& k) {
    const int64_t num_q = q.high - q.low + 1, num_k = k.high - k.low + 1, number = num_q * num_k;
    const Seen told = seen({q.low * kQueries, std::min((q.high + 1) * kQueries, sequence_->len_q) - 1},
                           {k.low * kKeys, std::min((k.high + 1) * kKeys, sequence_->len_k) - 1});
    if (told != Seen::kSome || number == 1) {
      (told == Seen::kNone ? counts_.none : told == Seen::kAll ? counts_.all : counts_.some) += number;
      return;
    }
    const int64_t middle_q = q.low + num_q / 2, middle_k = k.low + num_k / 2;
    if (num_q >= num_k) {
      count({q.low, middle_q - 1}, k);
      count({middle_q, q.high}, k);
    } else {
      count(q, {k.low, middle_k - 1});
      count(q, {middle_k, k.high});
    }
  }

  Seen seen(const Range& q, const Range& k) const {
    const Seen by_band = is_open(band_) ? Seen::kAll : seen_by_band(band_, *sequence_, q, k);
    if (by_band == Seen::kNone || call_.code == nullptr) return by_band;
    const int64_t offset = sequence_->offset;
    const Seen by_program = program::seen(call_, {{b_, b_}, {h_, h_}, q, k, {offset, offset}});
    return by_program == Seen::kAll ? by_band : by_program;
  }

  const Band band_;
  const program::Call& call_;
  const Sequence* sequence_ = nullptr;
  int64_t b_ = 0, h_ = 0;
  MaskBlocks counts_;
};

bool reads(const Program& program, Op input) {
  return std::any_of(program.steps().begin(), program.steps().end(),
                     [&](const ProgramStep& step) { return step.op == input; });
}

// Whether regions are hidden, or shown, throughout: by bounds, else by halves down to their pairs.
class Certainty {
 public:
  // At most 256 questions for each block, and some: of 0.1 us or so each, where computing a block takes 50 us or more.
  Certainty(const program::Call& call, int64_t num_blocks) : call_(call), questions_(4096 + 256 * num_blocks) {}

  bool is(Seen wanted, const program::Region& r) {
    if (--questions_ < 0) return false;
    const Seen told = program::seen(call_, r);
    if (told != Seen::kSome) return told == wanted;
    const bool one_query = r.q.low == r.q.high, one_key = r.k.low == r.k.high;
    if (one_query && one_key) {
      const program::Place at{r.b.low, r.h.low, r.offset.low, r.q.low, r.k.low, r.q.low - r.k.low};
      return program::shows(call_, at) == (wanted == Seen::kAll);
    }
    program::Region first = r, second = r;
    const bool halve_keys = !one_key && (one_query || r.k.high - r.k.low >= r.q.high - r.q.low);
    Range &low = halve_keys ? first.k : first.q, &high = halve_keys ? second.k : second.q;
    low.high = low.low + (low.high - low.low) / 2;
    high.low = low.high + 1;
    return is(wanted, first) && is(wanted, second);
  }

 private:
  const program::Call& call_;
  int64_t questions_;
};

Status check_table(const AttentionDesc& desc, int64_t block_q, int64_t block_k, const Tensor& table) {
  if (desc.packed || desc.program == nullptr || desc.program->mask() < 0) {
    return invalid("a table of blocks is compared with the mask of a program, without cu_seqlens");
  }
  if (block_q < 1 || block_k < 1) {
    return invalid(sentence("blocks have ", block_q, " queries and ", block_k, " keys, must have 1 or more"));
  }
  const Dim dims[] = {{"batch", table.ndim == 4 && table.dims[0] == 1 ? 1 : desc.batch},
                      {"num_heads", table.ndim == 4 && table.dims[1] == 1 ? 1 : desc.num_heads},
                      {"blocks of queries", pieces(desc.seqlen_q, block_q)},
                      {"blocks of keys", pieces(desc.seqlen_k, block_k)}};
  MemoryRange range;
  return check_tensor("table", table, OperandShape(DType::kInt32, dims), Device::kCpu, &range);
}

}  // namespace

Result<MaskBlocks> count_mask_blocks(const AttentionDesc& desc, const ForwardArgs& args) try {
  if (Status s = check_desc(desc); !s.ok()) return s;
  if (Status s = check_told(desc, args); !s.ok()) return s;
  const program::Call call = program_call(desc, args);
  HeadBlocks head(desc, args, call);
  const bool heads_differ = desc.program != nullptr && reads(*desc.program, Op::kHead);
  const int64_t counted = heads_differ ? desc.num_heads : std::min<int64_t>(desc.num_heads, 1);
  const int64_t times = heads_differ ? 1 : desc.num_heads;
  MaskBlocks sum;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const Sequence s = sequence(desc, args, b);
    for (int64_t h = 0; h < counted; ++h) {
      const MaskBlocks blocks = head.count(b, h, s);
      sum.none += times * blocks.none;
      sum.some += times * blocks.some;
      sum.all += times * blocks.all;
    }
  }
  return sum;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<bool> mask_implies_blocks(const AttentionDesc& desc, const ForwardArgs& args, int64_t block_q, int64_t block_k,
                                 const Tensor& table) try {
  if (Status s = check_desc(desc); !s.ok()) return s;
  if (Status s = check_told(desc, args); !s.ok()) return s;
  if (Status s = check_table(desc, block_q, block_k, table); !s.ok()) return s;
  const program::Call call = program_call(desc, args);
  Certainty certain(call, table.num_elements());
  const int64_t batch = table.dims[0] > 1 || reads(*desc.program, Op::kBatch) ? desc.batch : 1;
  const int64_t heads = table.dims[1] > 1 || reads(*desc.program, Op::kHead) ? desc.num_heads : 1;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t offset = sequence(desc, args, b).offset;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < table.dims[2]; ++i) {
        for (int64_t j = 0; j < table.dims[3]; ++j) {
          const int64_t at = (table.dims[0] > 1 ? b * table.strides[0] : 0) +
                             (table.dims[1] > 1 ? h * table.strides[1] : 0) + i * table.strides[2] +
                             j * table.strides[3];
          const int32_t told = static_cast<const int32_t*>(table.data)[at];
          if (told != 0 && told != 2) continue;
          const Range q{i * block_q, std::min((i + 1) * block_q, desc.seqlen_q) - 1};
          const Range k{j * block_k, std::min((j + 1) * block_k, desc.seqlen_k) - 1};
          if (!certain.is(told == 0 ? Seen::kNone : Seen::kAll, {{b, b}, {h, h}, q, k, {offset, offset}})) return false;
        }
      }
    }
  }
  return true;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
