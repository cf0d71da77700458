// What a task of decoding works on: heads of one sequence or of several that share a chunk, what they see of it, and which
// of them read a block together.
#pragma once

#include "cpu/attention/decode_int8.h"
#include "cpu/attention/decode_partial.h"
#include "cpu/attention/decode_program.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// How many places of rows a task lists: of its chunk, and of what is asked for behind it.
constexpr int kPlaces = kDecodeChunk + 5 * kDecodeBlock + 1;

// One key/value head of a sequence's task.
struct DecodeHead {
  const DecodeTask* task;
  int64_t kv_head;
  KeyRows key, value;
  DecodeRow* row;  // [num_rows]
  DecodeChunk chunk;
  const float* query;  // words of row 0, and query_stride behind those of the next
  ptrdiff_t query_stride;
  float *scores, *m, *l, *out;  // m, l and O of this chunk
  float* partial_out;           // where O belongs
};

// A task's memory, in floats: Q, S, copies of a block of keys and of values, P times the scales of values, the places of keys
// and of values, O of rows of sequences that are computed together, sums of the products of the bytes of values, and heads
// and rows, which on the stack all of kDecodeRows would have to be begun.
struct MemoryLayout {
  int64_t query_stride, scores, keys, values, scaled, places, out, sums, heads, rows, floats;
  MemoryLayout(int num_rows, int64_t head_dim, int64_t head_dim_v)
      : query_stride(whole(head_dim, 16)),
        scores(padded_rows(num_rows) * query_stride),
        keys(scores + whole(padded_rows(num_rows) * int64_t{kRowScores}, 16)),
        values(keys + whole(kDecodeBlock * head_dim, 16)),
        scaled(values + whole(kDecodeBlock * head_dim_v, 16)),
        places(scaled + whole(padded_rows(num_rows) * int64_t{kRowScores}, 16)),
        out(places + whole(int64_t{2 * kPlaces * sizeof(PoolPlace) / sizeof(float)}, 16)),
        sums(out + num_rows * whole(head_dim_v, 16)),
        heads(sums + 2 * num_rows * plane_ints(head_dim_v)),
        rows(heads + floats_of<DecodeHead>(num_rows)),
        floats(rows + floats_of<DecodeRow>(num_rows)) {}

  template <class T>
  static int64_t floats_of(int64_t count) {
    return whole(count * int64_t{sizeof(T) / sizeof(float)}, 16);
  }
};

struct Decode {
  const Problem& problem;
  const DecodeTask& task;  // the first sequence's, as large as those of the others
  int sequences, heads;    // heads: of all sequences; those that read the same keys follow each other
  PartialLayout partial;
  MemoryLayout layout;  // of all heads
  float* scratch;
  PoolPlace *key_places, *value_places;  // from the chunk's first row on, which all heads share
  DecodeHead* head;                      // [heads]
  DecodeRow* row;                        // [heads][num_rows]
  DecodeChunk chunk;                     // as all heads see it
  DecodeProgram program;

  // Heads and rows are not there yet.
  Decode(const Problem& p, const DecodePart* parts, int num_parts, float* memory)
      : problem(p),
        task(parts[0].task),
        sequences(num_parts),
        heads(num_parts * task.num_heads),
        partial(task.num_rows, p.head_dim_v),
        layout(heads * padded_rows(task.num_rows), p.head_dim, p.head_dim_v),
        scratch(memory),
        key_places(reinterpret_cast<PoolPlace*>(memory + layout.places)),
        value_places(key_places + kPlaces),
        head(reinterpret_cast<DecodeHead*>(memory + layout.heads)),
        row(reinterpret_cast<DecodeRow*>(memory + layout.rows)),
        chunk{},
        program(p.program, memory + layout.floats) {}
};

// Bits of the blocks that hold keys [begin, end).
inline uint32_t blocks_of(int begin, int end) {
  if (begin >= end) return 0;
  const uint32_t up_to_last = ~0u >> (31 - (end - 1) / kDecodeBlock);
  return up_to_last & ~0u << (begin / kDecodeBlock);
}

