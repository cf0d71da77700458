// FlashAttention-2 forward (algorithm 1 of arXiv:2307.08691) for one instruction set, queries along the lanes:
//   Q^T [D][kTile]   K, V [kBlock][D]   S^T, P^T [kBlock][kTile]   O^T [Dv][kTile]   m, l [kTile]
#include "cpu/dropout.h"
#include "cpu/isa_functions.h"
#include "cpu/softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

constexpr int kBlock = 64;  // keys
constexpr int kGroup = kLanes;  // keys of a block that share a range of vectors, where not every query sees all

struct Tile {
  TileState state;
  TileRanges ranges;
  float* query;  // Q^T, words
  int64_t first_query;
  int num_queries;
  bool some_hidden;  // in a block that was computed
};

struct Scratch {
  Tile tile[kMaxTiles];
  alignas(64) float p[kBlock * kTile];
  alignas(64) float additive[kBlock * kTile];
  alignas(64) float diagonal[kTile];
  BlockRanges ranges;
  uint16_t kept[kBlock][kVecs];
};

constexpr size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The keys and values of one block, as words that the microkernel can read: in place, or copied.
struct Block {
  int64_t first;
  int num_keys;
  const float *key, *value;
  ptrdiff_t key_stride, value_stride;
};

// One head of one sequence.
struct Head {
  const Problem& problem;
  const ForwardTask& task;
  Rows key, value;
  Additive additive;
  ScoreRule rule;
  Scratch* scratch;
  float *key_copy, *value_copy;
  bool careful;  // NaN or inf among hidden values: see add_not_finite
};

// Copying costs 1 % at 4 tiles; reading in place needs words of the right type, and rows that are not a multiple of
// 1 KiB apart: those fall into few sets of the L1 cache (DESIGN: [B, S, H, D] has them, 16 heads of 64).
template <class Mac>
bool readable_in_place(const Rows& x, int64_t columns) {
  const bool word_type = x.dtype == (Mac::kElements == 1 ? DType::kFloat32 : DType::kBFloat16);
  return word_type && x.column_stride == 1 && columns % Mac::kElements == 0 && x.stride % Mac::kElements == 0 &&
         (x.stride == columns || x.stride % 256 != 0);
}

template <class Mac>
Block load_block(const Head& head, int64_t first) {
  const Problem& problem = head.problem;
  const int64_t left = head.task.sequence.len_k - first;
  Block block{first, left < kBlock ? static_cast<int>(left) : kBlock, nullptr, nullptr, 0, 0};
  const int padded = (block.num_keys + kMicroRows - 1) / kMicroRows * kMicroRows;
  const bool whole = padded == block.num_keys;
  if (whole && readable_in_place<Mac>(head.key, problem.head_dim)) {
    block.key_stride = head.key.stride / Mac::kElements;
    block.key = f32(head.key.data) + first * block.key_stride;
  } else {
    block.key_stride = words_of(problem.head_dim, Mac::kElements);
    block.key = head.key_copy;
    copy_rows<Mac>(head.key_copy, head.key, first, block.num_keys, padded, problem.head_dim);
  }
  if (Mac::kElements == 1 && whole && !head.careful && readable_in_place<Mac>(head.value, problem.head_dim_v)) {
    block.value_stride = head.value.stride;
    block.value = f32(head.value.data) + first * block.value_stride;
  } else {
    block.value_stride = problem.head_dim_v;
    block.value = head.value_copy;
    copy_values<Mac>(head.value_copy, head.value, first, block.num_keys, padded, problem.head_dim_v, head.careful);
  }
  return block;
}

// S^T = K Q^T for keys [begin, end) and one microkernel's vectors, then P^T.
template <class Mac, int kVecs_>
void score_keys(const Head& head, Tile& tile, const Block& block, const BlockView& view, int begin, int end, int lane) {
  const int64_t words = words_of(head.problem.head_dim, Mac::kElements);
  constexpr int kRows = kVecs_ * kMicroRows < 12 ? 2 * kMicroRows : kMicroRows;
  int k = begin;
  for (; k + kRows <= end; k += kRows) {
    F s[kRows][kVecs_];
    clear(s);
    contract<Mac, true>(s, tile.query + lane, kTile, block.key + k * block.key_stride, block.key_stride, words);
    softmax_step<Mac>(s, head.scratch->p, tile.state, head.rule, view, k, lane, head.problem.head_dim_v);
  }
  if constexpr (kRows != kMicroRows) {
    for (; k < end; k += kMicroRows) {
      F s[kMicroRows][kVecs_];
      clear(s);
      contract<Mac, true>(s, tile.query + lane, kTile, block.key + k * block.key_stride, block.key_stride, words);
      softmax_step<Mac>(s, head.scratch->p, tile.state, head.rule, view, k, lane, head.problem.head_dim_v);
    }
  }
}

