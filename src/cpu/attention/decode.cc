// Few queries and many keys (decoding): all query heads of a key/value head in one pass over K and V, chunk by chunk.
// A chunk's m, l and O are a partial result, which decode_merge.cc merges.
// Heads that lie side by side in memory, as in [B, S, H, D], take turns block by block: together they read whole rows. So do
// sequences that share the keys of a chunk: each block comes from memory once.
#include "cpu/attention/decode_heads.h"
#include "cpu/attention/decode_int8.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// Visits what is read in one go: blocks, as other heads have their turn after each, and as much is copied at once; in line
// all that follow each other.
template <class Row, class Visit>
inline void for_each_reading(const Decode& x, bool copies, const Visit& visit) {
  if (kInLine<Row> && !copies) return for_each_run(x.chunk, visit);
  for_each_block(x.chunk, visit);
}

template <class Row, int kRows>
void score_chunk(Decode& x) {
  for (int h = 0; h < x.heads; ++h) load_queries<typename Row::Mac>(x, x.head[h]);
  const int rows = computed_rows(x);
  const int64_t dim = x.problem.head_dim;
  const int first_value = x.chunk.first_block();
  for_each_reading<Row>(x, false, [&](int key, int n) {
    const bool in_place = reads_in_place<Row>(x.head[0].key.rows);
    AheadRuns runs, no_runs;
    Ahead ahead = ahead_of(x, key, keys_of(x), in_place ? kVectorBytes<Row> : 1, values_of(x), first_value, runs);
    for_readers(
        x, 0, x.heads, key, [&](const Readers& readers) __attribute__((always_inline)) {
          Rows at = block_of(x, readers.first().key, x.key_places, key);
          at.scaled_later = scales_later<Row>(at);
          const auto score = [&]<class R>(const RowsAt<R>& keys, int64_t columns, Ahead& asked)
              __attribute__((always_inline)) {
            if (readers.alone()) {
              const DecodeHead& head = readers.first();
              return score_rows<R, kRows>(head.scores + key, head.query, head.query_stride, rows, keys, columns, asked);
            }
            readers.each<kRows>(rows, asked, [&]<int kTogether>(const DecodeHead& head, int together, Ahead& asks) {
              score_shared_rows<R, kTogether>(head.scores + key, head.query, head.query_stride, together, keys, columns,
                                              asks);
            });
          };
          if (in_place) {
            score(rows_in_place<Row>(at, n, dim, x.scratch + x.layout.keys), dim, ahead);
          } else {
            Ahead idle = ask_for_copy(x, ahead, n, numbers_bytes(at.dtype, dim), no_runs);
            float* const copy = x.scratch + x.layout.keys;
            if constexpr (Row::kDType == DType::kInt4x2) {  // always in place (with_row)
            } else if constexpr (sizeof(typename Row::Element) == 1) {
              with_copied_bytes<Row>(at, n, dim, copy, [&](const RowsAt<Row>& keys) { score(keys, dim, idle); });
            } else {
              with_copied_keys<typename Row::Mac>(
                  at, n, dim, copy,
                  [&]<class R>(const RowsAt<R>& keys, int64_t columns) { score(keys, columns, idle); });
            }
          }
          if (!at.scaled_later) return;
          const BlockScales scales(at, n);
          readers.each<kRows>(rows, ahead, [&]<int>(const DecodeHead& head, int together, Ahead&) {
            multiply_by_scales(head.scores + key, head.scores + key, kRowScores, together, at.dtype, scales);
          });
        });
  });
}

// Visits a head's rows: visit(r, scores of row r, what they become).
template <class Visit>
void for_each_row(const Decode& x, const DecodeHead& head, const Visit& visit) {
  const DecodeTask& task = *head.task;
  for_each_head(head.row, task.num_rows, [&](int begin, int end) {
    const Score of_head(x.problem, task.sequence, task.b, head.row[begin].h);
    for (int r = begin; r < end; ++r) {
      visit(r, head.scores + r * kRowScores, RowScore(of_head, head.row[r], head.chunk));
    }
  });
}

