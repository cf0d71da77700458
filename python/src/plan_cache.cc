#include "plan_cache.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "cache.h"

namespace polyhead::python {
namespace {

constexpr size_t kMostPlans = 256;

struct Key {
  AttentionDesc desc;
  std::string kernel;
  Executor* executor = nullptr;
  Device device = Device::kCpu;
  bool operator==(const Key&) const = default;

  // The same without making a key.
  bool is(const AttentionDesc& asked, std::string_view name, const Where& where) const {
    return desc == asked && kernel == name && executor == where.executor &&
           device == where.device.value_or(Device::kCpu);
  }
};

// Over what most often differs; operator== tells the rest apart.
struct Hash {
  size_t operator()(const Key& key) const {
    const AttentionDesc& d = key.desc;
    return hash_words({d.batch, d.seqlen_q, d.seqlen_k, d.num_heads, d.num_heads_kv, d.head_dim, d.head_dim_v,
                       static_cast<int64_t>(d.dtype), int64_t{d.packed}, int64_t{d.causal}, d.window_left,
                       d.window_right, d.query_offset.value_or(0), reinterpret_cast<int64_t>(d.program.get())}) ^
           std::hash<std::string>()(key.kernel);
  }
};

}  // namespace

Result<std::shared_ptr<const Plan>> cached_plan(const AttentionDesc& desc, std::string_view kernel,
                                                const Where& where) {
  static auto* const cache = new Cache<Key, Plan, Hash>(kMostPlans);  // threads may outlive the interpreter
  const Device device = where.device.value_or(Device::kCpu);
  return cache->get(
      [&](const Key& key) { return key.is(desc, kernel, where); },
      [&] {
        return Key{desc, std::string(kernel), where.executor, device};
      },
      [&] { return plan(desc, {.kernel = kernel, .where = {.device = device, .executor = where.executor}}); });
}

}  // namespace polyhead::python
