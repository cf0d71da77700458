// Few queries and many keys (decoding): all query heads of a key/value head in one pass over K and V, chunk by chunk.
// A chunk's m, l and O are a partial result, which decode_merge.cc merges.
// Heads that lie side by side in memory, as in [B, S, H, D], take turns block by block: together they read whole rows.
#include "cpu/attention/decode_int8.h"
#include "cpu/attention/decode_partial.h"
#include "cpu/attention/decode_products.h"
#include "cpu/attention/decode_program.h"
#include "cpu/attention/decode_softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// How many places of rows a task lists: of its chunk, and of what is asked for behind it.
constexpr int kPlaces = kDecodeChunk + 5 * kDecodeBlock + 1;

// A task's memory, in floats: Q, S, copies of a block of keys and of values, P times the scales of values, the places of keys
// and of values, and sums of the products of the bytes of values.
struct MemoryLayout {
  int64_t query_stride, scores, keys, values, scaled, places, sums, floats;
  MemoryLayout(int rows, int64_t head_dim, int64_t head_dim_v)
      : query_stride(whole(head_dim, 16)),
        scores(padded_rows(rows) * query_stride),
        keys(scores + whole(padded_rows(rows) * int64_t{kRowScores}, 16)),
        values(keys + whole(kDecodeBlock * head_dim, 16)),
        scaled(values + whole(kDecodeBlock * head_dim_v, 16)),
        places(scaled + whole(padded_rows(rows) * int64_t{kRowScores}, 16)),
        sums(places + whole(int64_t{2 * kPlaces * sizeof(PoolPlace) / sizeof(float)}, 16)),
        floats(sums + 2 * rows * plane_ints(head_dim_v)) {}
};

// One key/value head of a task.
struct DecodeHead {
  int64_t kv_head;
  KeyRows key, value;
  DecodeRow* row;  // [num_rows]
  DecodeChunk chunk;
  float *query, *scores, *m, *l, *out;  // m, l and O of this chunk
};

struct Decode {
  const Problem& problem;
  const DecodeTask& task;
  PartialLayout partial;
  MemoryLayout layout;  // of all heads
  float* scratch;
  PoolPlace *key_places, *value_places;  // from the chunk's first row on, which all heads share
  DecodeChunk chunk = {};                // as all heads see it
  DecodeHead head[kDecodeRows];
  DecodeRow row[kDecodeRows];
  DecodeProgram program;
};

// Bits of the blocks that hold keys [begin, end).
uint32_t blocks_of(int begin, int end) {
  if (begin >= end) return 0;
  const uint32_t up_to_last = ~0u >> (31 - (end - 1) / kDecodeBlock);
  return up_to_last & ~0u << (begin / kDecodeBlock);
}

// Which keys of the chunk each row sees, and which blocks some row sees.
void look_at_chunk(Decode& x, DecodeHead& head, int64_t first) {
  const Sequence& s = x.task.sequence;
  const int64_t left = s.len_k - first;
  DecodeChunk& chunk = head.chunk;
  chunk = {first, left < kDecodeChunk ? static_cast<int>(left) : kDecodeChunk, 0, true};
  for (int r = 0; r < x.task.num_rows; ++r) {
    DecodeRow& row = head.row[r] = row_at(x.problem, x.task, head.kv_head, r);
    const KeyRange range = key_range(x.problem.band, s, row.i);
    row.begin = clamp_to_block(range.begin, first, chunk.num_keys);
    row.end = clamp_to_block(range.end, first, chunk.num_keys);
    row.sinks = clamp_to_block(sinks_end(x.problem.band, range), first, chunk.num_keys);
    if (row.begin > 0 || row.end < chunk.num_keys) chunk.all = false;
    chunk.blocks |= blocks_of(row.begin, row.end) | blocks_of(0, row.sinks);
  }
  if (chunk.blocks != 0 && x.program.is_given()) {
    const int first_row = static_cast<int>(head.row - x.row);
    if (!x.program.look(x.task.b, s, head.row, x.task.num_rows, first_row, chunk)) chunk.blocks = 0;
  }
  uint32_t blocks = 0;
  for (int r = 0; r < x.task.num_rows; ++r) {
    const RowScore row(x.problem, x.task, head.row[r], chunk);
    const Options& options = row.score.options;
    if (!options.may_hide()) return;
    if (r > 0 && options.same_for_heads() && (options.same_for_queries() || r >= s.len_q)) break;
    blocks |= blocks_left(row);
  }
  chunk.all = false;
  chunk.blocks &= blocks;
}