void make_weights(Decode& x, const DecodeHead& head) {
  alignas(64) uint8_t kept[kDecodeChunk / 8];
  const Dropout& dropout = x.problem.dropout;
  const DecodeTask& task = *head.task;
  if (x.program.has_score()) {
    for_each_row(x, head, [](int, float* scores, const RowScore& row) { score_by_options(scores, row); });
    x.program.score(task.b, task.sequence, head.row, task.num_rows, static_cast<int>(head.row - x.row), head.chunk,
                    head.scores);
  }
  for_each_row(x, head, [&](int r, float* scores, const RowScore& score) {
    if (dropout.threshold > 0) {
      const int64_t head_index = task.b * x.problem.num_heads + score.row.h;
      dropout_row(kept, dropout, static_cast<uint32_t>(head_index), score.row.i, x.chunk.first, 0, x.chunk.num_keys);
    }
    const auto* const kept_of_row = dropout.threshold > 0 ? &kept : nullptr;
    if (x.problem.softmax) {
      softmax_row(scores, score, kept_of_row, head.m + r, head.l + r);
    } else {
      weight_row(scores, score, kept_of_row);
      head.m[r] = 0;  // computed
    }
  });
}

// O of the chunk, of heads [first, end). With `finite`, NaN and inf among the values are taken as 0.
template <class Row, int kRows>
void weigh_chunk(const Decode& x, int first, int end, bool finite) {
  const int rows = computed_rows(x);
  const int64_t dim = x.problem.head_dim_v;
  for (int h = first; h < end && x.sequences > 1; ++h) {  // which take sums up at different blocks
    const size_t floats = static_cast<size_t>(rows * x.partial.out_stride);
    if (x.head[h].chunk.blocks != 0) __builtin_memset(x.head[h].out, 0, floats * sizeof(float));
  }
  for_each_reading<Row>(x, finite, [&](int key, int n) {
    const bool in_place = reads_in_place<Row>(x.head[0].value.rows) && !finite;
    AheadRuns runs, no_runs;
    Ahead ahead = ahead_of(x, key, values_of(x), in_place ? kVectorBytes<Row> : 1, keys_of(x), kDecodeChunk, runs);
    for_readers(
        x, first, end, key, [&](const Readers& readers) __attribute__((always_inline)) {
          Rows at = block_of(x, readers.first().value, x.value_places, key);
          at.scaled_later = scales_later<Row>(at);
          const auto accumulate = [&]<class R>(const RowsAt<R>& values, Ahead& asked) __attribute__((always_inline)) {
            const auto weights = [&](const DecodeHead& head, int together) __attribute__((always_inline))
                                     ->const float* {
              if (!at.scaled_later) return head.scores + key;
              float* const scaled = x.scratch + x.layout.scaled;
              BlockScales scales(at, n);
              if (finite) scales.clear_not_finite();
              multiply_by_scales(scaled, head.scores + key, kRowScores, together, at.dtype, scales);
              return scaled;
            };
            const auto stride = x.partial.out_stride;
            if (readers.alone()) {
              const DecodeHead& head = readers.first();
              const bool fresh = x.sequences == 1 && head.chunk.first_block() == key;
              return accumulate_rows<R, kRows>({head.out, stride, fresh}, weights(head, rows), rows, values, dim,
                                               asked);
            }
            readers.each<kRows>(rows, asked, [&]<int kTogether>(const DecodeHead& head, int together, Ahead& asks) {
              accumulate_shared_rows<R, kTogether>({head.out, stride, false}, weights(head, together), together, values,
                                                   dim, asks);
            });
          };
          if (in_place) return accumulate(rows_in_place<Row>(at, n, dim, x.scratch + x.layout.values), ahead);
          Ahead idle = ask_for_copy(x, ahead, n, numbers_bytes(at.dtype, dim), no_runs);
          with_copied_values(at, n, dim, finite, x.scratch + x.layout.values,
                             [&](const RowsAt<FloatRow>& values) { accumulate(values, idle); });
        });
  });
}

