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

inline DecodeRow row_at(const Problem& problem, const DecodeTask& task, int64_t kv_head, int r) {
  const int64_t index = task.first_row + r;
  return {kv_head * problem.group + index / task.sequence.len_q, index % task.sequence.len_q, 0, 0, 0};
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
