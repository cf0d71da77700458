// Products: rows and columns of C for one task, a chunk of K after the other.
#include "cpu/linear/epilogue.h"
#include "cpu/linear/gemm_pack.h"
#include "cpu/linear/gemm_stream.h"
#ifdef POLYHEAD_HAS_TMM
#include "cpu/linear/gemm_tmm.h"
#endif

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

int64_t whole_panels(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// Where the sums of a task stand until its last chunk: panel after panel, [rows][kColumns], in scratch or in the
// partial sums of a slice. With one chunk and nothing more to do than to add `onto` (C itself or a bias), whole panels
// go to C at once.
struct Sums {
  float* data = nullptr;
  int64_t panel_stride = 0;
  float* out = nullptr;  // in C; null: all in `data`
  ptrdiff_t out_stride = 0;
  Onto onto = {};

  // Of the columns from `column`, a panel's first, on.
  Onto onto_panel(int64_t column) const { return {onto.data == nullptr ? nullptr : onto.data + column, onto.stride}; }
};

struct GemmScratch {
  float *a, *panels, *sums;
};

constexpr int64_t kPanelWords = kChunkWords * kColumns;

int64_t a_floats(int64_t rows) {
  const int64_t along = (kTmm ? whole(rows, kTileRows) : rows) * kRowStride, across = whole_tiles(rows) * kTileStride;
  const int64_t most = along > across ? along : across;
  return (most + 15) / 16 * 16;
}

GemmScratch scratch_of(void* memory, int64_t rows, bool packs) {
  float* a = static_cast<float*>(memory);
  float* panels = a + a_floats(rows);
  return {a, panels, panels + (packs ? kGroupPanels * kPanelWords : 0)};
}

bool plain_columns(const Matrix& x) {
  return x.dtype == DType::kFloat32 && one_dim(x.rows) && one_dim(x.columns) && x.columns.strides[2] == 1;
}

template <class Mac>
Sums sums_of(const GemmWork& work, const GemmTask& task, bool streaming, float* scratch) {
  if (task.partial != nullptr) {
    return {task.partial + task.first_column / kColumns * task.panel_stride + task.first_row * kColumns,
            task.panel_stride};
  }
  Sums sums{scratch, task.num_rows * kColumns};
  const EpilogueWork& epilogue = work.epilogue;
  const bool biased = epilogue.bias.data != nullptr;
  const bool one_chunk = task.num_k <= kChunkWords * Mac::kElements;
  if (!one_chunk || !plain_columns(work.c) || epilogue.changes_more_than_bias) return sums;
  if (biased && (work.accumulate || !plain_columns(epilogue.bias))) return sums;
  if (streaming && (biased || work.accumulate)) return sums;
  sums.out_stride = work.c.rows.strides[2];
  sums.out = static_cast<float*>(work.c.data) + task.first_row * sums.out_stride + task.first_column;
  if (work.accumulate) sums.onto = {sums.out, sums.out_stride};
  if (biased) sums.onto = {static_cast<const float*>(epilogue.bias.data) + task.first_column, 0};
  return sums;
}

#ifndef POLYHEAD_HAS_TMM
// Packs rows of A tile by tile, each before it is first multiplied; the rows of the next one are asked for meanwhile.
// Measured on Zen 4 (2026-11-25, float32, one thread, B from memory, ms): [384, 768] x [768, 768] 4.24 to 4.11, [384, 3072]
// x [3072, 768] 17.2 to 16.5.
template <class Mac>
struct PackTiles {
  float* packed;
  const GemmWork& work;
  const GemmTask& task;
  int64_t k, num_k;
  ptrdiff_t row_bytes = work.a.rows.strides[2] * kBytes<Mac>;

  const char* operator()(int64_t tile) const {
    const int64_t first = tile * kTileRows, left = task.num_rows - first;
    pack_along<Mac>(packed + first * kRowStride, work.a, task.first_row + first, left < kTileRows ? left : kTileRows, k,
                    num_k);
    if (left < 2 * kTileRows || !one_dim(work.a.rows) || !plain_axis<Mac>(work.a, work.a.columns)) return nullptr;
    return static_cast<const char*>(work.a.data) + (task.first_row + first + kTileRows) * row_bytes + k * kBytes<Mac>;
  }
};
#endif

// Adds the terms [k, k + num_k) to the sums, or sets them with the first chunk.
template <class Mac>
void add_chunk(const GemmWork& work, const GemmTask& task, bool streaming, const GemmScratch& scratch, const Sums& sums,
               int64_t k, int64_t num_k) {
  const bool packed_along = packs_along(work.a) || streaming, along = packed_along || kTmm, add = k > task.first_k;
  const int64_t words = words_of(num_k, Mac::kElements);
  const bool by_tiles = packed_along && !streaming && !kTmm && num_k > 0;  // as the first panel's pass comes to them
  if (num_k == 0 || by_tiles) {
    // without terms C = epilogue(0)
  } else if (packed_along) {
    pack_along<Mac>(scratch.a, work.a, task.first_row, task.num_rows, k, num_k);
  } else {
    const Matrix across{work.a.data, work.a.dtype, work.a.columns, work.a.rows};
#ifdef POLYHEAD_HAS_TMM
    pack_turned<Mac>(scratch.a, across, task.first_row, task.num_rows, k, num_k);
#else
    pack_across<Mac>(scratch.a, kTileRows, kTileStride, across, task.first_row, task.num_rows, k, num_k);
#endif
  }
  const int64_t packed_stride = words_of(work.k, Mac::kElements) * kColumns;
  int64_t streamed = 0;
#ifndef POLYHEAD_HAS_TMM
  if (streaming && num_k > 0) {
    const bool to_c = sums.out != nullptr;
    const StreamSums to{to_c ? sums.out : sums.data, to_c ? kColumns : sums.panel_stride,
                        to_c ? sums.out_stride : kColumns};
    streamed = stream_columns<Mac>(static_cast<int>(task.num_rows), to, scratch.a, work.b, task.first_column,
                                   task.num_columns, k, num_k, add);
  }
#endif
  for (int64_t first = streamed; first < task.num_columns; first += kColumns) {
    const int64_t left = task.num_columns - first, columns = left < kColumns ? left : kColumns;
    const float *panel = nullptr, *next = nullptr;
    if (task.packed != nullptr) {
      panel = task.packed + (task.first_column + first) / kColumns * packed_stride + k / Mac::kElements * kColumns;
      next = panel + packed_stride;
    } else {
      const int64_t within = (first - streamed) / kColumns % kGroupPanels, group = kGroupPanels * kColumns;
      if (within == 0) {
        pack_columns<Mac>(scratch.panels, kPanelWords, work.b, task.first_column + first, left < group ? left : group,
                          k, num_k);
      }
      panel = scratch.panels + within * kPanelWords;
      next = panel + kPanelWords;
    }
    const bool to_c = sums.out != nullptr && columns == kColumns;
    float* out = to_c ? sums.out + first : sums.data + first / kColumns * sums.panel_stride;
    const ptrdiff_t stride = to_c ? sums.out_stride : kColumns;
    const Onto onto = add ? Onto{out, stride} : to_c ? sums.onto_panel(first) : Onto{};
    const auto multiply = [&]<bool kAlong>(const auto& prepare) {
      multiply_panel<Mac, kAlong>(out, stride, scratch.a, panel, next, words, task.num_rows, columns, onto, prepare);
    };
#ifndef POLYHEAD_HAS_TMM
    if (by_tiles && first == 0) {
      multiply.template operator()<true>(PackTiles<Mac>{scratch.a, work, task, k, num_k});
      continue;
    }
#endif
    if (along) {
      multiply.template operator()<true>(Packed());
    } else {
      multiply.template operator()<false>(Packed());
    }
  }
}

// Columns [first, end) of rows whose sums are complete, `first` being a panel's first: panels from `data` on, each
// [rows][kColumns].
void finish(const GemmWork& work, int64_t first_row, int64_t num_rows, int64_t first, int64_t end, const float* data,
            int64_t panel_stride) {
  for (int64_t r = 0; r < num_rows; ++r, data += kColumns) {
    if (!work.epilogue.changes() && !work.accumulate) {
      const Line row = row_of(work.c, first_row + r);
      const float* from = data;
      for (int64_t at = first; at < end; at += kColumns, from += panel_stride) {
        for (int lane = 0; lane < kColumns && at + lane < end; lane += kLanes) {
          const int64_t left = end - at - lane;
          store_line(row, at + lane, load(from + lane), left < kLanes ? static_cast<int>(left) : kLanes);
        }
      }
      continue;
    }
    const EpilogueRow line = epilogue_row(work.epilogue, work.c, first_row + r, work.accumulate);
    finish_row(work.epilogue, line, first_row + r, first, end, [&](int64_t at, int) {
      const int64_t column = at - first;
      return load(data + column / kColumns * panel_stride + column % kColumns);
    });
  }
}

template <class Mac>
void compute(const GemmWork& work, const GemmTask& task, void* memory) {
  const GemmScratch scratch = scratch_of(memory, task.num_rows, task.packed == nullptr);
  const bool streaming = task.packed == nullptr && streams<Mac>(task.num_rows, work.b);
  const Sums sums = sums_of<Mac>(work, task, streaming, scratch.sums);
  int64_t k = task.first_k;
  const int64_t end_k = task.first_k + task.num_k, chunk = kChunkWords * Mac::kElements;
  do {  // without terms, once: sums of 0
    add_chunk<Mac>(work, task, streaming, scratch, sums, k, end_k - k < chunk ? end_k - k : chunk);
    k += chunk;
  } while (k < end_k);
  if (task.partial != nullptr) return;
  const int64_t whole = sums.out == nullptr ? 0 : task.num_columns / kColumns * kColumns;  // columns that are in C
  finish(work, task.first_row, task.num_rows, task.first_column + whole, task.first_column + task.num_columns,
         sums.data + whole / kColumns * sums.panel_stride, sums.panel_stride);
}

}  // namespace

