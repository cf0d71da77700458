// Gradients of what is added to the scores, bias and ALiBi slopes: dS recomputed and summed where these broadcast.
//   dbias = sum dS   dslope = -sum dS |i + offset - j|
// A pass of its own over S and dP (two products more), where attention_backward.cc does not add dS as it goes: whoever
// owns an element of the bias sums it over batch and heads in order, in float32, so no partial sums are kept and no
// thread waits for another.
#include "cpu/attention/gradient.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct ScoreGradientMemory {
  GradientTile tile;
  ViewMemory view;
};

constexpr int64_t kScratchFloats = (sizeof(ScoreGradientMemory) + 63) / 64 * 16;

// sums[key][query] += what ds gives to the bias, or to ALiBi's slope.
template <int kRows>
inline void add_rows(float* sums, const Score& score, const Options::Memory& memory, const BlockView& view, bool slope,
                     F (&ds)[kRows], int key, int at) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    F x = score.gradient_after<MaskAndBias>(ds[r], view, key + r, at, memory);
    if (slope) {
      x = option<Alibi>(score.options)
              .slope_gradient(score.gradient_after<Alibi>(ds[r], view, key + r, at, memory), view.at(key + r, at),
                              view_of<Alibi>(score.options, view.options));
    }
    float* sum = sums + (key + r) * kTile + at;
    store(sum, load(sum) + x);
  }
}

// What add(head, tile, block, t) makes of the blocks that a task's tile sees.
template <class Mac, class Add>
void for_each_block(const BackwardProblem& gradients, const ScoreTask& task, float* memory, const Add& add) {
  const Problem& problem = gradients.forward;
  const Sequence& s = task.sequence;
  ScoreGradientMemory* scratch = reinterpret_cast<ScoreGradientMemory*>(memory);
  memory += kScratchFloats;
  GradientHead head = gradient_head(gradients, s, task.b, task.h, &scratch->view);
  const int64_t dim = whole(problem.head_dim, kDimStep), dim_v = whole(problem.head_dim_v, kDimStep);
  head.key_copy = take(memory, kBlock * dim);
  head.value_copy = take(memory, kBlock * dim_v);
  head.p = take(memory, kTileFloats);
  Later later;
  head.later = &later;
  head.score.options.take_memory(scratch->view.options, memory, true);
  GradientTile& tile = scratch->tile;
  tile.query = take(memory, dim * kTile);
  tile.grad_out = take(memory, dim_v * kTile);
  tile.first_query = task.first_query;
  tile.num_queries = s.len_q - tile.first_query < kTile ? static_cast<int>(s.len_q - tile.first_query) : kTile;
  tile.ranges = tile_ranges(problem.band, s, tile.first_query, tile.num_queries);
  const int64_t end = s.len_k - task.first_key < kScoreKeys ? s.len_k : task.first_key + kScoreKeys;
  if (!sees(tile, task.first_key, end)) return;
  load_tile<Mac>(head, tile, head.p);
  int64_t first = next_block(head, &tile, 1, task.first_key, end);
  for (; first < end; first = next_block(head, &tile, 1, first + kBlock, end)) {
    const KeyBlock block = load_keys<Mac>(head, first);
    const TileView t = view_present(head, tile, block, kTile);
    if (t.begin < t.end) add(head, tile, block, t);
  }
}

template <class Mac>
void add_task(const BackwardProblem& gradients, const ScoreTask& task, float* memory) {
  for_each_block<Mac>(
      gradients, task, memory, [&](const auto& head, const auto& tile, const auto& block, const auto& t) {
        float* sums = task.sums + (block.first - task.first_key) * kTile;
        for_each_part(t, [&](const Part& part, const BlockView& view) {
          weigh_part<Mac>(head, tile, block, view, part);
          differentiate_scores<Mac>(
              head, tile, block, view, part, true, {},
              [&]<int kRows>(F(&)[kRows], F(&ds)[kRows], int key, int at) {
                add_rows(sums, head.score, head.view_memory->options, view, task.distances, ds, key, at);
              },
              [](int, int) {});
        });
      });
}

}  // namespace

size_t score_scratch_bytes(int64_t head_dim, int64_t head_dim_v) {
  const int64_t dims = whole(head_dim, kDimStep) + whole(head_dim_v, kDimStep);
  const int64_t floats =
      kScratchFloats + (kBlock + kTile) * dims + kTileFloats + Options::memory_floats({true, true, true});
  return static_cast<size_t>((floats + 15) / 16 * 16) * sizeof(float);
}

void add_score_gradients(const BackwardProblem& problem, const ScoreTask& task, void* scratch) {
  with_words(in_bf16_pairs(problem), [&]<class Mac>() { add_task<Mac>(problem, task, static_cast<float*>(scratch)); });
}

void store_score_gradients(const Broadcast& to, int64_t at, const float* sums, int64_t num_queries, int64_t num_keys,
                           bool accumulate) {
  for (int64_t q = 0; q < num_queries; q += kLanes) {
    for (int64_t k = 0; k < num_keys; k += kLanes) {
      const int n = num_keys - k < kLanes ? static_cast<int>(num_keys - k) : kLanes;
      F block[kLanes];
      for (int i = 0; i < kLanes; ++i) {  // -0 becomes 0, as in sums that begin at 0
        block[i] = i < n ? load(sums + (k + i) * kTile + q) + broadcast(0.0f) : broadcast(0.0f);
      }
      transpose(block);
      for (int r = 0; r < kLanes && q + r < num_queries; ++r) {
        const int64_t row = at + (q + r) * to.stride_q + k * to.stride_k;
        store_sum(const_cast<void*>(to.data), to.dtype, row, to.stride_k, block[r], n, accumulate);
      }
    }
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