// Keys [begin, end), multiples of kMicroRows, and vectors [v_begin, v_end): P^T, then O^T += P^T V.
template <class Mac>
void attend_keys(const Head& head, Tile& tile, const Block& block, const BlockView& view, int begin, int end,
                 int v_begin, int v_end) {
  for (int v = v_begin; v < v_end; v += kMicroVecs) {
    const int lane = v * kLanes;
    switch (v_end - v < kMicroVecs ? v_end - v : kMicroVecs) {
      case 1: score_keys<Mac, 1>(head, tile, block, view, begin, end, lane); break;
      case 2: score_keys<Mac, 2>(head, tile, block, view, begin, end, lane); break;
      case 3: score_keys<Mac, kMicroVecs == 4 ? 3 : 1>(head, tile, block, view, begin, end, lane); break;
      default: score_keys<Mac, kMicroVecs == 4 ? 4 : 1>(head, tile, block, view, begin, end, lane); break;
    }
  }
  const int first_word = begin / Mac::kElements;
  accumulate<Mac>(tile.state.out, head.scratch->p + first_word * kTile,
                  block.value + first_word * block.value_stride, block.value_stride, (end - begin) / Mac::kElements,
                  head.problem.head_dim_v, v_begin, v_end);
}

float weight_at(const float* p, int elements, int key, int lane) {
  if (elements == 1) return p[key * kTile + lane];
  uint32_t word;
  __builtin_memcpy(&word, p + key / 2 * kTile + lane, sizeof word);
  word = key % 2 == 0 ? word << 16 : word & 0xffff0000u;
  float weight;
  __builtin_memcpy(&weight, &word, sizeof weight);
  return weight;
}

// In the careful pass V's NaN and inf were taken as 0; here they reach the queries that see them, and no others.
template <class Mac>
void add_not_finite(const Head& head, Tile& tile, const Block& block, const BlockView& view, int begin, int end) {
  alignas(64) float row[kLanes];
  for (int k = begin; k < end && k < block.num_keys; ++k) {
    for (int64_t d = 0; d < head.problem.head_dim_v; ++d) {
      store(row, load_columns(head.value, block.first + k, d, 1));
      if (row[0] - row[0] == 0.0f) continue;
      for (int q = 0; q < tile.num_queries; ++q) {
        if (view.ranges != nullptr && (k < view.ranges->begin[q] || k >= view.ranges->end[q])) continue;
        if (view.additive != nullptr && view.additive[view.additive_shared ? k : k * kTile + q] == -kInfinity) continue;
        tile.state.out[d * kTile + q] += weight_at(head.scratch->p, Mac::kElements, k, q) * row[0];
      }
    }
  }
}

