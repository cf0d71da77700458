// Which sequences of a call read the same keys: those whose page tables agree over a whole chunk that lies inside their
// lengths, as where a prompt is shared, or beams read one cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

class SharedChunks {
 public:
  // 0 where sequences of `desc` can share nothing.
  static MemorySize bytes(const AttentionDesc& desc);

  SharedChunks() = default;  // nothing is shared
  SharedChunks(const AttentionDesc& desc, const Problem& problem, const Sequences& sequences, void* memory);

  // Looks at sequences [first_b, end_b). has(b, chunk) tells whether a sequence may share a chunk at all.
  template <class Has>
  void find(int64_t first_b, int64_t end_b, const Has& has) {
    int64_t longest = 0;
    for (int64_t b = first_b; b < end_b && most_chunks_ > 0; ++b) longest = std::max(longest, (*sequences_)[b].len_k);
    num_chunks_ = longest / kDecodeChunk;
    for (int64_t c = 0; c < num_chunks_; ++c) {
      int32_t* const found = order_ + c * batch_;
      int64_t count = 0;
      for (int64_t b = first_b; b < end_b; ++b) {
        groups_[c * batch_ + b] = {};
        if ((*sequences_)[b].len_q > 0 && (*sequences_)[b].len_k >= (c + 1) * kDecodeChunk && has(b, c)) {
          found[count++] = static_cast<int32_t>(b);
        }
      }
      if (count > 1) group(c, found, count);
    }
  }

  // The sequences that share a chunk with b, itself among them, in a fixed order; none: nobody does.
  std::span<const int32_t> with(int64_t b, int64_t chunk) const {
    if (chunk >= num_chunks_) return {};
    const Group& group = groups_[chunk * batch_ + b];
    return {order_ + chunk * batch_ + group.first, static_cast<size_t>(group.count)};
  }

 private:
  struct Group {
    int32_t first = 0, count = 0;
  };

  void group(int64_t chunk, int32_t* found, int64_t count);
  std::span<const int64_t> pages_of(int64_t b, int64_t chunk) const;

  const Problem* problem_ = nullptr;
  const Sequences* sequences_ = nullptr;
  int64_t batch_ = 0, most_chunks_ = 0;  // of the longest sequence that there can be, whole ones
  int64_t num_chunks_ = 0;               // of the longest that there is
  Group* groups_ = nullptr;              // [chunks][batch]: a range of order_
  int32_t* order_ = nullptr;             // [chunks][batch]: those that may share it, those that do beside each other
};

}  // namespace polyhead::cpu