// The same, where options hide the same from all heads and one before has looked.
void look_as(Decode& x, const DecodeHead& looked, DecodeHead& head) {
  head.chunk = looked.chunk;
  for (int r = 0; r < x.task.num_rows; ++r) {
    head.row[r] = looked.row[r];
    head.row[r].h += (head.kv_head - looked.kv_head) * x.problem.group;
    if (looked.row[r].shown == nullptr) continue;
    x.program.look_as(looked.row[r], head.row[r], static_cast<int>(head.row + r - x.row));
  }
}

bool same_for_heads(const Decode& x) { return Score(x.problem, x.task.sequence, x.task.b, 0).options.same_for_heads(); }

// Where each head's memory is, and what it sees of the chunk. m of a head that sees nothing says so.
void look_at_heads(Decode& x, int64_t first, float* partial, int64_t head_stride) {
  const int64_t first_k = x.task.sequence.first_k, len_k = x.task.sequence.len_k;
  const int rows = padded_rows(x.task.num_rows);
  bool same = false;
  for (int h = 0; h < x.task.num_heads; ++h, partial += head_stride) {
    DecodeHead& head = x.head[h];
    head.kv_head = x.task.kv_head + h;
    head.key = key_rows_of(x.problem.key, x.task.b, head.kv_head, first_k, len_k);
    head.value = key_rows_of(x.problem.value, x.task.b, head.kv_head, first_k, len_k);
    head.row = x.row + h * x.task.num_rows;
    head.query = x.scratch + h * rows * x.layout.query_stride;
    head.scores = x.scratch + x.layout.scores + h * rows * kRowScores;
    head.m = partial;
    head.l = partial + x.partial.statistics;
    head.out = partial + 2 * x.partial.statistics;
    if (h == 1) same = same_for_heads(x);
    same ? look_as(x, x.head[0], head) : look_at_chunk(x, head, first);
    x.chunk.first = first;
    x.chunk.num_keys = head.chunk.num_keys;
    x.chunk.blocks |= head.chunk.blocks;
    for (int r = 0; r < x.task.num_rows && head.chunk.blocks == 0; ++r) head.m[r] = kNotComputed;
  }
}

template <class Mac>
void load_queries(const Decode& x, const DecodeHead& head) {
  float* out = head.query;
  const int64_t dim = x.problem.head_dim, words = words_of(dim, Mac::kElements);
  for (int r = 0; r < padded_rows(x.task.num_rows); ++r, out += x.layout.query_stride) {
    const DecodeRow row = row_at(x.problem, x.task, head.kv_head, r < x.task.num_rows ? r : 0);
    const Rows query = rows_of(x.problem.query, x.task.b, row.h, x.task.sequence.first_q + row.i);
    for (int64_t word = 0; word < words; word += kLanes) {
      const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
      store(out + word, load_words<Mac>(query, 0, word, n, dim));
    }
  }
}

// Where the rows of a chunk lie: apart from each other in pages; else those of any block from its first on, and the one
// behind them, whose place is taken when a block's last row has been asked for.
void list_places(PoolPlace* places, const KeyRows& x, int64_t first) {
  if (x.pages == nullptr) {
    for (int k = 0; k <= kDecodeBlock; ++k) places[k] = {k * x.rows.row_bytes, k * x.rows.scale_row_bytes};
    return;
  }
  const int64_t left = x.num_rows - first, n = left < kPlaces ? left : kPlaces;
  x.list(first, n, places);
  for (int64_t k = n; k < kPlaces; ++k) places[k] = places[n - 1];
}

// The rows of a head's block that starts at `key` of the chunk.
Rows block_of(const Decode& x, const KeyRows& rows, const PoolPlace* places, int key) {
  Rows block = rows.pages == nullptr ? rows.rows.from(x.chunk.first + key, 0) : rows.rows;
  block.apart = rows.pages == nullptr ? places : places + key;
  return block;
}

