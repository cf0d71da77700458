// Epilogues without a product, and sums over rows.
#include "cpu/linear/epilogue.h"

namespace polyhead::cpu::POLYHEAD_ISA {

void pointwise_rows(const PointwiseWork& work, int64_t first, int64_t end, float* sums) {
  for (int64_t at = 0; sums != nullptr && at < work.n; at += kLanes) store(sums + at, broadcast(0.0f));
  for (int64_t row = first; row < end; ++row) {
    EpilogueRow line = epilogue_row(work.epilogue, work.y, row, work.accumulate);
    line.sums = sums;
    const Line x = row_of(work.x, row);
    finish_row(work.epilogue, line, row, 0, work.n, [&](int64_t at, int n) { return load_line(x, at, n); });
  }
}

void merge_sums(const Matrix& out, bool accumulate, int64_t n, const float* partial, int64_t count, int64_t stride) {
  const Line to = row_of(out, 0);
  for (int64_t at = 0; at < n; at += kLanes) {
    const int num = n - at < kLanes ? static_cast<int>(n - at) : kLanes;
    F sum = broadcast(0.0f);
    for (int64_t i = 0; i < count; ++i) sum = sum + load(partial + i * stride + at);
    if (accumulate) sum = sum + load_line(to, at, num);
    store_line(to, at, sum, num);
  }
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
