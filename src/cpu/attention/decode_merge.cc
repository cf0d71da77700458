// Decoding's partial results become rows of O and L: merged in order of their chunks, so that threads change no bit.
#include "cpu/attention/decode_partial.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// How rows end: L, and what O is divided by. In each partial result, m becomes the factor that merges it, or -1 where it
// was not computed.
struct RowEnds {
  alignas(64) float divisor[kDecodeRows], logsumexp[kDecodeRows];
  uint32_t hidden = 0;  // a bit for each row
};
static_assert(kDecodeRows <= 32);

// Where there is no softmax, what is there is added up.
void end_sums(RowEnds& ends, const DecodeTask& task, const PartialLayout& layout, float* partials,
              int64_t num_partials) {
  for (int r = 0; r < task.num_rows; ++r) {
    ends.divisor[r] = 1;
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
  DecodeRow row = first_row(problem, task, task.kv_head);
  for (int r = 0; r < task.num_rows && problem.sinks != nullptr; ++r, go_on(row, task)) {
    sinks[r] = sink_of(problem, row.h);
  }
  for (int r = 0; r < task.num_rows; r += kLanes) {
    const int n = task.num_rows - r < kLanes ? task.num_rows - r : kLanes;
    const F sink = problem.sinks == nullptr ? broadcast(-kInfinity) : load_first(sinks + r, n);
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
    ends.hidden |= bits(none) << r;
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
  const bool hidden = (ends.hidden >> r & 1) != 0;
  const int64_t at = task.b * out.stride_b + row.h * out.stride_h + (task.sequence.first_q + row.i) * out.stride_s;
  const float* const rows = partials + 2 * layout.statistics + r * layout.out_stride;
  const F divisor = broadcast(ends.divisor[r]), reciprocal = broadcast(1.0f) / divisor;
  const F scale = broadcast(problem.dropout.scale);
  const int64_t floats = layout.floats;
  const auto vector_at = [=](int64_t d) __attribute__((always_inline)) {
    if (hidden) return broadcast(0.0f);
    F sum = broadcast(0.0f);
    for (int64_t c = 0; c < num_partials; ++c) {
      const float alpha = partials[c * floats + r];
      if (alpha != -1.0f) sum = fma(load(rows + c * floats + d), broadcast(alpha), sum);
    }
    return divide(sum, divisor, reciprocal) * scale;
  };
  const int64_t dim = problem.head_dim_v;
  int64_t d = 0;
  if (out.dtype == DType::kFloat32 && out.stride_d == 1) {
    float* const target = static_cast<float*>(out.data) + at;
    for (; d + kLanes <= dim; d += kLanes) store(target + d, vector_at(d));
  }
  for (; d < dim; d += kLanes) {
    const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
    store_elements(out.data, out.dtype, at + d * out.stride_d, out.stride_d, vector_at(d), n);
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
  DecodeRow row = first_row(problem, task, task.kv_head);
  for (int r = 0; r < task.num_rows; ++r, go_on(row, task)) {
    if ((ends.hidden >> r & 1) != 0 && sees_only_minus_infinity(problem, task, row)) {
      ends.hidden &= ~(1u << r);
      ends.divisor[r] = ends.logsumexp[r] = __builtin_nanf("");
    }
    store_row(problem, task, layout, partials, num_partials, r, row, ends);
    if (problem.logsumexp.data == nullptr) continue;
    *at(problem.logsumexp, task.b, row.h, task.sequence.first_q + row.i) = ends.logsumexp[r];
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