template <class Mac>
void attend_block(const Head& head, Tile& tile, const Block& block) {
  const TileRanges& ranges = tile.ranges;
  const int begin = clamp_to_block(ranges.any_begin, block.first, kBlock);
  const int end = clamp_to_block(ranges.any_end, block.first, block.num_keys);
  if (begin >= end) return;
  Scratch& scratch = *head.scratch;
  const int num_vecs = (tile.num_queries + kLanes - 1) / kLanes;
  BlockView view;
  if (head.additive.given()) {
    const Seen seen = additive_tile(scratch.additive, head.additive, tile.first_query, tile.num_queries, block.first,
                                    begin, end);
    if (seen == Seen::kNone) return;
    if (seen == Seen::kSome) {
      view.additive = scratch.additive;
      view.additive_shared = head.additive.same_for_all_queries();
      tile.some_hidden = true;
    }
  }
  if (head.problem.slopes != nullptr) {
    const int64_t first = tile.first_query + head.task.sequence.offset - block.first;
    for (int q = 0; q < kTile; ++q) scratch.diagonal[q] = static_cast<float>(first + q);
    view.diagonal = scratch.diagonal;
  }
  if (head.problem.dropout.threshold > 0) {
    const int64_t head_index = head.task.b * head.problem.num_heads + head.task.h;
    dropout_tile(scratch.kept, head.problem.dropout, static_cast<uint32_t>(head_index), tile.first_query, block.first,
                 begin, end, num_vecs);
    view.kept = scratch.kept;
  }
  const bool all = ranges.all_begin <= block.first && ranges.all_end >= block.first + block.num_keys &&
                   block.num_keys % kMicroRows == 0;
  if (all) {
    attend_keys<Mac>(head, tile, block, view, 0, block.num_keys, 0, num_vecs);
  } else {
    tile.some_hidden = true;
    block_ranges(scratch.ranges, ranges, block.first, kBlock);
    view.ranges = &scratch.ranges;
    for (int k = begin / kGroup * kGroup; k < end; k += kGroup) {
      int v_begin = num_vecs, v_end = 0;
      for (int v = 0; v < num_vecs; ++v) {
        if (scratch.ranges.vec_begin[v] >= k + kGroup || scratch.ranges.vec_end[v] <= k) continue;
        if (v < v_begin) v_begin = v;
        v_end = v + 1;
      }
      const int first = k < begin ? begin / kMicroRows * kMicroRows : k;
      const int last = k + kGroup < end ? k + kGroup : (end + kMicroRows - 1) / kMicroRows * kMicroRows;
      if (v_begin < v_end) attend_keys<Mac>(head, tile, block, view, first, last, v_begin, v_end);
    }
  }
  if (head.careful) add_not_finite<Mac>(head, tile, block, view, begin, end);
}

// Whether mask and bias leave query i a visible key in its range.
bool sees_a_key(const Additive& additive, const KeyRange& range, int64_t i) {
  for (int64_t k = range.begin; k < range.end; k += kLanes) {
    const int n = range.end - k < kLanes ? static_cast<int>(range.end - k) : kLanes;
    SeenBits seen;
    seen.add(additive_row(additive, i, k, n), n);
    if (seen.seen() != Seen::kNone) return true;
  }
  return false;
}

// O / l and L, written out. False if something hidden was computed and O holds NaN or inf: hidden values may have leaked.
bool finish_tile(const Head& head, Tile& tile) {
  const Problem& problem = head.problem;
  const Sequence& s = head.task.sequence;
  alignas(64) float inverse[kTile], logsumexp[kTile];
  for (int q = 0; q < kTile; q += kLanes) {
    const F l = load(tile.state.l + q), m = load(tile.state.m + q);
    const M none = equal(l, broadcast(0.0f));
    store(inverse + q, select(none, broadcast(0.0f), broadcast(problem.dropout.scale) / l));
    // m ln 2 in two parts: ln 2 rounded to one float would cost half a unit in the last place.
    const F natural = fma(m, broadcast(0.693359375f), fma(m, broadcast(-2.12194440e-4f), log(l)));
    store(logsumexp + q, select(none, broadcast(-kInfinity), natural));
  }
  bool hidden_row[kTile];
  for (int q = 0; q < tile.num_queries; ++q) {
    hidden_row[q] = tile.state.l[q] == 0.0f;
    const KeyRange range{tile.ranges.begin[q], tile.ranges.end[q]};
    if (hidden_row[q] && range.begin < range.end && sees_a_key(head.additive, range, tile.first_query + q)) {
      hidden_row[q] = false;  // every score it sees is -inf: exp(-inf + inf)
      inverse[q] = logsumexp[q] = __builtin_nanf("");
    }
  }
  const int64_t row0 = s.first_q + tile.first_query;
  const Operand& out = problem.out;
  const int64_t out0 = head.task.b * out.stride_b + head.task.h * out.stride_h + row0 * out.stride_s;
  for (int64_t pass = tile.some_hidden && !head.careful ? 0 : 1; pass < 2; ++pass) {  // check, then write
    for (int64_t d = 0; d < problem.head_dim_v; d += kLanes) {
      const int n = problem.head_dim_v - d < kLanes ? static_cast<int>(problem.head_dim_v - d) : kLanes;
      for (int q = 0; q < tile.num_queries; q += kLanes) {
        F block[kLanes];
        M finite = mask_from_bits(~0u);
        for (int i = 0; i < kLanes; ++i) {
          block[i] = i < n ? load(tile.state.out + (d + i) * kTile + q) * load(inverse + q) : broadcast(0.0f);
          finite = both(finite, equal(block[i] - block[i], broadcast(0.0f)));
        }
        const int rows = tile.num_queries - q < kLanes ? tile.num_queries - q : kLanes;
        if (pass == 0) {
          if ((~bits(finite) & ((1u << rows) - 1)) != 0) return false;
          continue;
        }
        transpose(block);
        for (int r = 0; r < rows; ++r) {
          store_columns(out.data, out.dtype, out0 + (q + r) * out.stride_s + d * out.stride_d, out.stride_d,
                        hidden_row[q + r] ? broadcast(0.0f) : block[r], n);
        }
      }
    }
  }
  if (problem.logsumexp != nullptr) {
    float* target = problem.logsumexp + head.task.b * problem.logsumexp_stride_b +
                    head.task.h * problem.logsumexp_stride_h + row0 * problem.logsumexp_stride_s;
    for (int q = 0; q < tile.num_queries; ++q) target[q * problem.logsumexp_stride_s] = logsumexp[q];
  }
  return true;
}

