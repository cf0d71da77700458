// What decoding keeps of a chunk of keys, and which queries its rows are.
#pragma once

#include "cpu/attention/decode_softmax.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

// m of a chunk of which a row's task sees nothing: O is not there.
constexpr float kNotComputed = -kInfinity;

// A partial result, in floats: m [rows], l [rows], both padded to vectors, O [padded rows][Dv, padded to vectors].
struct PartialLayout {
  int64_t statistics, out_stride, floats;
  PartialLayout(int rows, int64_t head_dim_v)
      : statistics(whole(rows, 16)),
        out_stride(whole(head_dim_v, 16)),
        floats(2 * statistics + padded_rows(rows) * out_stride) {}
};

// The rows of a task of one key/value head, one after the other.
inline DecodeRow first_row(const Problem& problem, const DecodeTask& task, int64_t kv_head) {
  const int64_t h = kv_head * problem.group;
  if (task.first_row == 0) return {h, 0, 0, 0, 0};
  return {h + task.first_row / task.sequence.len_q, task.first_row % task.sequence.len_q, 0, 0, 0};
}
inline void go_on(DecodeRow& row, const DecodeTask& task) {
  if (++row.i == task.sequence.len_q) ++row.h, row.i = 0;
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
