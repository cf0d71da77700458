// What is made once and serves many calls: plans and blocks, by key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "polyhead/status.h"

namespace polyhead::python {

// FNV-1a, a word at a time.
inline uint64_t hash_words(std::initializer_list<int64_t> words) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
  return hash ^ (hash >> 32);
}

// At most `most` are remembered; all are forgotten when there would be more. Any thread. One for each call of get() in
// the source: what a thread remembers of its last call belongs to that.
template <class Key, class Made, class Hash>
class Cache {
 public:
  explicit Cache(size_t most) : most_(most) {}

  // The one of this thread's call before, if is_key(its key); else that of make_key(); else what make() gives, a
  // Result<Made>. Threads that ask for a new one at once all make it, for none waits while another does: one stays.
  template <class IsKey, class MakeKey, class Make>
  Result<std::shared_ptr<const Made>> get(IsKey is_key, MakeKey make_key, Make make) {
    thread_local Key last_key;
    thread_local std::shared_ptr<const Made> last;  // most calls are like the one before
    if (last && is_key(last_key)) return last;

    Key key = make_key();
    std::shared_ptr<const Made> found = find(key);
    if (!found) {
      Result<Made> made = make();
      if (!made.ok()) return made.status();
      found = keep(key, std::make_shared<const Made>(std::move(*made)));
    }
    last_key = std::move(key);
    last = found;
    return found;
  }

 private:
  std::shared_ptr<const Made> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? nullptr : found->second;
  }

  std::shared_ptr<const Made> keep(const Key& key, std::shared_ptr<const Made> made) {
    const std::lock_guard lock(mutex_);
    if (by_key_.size() >= most_) by_key_.clear();
    return by_key_.try_emplace(key, std::move(made)).first->second;
  }

  const size_t most_;
  std::mutex mutex_;  // never held while Python code may run
  std::unordered_map<Key, std::shared_ptr<const Made>, Hash> by_key_;
};

}  // namespace polyhead::python