template <class Mac>
void attend(const Head& head, Tile* tiles, int num_tiles) {
  int64_t begin = head.task.sequence.len_k, end = 0;
  for (int t = 0; t < num_tiles; ++t) {
    Tile& tile = tiles[t];
    tile.some_hidden = false;
    for (int q = 0; q < kTile; ++q) {
      tile.state.m[q] = kNoMaximum;
      tile.state.l[q] = 0;
    }
    __builtin_memset(tile.state.out, 0, static_cast<size_t>(head.problem.head_dim_v) * kTile * sizeof(float));
    if (tile.ranges.any_begin < begin) begin = tile.ranges.any_begin;
    if (tile.ranges.any_end > end) end = tile.ranges.any_end;
  }
  for (int64_t first = begin / kBlock * kBlock; first < end; first += kBlock) {
    const Block block = load_block<Mac>(head, first);
    for (int t = 0; t < num_tiles; ++t) attend_block<Mac>(head, tiles[t], block);
  }
}

template <class Mac>
void forward_task(const Problem& problem, const ForwardTask& task, void* memory) {
  const Sequence& s = task.sequence;
  const int64_t kv_head = task.h / problem.group;
  Scratch* scratch = static_cast<Scratch*>(memory);
  float* floats = reinterpret_cast<float*>(static_cast<char*>(memory) + round_up(sizeof(Scratch)));
  Head head{problem, task, rows_of(problem.key, task.b, kv_head, s.first_k),
            rows_of(problem.value, task.b, kv_head, s.first_k), additive(problem, task.b, task.h),
            score_rule(problem, task.b, task.h), scratch, floats, floats + kBlock * problem.head_dim, false};
  floats += kBlock * (problem.head_dim + problem.head_dim_v);
  int num_tiles = 0;
  for (int64_t done = 0; done < task.num_queries; done += kTile, ++num_tiles) {
    Tile& tile = scratch->tile[num_tiles];
    tile.first_query = task.first_query + done;
    tile.num_queries = task.num_queries - done < kTile ? static_cast<int>(task.num_queries - done) : kTile;
    tile.query = floats;
    tile.state.out = floats + problem.head_dim * kTile;
    floats += (problem.head_dim + problem.head_dim_v) * kTile;
    tile.ranges = tile_ranges(problem.band, s, tile.first_query, tile.num_queries);
    transpose_rows<Mac>(tile.query, rows_of(problem.query, task.b, task.h, s.first_q + tile.first_query),
                        tile.num_queries, problem.head_dim);
  }
  attend<Mac>(head, scratch->tile, num_tiles);
  for (int t = 0; t < num_tiles; ++t) {
    if (finish_tile(head, scratch->tile[t])) continue;
    head.careful = true;
    attend<Mac>(head, scratch->tile + t, 1);
    finish_tile(head, scratch->tile[t]);
    head.careful = false;
  }
}

}  // namespace

// Behind Scratch lie, in floats: K and V of a block, then Q^T and O^T of each tile.
size_t forward_scratch_bytes(int64_t head_dim, int64_t head_dim_v, int tiles) {
  const size_t dims = static_cast<size_t>(head_dim + head_dim_v);
  return round_up(sizeof(Scratch)) + round_up(dims * sizeof(float) * static_cast<size_t>(kBlock + tiles * kTile));
}

void forward_tiles(const Problem& problem, const ForwardTask& task, void* scratch) {
#ifdef POLYHEAD_HAS_BF16_DOT
  if (problem.dtype == DType::kBFloat16) return forward_task<BFloat16Pair>(problem, task, scratch);
#endif
  forward_task<Float32>(problem, task, scratch);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