bool finite_output(const Decode& x, const DecodeHead& head) {
  for (int r = 0; r < x.task.num_rows; ++r) {
    const float* out = head.out + r * x.partial.out_stride;
    F sum = broadcast(0.0f);  // NaN as soon as one term is NaN or inf
    for (int64_t d = 0; d < x.problem.head_dim_v; d += kLanes) sum = fma(load(out + d), broadcast(0.0f), sum);
    if (any(negate(equal(sum, broadcast(0.0f))))) return false;
  }
  return true;
}

bool sees(const Decode& x, const DecodeHead& head, int r, int key) {
  const DecodeRow& row = head.row[r];
  if ((key < row.begin && key >= row.sinks) || key >= row.end) return false;
  const Score score(x.problem, head.task->sequence, head.task->b, row.h);
  return (bits(RowScore(score, row, head.chunk).shown(key)) & 1) != 0;
}

// V's NaN and inf were taken as 0; here they reach the rows that see them, and no others.
void add_not_finite(const Decode& x, const DecodeHead& head) {
  alignas(64) float element[kLanes];
  for_each_block(head.chunk, [&](int first, int n) {
    for (int key = first; key < first + n; ++key) {
      const Rows value = head.value.in_place(x.chunk.first + key, 1);
      for (int64_t d = 0; d < x.problem.head_dim_v; ++d) {
        store(element, load_columns(value, 0, d, 1));
        if (element[0] - element[0] == 0.0f) continue;
        for (int r = 0; r < x.task.num_rows; ++r) {
          if (!sees(x, head, r, key)) continue;
          head.out[r * x.partial.out_stride + d] += head.scores[r * kRowScores + key] * element[0];
        }
      }
    }
  });
}

#ifdef POLYHEAD_HAS_INT8_DOT
// P times the scales of values, of all heads, in planes of bytes; their units. False, for a head: a scale is NaN or inf, and
// is taken as 0.
void make_planes(const Decode& x, float (&unit)[kDecodeRows], bool (&finite)[kDecodeRows]) {
  for (int h = 0; h < x.heads; ++h) {
    const DecodeHead& head = x.head[h];
    float* const weights = x.scratch + x.layout.scaled + h * padded_rows(x.task.num_rows) * kRowScores;
    finite[h] = true;
    for_each_block(head.chunk, [&](int key, int n) {
      const Rows at = block_of(x, head.value, x.value_places, key);
      BlockScales scales(at, n);
      finite[h] = finite[h] && scales.finite();
      scales.clear_not_finite();
      multiply_by_scales(weights + key, head.scores + key, kRowScores, x.task.num_rows, at.dtype, scales);
    });
    for (int r = 0; r < x.task.num_rows; ++r) {
      unit[h * x.task.num_rows + r] = weights_to_planes(weights + r * kRowScores, head.chunk);
    }
  }
}

