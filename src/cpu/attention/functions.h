// What one instruction set offers: a table of functions over plain pointers. kernels.cc alone calls them.
#pragma once

#include <cstddef>

#include "cpu/attention/problem.h"
#include "cpu/isa/list.h"

namespace polyhead::cpu {

constexpr int kMaxTiles = 3;  // tiles of a task; of forward, IsaFunctions::forward_tiles_at_once

// What a thread will probably compute next: asked for in advance. Rows are those of the operands; none: nothing.
struct NextRows {
  Sequence sequence;
  int64_t b = 0, h = 0;
  int64_t first_query = 0, num_queries = 0;
  bool other_keys = true;  // than those that are in the cache

  int64_t first_row() const { return sequence.first_q + first_query; }
};

// A run of queries of one head of one sequence: at most forward_tiles_at_once tiles, all below sequence.len_q.
struct ForwardTask {
  Sequence sequence;
  int64_t b = 0, h = 0;
  int64_t first_query = 0, num_queries = 0;
  NextRows next = {};

  // What else is asked for of the tiles, at a second pass over the keys:
  bool attn_weights = false;  // written to problem.attn_weights, per head, where not 0: the rows are cleared before
  float* mean = nullptr;      // [seqlen_k][kTileQueries], one tile: weights are added
  float* columns = nullptr;   // [seqlen_k][lanes]: sums over the queries are added
};

// The path of tiny heads (cpu/tiny_tasks.cc).
constexpr int kTinySize = 16;  // queries, keys and dims at most

// The path of few queries (cpu/decode_tasks.cc).
constexpr int kDecodeChunk = 512;  // keys whose partial result stands by itself
constexpr int kDecodeRows = 32;    // rows of a task at most, padded_rows of each of its heads

// A head's rows are computed one, two, or four at a time; rows that fill a four are computed and not used.
static constexpr int padded_rows(int rows) { return rows < 3 ? rows : (rows + 3) / 4 * 4; }

// Some queries of the heads that share a key/value head: row r is query r % len_q of head kv_head * group + r / len_q.
// The same of num_heads key/value heads from kv_head on, whose rows of keys, and of values, follow each other in memory.
struct DecodeTask {
  Sequence sequence;
  int64_t b = 0, kv_head = 0;
  int num_heads = 1;
  int64_t first_row = 0;
  int num_rows = 0;
  bool from_memory = false;  // what the call reads is more than caches hold: changes no bit
};

// A sequence's task, and where its result goes: of each head head_stride floats behind the one before.
struct DecodePart {
  DecodeTask task;
  float* partial = nullptr;
  int64_t head_stride = 0;
};

// What adds up the gradients of one head's captures, in the order of code.gathers; null: not asked for. By the rate of the
// element read: [64], [queries], [keys], [queries + keys] (at q - k + keys), or, where it is kFull, the capture itself.
struct CaptureSums {
  float* const* sums = nullptr;
  int64_t keys = 0;  // whole blocks
};

// Backward: one query head against some keys of the key/value head it reads.
struct BackwardTask {
  Sequence sequence;
  int64_t b = 0, h = 0, kv_head = 0;
  int64_t first_key = 0, end_key = 0;              // whole chunks, but for the sequence's last
  int64_t chunk_keys = 0;                          // keys whose share of dQ is summed by itself; whole blocks
  int64_t first_query = 0, end_query = INT64_MAX;  // what of the sequence's; whole groups of tiles, but for the last

  // Sums to add to, of the keys from first_key on: [whole groups][head_dim in whole vectors]; null: not asked for.
  float *key_sums = nullptr, *value_sums = nullptr;

  bool bias = false;         // dS is added to problem.grad_bias, where nobody else adds to the same elements meanwhile,
  bool begins_bias = false;  // or is written there, and 0 of the pairs that see nothing

  CaptureSums captures;  // of all queries and keys of the head: none of `partial`

  NextRows next = {};

  // Null: dQ is written. Else this chunk's share: [tiles][head_dim][kTileQueries] from first_query on, of the tiles that see
  // the chunk.
  float* partial = nullptr;
};

// Backward: dS of one head's tile of queries against keys [first_key, first_key + kScoreKeys).
constexpr int kScoreKeys = 512;

struct ScoreTask {
  Sequence sequence;
  int64_t b = 0, h = 0;
  int64_t first_query = 0, first_key = 0;
  float* sums = nullptr;   // [kScoreKeys][kTileQueries]: dS is added,
  bool distances = false;  // or -dS times the distance that ALiBi's slope multiplies
};

struct IsaFunctions {
  // Scratch, in bytes and aligned to 64, of forward_tiles for tasks of `tiles` tiles; `additive`, with a bias: more.
  int forward_tiles_at_once;
  size_t (*forward_scratch_bytes)(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive);
  void (*forward_tiles)(const Problem& problem, const ForwardTask& task, void* scratch);

