#include "plan_cache.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace polyhead::python {
namespace {

constexpr size_t kMostPlans = 256;
constexpr size_t kNumWords = 48;

// A desc as words, each field one, so that two keys are equal only where the descs are.
struct Key {
  std::array<uint64_t, kNumWords> words{};
  std::string kernel;
  bool operator==(const Key&) const = default;
};

struct Hash {
  size_t operator()(const Key& key) const {  // FNV-1a, a word at a time
    uint64_t hash = 0xcbf29ce484222325;
    for (const uint64_t word : key.words) hash = (hash ^ word) * 0x100000001b3;
    return hash ^ (hash >> 32) ^ std::hash<std::string>()(key.kernel);
  }
};

Key key_of(const AttentionDesc& d, std::string_view kernel, const Executor* executor) {
  // A new field of AttentionDesc belongs into the key: then count it here.
  static_assert(sizeof(AttentionDesc) == 280, "AttentionDesc has changed: bring its fields into key_of");
  Key key;
  size_t count = 0;
  const auto add = [&](auto value) {
    if constexpr (std::is_same_v<decltype(value), double>) {
      key.words[count++] = std::bit_cast<uint64_t>(value);
    } else {
      key.words[count++] = static_cast<uint64_t>(value);
    }
  };
  const auto add_operand = [&](const BroadcastOperand& operand) {
    add(operand.given);
    add(operand.dtype);
    for (const int64_t dim : operand.dims) add(dim);
  };
  add(d.batch), add(d.seqlen_q), add(d.seqlen_k), add(d.num_heads), add(d.num_heads_kv), add(d.head_dim);
  add(d.head_dim_v), add(d.dtype), add(d.packed), add(d.has_seqlens_q), add(d.has_seqlens_k);
  add(d.scale.has_value()), add(d.scale.value_or(0)), add(d.softcap);
  add(d.causal), add(d.window_left), add(d.window_right), add(d.align);
  add(d.query_offset.has_value()), add(d.query_offset.value_or(0)), add(d.has_query_offsets);
  add_operand(d.attn_mask), add_operand(d.attn_bias);
  add(d.alibi_slopes_ndim), add(d.dropout_p), add(d.return_weights), add(d.return_column_sums), add(d.has_windows);
  const DropoutOrigin& origin = d.dropout_origin;
  add(origin.first_head), add(origin.num_heads), add(origin.first_query), add(origin.first_key);
  add(reinterpret_cast<uintptr_t>(executor));
  key.kernel = kernel;
  return key;
}

struct Cache {
  std::mutex mutex;  // never held while Python code may run
  std::unordered_map<Key, std::shared_ptr<const Plan>, Hash> plans;
};

Cache& cache() {
  static auto* const the_cache = new Cache;  // not destroyed: threads may outlive the interpreter
  return *the_cache;
}

}  // namespace

Result<std::shared_ptr<const Plan>> cached_plan(const AttentionDesc& desc, std::string_view kernel,
                                                Executor* executor) {
  Key key = key_of(desc, kernel, executor);
  thread_local Key last_key;
  thread_local std::shared_ptr<const Plan> last;  // most calls are like the one before
  if (last && key == last_key) return last;

  Cache& known = cache();
  const std::lock_guard lock(known.mutex);
  const auto found = known.plans.find(key);
  if (found != known.plans.end()) {
    last_key = std::move(key);
    last = found->second;
    return last;
  }

  Result<Plan> made = plan(desc, {.kernel = kernel, .where = {.executor = executor}});
  if (!made.ok()) return made.status();
  if (known.plans.size() >= kMostPlans) known.plans.clear();
  auto shared = std::make_shared<const Plan>(std::move(*made));
  known.plans.emplace(std::move(key), shared);
  return shared;
}

}  // namespace polyhead::python
