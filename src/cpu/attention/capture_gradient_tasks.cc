// Each head sums the gradients of what it read by the rate of the reading: of a query's element over the keys, of a
// distance's along the diagonals. Then the heads' sums are added to the captures in order, so that the bits do not depend
// on the number of threads. Elements that are different for every pair are added where they lie: heads that may share
// some take turns.
#include "cpu/attention/capture_gradient_tasks.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "contract/attention_operands.h"
#include "core/dtype.h"
#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

using program::Code;
using program::GatherGradient;
using program::Instruction;
using program::Rate;

struct Sizes {
  int64_t queries, keys;  // in whole tiles and blocks

  explicit Sizes(const AttentionDesc& desc)
      : queries(pieces(desc.seqlen_q, kTileQueries) * kTileQueries),
        keys(pieces(desc.seqlen_k, program::kCodeKeys) * program::kCodeKeys) {}

  int64_t floats(Rate rate) const {
    switch (rate) {
      case Rate::kUniform: return kTileQueries;
      case Rate::kQuery: return queries;
      case Rate::kKey: return keys;
      case Rate::kDiagonal: return queries + keys + kTileQueries;
      case Rate::kFull: break;
    }
    return 0;
  }
  int64_t head_floats(const Code& code) const {
    int64_t sum = 0;
    for (int g = 0; g < code.num_gathers; ++g) sum += floats(code.instructions[code.gathers[g].gather].rate);
    return sum;
  }
};

MemorySize table_floats(const AttentionDesc& desc) {
  MemorySize sum = 0;
  for (size_t i = 0; i < desc.captures.size(); ++i) {
    if (desc.program->captures()[i].type == ValueType::kFloat) sum += num_elements(desc.captures[i]).rounded_up(16);
  }
  return sum;
}

using Call = CaptureGradients;

const Code& code_of(const Call& call) { return *call.program.code; }
const Instruction& gather(const Call& call, int g) {
  return code_of(call).instructions[code_of(call).gathers[g].gather];
}
bool wants(const Call& call, int capture) {
  const auto at = static_cast<size_t>(capture);
  return at < call.args.grad_captures.size() && call.args.grad_captures[at].given();
}

// The sums of capture `capture`, of all heads.
float* table(const Call& call, int capture) {
  MemorySize before = 0;
  for (int i = 0; i < capture; ++i) {
    if (call.desc.program->captures()[static_cast<size_t>(i)].type != ValueType::kFloat) continue;
    before += num_elements(call.desc.captures[static_cast<size_t>(i)]).rounded_up(16);
  }
  return call.memory + before.value();
}
float* head_sums(const Call& call, int64_t head) {
  return call.memory + table_floats(call.desc).value() + head * Sizes(call.desc).head_floats(code_of(call));
}

// Whether every element that pairs read for themselves is read in one batch element, or head, alone: at each place where
// a capture is read so, the same of its dims counts these.
bool each_reads_its_own(const Call& call, Op index) {
  bool may[program::kMostCaptures][ProgramStep::kMostOperands];  // that dim
  bool read[program::kMostCaptures] = {};
  for (auto& dims : may) std::fill(std::begin(dims), std::end(dims), true);
  for (int g = 0; g < code_of(call).num_gathers; ++g) {
    const Instruction& x = gather(call, g);
    if (x.rate != Rate::kFull || !wants(call, x.capture)) continue;
    read[x.capture] = true;
    for (int n = 0; n < ProgramStep::kMostOperands; ++n) {
      const bool counts = n < x.num_operands && code_of(call).instructions[x.operands[n]].op == index;
      may[x.capture][n] = may[x.capture][n] && counts;
    }
  }
  for (int c = 0; c < program::kMostCaptures; ++c) {
    if (read[c] && std::none_of(std::begin(may[c]), std::end(may[c]), [](bool dim) { return dim; })) return false;
  }
  return true;
}

