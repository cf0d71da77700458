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

constexpr int kMostGathers = 128;  // steps of a program

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

MemorySize lane_bytes(const IsaFunctions& functions, const AttentionDesc& desc) {
  return scratch_bytes(functions.score_scratch_bytes, desc) + program_bytes(desc, true);
}

struct Call {
  const IsaFunctions& functions;
  const AttentionDesc& desc;
  const BackwardArgs& args;
  const Sequences& sequences;
  const BackwardProblem problem;
  const Code& code;
  const Sizes sizes;
  const Run& run;

  char* memory() const { return static_cast<char*>(args.forward.workspace); }
  void* scratch(int lane) const { return memory() + lane_bytes(functions, desc).value() * static_cast<size_t>(lane); }
  // The sums of capture `capture`, of all heads.
  float* table(int capture) const {
    MemorySize before = 0;
    for (int i = 0; i < capture; ++i) {
      if (desc.program->captures()[static_cast<size_t>(i)].type != ValueType::kFloat) continue;
      before += num_elements(desc.captures[static_cast<size_t>(i)]).rounded_up(16);
    }
    return static_cast<float*>(scratch(run.num_threads)) + before.value();
  }
  float* head_sums(int64_t head) const {
    return static_cast<float*>(scratch(run.num_threads)) + table_floats(desc).value() + head * sizes.head_floats(code);
  }

  bool wants(int capture) const {
    const auto at = static_cast<size_t>(capture);
    return at < args.grad_captures.size() && args.grad_captures[at].given();
  }
  const Instruction& gather(int g) const { return code.instructions[code.gathers[g].gather]; }
};

// Its sums; and to the tables what each pair reads for itself.
void run_head(const Call& call, int64_t b, int64_t h, int lane) {
  float* sums[kMostGathers];
  float* next = call.head_sums(b * call.desc.num_heads + h);
  std::memset(next, 0, static_cast<size_t>(call.sizes.head_floats(call.code)) * sizeof(float));
  for (int g = 0; g < call.code.num_gathers; ++g) {
    const int capture = call.code.gathers[g].capture;
    const Rate rate = call.gather(g).rate;
    sums[g] = !call.wants(capture) ? nullptr : rate == Rate::kFull ? call.table(capture) : next;
    next += call.sizes.floats(rate);
  }
  ScoreTask task;
  task.sequence = call.sequences[b];
  task.b = b;
  task.h = h;
  task.captures = {sums, call.sizes.keys};
  for (task.first_query = 0; task.first_query < task.sequence.len_q; task.first_query += kTileQueries) {
    for (task.first_key = 0; task.first_key < task.sequence.len_k; task.first_key += kScoreKeys) {
      call.functions.add_captures(call.problem, task, call.scratch(lane));
    }
  }
}

// Whether every element that pairs read for themselves is read in one batch element, or head, alone: at each place where
// a capture is read so, the same of its dims counts these.
bool each_reads_its_own(const Call& call, Op index) {
  bool may[program::kMostCaptures][ProgramStep::kMostOperands];  // that dim
  bool read[program::kMostCaptures] = {};
  for (auto& dims : may) std::fill(std::begin(dims), std::end(dims), true);
  for (int g = 0; g < call.code.num_gathers; ++g) {
    const Instruction& x = call.gather(g);
    if (x.rate != Rate::kFull || !call.wants(x.capture)) continue;
    read[x.capture] = true;
    for (int n = 0; n < ProgramStep::kMostOperands; ++n) {
      const bool counts = n < x.num_operands && call.code.instructions[x.operands[n]].op == index;
      may[x.capture][n] = may[x.capture][n] && counts;
    }
  }
  for (int c = 0; c < program::kMostCaptures; ++c) {
    if (read[c] && std::none_of(std::begin(may[c]), std::end(may[c]), [](bool dim) { return dim; })) return false;
  }
  return true;
}

void run_heads(const Call& call) {
  const int64_t batch = call.desc.batch, heads = call.desc.num_heads;
  const bool by_batch = each_reads_its_own(call, Op::kBatch), by_head = each_reads_its_own(call, Op::kHead);
  const int64_t batches_at_once = by_batch ? batch : 1, heads_at_once = by_head ? heads : 1;
  run_tasks(call.run, batches_at_once * heads_at_once, [&](int64_t index, int lane) {
    const int64_t first_b = index / heads_at_once, first_h = index % heads_at_once;
    for (int64_t b = first_b; b < (by_batch ? first_b + 1 : batch); ++b) {
      for (int64_t h = first_h; h < (by_head ? first_h + 1 : heads); ++h) run_head(call, b, h, lane);
    }
  });
}

// One head's sums of one gather, to the table of its capture.
void add_to_table(const Call& call, int g, int64_t b, int64_t h, const float* sums) {
  const Instruction& x = call.gather(g);
  const Sequence& s = call.sequences[b];
  float* const table = call.table(x.capture);
  program::Place at{b, h, s.offset, 0, 0, 0};
  const auto add = [&](float sum) {
    if (sum != 0)
      table[program::element(call.problem.forward.program, call.code.for_captures, call.code.gathers[g].gather, at)] +=
          sum;
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
      for (at.diagonal = 1 - s.len_k; at.diagonal < s.len_q; ++at.diagonal) add(sums[at.diagonal + call.sizes.keys]);
      return;
    case Rate::kFull: return;
  }
}

void finish_capture(const Call& call, int capture) {
  for (int64_t head = 0; head < call.desc.batch * call.desc.num_heads; ++head) {
    const float* sums = call.head_sums(head);
    for (int g = 0; g < call.code.num_gathers; ++g) {
      if (call.code.gathers[g].capture == capture) {
        add_to_table(call, g, head / call.desc.num_heads, head % call.desc.num_heads, sums);
      }
      sums += call.sizes.floats(call.gather(g).rate);
    }
  }
  const Tensor& t = call.args.grad_captures[static_cast<size_t>(capture)];
  const float* const table = call.table(capture);
  for (int64_t n = 0, count = t.num_elements(); n < count; ++n) {
    int64_t at = 0;
    for (int64_t i = t.ndim - 1, rest = n; i >= 0; rest /= t.dims[i--]) at += rest % t.dims[i] * t.strides[i];
    const double before = call.args.accumulate ? load_element(t.data, t.dtype, at) : 0;
    store_element(t.data, t.dtype, at, before + double{table[n]});
  }
}

bool asks_for_captures(const BackwardArgs& args) {
  return std::any_of(args.grad_captures.begin(), args.grad_captures.end(), [](const Tensor& t) { return t.given(); });
}

}  // namespace

MemorySize capture_gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc,
                                             int num_threads) {
  if (desc.program == nullptr || desc.captures.empty()) return 0;
  const Code& code = program::schedule_of(*desc.program);
  const MemorySize sums = MemorySize(desc.batch) * desc.num_heads * Sizes(desc).head_floats(code);
  return lane_bytes(functions, desc) * num_threads + ((table_floats(desc) + sums) * sizeof(float)).rounded_up(64);
}

void capture_gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                                const Sequences& sequences, const Run& run) {
  if (!asks_for_captures(args)) return;
  const Call call{functions,   desc, args, sequences, backward_problem(desc, args), program::schedule_of(*desc.program),
                  Sizes(desc), run};
  std::memset(call.table(0), 0, table_floats(desc).value() * sizeof(float));
  run_heads(call);
  run_tasks(run, static_cast<int64_t>(args.grad_captures.size()), [&](int64_t capture, int) {
    if (call.wants(static_cast<int>(capture))) finish_capture(call, static_cast<int>(capture));
  });
}

}  // namespace polyhead::cpu