  // decode_chunk computes keys [chunk * kDecodeChunk, ...) of as many heads and rows of each part, whose sequences all have
  // these keys, at the same places: each part's result is that of a call without the others. decode_merge ends rows of one
  // head whose chunks are all computed, in partial results that follow each other. `rows` is a task's num_rows, `heads` its
  // num_heads, of all parts together, or more.
  size_t (*decode_scratch_bytes)(int64_t head_dim, int64_t head_dim_v, int rows, int heads);
  size_t (*decode_partial_bytes)(int64_t head_dim_v, int rows);
  void (*decode_chunk)(const Problem& problem, const DecodePart* parts, int num_parts, int64_t chunk, void* scratch);
  void (*decode_merge)(const Problem& problem, const DecodeTask& task, float* partials, int64_t num_partials);

  // Heads [first, end), counted b * num_heads + h, that all see what `sequence` tells.
  size_t (*tiny_scratch_bytes)();
  // mean: [first, end) are all heads of a batch element, whose mean is written to problem.attn_weights.
  void (*tiny_heads)(const Problem& problem, const Sequence& sequence, int64_t first, int64_t end, bool mean,
                     void* scratch);

  // backward_head adds a head's share to the sums of keys and writes dQ or its partial sums, `tiles` tiles at a time;
  // backward_keys writes dK and dV from the sums; backward_queries adds one tile's partial sums of the task's chunks, which
  // lie `partial_stride` floats apart, to `sum` [head_dim][kTileQueries] in order, and writes dQ after the last chunk.
  size_t (*backward_scratch_bytes)(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive, bool softcap);
  size_t (*backward_sum_floats)(int64_t num_keys, int64_t dim);
  void (*backward_head)(const BackwardProblem& problem, const BackwardTask& task, int tiles, void* scratch);
  void (*backward_keys)(const BackwardProblem& problem, const BackwardTask& task);
  void (*backward_queries)(const BackwardProblem& problem, const BackwardTask& task, int64_t first_query, float* sum,
                           const float* partial, ptrdiff_t partial_stride);

  // store_score_gradients writes the first queries and keys of sums, from element `at` of `to` on.
  size_t (*score_scratch_bytes)(int64_t head_dim, int64_t head_dim_v);
  void (*add_score_gradients)(const BackwardProblem& problem, const ScoreTask& task, void* scratch);
  void (*store_score_gradients)(const Broadcast& to, int64_t at, const float* sums, int64_t num_queries,
                                int64_t num_keys, bool accumulate);

  // Key/value heads [first, end), counted b * num_heads_kv + g, likewise.
  size_t (*tiny_backward_scratch_bytes)();
  void (*tiny_backward_heads)(const BackwardProblem& problem, const Sequence& sequence, int64_t first, int64_t end,
                              void* scratch);

  // problem.attn_weights[b, 0, first_query + q, :] = mean[:][q] / num_heads.
  void (*store_mean)(const Problem& problem, int64_t b, int64_t first_query, int64_t num_queries, const float* mean);
  int lanes;  // floats of a vector
};

#ifdef POLYHEAD_ISA
namespace POLYHEAD_ISA {
size_t forward_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive);
void forward_tiles(const Problem& problem, const ForwardTask& task, void* scratch);
size_t planes_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive);  // of float32 in planes
void planes_tiles(const Problem& problem, const ForwardTask& task, void* scratch);
size_t decode_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int rows, int heads);
size_t decode_partial_bytes(int64_t head_dim_v, int rows);
void decode_chunk(const Problem& problem, const DecodePart* parts, int num_parts, int64_t chunk, void* scratch);
void decode_merge(const Problem& problem, const DecodeTask& task, float* partials, int64_t num_partials);
size_t tiny_scratch_bytes();
void tiny_heads(const Problem& problem, const Sequence& sequence, int64_t first, int64_t end, bool mean, void* scratch);
size_t backward_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles, bool additive, bool softcap);
size_t backward_sum_floats(int64_t num_keys, int64_t dim);
void backward_head(const BackwardProblem& problem, const BackwardTask& task, int tiles, void* scratch);
void backward_keys(const BackwardProblem& problem, const BackwardTask& task);
void backward_queries(const BackwardProblem& problem, const BackwardTask& task, int64_t first_query, float* sum,
                      const float* partial, ptrdiff_t partial_stride);
size_t score_scratch_bytes(int64_t head_dim, int64_t head_dim_v);
void add_score_gradients(const BackwardProblem& problem, const ScoreTask& task, void* scratch);
void store_score_gradients(const Broadcast& to, int64_t at, const float* sums, int64_t num_queries, int64_t num_keys,
                           bool accumulate);
size_t tiny_backward_scratch_bytes();
void tiny_backward_heads(const BackwardProblem& problem, const Sequence& sequence, int64_t first, int64_t end,
                         void* scratch);
void store_mean(const Problem& problem, int64_t b, int64_t first_query, int64_t num_queries, const float* mean);
}  // namespace POLYHEAD_ISA
#endif

#define DECLARE(name, features)         \
  namespace name {                      \
  extern const IsaFunctions kFunctions; \
  }
POLYHEAD_ISAS(DECLARE)
#undef DECLARE
#ifdef __x86_64__
namespace amx {
// Forward of float32 and float16 in planes of bfloat16; all else by vectors.
extern const IsaFunctions kFloat32Functions;
}  // namespace amx
#endif

}  // namespace polyhead::cpu
