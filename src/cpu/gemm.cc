// Products: rows and columns of C for one task, a chunk of K after the other.
#include "cpu/epilogue.h"
#include "cpu/gemm_pack.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

int64_t whole_panels(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// Where the sums of a task stand until its last chunk: in C itself, in the partial sums of a slice, or in scratch. A
// last panel of fewer columns has a place of its own where C is used itself.
struct Sums {
  float *data = nullptr, *tail = nullptr;
  ptrdiff_t stride = 0;

  float* panel(int64_t first, int64_t columns) const {
    return tail != nullptr && columns < kColumns ? tail : data + first;
  }
  ptrdiff_t panel_stride(int64_t columns) const { return tail != nullptr && columns < kColumns ? kColumns : stride; }
};

struct Scratch {
  float *a, *panels, *sums;
};

constexpr int64_t kPanelWords = kChunkWords * kColumns;

int64_t a_floats(int64_t rows) {
  const int64_t along = rows * kRowStride, across = whole_tiles(rows) * kTileStride;
  const int64_t most = along > across ? along : across;
  return (most + 15) / 16 * 16;
}

Scratch scratch_of(void* memory, int64_t rows, bool packs) {
  float* a = static_cast<float*>(memory);
  float* panels = a + a_floats(rows);
  return {a, panels, panels + (packs ? kGroupPanels * kPanelWords : 0)};
}

bool in_place(const GemmWork& work, const GemmTask& task) {
  const Matrix& c = work.c;
  return task.partial == nullptr && c.dtype == DType::kFloat32 && one_dim(c.rows) && one_dim(c.columns) &&
         c.columns.strides[2] == 1 && !work.accumulate && work.epilogue.residual.data == nullptr;
}

Sums sums_of(const GemmWork& work, const GemmTask& task, float* scratch) {
  if (task.partial != nullptr) {
    return {task.partial + task.first_row * task.partial_stride + task.first_column, nullptr, task.partial_stride};
  }
  if (in_place(work, task)) {
    const ptrdiff_t stride = work.c.rows.strides[2];
    return {static_cast<float*>(work.c.data) + task.first_row * stride + task.first_column, scratch, stride};
  }
  return {scratch, nullptr, whole_panels(task.num_columns) * kColumns};
}

// Adds the terms [k, k + num_k) to the sums, or sets them with the first chunk.
template <class Mac>
void add_chunk(const GemmWork& work, const GemmTask& task, const Scratch& scratch, const Sums& sums, int64_t k,
               int64_t num_k) {
  const bool along = packs_along(work.a), add = k > task.first_k;
  const int64_t words = words_of(num_k, Mac::kElements);
  if (num_k == 0) {
    // C = epilogue(0)
  } else if (along) {
    pack_along<Mac>(scratch.a, work.a, task.first_row, task.num_rows, k, num_k);
  } else {
    const Matrix across{work.a.data, work.a.dtype, work.a.columns, work.a.rows};
    pack_across<Mac>(scratch.a, kTileRows, kTileStride, across, task.first_row, task.num_rows, k, num_k);
  }
  const int64_t packed_stride = words_of(work.k, Mac::kElements) * kColumns;
  for (int64_t first = 0; first < task.num_columns; first += kColumns) {
    const int64_t left = task.num_columns - first, columns = left < kColumns ? left : kColumns;
    const float* panel = nullptr;
    if (task.packed != nullptr) {
      panel = task.packed + (task.first_column + first) / kColumns * packed_stride + k / Mac::kElements * kColumns;
    } else {
      const int64_t within = first / kColumns % kGroupPanels, group = kGroupPanels * kColumns;
      if (within == 0) {
        pack_columns<Mac>(scratch.panels, kPanelWords, work.b, task.first_column + first, left < group ? left : group,
                          k, num_k);
      }
      panel = scratch.panels + within * kPanelWords;
    }
    float* out = sums.panel(first, columns);
    const ptrdiff_t stride = sums.panel_stride(columns);
    if (along) {
      multiply_panel<Mac, true>(out, stride, scratch.a, panel, words, task.num_rows, columns, add);
    } else {
      multiply_panel<Mac, false>(out, stride, scratch.a, panel, words, task.num_rows, columns, add);
    }
  }
}

// Columns [first, end) of rows whose sums are complete: row r of the task's at data + r * stride, from `first` on.
void finish(const GemmWork& work, int64_t first_row, int64_t num_rows, int64_t first, int64_t end, const float* data,
            ptrdiff_t stride) {
  for (int64_t r = 0; r < num_rows; ++r, data += stride) {
    const EpilogueRow line = epilogue_row(work.epilogue, work.c, first_row + r, work.accumulate);
    finish_row(work.epilogue, line, first_row + r, first, end,
               [&](int64_t at, int n) { return load_first(data + (at - first), n); });
  }
}

template <class Mac>
void compute(const GemmWork& work, const GemmTask& task, void* memory) {
  const Scratch scratch = scratch_of(memory, task.num_rows, task.packed == nullptr);
  const Sums sums = sums_of(work, task, scratch.sums);
  int64_t k = task.first_k;
  const int64_t end_k = task.first_k + task.num_k, chunk = kChunkWords * Mac::kElements;
  do {  // without terms, once: sums of 0
    add_chunk<Mac>(work, task, scratch, sums, k, end_k - k < chunk ? end_k - k : chunk);
    k += chunk;
  } while (k < end_k);
  if (task.partial != nullptr) return;
  const int64_t end = task.first_column + task.num_columns;
  const int64_t tail = sums.tail == nullptr ? 0 : task.num_columns % kColumns;
  if (sums.tail == nullptr || work.epilogue.changes) {
    finish(work, task.first_row, task.num_rows, task.first_column, end - tail, sums.data, sums.stride);
  }
  if (tail > 0) finish(work, task.first_row, task.num_rows, end - tail, end, sums.tail, kColumns);
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
#ifdef POLYHEAD_HAS_BF16_DOT
  if (b.dtype == DType::kBFloat16) {
    return pack_columns<BFloat16Pair>(packed, panel_stride, b, first, end - first, first_k, num_k);
  }
#endif
  pack_columns<Float32>(packed, panel_stride, b, first, end - first, first_k, num_k);
}

size_t block_scratch_bytes(int64_t num_rows, int64_t num_columns, bool packs) {
  const int64_t panels = packs ? kGroupPanels * kPanelWords : 0;
  const int64_t floats = a_floats(num_rows) + panels + num_rows * whole_panels(num_columns) * kColumns;
  return static_cast<size_t>((floats + 15) / 16 * 16) * sizeof(float);
}

void gemm_block(const GemmWork& work, const GemmTask& task, void* scratch) {
#ifdef POLYHEAD_HAS_BF16_DOT
  if (work.dtype == DType::kBFloat16) return compute<BFloat16Pair>(work, task, scratch);
#endif
  compute<Float32>(work, task, scratch);
}

void gemm_merge(const GemmWork& work, int64_t first, int64_t end, float* partial, int64_t partial_stride,
                int64_t num_slices, int64_t slice_stride) {
  for (int64_t row = first; row < end; ++row) {
    float* sum = partial + row * partial_stride;
    for (int64_t slice = 1; slice < num_slices; ++slice) {
      const float* from = sum + slice * slice_stride;
      for (int64_t n = 0; n < partial_stride; n += kLanes) store(sum + n, load(sum + n) + load(from + n));
    }
    finish(work, row, 1, 0, work.n, sum, partial_stride);
  }
}

const LinearFunctions kLinearFunctions = {
    kColumns,   kTileRows,  word_elements,  kChunkWords, kGroupPanels,      pack_panels,       block_scratch_bytes,
    gemm_block, gemm_merge, pointwise_rows, merge_sums,  norm_forward_rows, norm_backward_rows};

}  // namespace polyhead::cpu::POLYHEAD_ISA
