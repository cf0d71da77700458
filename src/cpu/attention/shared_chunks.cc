#include "cpu/attention/shared_chunks.h"

#include <algorithm>
#include <cstring>

namespace polyhead::cpu {
namespace {

// Whole chunks of a sequence, where some can be shared. A sequence of one chunk has nothing to merge, and stays alone.
int64_t shareable_chunks(const AttentionDesc& desc) {
  const bool some = desc.page_size > 0 && desc.batch > 1 && desc.batch <= INT32_MAX && desc.seqlen_k > kDecodeChunk;
  return some ? desc.seqlen_k / kDecodeChunk : 0;
}

}  // namespace

MemorySize SharedChunks::bytes(const AttentionDesc& desc) {
  return MemorySize(desc.batch) * shareable_chunks(desc) * (sizeof(Group) + sizeof(int32_t));
}

SharedChunks::SharedChunks(const AttentionDesc& desc, const Problem& problem, const Sequences& sequences, void* memory)
    : problem_(&problem),
      sequences_(&sequences),
      batch_(desc.batch),
      most_chunks_(shareable_chunks(desc)),
      groups_(static_cast<Group*>(memory)),
      order_(reinterpret_cast<int32_t*>(groups_ + batch_ * most_chunks_)) {}

std::span<const int64_t> SharedChunks::pages_of(int64_t b, int64_t chunk) const {
  const Operand& key = problem_->key;
  const int64_t first = chunk * kDecodeChunk / key.page_size, end = pieces((chunk + 1) * kDecodeChunk, key.page_size);
  return {key.page_table + b * key.pages_per_sequence + first, static_cast<size_t>(end - first)};
}

// Sorted, those that share stand beside each other: with as many queries, and the same pages.
void SharedChunks::group(int64_t chunk, int32_t* found, int64_t count) {
  const auto compare = [&](int32_t a, int32_t b) {
    const int64_t queries = (*sequences_)[a].len_q - (*sequences_)[b].len_q;
    if (queries != 0) return queries < 0 ? -1 : 1;
    const std::span<const int64_t> pages = pages_of(a, chunk);
    return std::memcmp(pages.data(), pages_of(b, chunk).data(), pages.size_bytes());
  };
  std::sort(found, found + count, [&](int32_t a, int32_t b) {
    const int order = compare(a, b);
    return order != 0 ? order < 0 : a < b;
  });
  for (int64_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && compare(found[first], found[end]) == 0;) ++end;
    if (end - first < 2) continue;
    for (int64_t i = first; i < end; ++i) {
      groups_[chunk * batch_ + found[i]] = {static_cast<int32_t>(first), static_cast<int32_t>(end - first)};
    }
  }
}

}  // namespace polyhead::cpu
