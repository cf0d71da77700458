// A program on the rows of decoding: keys lie along the lanes, 64 of them, so that its code is the one with queries and
// keys in each other's places, and the rows of a strip are the queries of one head.
#pragma once

#include "cpu/attention/decode_products.h"
#include "cpu/attention/decode_softmax.h"
#include "cpu/attention/program/machine.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

class DecodeProgram {
 public:
  // `memory`: that of program_bytes() of call.h.
  DecodeProgram(const program::Call& call, float* memory) {
    if (call.code == nullptr) return;
    asked_ = &call;
    __builtin_memcpy(call_, &call, sizeof call);
    reinterpret_cast<program::Call*>(call_)->code = call.code->transposed;
    const auto address = reinterpret_cast<uintptr_t>(memory);
    memory_ = ProgramLayout(*call.code, false).at(reinterpret_cast<char*>(memory) + (64 - address % 64) % 64);
  }

  bool is_given() const { return asked_ != nullptr; }
  bool has_score() const { return asked_ != nullptr && transposed().code->score >= 0; }

  // Which keys of the chunk its mask shows each row, which from now on tells it; false: none to any. The rows are those of
  // a task from `first_row` on.
  bool look(int64_t b, const Sequence& s, DecodeRow* rows, int num_rows, int first_row, const DecodeChunk& chunk) {
    bool some = false;
    // Of the rows behind, each is the same query of another head as the one s.len_q before it.
    const int looked_at =
        transposed().code->mask_reads_head || s.len_q > num_rows ? num_rows : static_cast<int>(s.len_q);
    for_each_head(rows, looked_at, [&](int begin, int end) {
      uint16_t(*const shown)[kWords] = shown_ + first_row + begin;
      for (int r = begin; r < end; ++r) rows[r].shown = shown_[first_row + r];
      const int64_t last = chunk.first + chunk.num_keys - 1;
      const program::Region region{{b, b},
                                   {rows[begin].h, rows[begin].h},
                                   {rows[begin].i, rows[end - 1].i},
                                   {chunk.first, last},
                                   {s.offset, s.offset}};
      const program::Seen told = program::seen(*asked_, region);
      some = some || told != program::Seen::kNone;
      const uint16_t all = told == program::Seen::kNone ? 0 : 0xffff;
      for (int r = 0; r < end - begin; ++r) {
        for (uint16_t& word : shown[r]) word = all;
      }
      if (told != program::Seen::kSome) return;
      for_each_piece(chunk,
                     [&](int key) { look_at_piece(place(b, s, rows[begin], chunk, key), key, end - begin, shown); });
    });
    for (int r = looked_at; r < num_rows; ++r) look_as(rows[r - s.len_q], rows[r], first_row + r);
    return some;
  }

  // What the row sees that looked before. `number`: in the task.
  void look_as(const DecodeRow& looked, DecodeRow& row, int number) {
    row.shown = shown_[number];
    __builtin_memcpy(shown_[number], looked.shown, sizeof shown_[number]);
  }

  // scores [row][kRowScores] -> the program's, and which of them do not hide their key.
  void score(int64_t b, const Sequence& s, const DecodeRow* rows, int num_rows, int first_row, const DecodeChunk& chunk,
             float* scores) {
    for_each_head(rows, num_rows, [&](int begin, int end) {
      for_each_piece(chunk, [&](int key) {
        constexpr size_t kBytes = kTile * sizeof(float);
        float* const piece = scores + begin * kRowScores + key;
        for (int r = 0; r < end - begin; ++r)
          __builtin_memcpy(memory_.scores + r * kTile, piece + r * kRowScores, kBytes);
        const ProgramPlace at = place(b, s, rows[begin], chunk, key);
        prepare_score(transposed(), at, memory_, 0, end - begin);
        run_score(transposed(), at, memory_, 0, end - begin);
        for (int r = 0; r < end - begin; ++r) {
          const float* const result = memory_.results + r * kTile;
          __builtin_memcpy(piece + r * kRowScores, result, kBytes);
          uint16_t* const shown = shown_[first_row + begin + r] + key / 16;
          for (int lane = 0; lane < kTile; lane += kLanes) {
            const uint32_t hidden = bits(equal(load(result + lane), broadcast(-kInfinity))) & kAllLanes;
            shown[lane / 16] = static_cast<uint16_t>(shown[lane / 16] & ~(hidden << (lane % 16)));
          }
        }
      });
    });
  }

 private:
  const program::Call& transposed() const { return *reinterpret_cast<const program::Call*>(call_); }

  static constexpr int kWords = kDecodeChunk / 16;
  static constexpr uint32_t kAllLanes = (1u << (kLanes - 1) << 1) - 1;

  // Every kTile keys of which some block is seen.
  template <class Visit>
  static void for_each_piece(const DecodeChunk& chunk, const Visit& visit) {
    constexpr int kBlocks = kTile / kDecodeBlock;
    for (int key = 0; key < chunk.num_keys; key += kTile) {
      if ((chunk.blocks >> (key / kDecodeBlock) & ((1u << kBlocks) - 1)) != 0) visit(key);
    }
  }

  static ProgramPlace place(int64_t b, const Sequence& s, const DecodeRow& row, const DecodeChunk& chunk, int key) {
    return {b, row.h, s.offset, chunk.first + key, row.i};
  }

  void look_at_piece(const ProgramPlace& at, int key, int rows, uint16_t (*shown)[kWords]) {
    uint16_t seen[kMostQueries][kTile / 4];
    run_mask(transposed(), at, memory_, 0, rows, kTile, seen);
    for (int r = 0; r < rows; ++r) {
      for (int word = 0; word < kTile / 16; ++word) {
        uint32_t all = 0;
        for (int v = 0; v < 16 / kLanes; ++v) all |= uint32_t{seen[r][word * (16 / kLanes) + v]} << (v * kLanes);
        shown[r][key / 16 + word] = static_cast<uint16_t>(all);
      }
    }
  }

  static constexpr int kMostQueries = kDecodeRows;  // of one head in a task

  const program::Call* asked_ = nullptr;  // null: no program
  // With the transposed code; nothing, if there is no program.
  alignas(program::Call) char call_[sizeof(program::Call)];
  ProgramMemory memory_;
  uint16_t shown_[kDecodeRows][kWords];  // of the rows of all heads of a task
};

// Products of a row -> the scores of its options, in all blocks of the chunk that are seen.
inline void score_by_options(float* scores, const RowScore& x) {
  for_each_block(x.chunk, [&](int key, int) {
    for (int k = key; k < key + kDecodeBlock && x.at(k).n > 0; k += kLanes) {
      store(scores + k, x.of_options(load(scores + k), k));
    }
  });
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
