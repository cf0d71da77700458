#include "call_counts.h"

#include <array>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace polyhead::torch_ops {
namespace {

constexpr size_t kMostSizes = 4096;  // a decoder meets new ones at every step

using Key = std::array<uint64_t, 12>;  // a CallCount without its count

struct Hash {
  size_t operator()(const Key& key) const {  // FNV-1a, a word at a time
    uint64_t hash = 0xcbf29ce484222325;
    for (const uint64_t word : key) hash = (hash ^ word) * 0x100000001b3;
    return hash ^ (hash >> 32);
  }
};

struct Counts {
  std::mutex mutex;
  std::unordered_map<Key, CallCount, Hash> by_key;
};

Counts& counts() {
  static auto* const the_counts = new Counts;  // not destroyed: threads may outlive the interpreter
  return *the_counts;
}

Key key_of(const CallCount& c) {
  const auto word = [](auto value) { return static_cast<uint64_t>(value); };
  return {word(c.op),           word(c.dtype),    word(c.packed),     word(c.other),
          word(c.batch),        word(c.seqlen_q), word(c.seqlen_k),   word(c.num_heads),
          word(c.num_heads_kv), word(c.head_dim), word(c.head_dim_v), reinterpret_cast<uintptr_t>(c.kernel)};
}

}  // namespace

void count_call(Counted op, const AttentionDesc& d, const char* kernel) {
  CallCount call;
  call.op = static_cast<int32_t>(op);
  call.dtype = static_cast<int32_t>(d.dtype);
  call.packed = d.packed ? 1 : 0;
  call.batch = d.batch;
  call.seqlen_q = d.seqlen_q;
  call.seqlen_k = d.seqlen_k;
  call.num_heads = d.num_heads;
  call.num_heads_kv = d.num_heads_kv;
  call.head_dim = d.head_dim;
  call.head_dim_v = d.head_dim_v;
  call.kernel = kernel;

  Counts& all = counts();
  const std::lock_guard lock(all.mutex);
  auto found = all.by_key.find(key_of(call));
  if (found == all.by_key.end()) {
    if (all.by_key.size() >= kMostSizes) {
      CallCount other;
      other.op = call.op;
      other.dtype = call.dtype;
      other.other = 1;
      other.kernel = call.kernel;
      call = other;
    }
    found = all.by_key.try_emplace(key_of(call), call).first;
  }
  ++found->second.count;
}

}  // namespace polyhead::torch_ops

int64_t polyhead_torch_call_counts(polyhead::torch_ops::CallCount* counts, int64_t capacity, int32_t reset) {
  auto& all = polyhead::torch_ops::counts();
  const std::lock_guard lock(all.mutex);
  const auto size = static_cast<int64_t>(all.by_key.size());
  int64_t i = 0;
  for (const auto& [key, count] : all.by_key) {
    if (i >= capacity) return size;
    counts[i++] = count;
  }
  if (reset != 0) all.by_key.clear();
  return size;
}