// Keys or values of the first head, whose rows all heads share.
struct Side {
  const KeyRows& rows;
  const PoolPlace* places;
  int64_t columns;
};
Side keys_of(const Decode& x) { return {x.head[0].key, x.key_places, x.problem.head_dim}; }
Side values_of(const Decode& x) { return {x.head[0].value, x.value_places, x.problem.head_dim_v}; }

// What is read after the block that starts at `key`, 8 KiB or more behind it; behind the last block, rows of `then` from
// then_key on. Rows are those of all heads, as vectors of vector_bytes read them. The runs are told in `runs`.
Ahead ahead_of(const Decode& x, int key, const Side& now, int64_t vector_bytes, const Side& then, int then_key,
               AheadRuns& runs) {
  const int64_t head_bytes = whole(numbers_bytes(now.rows.rows.dtype, now.columns), vector_bytes);
  const int64_t bytes = x.task.num_heads * head_bytes, block_bytes = kDecodeBlock * bytes;
  int between = block_bytes >= 8192 ? 0 : block_bytes >= 4096 ? 1 : 3;  // blocks
  if (numbers_bytes(now.rows.rows.dtype, 2) <= 2) ++between;            // of bytes a block is computed sooner
  uint32_t left = x.chunk.blocks & (~1u << (key / kDecodeBlock));
  for (; left != 0 && between > 0; --between) left &= left - 1;
  const Side& side = left != 0 ? now : then;
  const int row = left != 0 ? __builtin_ctz(left) * kDecodeBlock : then_key + between * kDecodeBlock;
  const Rows next = block_of(x, side.rows, side.places, row);
  const auto base = reinterpret_cast<uintptr_t>(next.data);
  const auto first = base + static_cast<uintptr_t>(next.apart[0].data);
  const bool one_run = next.apart[kDecodeBlock - 1].data - next.apart[0].data == (kDecodeBlock - 1) * bytes;
  runs = one_run ? AheadRuns{block_bytes, first, nullptr} : AheadRuns{bytes, base, next.apart + 1};
  return {first, runs.bytes, &runs};
}

// For a block of one head that is copied. Products then have nothing to ask for.
Ahead ask_for_copy(const Decode& x, Ahead& ahead, int num_rows, int64_t row_bytes, AheadRuns& idle) {
  for (int64_t at = 64; at <= num_rows * row_bytes; at += 64) ahead.ask<64>();
  idle = {kDecodeBlock, reinterpret_cast<uintptr_t>(x.scratch), nullptr};
  return {idle.base, idle.bytes, &idle};
}

template <class Row, int kRows>
void score_chunk(Decode& x) {
  for (int h = 0; h < x.task.num_heads; ++h) load_queries<typename Row::Mac>(x, x.head[h]);
  const int rows = padded_rows(x.task.num_rows);
  const int64_t dim = x.problem.head_dim;
  const int first_value = __builtin_ctz(x.chunk.blocks) * kDecodeBlock;
  for_each_block(x.chunk, [&](int key, int n) {
    const bool in_place = reads_in_place<Row>(x.head[0].key.rows);
    AheadRuns runs, no_runs;
    Ahead ahead = ahead_of(x, key, keys_of(x), in_place ? kVectorBytes<Row> : 1, values_of(x), first_value, runs);
    for (int h = 0; h < x.task.num_heads; ++h) {
      const DecodeHead& head = x.head[h];
      if (!head.chunk.has_block(key)) continue;
      Rows at = block_of(x, head.key, x.key_places, key);
      at.scaled_later = scales_later<Row>(at);
      float* const scores = head.scores + key;
      const auto score = [&]<class R>(const RowsAt<R>& keys, int64_t columns, Ahead& asked) {
        score_rows<R, kRows>(scores, head.query, x.layout.query_stride, rows, keys, columns, asked);
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
              at, n, dim, copy, [&]<class R>(const RowsAt<R>& keys, int64_t columns) { score(keys, columns, idle); });
        }
      }
      if (at.scaled_later) multiply_by_scales(scores, scores, kRowScores, rows, at.dtype, BlockScales(at, n));
    }
  });
}

