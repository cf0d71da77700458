// Writing to caches of keys and values, and reading them back.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "cache/append.h"
#include "cache/heads.h"
#include "contract/operands.h"
#include "contract/sequences.h"
#include "contract/where.h"
#include "core/dtype.h"
#include "core/memory_size.h"
#include "core/sentence.h"
#include "core/threads.h"
#include "polyhead/cache.h"

namespace polyhead {
namespace {

bool is_float_of_cache(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

Status check_format(const char* name, DType dtype, const char* group_name, int64_t group, const char* dim_name,
                    int64_t dim) {
  if (!is_float_of_cache(dtype) && !has_scales(dtype)) {
    return invalid(sentence(name, " is ", dtype_name(dtype),
                            ", takes float32, bfloat16, float16, int8, float8_e4m3, float8_e5m2 or int4x2"));
  }
  if (dtype == DType::kInt4x2 && dim % 2 != 0) {
    return invalid(sentence(dim_name, " is ", dim, ", must be even where ", name, " is int4x2"));
  }
  if (group == 0) return {};
  if (!has_scales(dtype)) {
    return invalid(sentence(group_name, " is ", group, ", but ", dtype_name(dtype), " has no scales: leave it 0"));
  }
  if (group > 0 && group % 16 == 0 && dim % group == 0) return {};
  return invalid(sentence(group_name, " is ", group,
                          ", must be 0 (one scale for a row), or a multiple of 16 that divides ", dim_name, " ", dim));
}

Status check_desc(const KvCacheDesc& d) {
  const struct {
    const char* name;
    int64_t value, least;
  } sizes[] = {{"num_pages", d.num_pages, 0},       {"page_size", d.page_size, 1},   {"head_dim", d.head_dim, 0},
               {"num_heads_kv", d.num_heads_kv, 0}, {"head_dim_v", d.head_dim_v, 0}, {"rotary_dim", d.rotary_dim, 0}};
  for (const auto& size : sizes) {
    if (size.value < size.least)
      return invalid(sentence(size.name, " is ", size.value, ", must be ", size.least, " or more"));
  }
  if (d.rotary_dim > d.head_dim || d.rotary_dim % 2 != 0) {
    return invalid(sentence("rotary_dim is ", d.rotary_dim, ", must be even and at most head_dim ", d.head_dim));
  }
  if (d.hadamard && (d.head_dim & (d.head_dim - 1)) != 0) {
    return invalid(sentence("head_dim is ", d.head_dim, ", must be a power of 2 for hadamard"));
  }
  Status status = check_format("key_dtype", d.key_dtype, "key_group", d.key_group, "head_dim", d.head_dim);
  if (!status.ok()) return status;
  return check_format("value_dtype", d.value_dtype, "value_group", d.value_group, "head_dim_v", d.head_dim_v);
}

OperandShape of_any_float(const Tensor& t, const Dim (&dims)[3]) {
  return {is_float_of_cache(t.dtype) ? t.dtype : DType::kFloat32, dims};
}

OperandShape integers(Dim count) {
  OperandShape shape(DType::kInt64, {count});
  shape.takes = OperandShape::Takes::kInt32OrInt64;
  return shape;
}

// The pool's tensors as the desc has them.
KvTensors shaped(const KvCacheDesc& d) {
  const auto pool = [&](DType dtype, int64_t dim) {
    return Tensor(nullptr, dtype, {d.num_pages, d.page_size, d.num_heads_kv, dtype == DType::kInt4x2 ? dim / 2 : dim});
  };
  const auto scales = [&](DType dtype, int64_t group, int64_t dim) {
    return has_scales(dtype) ? pool(scale_dtype(dtype), group == 0 ? 1 : dim / group) : Tensor();
  };
  return {pool(d.key_dtype, d.head_dim), pool(d.value_dtype, d.head_dim_v),
          scales(d.key_dtype, d.key_group, d.head_dim), scales(d.value_dtype, d.value_group, d.head_dim_v)};
}

constexpr Tensor KvTensors::*kPool[] = {&KvTensors::key, &KvTensors::value, &KvTensors::key_scales,
                                        &KvTensors::value_scales};

// The pool, whose tokens are written (kGradient: any strides whose elements lie apart) or read.
Status add_pool(Operands& operands, Role role, const KvCacheDesc& d, const KvTensors& pool) {
  for (const PoolOperand& each : pool_operands(d)) {
    const Tensor& t = pool.*each.tensor;
    const bool expected = each.shape.ndim > 0;
    if (!expected && t.given()) return invalid(sentence(each.name, " is given, but ", kNoScales));
    if (!expected) continue;
    if (Status status = operands.add(role, each.name, t, each.shape); !status.ok()) return status;
  }
  return {};
}

using Numbers = std::vector<int64_t>;

Status read_all(const char* name, const Tensor& t, const NumberRange& range, Numbers* out) {
  const auto count = static_cast<size_t>(t.dims[0]);
  if (count > out->max_size()) throw std::bad_alloc();  // tensors whose strides are 0 may be as long as that
  out->resize(count);
  return read_numbers(name, -1, t, t.dims[0], range, out->data());
}

// Of tokens that there must be, to be read or written.
Status read_slots(const KvCacheDesc& d, const char* name, const Tensor& t, Numbers* out) {
  NumberRange range = slot_range(d);
  range.least = 0, range.of_what = "the slots of the cache";
  return read_all(name, t, range, out);
}

Status check_each_once(const char* name, Numbers slots) {
  return check_distinct(name, slots.data(), static_cast<int64_t>(slots.size()));
}

Status check_tables(Operands& operands, const KvCacheDesc& d, const KvAppendArgs& args, int64_t tokens) {
  if (d.rotary_dim == 0) {
    const std::pair<const char*, const Tensor*> unused[] = {
        {"positions", &args.positions}, {"cos", &args.cos}, {"sin", &args.sin}};
    for (const auto& [name, tensor] : unused) {
      if (tensor->given()) return invalid(sentence(name, " is given, but rotary_dim is 0"));
    }
    return {};
  }
  const Dim rows{"positions", args.cos.ndim > 0 ? args.cos.dims[0] : 0}, pairs{"rotary_dim / 2", d.rotary_dim / 2};
  Status status = operands.add(Role::kInput, "positions", args.positions, integers({"tokens", tokens}));
  if (status.ok()) status = operands.add(Role::kInput, "cos", args.cos, {DType::kFloat32, {rows, pairs}});
  if (status.ok()) status = operands.add(Role::kInput, "sin", args.sin, {DType::kFloat32, {rows, pairs}});
  return status;
}

Status check_append(Operands& operands, const KvCacheDesc& d, const KvTensors& pool, const KvAppendArgs& args) {
  const int64_t tokens = args.slots.ndim == 1 ? args.slots.dims[0] : 0;
  const Dim n{"tokens", tokens}, heads_kv{"num_heads_kv", d.num_heads_kv};
  const Dim heads{"num_heads", args.query.ndim == 3 ? args.query.dims[1] : 0}, dim{"head_dim", d.head_dim};
  Status status = operands.add(Role::kInput, "slots", args.slots, integers(n));
  if (status.ok()) status = operands.add(Role::kInput, "key", args.key, of_any_float(args.key, {n, heads_kv, dim}));
  if (status.ok()) {
    status = operands.add(Role::kInput, "value", args.value,
                          of_any_float(args.value, {n, heads_kv, {"head_dim_v", d.head_dim_v}}));
  }
  if (status.ok()) status = check_tables(operands, d, args, tokens);
  if (status.ok()) status = add_pool(operands, Role::kGradient, d, pool);
  if (!status.ok()) return status;
  if (!args.query.given() && args.query_out.given()) return invalid("query_out is given, but query is missing");
  if (!args.query.given()) return {};
  const bool in_place = same_view(args.query, args.query_out);
  if (!in_place) status = operands.add(Role::kInput, "query", args.query, of_any_float(args.query, {n, heads, dim}));
  if (!status.ok()) return status;
  return operands.add(Role::kGradient, "query_out", args.query_out, of_any_float(args.query_out, {n, heads, dim}));
}

// [batch, time, ...] of tokens [time, ...]: one sequence.
Tensor as_sequence(const Tensor& t) {
  if (!t.given()) return t;
  Tensor all = t;
  all.ndim = t.ndim + 1, all.dims[0] = 1, all.strides[0] = 0;
  for (int i = 0; i < t.ndim; ++i) all.dims[i + 1] = t.dims[i], all.strides[i + 1] = t.strides[i];
  return all;
}

// call(kernel, run) where the numbers lie on a device, which has to look at them itself.
template <class Call>
Status there(Device device, const Operands& operands, void* stream, const Call& call) {
  const Result<const linear::Kernel*> kernel = linear::choose_kernel(DType::kFloat32, "", device);
  if (!kernel.ok()) return kernel.status();
  const Run run(nullptr, 1, stream);
  if (Status status = check_place(**kernel, operands, nullptr, 0, run); !status.ok()) return status;
  return call(**kernel, run);
}

Status no_stream(void* stream) {
  return stream == nullptr ? Status() : invalid("stream is given, but the CPU has no streams");
}

Status append_there(const KvCacheDesc& desc, const KvTensors& pool, const KvAppendArgs& args,
                    const Operands& operands) {
  AppendArgs tokens = {pool,
                       as_sequence(args.key),
                       as_sequence(args.value),
                       as_sequence(args.slots),
                       as_sequence(args.query),
                       as_sequence(args.query_out)};
  if (desc.rotary_dim > 0) tokens.positions = as_sequence(args.positions), tokens.cos = args.cos, tokens.sin = args.sin;
  return there(pool.key.device, operands, args.stream,
               [&](const linear::Kernel& kernel, const Run& run) { return kernel.append(desc, tokens, run); });
}

}  // namespace

std::array<PoolOperand, 4> pool_operands(const KvCacheDesc& d) {
  static constexpr const char* kNames[][2] = {{"pool.key", "head_dim"},
                                              {"pool.value", "head_dim_v"},
                                              {"pool.key_scales", "head_dim / key_group"},
                                              {"pool.value_scales", "head_dim_v / value_group"}};
  const KvTensors expected = shaped(d);
  std::array<PoolOperand, 4> operands;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Tensor& e = expected.*kPool[i];
    operands[i].name = kNames[i][0];
    operands[i].tensor = kPool[i];
    if (!e.given()) continue;
    const char* const columns = e.dtype == DType::kInt4x2 ? "half of the head dim" : kNames[i][1];
    operands[i].shape = OperandShape(
        e.dtype,
        {{"num_pages", e.dims[0]}, {"page_size", e.dims[1]}, {"num_heads_kv", e.dims[2]}, {columns, e.dims[3]}});
  }
  return operands;
}

Result<KvCache> kv_cache(const KvCacheDesc& desc) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  KvCache cache(desc);
  const KvTensors pool = shaped(desc);
  MemoryMap map;
  for (size_t i = 0; i < std::size(kPool); ++i) {
    const Tensor& t = pool.*kPool[i];
    if (t.given()) cache.at_[i] = map.take({t.dims[0], t.dims[1], t.dims[2], t.dims[3]}, dtype_size_bytes(t.dtype));
  }
  if (!map.fits() || !(MemorySize(desc.num_pages) * desc.page_size).fits()) {
    return invalid(sentence("the cache is too large: num_pages ", desc.num_pages, " * page_size ", desc.page_size,
                            " * num_heads_kv ", desc.num_heads_kv, " * (head_dim ", desc.head_dim, " + head_dim_v ",
                            desc.head_dim_v, ") elements pass the address space"));
  }
  cache.bytes_ = map.bytes();
  return cache;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

KvTensors KvCache::tensors(void* buffer) const {
  KvTensors pool = shaped(desc_);
  for (size_t i = 0; i < std::size(kPool); ++i) {
    Tensor& t = pool.*kPool[i];
    if (t.given()) t.data = static_cast<char*>(buffer) + at_[i];
  }
  return pool;
}

Status KvCache::append(const KvTensors& pool, const KvAppendArgs& args) const try {
  Operands operands(pool.key.device);
  if (Status status = check_append(operands, desc_, pool, args); !status.ok()) return status;
  if (pool.key.device != Device::kCpu) return append_there(desc_, pool, args, operands);
  if (Status status = no_stream(args.stream); !status.ok()) return status;
  Numbers slots, positions;
  if (Status status = read_all("slots", args.slots, slot_range(desc_), &slots); !status.ok()) return status;
  if (Status status = check_each_once("slots", slots); !status.ok()) return status;
  const bool rotary = desc_.rotary_dim > 0;
  if (rotary) {
    Status status = read_all("positions", args.positions, position_range(args.cos), &positions);
    if (!status.ok()) return status;
  }
  const Heads key{args.key}, value{args.value}, query{args.query}, query_out{args.query_out};
  NewTokens tokens{static_cast<int64_t>(slots.size()), slots.data(), rotary ? positions.data() : nullptr, &args.cos,
                   &args.sin};
  tokens.key = &key, tokens.value = &value;
  if (args.query.given()) tokens.query = &query, tokens.query_out = &query_out;
  const Run run(args.executor != nullptr ? *args.executor : default_executor());
  std::vector<float> memory(static_cast<size_t>(run.num_threads * longest_head(desc_)));
  polyhead::append(desc_, pool, tokens, memory.data(), run);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status KvCache::copy(const KvTensors& pool, const Tensor& from, const Tensor& to, void* stream) const try {
  Operands operands(pool.key.device);
  const Dim n{"tokens", from.ndim == 1 ? from.dims[0] : 0};
  Status status = operands.add(Role::kInput, "from", from, integers(n));
  if (status.ok()) status = operands.add(Role::kInput, "to", to, integers(n));
  if (status.ok()) status = add_pool(operands, Role::kGradient, desc_, pool);
  if (status.ok() && pool.key.device != Device::kCpu) {
    return there(pool.key.device, operands, stream, [&](const linear::Kernel& kernel, const Run& run) {
      return kernel.copy_tokens(desc_, {pool, from, to}, run);
    });
  }
  if (status.ok()) status = no_stream(stream);
  Numbers sources, targets;
  if (status.ok()) status = read_slots(desc_, "from", from, &sources);
  if (status.ok()) status = read_slots(desc_, "to", to, &targets);
  if (status.ok()) status = check_each_once("to", targets);
  if (!status.ok()) return status;
  for (Tensor KvTensors::*const each : kPool) {
    const Tensor& t = pool.*each;
    if (!t.given()) continue;
    const Heads place{t, desc_.page_size};
    const size_t element = dtype_size_bytes(t.dtype);
    const int64_t columns = t.dims[3];
    std::vector<char> staged(sources.size() * static_cast<size_t>(t.dims[2] * columns) * element);
    const auto visit = [&](const Numbers& slots, const auto& move) {
      char* at = staged.data();
      for (const int64_t slot : slots) {
        for (int64_t h = 0; h < t.dims[2]; ++h) {
          for (int64_t d = 0; d < columns; ++d, at += element) {
            move(at, place.row(slot, h) + d * place.stride() * static_cast<int64_t>(element));
          }
        }
      }
    };
    visit(sources, [&](char* to_stage, const char* stored) { std::memcpy(to_stage, stored, element); });
    visit(targets, [&](const char* from_stage, char* stored) { std::memcpy(stored, from_stage, element); });
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status KvCache::read(const KvTensors& pool, const Tensor& slots, const Tensor& key, const Tensor& value,
                     void* stream) const try {
  Operands operands(pool.key.device);
  const Dim n{"tokens", slots.ndim == 1 ? slots.dims[0] : 0}, heads{"num_heads_kv", desc_.num_heads_kv};
  Status status = operands.add(Role::kInput, "slots", slots, integers(n));
  if (status.ok()) status = add_pool(operands, Role::kInput, desc_, pool);
  const struct {
    const char* name;
    Heads from;
    const Tensor& to;
    Dim dim;
  } parts[] = {{"key", keys_of(desc_, pool), key, {"head_dim", desc_.head_dim}},
               {"value", values_of(desc_, pool), value, {"head_dim_v", desc_.head_dim_v}}};
  for (const auto& part : parts) {
    if (!status.ok() || !part.to.given()) continue;
    status = operands.add(Role::kGradient, part.name, part.to, of_any_float(part.to, {n, heads, part.dim}));
  }
  if (status.ok() && !key.given() && !value.given()) return invalid("key and value are missing, one must be given");
  if (status.ok() && pool.key.device != Device::kCpu) {
    return there(pool.key.device, operands, stream, [&](const linear::Kernel& kernel, const Run& run) {
      return kernel.read_tokens(desc_, {pool, slots, key, value}, run);
    });
  }
  if (status.ok()) status = no_stream(stream);
  Numbers from;
  if (status.ok()) status = read_slots(desc_, "slots", slots, &from);
  if (!status.ok()) return status;
  std::vector<float> x(static_cast<size_t>(longest_head(desc_)));
  for (const auto& part : parts) {
    if (!part.to.given()) continue;
    for (size_t i = 0; i < from.size(); ++i) {
      for (int64_t h = 0; h < desc_.num_heads_kv; ++h) {
        load(part.from, from[i], h, x.data());
        store(x.data(), {part.to}, static_cast<int64_t>(i), h);
      }
    }
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