// O of the chunk, of int8 values, in sums of integers.
void weigh_bytes(const Decode& x) {
  const int64_t dim = x.problem.head_dim_v, ints = plane_ints(dim);
  const int rows = x.task.num_rows, padded = padded_rows(rows);
  float unit[kDecodeRows];
  bool finite[kDecodeRows];
  make_planes(x, unit, finite);
  auto* const sums = reinterpret_cast<int32_t*>(x.scratch + x.layout.sums);
  __builtin_memset(sums, 0, static_cast<size_t>(x.heads * padded * 2 * ints) * sizeof(int32_t));
  for_each_block(x.chunk, [&](int key, int n) {
    const bool in_place = reads_in_place<Int8Row>(x.head[0].value.rows);
    AheadRuns runs, no_runs;
    Ahead ahead = ahead_of(x, key, values_of(x), in_place ? kBytesAtOnce : 1, keys_of(x), kDecodeChunk, runs);
    for_readers(
        x, 0, x.heads, key, [&](const Readers& readers) __attribute__((always_inline)) {
          const Rows at = block_of(x, readers.first().value, x.value_places, key);
          const auto accumulate = [&](const RowsAt<Int8Row>& values, Ahead& asked) {
            readers.each<4>(rows, asked, [&]<int>(const DecodeHead& head, int, Ahead& asks) {
              const auto h = &head - x.head;
              const float* const planes = x.scratch + x.layout.scaled + h * padded * kRowScores + key / 2;
              accumulate_bytes(sums + h * padded * 2 * ints, ints, planes, rows, values, dim, asks);
            });
          };
          if (in_place) return accumulate({at.data, at.apart, n}, ahead);
          Ahead idle = ask_for_copy(x, ahead, n, numbers_bytes(at.dtype, dim), no_runs);
          with_copied_bytes<Int8Row>(at, n, dim, x.scratch + x.layout.values,
                                     [&](const RowsAt<Int8Row>& values) { accumulate(values, idle); });
        });
  });
  for (int h = 0; h < x.heads; ++h) {
    const DecodeHead& head = x.head[h];
    for (int r = 0; r < rows && head.chunk.blocks != 0; ++r) {
      store_planes(head.out + r * x.partial.out_stride, x.partial.out_stride, sums + (h * padded + r) * 2 * ints, ints,
                   unit[h * rows + r]);
    }
    if (!finite[h]) add_not_finite(x, head);
  }
}
#endif

// O that was computed in scratch goes where it belongs.
void store_outputs(const Decode& x) {
  const int64_t floats = padded_rows(x.task.num_rows) * x.partial.out_stride;
  for (int h = 0; h < x.heads; ++h) {
    const DecodeHead& head = x.head[h];
    if (head.out == head.partial_out || head.chunk.blocks == 0) continue;
    __builtin_memcpy(head.partial_out, head.out, static_cast<size_t>(floats) * sizeof(float));
  }
}

template <int kRows>
void attend_chunk(Decode& x) {
  const int heads = x.heads;
  const Problem& p = x.problem;
  with_row<true>(x.task, p.dtype, p.key, p.head_dim, [&]<class Row>() {
    if constexpr (kRows < 4 || !kInLine<Row>) score_chunk<Row, kRows>(x);  // in_line() takes two rows at most
  });
  for (int h = 0; h < heads; ++h) {
    if (x.head[h].chunk.blocks != 0) make_weights(x, x.head[h]);
  }
#ifdef POLYHEAD_HAS_INT8_DOT
  const bool coarse = p.softmax && p.out.dtype == DType::kBFloat16;  // weights are not negative, and as fine as O needs
  if (coarse && p.value.dtype == DType::kInt8 && p.value.group >= p.head_dim_v) return weigh_bytes(x);
#endif
  with_row<false>(x.task, p.dtype, p.value, p.head_dim_v, [&]<class Row>() {
    if constexpr (kRows < 4 || !kInLine<Row>) {
      weigh_chunk<Row, kRows>(x, 0, heads, false);
      for (int h = 0; h < heads; ++h) {
        const DecodeHead& head = x.head[h];
        if (head.chunk.blocks == 0 || head.chunk.all || finite_output(x, head)) continue;
        weigh_chunk<Row, kRows>(x, h, h + 1, true);
        add_not_finite(x, head);
      }
    }
  });
}

}  // namespace

size_t decode_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int rows, int heads) {
  return static_cast<size_t>(MemoryLayout(heads * padded_rows(rows), head_dim, head_dim_v).floats) * sizeof(float);
}

void decode_chunk(const Problem& problem, const DecodePart* parts, int num_parts, int64_t chunk, void* scratch) {
  Decode x(problem, parts, num_parts, static_cast<float*>(scratch));
  look_at_heads(x, chunk * kDecodeChunk, parts);
  if (x.chunk.blocks == 0) return;
  list_places(x.key_places, x.head[0].key, x.chunk.first);
  list_places(x.value_places, x.head[0].value, x.chunk.first);
  switch (x.task.num_rows) {
    case 1: attend_chunk<1>(x); break;
    case 2: attend_chunk<2>(x); break;
    default: attend_chunk<4>(x); break;
  }
  store_outputs(x);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