// Which keys of the chunk each row sees, and which blocks some row sees.
inline void look_at_chunk(Decode& x, DecodeHead& head, int64_t first) {
  const DecodeTask& task = *head.task;
  const Sequence& s = task.sequence;
  const int64_t left = s.len_k - first;
  DecodeChunk& chunk = head.chunk;
  chunk = {first, left < kDecodeChunk ? static_cast<int>(left) : kDecodeChunk, 0, true};
  DecodeRow row = first_row(x.problem, task, head.kv_head);
  for (int r = 0; r < x.task.num_rows; ++r, go_on(row, task)) {
    if (r == 0 || !is_open(x.problem.band)) {  // else as the row before
      const KeyRange range = key_range(x.problem.band, s, row.i);
      row.begin = clamp_to_block(range.begin, first, chunk.num_keys);
      row.end = clamp_to_block(range.end, first, chunk.num_keys);
      row.sinks = clamp_to_block(sinks_end(x.problem.band, range), first, chunk.num_keys);
      if (row.begin > 0 || row.end < chunk.num_keys) chunk.all = false;
      chunk.blocks |= blocks_of(row.begin, row.end) | blocks_of(0, row.sinks);
    }
    head.row[r] = row;
  }
  if (chunk.blocks != 0 && x.program.is_given()) {
    const int first_row = static_cast<int>(head.row - x.row);
    if (!x.program.look(task.b, s, head.row, x.task.num_rows, first_row, chunk)) chunk.blocks = 0;
  }
  uint32_t blocks = 0;
  for (int r = 0; r < x.task.num_rows; ++r) {
    const Score score(x.problem, s, task.b, head.row[r].h);
    const Options& options = score.options;
    if (!options.may_hide()) return;
    if (r > 0 && options.same_for_heads() && (options.same_for_queries() || r >= s.len_q)) break;
    blocks |= blocks_left(RowScore(score, head.row[r], chunk));
  }
  chunk.all = false;
  chunk.blocks &= blocks;
}

// The same, where options hide the same from all heads of a sequence and one before has looked.
inline void look_as(Decode& x, const DecodeHead& looked, DecodeHead& head) {
  head.chunk = looked.chunk;
  for (int r = 0; r < x.task.num_rows; ++r) {
    head.row[r] = looked.row[r];
    head.row[r].h += (head.kv_head - looked.kv_head) * x.problem.group;
    if (looked.row[r].shown == nullptr) continue;
    x.program.look_as(looked.row[r], head.row[r], static_cast<int>(head.row + r - x.row));
  }
}

inline bool same_for_heads(const Decode& x) {
  return Score(x.problem, x.task.sequence, x.task.b, 0).options.same_for_heads();
}

// Where each head's memory is, and what it sees of the chunk. m of a head that sees nothing says so.
inline void look_at_heads(Decode& x, int64_t first, const DecodePart* parts) {
  const int rows = padded_rows(x.task.num_rows);
  bool same = false;
  for (int n = 0; n < x.heads; ++n) {
    const int h = n / x.sequences, of = n % x.sequences;
    const DecodePart& part = parts[of];
    const Sequence& s = part.task.sequence;
    DecodeHead& head = x.head[n];
    head.task = &part.task;
    head.kv_head = x.task.kv_head + h;
    head.key = key_rows_of(x.problem.key, part.task.b, head.kv_head, s.first_k, s.len_k);
    head.value = key_rows_of(x.problem.value, part.task.b, head.kv_head, s.first_k, s.len_k);
    head.row = x.row + n * x.task.num_rows;
    head.scores = x.scratch + x.layout.scores + n * rows * kRowScores;
    float* const partial = part.partial + h * part.head_stride;
    head.m = partial;
    head.l = partial + x.partial.statistics;
    head.partial_out = partial + 2 * x.partial.statistics;
    // Rows of several sequences are computed together where they follow each other.
    const bool together = x.sequences > 1 && rows < 4;
    head.out = together ? x.scratch + x.layout.out + n * rows * x.partial.out_stride : head.partial_out;
    if (n == x.sequences) same = same_for_heads(x);
    same ? look_as(x, x.head[of], head) : look_at_chunk(x, head, first);
    x.chunk.first = first;
    x.chunk.num_keys = head.chunk.num_keys;
    x.chunk.blocks |= head.chunk.blocks;
    for (int r = 0; r < x.task.num_rows && head.chunk.blocks == 0; ++r) head.m[r] = kNotComputed;
  }
}

// Rows of each head that are computed: of sequences that share keys whole fours, which those of other heads join; else one
// or two behind the last four are computed by themselves, which three would lose by (0.93; one and two gain 1.04 to 1.10).
inline int computed_rows(const Decode& x) {
  const int rows = x.task.num_rows;
  return x.sequences == 1 && rows % 4 < 3 ? rows : padded_rows(rows);
}

// Bytes between rows of queries of a task, where they are the same between all; 0: they are not.
inline int64_t query_row_bytes(const Decode& x, const DecodeHead& head) {
  const Operand& query = x.problem.query;
  const int64_t len_q = head.task->sequence.len_q, bytes = element_bytes(query.dtype);
  if (len_q == 1) return query.stride_h * bytes;
  const bool one_run = head.row[0].h == head.row[x.task.num_rows - 1].h || query.stride_h == len_q * query.stride_s;
  return one_run ? query.stride_s * bytes : 0;
}

// Whether queries, row_bytes apart, are read as they lie: nothing is to be converted, and nothing behind them is read.
template <class Mac>
bool reads_queries_in_place(const Decode& x, const Rows& first, int64_t row_bytes) {
  return x.sequences == 1 && plain_words<Mac>(first) && x.problem.head_dim % (kLanes * Mac::kElements) == 0 &&
         computed_rows(x) == x.task.num_rows && row_bytes > 0 && row_bytes % kWordBytes == 0;
}