// One head's sums of one gather, to the table of its capture.
void add_to_table(const Call& call, int g, int64_t b, int64_t h, const float* sums) {
  const Instruction& x = gather(call, g);
  const Sequence& s = call.sequences[b];
  const Sizes sizes(call.desc);
  float* const to = table(call, x.capture);
  program::Place at{b, h, s.offset, 0, 0, 0};
  const auto add = [&](float sum) {
    if (sum == 0) return;
    to[program::element(call.program, code_of(call).for_gradients, code_of(call).gathers[g].gather, at)] += sum;
  };
  switch (x.rate) {
    case Rate::kUniform: {
      float sum = 0;
      for (int i = 0; i < kTileQueries; ++i) sum += sums[i];
      return add(sum);
    }
    case Rate::kQuery:
      for (at.q = 0; at.q < s.len_q; ++at.q) add(sums[at.q]);
      return;
    case Rate::kKey:
      for (at.k = 0; at.k < s.len_k; ++at.k) add(sums[at.k]);
      return;
    case Rate::kDiagonal:
      for (at.diagonal = 1 - s.len_k; at.diagonal < s.len_q; ++at.diagonal) add(sums[at.diagonal + sizes.keys]);
      return;
    case Rate::kFull: return;
  }
}

void finish_capture(const Call& call, int capture) {
  const Sizes sizes(call.desc);
  for (int64_t head = 0; head < call.desc.batch * call.desc.num_heads; ++head) {
    const float* sums = head_sums(call, head);
    for (int g = 0; g < code_of(call).num_gathers; ++g) {
      if (code_of(call).gathers[g].capture == capture) {
        add_to_table(call, g, head / call.desc.num_heads, head % call.desc.num_heads, sums);
      }
      sums += sizes.floats(gather(call, g).rate);
    }
  }
  const Tensor& t = call.args.grad_captures[static_cast<size_t>(capture)];
  const float* const from = table(call, capture);
  for (int64_t n = 0, count = t.num_elements(); n < count; ++n) {
    int64_t at = 0;
    for (int64_t i = t.ndim - 1, rest = n; i >= 0; rest /= t.dims[i--]) at += rest % t.dims[i] * t.strides[i];
    const double before = call.args.accumulate ? load_element(t.data, t.dtype, at) : 0;
    store_element(t.data, t.dtype, at, before + double{from[n]});
  }
}

}  // namespace

bool asks_for_captures(const BackwardArgs& args) {
  return std::any_of(args.grad_captures.begin(), args.grad_captures.end(), [](const Tensor& t) { return t.given(); });
}

MemorySize capture_sums_bytes(const AttentionDesc& desc) {
  if (desc.program == nullptr || desc.captures.empty()) return 0;
  const Code& code = program::schedule_of(*desc.program);
  const MemorySize sums = MemorySize(desc.batch) * desc.num_heads * Sizes(desc).head_floats(code);
  return ((table_floats(desc) + sums) * sizeof(float)).rounded_up(64);
}

Apart apart(const CaptureGradients& captures) {
  return {each_reads_its_own(captures, Op::kBatch), each_reads_its_own(captures, Op::kHead)};
}

void clear_captures(const CaptureGradients& captures) {
  std::memset(captures.memory, 0, table_floats(captures.desc).value() * sizeof(float));
}

CaptureSums start_head(const CaptureGradients& captures, int64_t b, int64_t h, float** sums) {
  const Code& code = code_of(captures);
  const Sizes sizes(captures.desc);
  float* next = head_sums(captures, b * captures.desc.num_heads + h);
  std::memset(next, 0, static_cast<size_t>(sizes.head_floats(code)) * sizeof(float));
  for (int g = 0; g < code.num_gathers; ++g) {
    const int capture = code.gathers[g].capture;
    const Rate rate = gather(captures, g).rate;
    sums[g] = !wants(captures, capture) ? nullptr : rate == Rate::kFull ? table(captures, capture) : next;
    next += sizes.floats(rate);
  }
  return {sums, sizes.keys};
}

void finish_captures(const CaptureGradients& captures, const Run& run) {
  run_tasks(run, static_cast<int64_t>(captures.args.grad_captures.size()), [&](int64_t capture, int) {
    if (wants(captures, static_cast<int>(capture))) finish_capture(captures, static_cast<int>(capture));
  });
}

}  // namespace polyhead::cpu