void make_weights(Decode& x, const DecodeHead& head) {
  alignas(64) uint8_t kept[kDecodeChunk / 8];
  const Dropout& dropout = x.problem.dropout;
  if (x.program.has_score()) {
    for (int r = 0; r < x.task.num_rows; ++r) {
      score_by_options(head.scores + r * kRowScores, RowScore(x.problem, x.task, head.row[r], head.chunk));
    }
    x.program.score(x.task.b, x.task.sequence, head.row, x.task.num_rows, static_cast<int>(head.row - x.row),
                    head.chunk, head.scores);
  }
  for (int r = 0; r < x.task.num_rows; ++r) {
    const DecodeRow& row = head.row[r];
    if (dropout.threshold > 0) {
      const int64_t head_index = x.task.b * x.problem.num_heads + row.h;
      dropout_row(kept, dropout, static_cast<uint32_t>(head_index), row.i, x.chunk.first, 0, x.chunk.num_keys);
    }
    const RowScore score(x.problem, x.task, row, head.chunk);
    float* const scores = head.scores + r * kRowScores;
    const auto* const kept_of_row = dropout.threshold > 0 ? &kept : nullptr;
    if (x.problem.softmax) {
      softmax_row(scores, score, kept_of_row, head.m + r, head.l + r);
    } else {
      weight_row(scores, score, kept_of_row);
      head.m[r] = 0;  // computed
    }
  }
}