inline Rows query_row(const Decode& x, const DecodeHead& head, int r) {
  return rows_of(x.problem.query, head.task->b, head.row[r].h, head.task->sequence.first_q + head.row[r].i);
}

template <class Mac>
void load_queries(const Decode& x, DecodeHead& head) {
  const Rows first = query_row(x, head, 0);
  const int64_t row_bytes = query_row_bytes(x, head);
  if (reads_queries_in_place<Mac>(x, first, row_bytes)) {
    head.query = f32(first.data);
    head.query_stride = row_bytes / kWordBytes;
    return;
  }
  float* out = x.scratch + (&head - x.head) * padded_rows(x.task.num_rows) * x.layout.query_stride;
  head.query = out;
  head.query_stride = x.layout.query_stride;
  const int64_t dim = x.problem.head_dim, words = words_of(dim, Mac::kElements);
  for (int r = 0; r < computed_rows(x); ++r, out += x.layout.query_stride) {
    const Rows query = query_row(x, head, r < x.task.num_rows ? r : 0);
    int64_t word = 0;
    for (; plain_words<Mac>(query) && (word + kLanes) * Mac::kElements <= dim; word += kLanes) {
      store(out + word, load(f32(query.data) + word));
    }
    for (; word < words; word += kLanes) {
      const int n = words - word < kLanes ? static_cast<int>(words - word) : kLanes;
      store(out + word, load_words<Mac>(query, 0, word, n, dim));
    }
  }
}

// Where the rows of a chunk lie: apart from each other in pages; else those of any block from its first on, and the one
// behind them, whose place is taken when a block's last row has been asked for.
inline void list_places(PoolPlace* places, const KeyRows& x, int64_t first) {
  if (x.pages == nullptr) {
    PoolPlace place = {0, 0};
    for (int k = 0; k <= kDecodeBlock; ++k) {
      places[k] = place;
      place.data += x.rows.row_bytes, place.scales += x.rows.scale_row_bytes;
    }
    return;
  }
  const int64_t left = x.num_rows - first, n = left < kPlaces ? left : kPlaces;
  x.list(first, n, places);
  for (int64_t k = n; k < kPlaces; ++k) places[k] = places[n - 1];
}

// The rows of a head's block that starts at `key` of the chunk.
inline Rows block_of(const Decode& x, const KeyRows& rows, const PoolPlace* places, int key) {
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
inline Side keys_of(const Decode& x) { return {x.head[0].key, x.key_places, x.problem.head_dim}; }
inline Side values_of(const Decode& x) { return {x.head[0].value, x.value_places, x.problem.head_dim_v}; }

// What is read after the block that starts at `key`, 8 KiB or more behind it; behind the last block, rows of `then` from
// then_key on. Rows are those of all heads, as vectors of vector_bytes read them. The runs are told in `runs`.
inline Ahead ahead_of(const Decode& x, int key, const Side& now, int64_t vector_bytes, const Side& then, int then_key,
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
inline Ahead ask_for_copy(const Decode& x, Ahead& ahead, int num_rows, int64_t row_bytes, AheadRuns& idle) {
  for (int64_t at = 64; at <= num_rows * row_bytes; at += 64) ahead.ask<64>();
  return idle_ahead(idle, x.scratch);
}

// Heads that read the same block of keys or values: one of each sequence.
struct Readers {
  const DecodeHead *begin, *end;
  int key;

  const DecodeHead& first() const { return *begin; }
  bool alone() const { return end - begin == 1; }

  // read<rows at a time>(head, rows, what it asks for), of those that see the block; `rows` of each are computed kRows at a
  // time. Fewer than four are joined by those of the heads behind. The first call asks for what comes next.
  template <int kRows, class Read>
  void each(int rows, Ahead& ahead, const Read& read) const {
    constexpr int kHeads = 4 / kRows;
    AheadRuns idle_runs;
    Ahead idle = idle_ahead(idle_runs, begin->query), *asked = &ahead;
    for (const DecodeHead* head = begin; head < end; asked = &idle) {
      if (kHeads > 1 && end - head >= kHeads && Readers{head, head + kHeads, key}.all()) {
        read.template operator()<4>(*head, 4, *asked);
        head += kHeads;
        continue;
      }
      if (head->chunk.has_block(key)) read.template operator()<kRows>(*head, rows, *asked);
      ++head;
    }
  }

  bool all() const {
    const DecodeHead* head = begin;
    while (head < end && head->chunk.has_block(key)) ++head;
    return head == end;
  }
  bool some() const {
    const DecodeHead* head = begin;
    while (head < end && !head->chunk.has_block(key)) ++head;
    return head < end;
  }
};

// Visits, among heads [first, end), those that read the same block, where one of them sees it: all heads, or one alone.
template <class Visit>
inline __attribute__((always_inline)) void for_readers(const Decode& x, int first, int end, int key,
                                                       const Visit& visit) {
  const int step = end - first < x.sequences ? end - first : x.sequences;
  for (int h = first; h < end; h += step) {
    const Readers readers{x.head + h, x.head + h + step, key};
    if (readers.some()) visit(readers);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
