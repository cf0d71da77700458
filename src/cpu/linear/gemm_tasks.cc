// Products cut into parts of C. Parts change no bit: an element's sum depends on K alone.
#include <algorithm>
#include <utility>

#include "cpu/linear/tasks.h"

namespace polyhead::cpu {
namespace {

constexpr int64_t kFewRows = 72;  // a part of fewer packs and reads too much again

int64_t whole(int64_t size, int64_t step) { return pieces(size, step) * step; }

// Equal parts, each a multiple of `step` and at most `most`.
int64_t equal_part(int64_t size, int64_t most, int64_t step) {
  return std::max(step, whole(pieces(size, pieces(size, most)), step));
}

struct Cut {
  int64_t rows = 0, columns = 0;  // of a part
  int64_t slices = 1, slice_k = 0;
  bool packs_first = false;  // B is packed as a whole, because several parts of rows use it

  int64_t parts(const linear::GemmDesc& desc) const { return pieces(desc.m, rows) * pieces(desc.n, columns); }
};

// Slices of K: from the sizes alone, because they decide the order of sums; of C and of its transpose the same.
void cut_k(const LinearFunctions& functions, const linear::GemmDesc& desc, Cut& cut) {
  constexpr int64_t kFewParts = 8, kSliceTerms = 1024;
  cut.slice_k = desc.k;
  const int64_t parts =
      pieces(std::min(desc.m, desc.n), functions.part_rows) * pieces(std::max(desc.m, desc.n), functions.part_columns);
  if (!desc.split_k || parts >= kFewParts) return;
  const int64_t slices = std::min(pieces(desc.k, kSliceTerms), pieces(2 * kFewParts, parts));
  if (slices < 2) return;
  cut.slice_k = whole(pieces(desc.k, slices), functions.chunk_words * functions.word_elements(desc.dtype));
  cut.slices = pieces(desc.k, cut.slice_k);
}

// Rows of a part, fewer than most where threads end together then. Measured on Zen 4 (2026-11-25, float32, two threads, packed
// weights, GFLOP/s at M = 384 and K x N of 768 x 3072, 3072 x 768, 768 x 768): 3 bands of 132 rows 194, 212, 224; 4 of 96
// 214, 219, 226.
int64_t balanced_rows(const linear::GemmDesc& desc, int64_t most, int64_t step, int64_t parts_of_band,
                      int num_threads) {
  constexpr int64_t kManyParts = 64;  // of a thread: ends lie close together
  const int64_t parts = pieces(desc.m, most) * parts_of_band;
  if (parts >= kManyParts * num_threads) return most;
  const auto longest = [&](int64_t rows) {  // of a thread, in rows
    const int64_t bands = pieces(desc.m, rows);
    return pieces(bands * parts_of_band, num_threads) * desc.m / bands;
  };
  int64_t best = most;
  for (int64_t bands = pieces(desc.m, most) + 1; bands <= pieces(desc.m, kFewRows); ++bands) {
    const int64_t rows = equal_part(desc.m, pieces(desc.m, bands), step);
    if (longest(rows) < longest(best)) best = rows;
  }
  return best;
}

Cut cut_of(const LinearFunctions& functions, const linear::GemmDesc& desc, int num_threads) {
  Cut cut;
  cut_k(functions, desc, cut);
  const int64_t step = functions.tile_rows;
  const bool packs_itself = !desc.prepacked && desc.m <= functions.unpacked_rows;
  cut.rows = equal_part(desc.m, packs_itself ? desc.m : functions.part_rows, step);
  // One row reads rows of B that are contiguous in long runs: of 1,024 columns 1.1 to 1.3 times as fast as of 512.
  const int64_t most_columns = (functions.tmm && desc.m == 1 ? 2 : 1) * functions.part_columns;
  cut.columns = equal_part(desc.n, most_columns, functions.panel_columns);
  if (num_threads > 1 && !packs_itself)
    cut.rows = balanced_rows(desc, cut.rows, step, pieces(desc.n, cut.columns) * cut.slices, num_threads);
  // Of parts that copy the same rows, each thread has one, or about as many as the others.
  const int64_t two_panels = 2 * functions.panel_columns;
  if (packs_itself && desc.m > step) {
    cut.columns = std::min(cut.columns, equal_part(desc.n, pieces(desc.n, num_threads), two_panels));
    if (cut.parts(desc) * cut.slices % num_threads != 0) {
      cut.columns = equal_part(desc.n, pieces(desc.n, whole(pieces(desc.n, cut.columns), num_threads)), two_panels);
    }
    if (cut.parts(desc) * cut.slices >= num_threads) return cut;
  }
  // Fewer columns, then fewer rows, until every thread has two parts.
  while (num_threads > 1 && cut.parts(desc) * cut.slices < 2 * int64_t{num_threads}) {
    if (cut.columns > two_panels) {
      cut.columns = whole(cut.columns / 2, functions.panel_columns);
    } else if (cut.rows > 2 * step) {
      cut.rows = whole(cut.rows / 2, step);
    } else {
      break;
    }
  }
  cut.packs_first = !desc.prepacked && desc.m > cut.rows;
  return cut;
}

// Where things lie in a call's workspace.
struct Workspace {
  size_t partial = 0, lanes = 0;  // offsets; B as it is packed comes first
  size_t lane_bytes = 0;          // of each thread
  MemorySize bytes;

