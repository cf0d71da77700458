// Products: rows and columns of C for one task, a chunk of K after the other.
#include "cpu/linear/epilogue.h"
#include "cpu/linear/gemm_pack.h"
#ifdef POLYHEAD_HAS_TMM
#include "cpu/linear/gemm_stream_tmm.h"
#else
#include "cpu/linear/gemm_stream.h"
#endif

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

int64_t whole_panels(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// Where the sums of a task stand until its last chunk: panel after panel, [rows][kColumns], in scratch or in the
// partial sums of a slice. With nothing more to do than to add `onto` (C itself or a bias), the last chunk sends whole panels
// to C.
struct Sums {
  float* data = nullptr;
  int64_t panel_stride = 0;
  float* out = nullptr;         // in C
  uint16_t* rounded = nullptr;  // likewise, where C is bfloat16; both null: all in `data`
  ptrdiff_t out_stride = 0;
  Onto onto = {};

  bool ends_in_c() const { return out != nullptr || rounded != nullptr; }

  // Of the panel from `column` on. add: to those of the chunks before.
  PanelSums of_panel(int64_t column, bool to_c, bool add) const {
    float* const sums = data + column / kColumns * panel_stride;
    const Onto before{add ? sums : nullptr, kColumns};
    if (!to_c) return {sums, kColumns, before, {}};
    const Onto more{onto.data == nullptr ? nullptr : onto.data + column, onto.stride};
    if (kTmm && rounded != nullptr) return {nullptr, out_stride, before, more, rounded + column};
    return {out + column, out_stride, before, more};
  }
};

struct GemmScratch {
  float *a, *panels, *sums;
};

constexpr int64_t kPanelWords = kChunkWords * kColumns;

// `rows` rows of A as they are packed: a chunk of them, or all of the `k` terms of those that may stream, as B is not packed.
int64_t a_floats(int64_t rows, int64_t k, bool packs) {
  if (packs && may_stream(rows, k)) {
    const int64_t words = kTmm ? words_of(k, 2) : k;
    return whole(rows, kStreamTile) * kRowStride * ((words + kChunkWords - 1) / kChunkWords + 1);
  }
  const int64_t along = (kTmm ? whole(rows, kTileRows) : rows) * kRowStride, across = whole_tiles(rows) * kTileStride;
  const int64_t most = along > across ? along : across;
  return (most + 15) / 16 * 16;
}

int64_t panel_floats(bool packs) { return packs ? kGroupPanels * kPanelWords : 0; }

GemmScratch scratch_of(void* memory, int64_t rows, int64_t k, bool packs) {
  float* a = static_cast<float*>(memory);
  float* panels = a + a_floats(rows, k, packs);
  return {a, panels, panels + panel_floats(packs)};
}

bool plain(const Matrix& x, DType dtype) { return x.dtype == dtype && one_dim(x.rows) && contiguous(x.columns); }

// Registers tmm leave a tile's sums in memory anyway: from there they go to C in bfloat16, with the bias as floats in `bias`.
Sums rounded_sums(const GemmWork& work, const GemmTask& task, Sums sums, float* bias) {
  if (work.accumulate || work.epilogue.changes_more_than_bias || !plain(work.c, DType::kBFloat16)) return sums;
  sums.out_stride = work.c.rows.strides[2];
  sums.rounded = static_cast<uint16_t*>(work.c.data) + task.first_row * sums.out_stride + task.first_column;
  if (work.epilogue.bias.data == nullptr) return sums;
  const Line line = row_of(work.epilogue.bias, 0);
  for (int64_t at = 0; at < task.num_columns; at += kLanes) {
    const int64_t left = task.num_columns - at;
    store(bias + at, load_line(line, task.first_column + at, left < kLanes ? static_cast<int>(left) : kLanes));
  }
  sums.onto = {bias, 0};
  return sums;
}

Sums sums_of(const GemmWork& work, const GemmTask& task, bool streaming, float* scratch) {
  if (task.partial != nullptr) {
    return {task.partial + task.first_column / kColumns * task.panel_stride + task.first_row * kColumns,
            task.panel_stride};
  }
  Sums sums{scratch, task.num_rows * kColumns};
  if (kTmm && work.c.dtype == DType::kBFloat16) {
    return rounded_sums(work, task, sums, scratch + whole_panels(task.num_columns) * sums.panel_stride);
  }
  const EpilogueWork& epilogue = work.epilogue;
  const bool biased = epilogue.bias.data != nullptr;
  if (!plain(work.c, DType::kFloat32) || epilogue.changes_more_than_bias) return sums;
  if (biased && (work.accumulate || !plain(epilogue.bias, DType::kFloat32))) return sums;
  if (!kTmm && streaming && (biased || work.accumulate)) return sums;
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

  LinesAhead operator()(int64_t tile) const {
    const int64_t first = tile * kTileRows, left = task.num_rows - first;
    pack_along<Mac>(packed + first * kRowStride, work.a, task.first_row + first, left < kTileRows ? left : kTileRows, k,
                    num_k);
    if (left < 2 * kTileRows || !one_dim(work.a.rows) || !contiguous(work.a.columns)) return {};
    const int64_t bytes = element_bytes(work.a.dtype);
    const ptrdiff_t row_bytes = work.a.rows.strides[2] * bytes;
    const char* const data = static_cast<const char*>(work.a.data) + k * bytes;
    return {data + (task.first_row + first + kTileRows) * row_bytes, row_bytes, kTileRows, Mac::kElements * bytes};
  }
};
#endif

// Columns [first, end) of rows whose sums are complete, `first` being a panel's first: panels from `data` on, each
// [rows][kColumns].
void finish(const GemmWork& work, int64_t first_row, int64_t num_rows, int64_t first, int64_t end, const float* data,
            int64_t panel_stride) {
  for (int64_t row = first_row; row < first_row + num_rows; ++row, data += kColumns) {
    const auto sums = [&](int64_t at, int /*n*/) {
      const int64_t column = at - first;
      return load(data + column / kColumns * panel_stride + column % kColumns);
    };
    if (work.epilogue.changes() || work.accumulate) {
      const EpilogueRow line = epilogue_row(work.epilogue, work.c, row, work.accumulate);
      finish_row(work.epilogue, line, row, first, end, sums);
      continue;
    }
    const Line line = row_of(work.c, row);
    for (int64_t at = first; at < end; at += kLanes) {
      const int n = end - at < kLanes ? static_cast<int>(end - at) : kLanes;
      store_line(line, at, sums(at, n), n);
    }
  }
}

// Where whole panels of the task go in C.
LinesOfC lines_of_c(const GemmWork& work, const GemmTask& task, int64_t column, int64_t columns) {
  const ptrdiff_t stride = work.c.rows.strides[2], element = element_bytes(work.c.dtype);
  const char* const c = static_cast<const char*>(work.c.data);
  return {c + (task.first_row * stride + task.first_column + column) * element, stride * element,
          columns * element - 1};
}

// The columns that stream, of all terms; returns how many.
#ifdef POLYHEAD_HAS_TMM
template <class Mac>
int64_t stream(const GemmWork& work, const GemmTask& task, const GemmScratch& scratch, const Sums& sums) {
  const int num_rows = static_cast<int>(task.num_rows);
  const int64_t columns = task.num_columns / kColumns * kColumns;
  if (columns == 0) return 0;
  const Terms terms{task.first_k, task.num_k};
  const bool along = streams_along(work.b);
  const auto put = [&](int64_t row, int64_t column, const float* rows, bool add, bool last) {
    const int64_t left = num_rows - row, most = along ? kTileRows : kTmmRows;
    put_rows<kPanelVecs>(sums.of_panel(column, last && sums.ends_in_c(), add).from_row(row), rows,
                         left < most ? left : most);
  };
  if (along) {
    pack_turned_rows<Mac>(scratch.a, work.a, task.first_row, num_rows, terms);
    stream_along<Mac>(work.b, task.first_column, columns, scratch.a, num_rows, terms, put);
  } else {
    pack_chunks<Mac>(scratch.a, work.a, task.first_row, num_rows, terms);
    if (num_rows == 1) {
      stream_row(work.b, task.first_column, columns, scratch.a, terms, put);
    } else {
      stream_across(work.b, task.first_column, columns, scratch.a, num_rows, terms, put);
    }
  }
  return columns;
}
#else
template <class Mac>
int64_t stream(const GemmWork& work, const GemmTask& task, const GemmScratch& scratch, const Sums& sums) {
  static_assert(kGroupPanels * kPanelWords >= kStreamSums);
  const int num_rows = static_cast<int>(task.num_rows), rows = stream_rows(num_rows);
  const int64_t end_k = task.first_k + task.num_k, chunk = kChunkWords * Mac::kElements;
  float* a = scratch.a;
  for (int64_t k = task.first_k; k < end_k; k += chunk, a += rows * kRowStride) {
    pack_along<Mac>(a, work.a, task.first_row, num_rows, k, end_k - k < chunk ? end_k - k : chunk);
    __builtin_memset(a + num_rows * kRowStride, 0, static_cast<size_t>((rows - num_rows) * kRowStride) * sizeof(float));
  }
  const bool to_c = sums.out != nullptr;
  const StreamSums to{to_c ? sums.out : sums.data, to_c ? kColumns : sums.panel_stride,
                      to_c ? sums.out_stride : kColumns};
  int64_t streamed = 0;
  with_stored<Mac>(work.b.dtype, [&]<DType kDType>() {
    streamed = stream_columns<Mac, kDType>(to, {scratch.a, num_rows, task.first_k, task.num_k}, work.b,
                                           task.first_column, task.num_columns, scratch.panels);
  });
  return streamed;
}
#endif

// Columns of B that are packed after those from `first` on, as many as a pass asks for. Where rows of B are contiguous, packing asks
// itself: Xeon, family 6 model 106, 2026-11-27, float32, one thread, [32, 1024] x [1024, 1024] 0.74 ms, asked for here 0.85.
template <class Mac>
LinesAhead next_columns(const GemmWork& work, const GemmTask& task, int64_t first, int64_t num, int64_t k) {
  const Matrix& b = work.b;
  const int64_t left = task.num_columns - first, bytes = element_bytes(b.dtype);
  if (left <= 0 || !contiguous(b.rows) || !one_dim(b.columns)) return {};
  const ptrdiff_t column_bytes = b.columns.strides[2] * bytes;
  const char* const data = static_cast<const char*>(b.data) + k * bytes;
  return {data + (task.first_column + first) * column_bytes, column_bytes, left < num ? left : num,
          Mac::kElements * bytes};
}

// The panel of the task's columns from `first` on, or two, of the terms [k, k + num_k): as B was packed before, or packed now, a
// few panels together from the column `begin` on.
template <class Mac>
Panels panels_at(const GemmWork& work, const GemmTask& task, int64_t begin, int64_t first, float* memory, int64_t k,
                 int64_t num_k) {
  const int64_t left = task.num_columns - first;
  // Of few rows the first half would wait for a panel that comes from memory, where a whole tile is work enough meanwhile.
  const bool pair = kPairs && task.num_rows > 2 * kTileRows && left >= 2 * kColumns;
  Panels panels;
  panels.columns = pair ? 2 * kColumns : left < kColumns ? left : kColumns;
  if (task.packed != nullptr) {
    panels.apart = words_of(work.k, Mac::kElements) * kColumns;
    panels.data = task.packed + (task.first_column + first) / kColumns * panels.apart + k / Mac::kElements * kColumns;
    panels.next = panels.data + (pair ? 2 : 1) * panels.apart;
    return panels;
  }
  constexpr int64_t kTogether = kGroupPanels * kColumns;
  const int64_t within = (first - begin) % kTogether;
  if (within == 0) {
    pack_columns<Mac>(memory, kPanelWords, work.b, task.first_column + first, left < kTogether ? left : kTogether, k,
                      num_k);
  }
  panels.apart = kPanelWords;
  panels.data = memory + within / kColumns * kPanelWords;
  panels.source = next_columns<Mac>(work, task, first + kTogether, panels.columns, k);
  return panels;
}

// Adds the terms [k, k + num_k) to the sums of the columns from `begin` on, or sets them with the first chunk.
template <class Mac>
void add_chunk(const GemmWork& work, const GemmTask& task, int64_t begin, const GemmScratch& scratch, const Sums& sums,
               int64_t k, int64_t num_k) {
  const bool packed_along = packs_along(work.a), along = packed_along || kTmm, add = k > task.first_k;
  const bool last = k + num_k == task.first_k + task.num_k;
  const int64_t words = words_of(num_k, Mac::kElements);
  const bool by_tiles = packed_along && !kTmm && num_k > 0;  // as the first panel's pass comes to them
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
  Panels panels;
  for (int64_t first = begin; first < task.num_columns; first += panels.columns) {
    panels = panels_at<Mac>(work, task, begin, first, scratch.panels, k, num_k);
    const bool to_c = last && sums.ends_in_c() && panels.columns % kColumns == 0;
    const PanelSums to[] = {sums.of_panel(first, to_c, add), sums.of_panel(first + kColumns, to_c, add)};
    const LinesOfC c = to_c ? lines_of_c(work, task, first, panels.columns) : LinesOfC();
    const auto multiply = [&]<bool kAlong>(const auto& prepare) {
      multiply_panels<Mac, kAlong>(to, c, scratch.a, panels, words, task.num_rows, prepare);
    };
#ifndef POLYHEAD_HAS_TMM
    if (by_tiles && first == begin) {
      multiply.template operator()<true>(PackTiles<Mac>{scratch.a, work, task, k, num_k});
    } else
#endif
        if (along) {
      multiply.template operator()<true>(Packed());
    } else {
      multiply.template operator()<false>(Packed());
    }
  }
}

template <class Mac>
void compute(const GemmWork& work, const GemmTask& task, void* memory) {
  const bool packs = task.packed == nullptr;
  const GemmScratch scratch = scratch_of(memory, task.num_rows, work.k, packs);
  const bool streaming = packs && may_stream(task.num_rows, work.k) && task.num_k > 0 && streams(task.num_rows, work.b);
  const Sums sums = sums_of(work, task, streaming, scratch.sums);
  int64_t k = task.first_k, streamed = 0;
  if (streaming) streamed = stream<Mac>(work, task, scratch, sums);
  const int64_t end_k = task.first_k + task.num_k, chunk = kChunkWords * Mac::kElements;
  while (streamed < task.num_columns) {  // without terms, once: sums of 0
    add_chunk<Mac>(work, task, streamed, scratch, sums, k, end_k - k < chunk ? end_k - k : chunk);
    k += chunk;
    if (k >= end_k) break;
  }
  if (task.partial != nullptr) return;
  const int64_t whole = sums.ends_in_c() ? task.num_columns / kColumns * kColumns : 0;  // columns that are in C
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

size_t part_scratch_bytes(int64_t num_rows, int64_t num_columns, int64_t k, bool packs) {
  const int64_t bias_rows = kTmm ? 1 : 0, sums = (num_rows + bias_rows) * whole_panels(num_columns) * kColumns;
  const int64_t floats = a_floats(num_rows, k, packs) + panel_floats(packs) + sums;
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
                                          kUnpackedRows,
                                          kPartRows,
                                          kPartColumns,
                                          pack_panels,
                                          part_scratch_bytes,
                                          gemm_part,
                                          gemm_merge,
                                          POLYHEAD_ISA_OF_ROWS::pointwise_rows,
                                          POLYHEAD_ISA_OF_ROWS::merge_sums,
                                          POLYHEAD_ISA_OF_ROWS::norm_forward_rows,
                                          POLYHEAD_ISA_OF_ROWS::norm_backward_rows};

}  // namespace polyhead::cpu::POLYHEAD_ISA
