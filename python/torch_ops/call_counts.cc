#include "call_counts.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace polyhead::torch_ops {
namespace {

constexpr size_t kMostSizes = 4096;  // a decoder meets new ones at every step
constexpr int kMostOwn = 32;         // of these, told apart by one thread before it hands them over

static_assert(std::has_unique_object_representations_v<CallCount>);
using Key = std::array<uint64_t, sizeof(CallCount) / sizeof(uint64_t)>;  // a CallCount whose count is 0

struct Hash {
  size_t operator()(const Key& key) const {  // FNV-1a, a word at a time
    uint64_t hash = 0xcbf29ce484222325;
    for (const uint64_t word : key) hash = (hash ^ word) * 0x100000001b3;
    return hash ^ (hash >> 32);
  }
};

// Of one thread, which alone adds entries and counts, without a lock.
struct OwnCounts {
  struct Entry {
    Key key;
    std::atomic<int64_t> count;
  };
  std::array<Entry, kMostOwn> entries;
  std::atomic<int> size = 0;
  int last = 0;  // most calls are like the one before
};

struct Counts {
  std::mutex mutex;  // of all below, and of taking from a thread's own
  std::unordered_map<Key, int64_t, Hash> by_key;
  std::vector<OwnCounts*> threads;

  void take(OwnCounts& own) {
    const int size = own.size.load(std::memory_order_acquire);
    for (int i = 0; i < size; ++i) {
      const int64_t count = own.entries[i].count.exchange(0, std::memory_order_relaxed);
      if (count > 0) add(own.entries[i].key, count);
    }
  }

 private:
  void add(const Key& key, int64_t count) {
    auto found = by_key.find(key);
    if (found == by_key.end()) {
      found = by_key.try_emplace(by_key.size() < kMostSizes ? key : without_sizes(key)).first;
    }
    found->second += count;
  }

  static Key without_sizes(const Key& key) {
    const auto call = std::bit_cast<CallCount>(key);
    CallCount other;
    other.op = call.op;
    other.dtype = call.dtype;
    other.other = 1;
    other.kernel = call.kernel;
    return std::bit_cast<Key>(other);
  }
};

Counts& counts() {
  static auto* const the_counts = new Counts;  // not destroyed: threads may outlive the interpreter
  return *the_counts;
}

OwnCounts& own_counts() {
  struct Owner {  // on the heap, so that a forked child may read what other threads had counted
    Owner() {
      const std::lock_guard lock(counts().mutex);
      counts().threads.push_back(own);
    }
    ~Owner() {
      Counts& all = counts();
      const std::lock_guard lock(all.mutex);
      all.take(*own);
      all.threads.erase(std::find(all.threads.begin(), all.threads.end(), own));
      delete own;
    }
    OwnCounts* const own = new OwnCounts;
  };
  thread_local const Owner owner;
  return *owner.own;
}

void count(const Key& key) {
  OwnCounts& own = own_counts();
  int size = own.size.load(std::memory_order_relaxed), at = own.last;
  if (at >= size || own.entries[at].key != key) {
    for (at = 0; at < size && own.entries[at].key != key;) ++at;
  }
  if (at == kMostOwn) {
    const std::lock_guard lock(counts().mutex);
    counts().take(own);
    own.size.store(0, std::memory_order_relaxed);
    at = size = 0;
  }
  if (at == size) {
    own.entries[at].key = key;
    own.entries[at].count.store(0, std::memory_order_relaxed);
    own.size.store(size + 1, std::memory_order_release);
  }
  own.last = at;
  own.entries[at].count.fetch_add(1, std::memory_order_relaxed);
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

  count(std::bit_cast<Key>(call));
}

}  // namespace polyhead::torch_ops

int64_t polyhead_torch_call_counts(polyhead::torch_ops::CallCount* counts, int64_t capacity, int32_t reset) {
  auto& all = polyhead::torch_ops::counts();
  const std::lock_guard lock(all.mutex);
  for (auto* own : all.threads) all.take(*own);
  const auto size = static_cast<int64_t>(all.by_key.size());
  int64_t i = 0;
  for (const auto& [key, count] : all.by_key) {
    if (i >= capacity) return size;
    counts[i] = std::bit_cast<polyhead::torch_ops::CallCount>(key);
    counts[i++].count = count;
  }
  if (reset != 0) all.by_key.clear();
  return size;
}
