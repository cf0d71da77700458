// The mask of a program, and the memory of its score: that runs on whole tiles (policy.h).
#pragma once

#include "cpu/attention/program/machine.h"
#include "cpu/attention/score/option.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

struct ProgramMask : Option {
  const program::Call& call;
  int64_t b, h, offset;
  bool has_mask, has_program;

  struct View {
    const uint16_t (*seen)[kTileQueries / 4] = nullptr;  // [key][vector]; null: all is seen
  };
  struct Memory {
    ProgramMemory program;
    uint16_t seen[kBlock][kTileQueries / 4];
  };

  static constexpr bool kHides = true;

  ProgramMask(const Problem& problem, const Sequence& sequence, int64_t b_, int64_t h_)
      : call(problem.program),
        b(b_),
        h(h_),
        offset(sequence.offset),
        has_mask(problem.program.code != nullptr && problem.program.code->mask >= 0),
        has_program(problem.program.code != nullptr) {}

  bool on() const { return has_mask; }
  bool may_hide() const { return has_program; }
  bool same_for_heads() const { return !has_mask || !call.code->mask_reads_head; }
  bool same_for_queries() const { return !has_mask; }

  // Its memory lies behind what memory_floats() of all options tells: callers know how much a program needs.
  void take_memory(Memory& own, float*& memory, bool gradients) const {
    if (!has_program) return;
    const ProgramLayout layout(*call.code, gradients);
    const auto address = reinterpret_cast<uintptr_t>(memory);
    char* const aligned = reinterpret_cast<char*>(memory) + (64 - address % 64) % 64;
    own.program = layout.at(aligned);
    memory += (layout.bytes() + ProgramLayout::kAlignment) / static_cast<int64_t>(sizeof(float));
  }

  bool may_see(const Queries& queries, const KeyRange& keys) const {
    return !has_mask || program::seen(call, region(queries, keys)) != program::Seen::kNone;
  }

  bool look(View& view, Memory& own, const Queries& queries, const Keys& keys) const {
    if (!has_mask) return true;
    const program::Seen told = program::seen(call, region(queries, {keys.first + keys.begin, keys.first + keys.end}));
    if (told != program::Seen::kSome) return told == program::Seen::kAll;
    const ProgramPlace at{b, h, offset, queries.first, keys.first};
    const program::Seen seen = run_mask(call, at, own.program, keys.begin, keys.end, queries.count, own.seen);
    if (seen == program::Seen::kSome) view.seen = own.seen;
    return seen != program::Seen::kNone;
  }
  bool hides(const View& view) const { return view.seen != nullptr; }

  M sees(M seen, const TilePlace& at, const View& view) const {
    return view.seen == nullptr ? seen : both(seen, mask_from_bits(view.seen[at.key][at.lane / kLanes]));
  }
  M sees(M seen, const RowPlace& at, const View&) const {
    if (at.shown != nullptr) return both(seen, mask_from_bits(uint32_t{at.shown[at.key / 16]} >> (at.key % 16)));
    if (!has_mask) return seen;
    uint32_t shown = 0;
    for (int i = 0; i < at.n; ++i) {
      const int64_t key = at.first_key + at.key + i;
      shown |= uint32_t{program::shows(call, {b, h, offset, at.query, key, at.query - key})} << i;
    }
    return both(seen, mask_from_bits(shown));
  }
  M sees(M seen, const HeadsPlace&, const View&) const { return seen; }  // tiny_takes refuses programs

  F score(F s, const TilePlace& at, const View& view, Kept&) const {
    if (view.seen == nullptr) return s;
    return select(mask_from_bits(view.seen[at.key][at.lane / kLanes]), s, broadcast(-kInfinity));
  }
  F score(F s, const RowPlace& at, const View& view, Kept&) const {
    return has_mask ? select(sees(mask_from_bits(~0u), at, view), s, broadcast(-kInfinity)) : s;
  }
  F score(F s, const HeadsPlace&, const View&, Kept&) const { return s; }

 private:
  program::Region region(const Queries& queries, const KeyRange& keys) const {
    const int64_t last = queries.first + queries.count - 1;
    return {{b, b}, {h, h}, {queries.first, last}, {keys.begin, keys.end - 1}, {offset, offset}};
  }
};

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