// O of the chunk, of heads [first, end). With `finite`, NaN and inf among the values are taken as 0.
template <class Row, int kRows>
void weigh_chunk(const Decode& x, int first, int end, bool finite) {
  const int rows = padded_rows(x.task.num_rows);
  const int64_t dim = x.problem.head_dim_v;
  for (int h = first; h < end; ++h) {
    const size_t floats = static_cast<size_t>(rows * x.partial.out_stride);
    if (x.head[h].chunk.blocks != 0) __builtin_memset(x.head[h].out, 0, floats * sizeof(float));
  }
  for_each_block(x.chunk, [&](int key, int n) {
    const bool in_place = reads_in_place<Row>(x.head[0].value.rows) && !finite;
    AheadRuns runs, no_runs;
    Ahead ahead = ahead_of(x, key, values_of(x), in_place ? kVectorBytes<Row> : 1, keys_of(x), kDecodeChunk, runs);
    for (int h = first; h < end; ++h) {
      const DecodeHead& head = x.head[h];
      if (!head.chunk.has_block(key)) continue;
      Rows at = block_of(x, head.value, x.value_places, key);
      at.scaled_later = scales_later<Row>(at);
      const float* p = head.scores + key;
      if (at.scaled_later) {
        float* const scaled = x.scratch + x.layout.scaled;
        BlockScales scales(at, n);
        if (finite) scales.clear_not_finite();
        multiply_by_scales(scaled, p, kRowScores, rows, at.dtype, scales);
        p = scaled;
      }
      if (in_place) {
        const RowsAt<Row> values = rows_in_place<Row>(at, n, dim, x.scratch + x.layout.values);
        accumulate_rows_of<Row, kRows>(head.out, x.partial.out_stride, p, rows, values, dim, ahead);
        continue;
      }
      Ahead idle = ask_for_copy(x, ahead, n, numbers_bytes(at.dtype, dim), no_runs);
      with_copied_values(at, n, dim, finite, x.scratch + x.layout.values, [&](const RowsAt<FloatRow>& values) {
        accumulate_rows_of<FloatRow, kRows>(head.out, x.partial.out_stride, p, rows, values, dim, idle);
      });
    }
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
  return (bits(RowScore(x.problem, x.task, row, head.chunk).shown(key)) & 1) != 0;
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
  for (int h = 0; h < x.task.num_heads; ++h) {
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
  __builtin_memset(sums, 0, static_cast<size_t>(x.task.num_heads * padded * 2 * ints) * sizeof(int32_t));
  for_each_block(x.chunk, [&](int key, int n) {
    const bool in_place = reads_in_place<Int8Row>(x.head[0].value.rows);
    AheadRuns runs, no_runs;
    Ahead ahead = ahead_of(x, key, values_of(x), in_place ? kBytesAtOnce : 1, keys_of(x), kDecodeChunk, runs);
    for (int h = 0; h < x.task.num_heads; ++h) {
      const DecodeHead& head = x.head[h];
      if (!head.chunk.has_block(key)) continue;
      const Rows at = block_of(x, head.value, x.value_places, key);
      const float* const planes = x.scratch + x.layout.scaled + h * padded * kRowScores + key / 2;
      const auto accumulate = [&](const RowsAt<Int8Row>& values, Ahead& asked) {
        accumulate_bytes(sums + h * padded * 2 * ints, ints, planes, rows, values, dim, asked);
      };
      if (in_place) {
        accumulate({at.data, at.apart, n}, ahead);
        continue;
      }
      Ahead idle = ask_for_copy(x, ahead, n, numbers_bytes(at.dtype, dim), no_runs);
      with_copied_bytes<Int8Row>(at, n, dim, x.scratch + x.layout.values,
                                 [&](const RowsAt<Int8Row>& values) { accumulate(values, idle); });
    }
  });
  for (int h = 0; h < x.task.num_heads; ++h) {
    const DecodeHead& head = x.head[h];
    for (int r = 0; r < rows && head.chunk.blocks != 0; ++r) {
      store_planes(head.out + r * x.partial.out_stride, x.partial.out_stride, sums + (h * padded + r) * 2 * ints, ints,
                   unit[h * rows + r]);
    }
    if (!finite[h]) add_not_finite(x, head);
  }
}
#endif

template <int kRows>
void attend_chunk(Decode& x) {
  const int heads = x.task.num_heads;
  const Problem& p = x.problem;
  with_row<true>(x.task, p.dtype, p.key, p.head_dim, [&]<class Row>() { score_chunk<Row, kRows>(x); });
  for (int h = 0; h < heads; ++h) {
    if (x.head[h].chunk.blocks != 0) make_weights(x, x.head[h]);
  }
#ifdef POLYHEAD_HAS_INT8_DOT
  const bool coarse = p.softmax && p.out.dtype == DType::kBFloat16;  // weights are not negative, and as fine as O needs
  if (coarse && p.value.dtype == DType::kInt8 && p.value.group >= p.head_dim_v) return weigh_bytes(x);
#endif
  with_row<false>(x.task, p.dtype, p.value, p.head_dim_v, [&]<class Row>() {
    weigh_chunk<Row, kRows>(x, 0, heads, false);
    for (int h = 0; h < heads; ++h) {
      const DecodeHead& head = x.head[h];
      if (head.chunk.blocks == 0 || head.chunk.all || finite_output(x, head)) continue;
      weigh_chunk<Row, kRows>(x, h, h + 1, true);
      add_not_finite(x, head);
    }
  });
}

}  // namespace

size_t decode_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int rows, int heads) {
  return static_cast<size_t>(MemoryLayout(heads * padded_rows(rows), head_dim, head_dim_v).floats) * sizeof(float);
}

void decode_chunk(const Problem& problem, const DecodeTask& task, int64_t chunk, float* partial, int64_t head_stride,
                  void* scratch) {
  const int rows = task.num_heads * padded_rows(task.num_rows);
  const MemoryLayout layout(rows, problem.head_dim, problem.head_dim_v);
  auto* const floats = static_cast<float*>(scratch);
  auto* const places = reinterpret_cast<PoolPlace*>(floats + layout.places);
  Decode x{problem,
           task,
           PartialLayout(task.num_rows, problem.head_dim_v),
           layout,
           floats,
           places,
           places + kPlaces,
           {},
           {},
           {},
           DecodeProgram(problem.program, floats + layout.floats)};
  look_at_heads(x, chunk * kDecodeChunk, partial, head_stride);
  if (x.chunk.blocks == 0) return;
  list_places(x.key_places, x.head[0].key, x.chunk.first);
  list_places(x.value_places, x.head[0].value, x.chunk.first);
  switch (task.num_rows) {
    case 1: attend_chunk<1>(x); break;
    case 2: attend_chunk<2>(x); break;
    default: attend_chunk<4>(x); break;
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
