// Decoding's partial results become rows of O and L: merged in order of their chunks, so that threads change no bit.
#include "cpu/attention/decode_partial.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// How rows end: L, and what O is divided by. In each partial result, m becomes the factor that merges it, or -1 where it
// was not computed.
struct RowEnds {
  alignas(64) float divisor[kDecodeRows], logsumexp[kDecodeRows];
  bool hidden[kDecodeRows];
};

// Where there is no softmax, what is there is added up.
void end_sums(RowEnds& ends, const DecodeTask& task, const PartialLayout& layout, float* partials,
              int64_t num_partials) {
  for (int r = 0; r < task.num_rows; ++r) {
    ends.divisor[r] = 1, ends.hidden[r] = false;
    for (int64_t c = 0; c < num_partials; ++c) {
      float* const m = partials + c * layout.floats + r;
      *m = *m == kNotComputed ? -1.0f : 1.0f;
    }
  }
}

void end_rows(RowEnds& ends, const Problem& problem, const DecodeTask& task, const PartialLayout& layout,
              float* partials, int64_t num_partials) {
  if (!problem.softmax) return end_sums(ends, task, layout, partials, num_partials);
  const Score score(problem, task.sequence, task.b, 0);  // for its factors, which all heads share
  const F factor = broadcast(score.to_log2);
  alignas(64) float sinks[kDecodeRows];
  for (int r = 0; r < kDecodeRows; ++r) {
    sinks[r] = r < task.num_rows ? sink_of(problem, row_at(problem, task, task.kv_head, r).h) : -kInfinity;
  }
  for (int r = 0; r < task.num_rows; r += kLanes) {
    const F sink = load(sinks + r);
    F m = maximum(broadcast(kNoMaximum), sink);
    for (int64_t c = 0; c < num_partials; ++c) m = maximum(load(partials + c * layout.floats + r), m);
    F l = exp2(sink - m, factor);
    for (int64_t c = 0; c < num_partials; ++c) {
      float* partial = partials + c * layout.floats + r;
      const F m_c = load(partial);
      const M computed = negate(equal(m_c, broadcast(kNotComputed)));
      const F alpha = exp2(m_c - m, factor);
      l = select(computed, fma(load(partial + layout.statistics), alpha, l), l);
      store(partial, select(computed, alpha, broadcast(-1.0f)));
    }
    const M none = equal(l, broadcast(0.0f));
    const F scale = broadcast(score.to_natural);
    store(ends.divisor + r, l);
    store(ends.logsumexp + r, select(none, broadcast(-kInfinity), fma(m, scale, log(l))));
    for (int lane = 0; lane < kLanes; ++lane) ends.hidden[r + lane] = (bits(none) >> lane & 1) != 0;
  }
}

// Of a row with l = 0: whether options leave it a key, so that all it sees has score -inf: exp(-inf + inf), NaN.
bool sees_only_minus_infinity(const Problem& problem, const DecodeTask& task, const DecodeRow& row) {
  return Score(problem, task.sequence, task.b, row.h)
      .leaves_a_key(problem.band, key_range(problem.band, task.sequence, row.i), row.i);
}

// A row's O: the sum of the partial ones, in order of their chunks, divided by l.
void store_row(const Problem& problem, const DecodeTask& task, const PartialLayout& layout, const float* partials,
               int64_t num_partials, int r, const DecodeRow& row, const RowEnds& ends) {
  const Operand& out = problem.out;
  const int64_t at = task.b * out.stride_b + row.h * out.stride_h + (task.sequence.first_q + row.i) * out.stride_s;
  const float* rows = partials + 2 * layout.statistics + r * layout.out_stride;
  const F divisor = broadcast(ends.divisor[r]), reciprocal = broadcast(1.0f) / divisor;
  const F scale = broadcast(problem.dropout.scale);
  for (int64_t d = 0; d < problem.head_dim_v; d += kLanes) {
    F sum = broadcast(0.0f);
    for (int64_t c = 0; c < num_partials && !ends.hidden[r]; ++c) {
      const float alpha = partials[c * layout.floats + r];
      if (alpha != -1.0f) sum = fma(load(rows + c * layout.floats + d), broadcast(alpha), sum);
    }
    const F o = ends.hidden[r] ? sum : divide(sum, divisor, reciprocal) * scale;
    const int n = problem.head_dim_v - d < kLanes ? static_cast<int>(problem.head_dim_v - d) : kLanes;
    store_elements(out.data, out.dtype, at + d * out.stride_d, out.stride_d, o, n);
  }
}

}  // namespace

size_t decode_partial_bytes(int64_t head_dim_v, int rows) {
  return static_cast<size_t>(PartialLayout(rows, head_dim_v).floats) * sizeof(float);
}

void decode_merge(const Problem& problem, const DecodeTask& task, float* partials, int64_t num_partials) {
  const PartialLayout layout(task.num_rows, problem.head_dim_v);
  RowEnds ends;
  end_rows(ends, problem, task, layout, partials, num_partials);
  for (int r = 0; r < task.num_rows; ++r) {
    const DecodeRow row = row_at(problem, task, task.kv_head, r);
    if (ends.hidden[r] && sees_only_minus_infinity(problem, task, row)) {
      ends.hidden[r] = false;
      ends.divisor[r] = ends.logsumexp[r] = __builtin_nanf("");
    }
    store_row(problem, task, layout, partials, num_partials, r, row, ends);
    if (problem.logsumexp.data == nullptr) continue;
    *at(problem.logsumexp, task.b, row.h, task.sequence.first_q + row.i) = ends.logsumexp[r];
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