int word_elements(DType dtype) {
#ifdef POLYHEAD_HAS_BF16_DOT
  return dtype == DType::kBFloat16 ? 2 : 1;
#else
  (void)dtype;
  return 1;
#endif
}

void pack_panels(const Matrix& b, int64_t n, int64_t first_k, int64_t num_k, int64_t first_panel, int64_t end_panel,
                 float* packed, int64_t panel_stride) {
  const int64_t first = first_panel * kColumns, end = end_panel * kColumns < n ? end_panel * kColumns : n;
  with_words(b.dtype == DType::kBFloat16,
             [&]<class Mac>() { pack_columns<Mac>(packed, panel_stride, b, first, end - first, first_k, num_k); });
}

size_t part_scratch_bytes(int64_t num_rows, int64_t num_columns, bool packs) {
  const int64_t panels = packs ? kGroupPanels * kPanelWords : 0;
  const int64_t floats = a_floats(num_rows) + panels + num_rows * whole_panels(num_columns) * kColumns;
  return static_cast<size_t>((floats + 15) / 16 * 16) * sizeof(float);
}

void gemm_part(const GemmWork& work, const GemmTask& task, void* scratch) {
  with_words(work.dtype == DType::kBFloat16, [&]<class Mac>() { compute<Mac>(work, task, scratch); });
}