  Workspace(const LinearFunctions& functions, const linear::GemmDesc& desc, const Cut& cut, int num_threads) {
    MemoryMap map;
    if (cut.packs_first) map.take_bytes(packed_bytes(functions, desc.k, desc.n, desc.dtype));
    const int64_t slices = cut.slices < 2 ? 0 : cut.slices;
    partial = map.take({slices, desc.m, whole(desc.n, functions.panel_columns)}, sizeof(float));
    const bool packs = !desc.prepacked && !cut.packs_first;
    lane_bytes = MemorySize(functions.part_scratch_bytes(std::min(cut.rows, desc.m), cut.columns, desc.k, packs))
                     .rounded_up(64)
                     .value();
    lanes = map.take({num_threads}, lane_bytes);
    bytes = map.bytes();
  }
};

linear::GemmDesc transposed(linear::GemmDesc desc) {
  std::swap(desc.m, desc.n);
  return desc;
}

// Whether C is computed as its transpose, B^T A^T: the same sums, but stored line by line where rows of C are contiguous
// and columns are not, as in gradients of torch's weights. Measured on Zen 5 (2026-11-21, float32, one thread): backward
// of a layer of [1, 384, 1024] with such weights 69 -> 38 ms.
bool transposes(const linear::GemmDesc& desc, const GemmWork& work) {
  return desc.split_k && !desc.prepacked && contiguous(work.c.rows) && !contiguous(work.c.columns) &&
         !work.epilogue.changes();
}

MemorySize workspace_bytes(const LinearFunctions& functions, const linear::GemmDesc& desc, int num_threads) {
  return Workspace(functions, desc, cut_of(functions, desc, num_threads), num_threads).bytes;
}

}  // namespace

MemorySize packed_bytes(const LinearFunctions& functions, int64_t k, int64_t n, DType dtype) {
  const int64_t words = pieces(k, functions.word_elements(dtype));
  return MemorySize(n).rounded_up(static_cast<uint64_t>(functions.panel_columns)) * words * sizeof(float);
}

void pack(const LinearFunctions& functions, const Matrix& b, void* packed, const Run& run) {
  const Matrix from = collapsed(b);
  const int64_t k = b.rows.size(), n = b.columns.size();
  const int64_t panels = pieces(n, functions.panel_columns);
  const int elements = functions.word_elements(b.dtype);
  const int64_t panel_stride = pieces(k, elements) * functions.panel_columns;
  constexpr int64_t kFewWords = 128, group = 8;
  int64_t chunk = functions.chunk_words * elements;
  const auto tasks = [&] { return pieces(panels, group) * pieces(k, chunk); };
  while (run.num_threads > 1 && tasks() < 4 * run.num_threads && chunk > kFewWords * elements) chunk /= 2;
  const int64_t chunks = pieces(k, chunk);
  run_tasks(run, tasks(), [&](int64_t index, int) {
    const int64_t first_panel = index / chunks * group, first_k = index % chunks * chunk;
    float* to = static_cast<float*>(packed) + first_panel * panel_stride + first_k / elements * functions.panel_columns;
    functions.pack_panels(from, n, first_k, std::min(chunk, k - first_k), first_panel,
                          std::min(panels, first_panel + group), to, panel_stride);
  });
}

MemorySize gemm_workspace_bytes(const LinearFunctions& functions, const linear::GemmDesc& desc, int num_threads) {
  if (desc.m == 0 || desc.n == 0) return 0;
  // Of matrices beyond the address space there is no call: what follows counts their parts in 64 bits.
  const MemorySize largest = MemorySize(64) * std::max(MemorySize(desc.m) * desc.n, MemorySize(desc.k));
  if (!largest.fits()) return largest;
  const MemorySize bytes = workspace_bytes(functions, desc, num_threads);
  if (!desc.split_k || desc.prepacked) return bytes;
  return std::max(bytes, workspace_bytes(functions, transposed(desc), num_threads));
}

void gemm(const LinearFunctions& functions, const linear::GemmDesc& desc, const linear::GemmArgs& args,
          const Run& run) {
  if (desc.m == 0 || desc.n == 0) return;
  GemmWork work{desc.dtype,
                collapsed(args.a),
                collapsed(args.b),
                collapsed(args.c),
                args.accumulate,
                epilogue_work(args.epilogue, args.c.rows),
                desc.n,
                desc.k};
  if (transposes(desc, work)) {
    linear::GemmArgs swapped = args;
    swapped.a = args.b.transposed(), swapped.b = args.a.transposed(), swapped.c = args.c.transposed();
    return gemm(functions, transposed(desc), swapped, run);
  }
  const Cut cut = cut_of(functions, desc, run.num_threads);
  const Workspace at(functions, desc, cut, run.num_threads);
  char* workspace = static_cast<char*>(args.workspace);
  float* partial = reinterpret_cast<float*>(workspace + at.partial);
  const float* packed = desc.prepacked ? static_cast<const float*>(args.prepacked) : nullptr;
  if (cut.packs_first) {
    pack(functions, args.b, workspace, run);
    packed = reinterpret_cast<const float*>(workspace);
  }
  const int64_t row_parts = pieces(desc.m, cut.rows), parts = cut.parts(desc);
  const auto row_of = [&](int64_t part) {  // the first; parts of whole tiles, as equal as these allow
    return std::min(desc.m, pieces(desc.m, functions.tile_rows) * part / row_parts * functions.tile_rows);
  };
  const int64_t panel_stride = desc.m * functions.panel_columns;
  const int64_t slice_stride = desc.m * whole(desc.n, functions.panel_columns);
  run_tasks(run, parts * cut.slices, [&](int64_t index, int lane) {
    const int64_t slice = index / parts, part = index % parts;
    GemmTask task;
    task.first_row = row_of(part % row_parts);
    task.num_rows = row_of(part % row_parts + 1) - task.first_row;
    task.first_column = part / row_parts * cut.columns;
    task.num_columns = std::min(cut.columns, desc.n - task.first_column);
    task.first_k = slice * cut.slice_k;
    task.num_k = std::min(cut.slice_k, desc.k - task.first_k);
    task.packed = packed;
    task.partial = cut.slices < 2 ? nullptr : partial + slice * slice_stride;
    task.panel_stride = panel_stride;
    functions.gemm_part(work, task, workspace + at.lanes + at.lane_bytes * static_cast<size_t>(lane));
  });
  if (cut.slices < 2) return;
  constexpr int64_t kMergedRows = 16;
  run_tasks(run, pieces(desc.m, kMergedRows), [&](int64_t index, int) {
    functions.gemm_merge(work, index * kMergedRows, std::min(desc.m, (index + 1) * kMergedRows), partial, panel_stride,
                         cut.slices, slice_stride);
  });
}

}  // namespace polyhead::cpu