void gemm_merge(const GemmWork& work, int64_t first, int64_t end, float* partial, int64_t panel_stride,
                int64_t num_slices, int64_t slice_stride) {
  const int64_t panels = whole_panels(work.n);
  for (int64_t panel = 0; panel < panels; ++panel) {
    float* sums = partial + panel * panel_stride;
    for (int64_t slice = 1; slice < num_slices; ++slice) {
      const float* from = sums + slice * slice_stride;
      for (int64_t i = first * kColumns; i < end * kColumns; i += kLanes)
        store(sums + i, load(sums + i) + load(from + i));
    }
  }
  finish(work, first, end - first, 0, work.n, partial + first * kColumns, panel_stride);
}

const LinearFunctions kLinearFunctions = {kTmm,
                                          kColumns,
                                          kTileRows,
                                          word_elements,
                                          kChunkWords,
                                          kGroupPanels,
                                          pack_panels,
                                          part_scratch_bytes,
                                          gemm_part,
                                          gemm_merge,
                                          POLYHEAD_ISA_OF_ROWS::pointwise_rows,
                                          POLYHEAD_ISA_OF_ROWS::merge_sums,
                                          POLYHEAD_ISA_OF_ROWS::norm_forward_rows,
                                          POLYHEAD_ISA_OF_ROWS::norm_backward_rows};

}  // namespace polyhead::cpu::POLYHEAD_ISA
