// Writing to caches of keys and values, and reading them back.
//   x [D] one head of one token   c, s [R / 2] cosines and sines of its position
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "cache/place.h"
#include "contract/operands.h"
#include "contract/sequences.h"
#include "core/dtype.h"
#include "core/memory_size.h"
#include "core/sentence.h"
#include "core/threads.h"
#include "polyhead/cache.h"

namespace polyhead {
namespace {

constexpr size_t kAlignment = 64;

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

struct PoolTensor {
  const char* name;
  Tensor KvTensors::*tensor;
  const char* columns;  // the name of its last dim
};
constexpr PoolTensor kPool[] = {{"pool.key", &KvTensors::key, "head_dim"},
                                {"pool.value", &KvTensors::value, "head_dim_v"},
                                {"pool.key_scales", &KvTensors::key_scales, "head_dim / key_group"},
                                {"pool.value_scales", &KvTensors::value_scales, "head_dim_v / value_group"}};

// The pool, whose tokens are written (kGradient: any strides whose elements lie apart) or read.
Status add_pool(Operands& operands, Role role, const KvCacheDesc& d, const KvTensors& pool) {
  const KvTensors expected = shaped(d);
  for (const PoolTensor& each : kPool) {
    const Tensor &t = pool.*each.tensor, &e = expected.*each.tensor;
    if (!e.given() && t.given()) return invalid(sentence(each.name, " is given, but the cache's dtype has no scales"));
    if (!e.given()) continue;
    const OperandShape shape(e.dtype, {{"num_pages", e.dims[0]},
                                       {"page_size", e.dims[1]},
                                       {"num_heads_kv", e.dims[2]},
                                       {e.dtype == DType::kInt4x2 ? "half of the head dim" : each.columns, e.dims[3]}});
    if (Status status = operands.add(role, each.name, t, shape); !status.ok()) return status;
  }
  return {};
}

Place keys_of(const KvCacheDesc& d, const KvTensors& pool) {
  return {pool.key, d.page_size, pool.key_scales.given() ? &pool.key_scales : nullptr};
}
Place values_of(const KvCacheDesc& d, const KvTensors& pool) {
  return {pool.value, d.page_size, pool.value_scales.given() ? &pool.value_scales : nullptr};
}

using Numbers = std::vector<int64_t>;

// The elements of [n], each least to most; read once.
Status read_numbers(const char* name, const Tensor& t, int64_t least, int64_t most, const char* of_what, Numbers* out) {
  out->reserve(static_cast<size_t>(t.dims[0]));
  for (int64_t i = 0; i < t.dims[0]; ++i) {
    const int64_t number = integer_at(t, i);
    if (number < least || number > most) {
      return invalid(sentence(name, "[", i, "] is ", number, ", must be ", least, " to ", most, ": ", of_what));
    }
    out->push_back(number);
  }
  return {};
}

Status read_slots(const KvCacheDesc& d, const char* name, const Tensor& t, bool may_skip, Numbers* out) {
  return read_numbers(name, t, may_skip ? -1 : 0, d.num_pages * d.page_size - 1,
                      may_skip ? "-1 is nowhere, else a slot of the cache" : "the slots of the cache", out);
}

Status check_distinct(const char* name, const Numbers& slots) {
  Numbers sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  const auto first = std::upper_bound(sorted.begin(), sorted.end(), int64_t{-1});
  const auto twice = std::adjacent_find(first, sorted.end());
  if (twice == sorted.end()) return {};
  return invalid(sentence(name, " holds ", *twice, " twice: a slot takes one token"));
}

// What is done to each head of key and query.
class Turn {
 public:
  Turn(const KvCacheDesc& desc, const KvAppendArgs& args, const Numbers& positions)
      : desc_(desc), args_(args), positions_(positions) {}

  void operator()(int64_t token, float* x) const {
    if (desc_.rotary_dim > 0) rotate(positions_[static_cast<size_t>(token)], x);
    if (desc_.hadamard) hadamard(x);
  }

 private:
  void rotate(int64_t position, float* x) const {
    const int64_t pairs = desc_.rotary_dim / 2;
    const int64_t step = desc_.interleaved ? 2 : 1, other = desc_.interleaved ? 1 : pairs;
    const auto* const c = static_cast<const float*>(args_.cos.data) + position * args_.cos.strides[0];
    const auto* const s = static_cast<const float*>(args_.sin.data) + position * args_.sin.strides[0];
    for (int64_t p = 0; p < pairs; ++p) {
      const float cosine = c[p * args_.cos.strides[1]], sine = s[p * args_.sin.strides[1]];
      float &first = x[p * step], &second = x[p * step + other];
      const float turned = first * cosine - second * sine;
      second = first * sine + second * cosine;
      first = turned;
    }
  }

  // The fast Walsh-Hadamard transform.
  void hadamard(float* x) const {
    const int64_t dim = desc_.head_dim;
    for (int64_t half = 1; half < dim; half *= 2) {
      for (int64_t block = 0; block < dim; block += 2 * half) {
        for (int64_t d = block; d < block + half; ++d) {
          const float a = x[d], b = x[d + half];
          x[d] = a + b;
          x[d + half] = a - b;
        }
      }
    }
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    for (int64_t d = 0; d < dim; ++d) x[d] *= scale;
  }

  const KvCacheDesc& desc_;
  const KvAppendArgs& args_;
  const Numbers& positions_;
};

// Calls work(token, x) for all tokens, x being memory for `dim` numbers.
template <class Work>
Status for_each_token(Executor* executor, int64_t tokens, int64_t dim, const Work& work) {
  constexpr int64_t kTokens = 16;  // of a task
  const Run run(executor != nullptr ? *executor : default_executor());
  std::vector<float> memory(static_cast<size_t>(run.num_threads) * static_cast<size_t>(dim));
  run_tasks(run, pieces(tokens, kTokens), [&](int64_t task, int lane) {
    float* const x = memory.data() + lane * dim;
    for (int64_t i = task * kTokens; i < std::min(tokens, (task + 1) * kTokens); ++i) work(i, x);
  });
  return {};
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

Status check_append(const KvCacheDesc& d, const KvTensors& pool, const KvAppendArgs& args) {
  Operands operands;
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
  if (!args.query.given()) return unasked("query_out", args.query_out);
  const bool in_place = same_view(args.query, args.query_out);
  if (!in_place) status = operands.add(Role::kInput, "query", args.query, of_any_float(args.query, {n, heads, dim}));
  if (!status.ok()) return status;
  return operands.add(Role::kGradient, "query_out", args.query_out, of_any_float(args.query_out, {n, heads, dim}));
}

}  // namespace

Result<KvCache> kv_cache(const KvCacheDesc& desc) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  KvCache cache(desc);
  const KvTensors pool = shaped(desc);
  MemoryMap map;
  for (size_t i = 0; i < std::size(kPool); ++i) {
    const Tensor& t = pool.*kPool[i].tensor;
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
    Tensor& t = pool.*kPool[i].tensor;
    if (t.given()) t.data = static_cast<char*>(buffer) + at_[i];
  }
  return pool;
}

Status KvCache::append(const KvTensors& pool, const KvAppendArgs& args) const try {
  if (Status status = check_append(desc_, pool, args); !status.ok()) return status;
  Numbers slots, positions;
  if (Status status = read_slots(desc_, "slots", args.slots, true, &slots); !status.ok()) return status;
  if (Status status = check_distinct("slots", slots); !status.ok()) return status;
  if (desc_.rotary_dim > 0) {
    Status status = read_numbers("positions", args.positions, 0, args.cos.dims[0] - 1, "the rows of cos", &positions);
    if (!status.ok()) return status;
  }
  const Turn turn(desc_, args, positions);
  const Place key = keys_of(desc_, pool), value = values_of(desc_, pool);
  const Place new_key{args.key}, new_value{args.value}, query{args.query}, query_out{args.query_out};
  const int64_t num_heads = args.query.given() ? query.heads() : 0;
  const auto write = [&](int64_t token, float* x) {
    for (int64_t h = 0; h < num_heads; ++h) {
      load(query, token, h, x);
      turn(token, x);
      store(x, query_out, token, h);
    }
    const int64_t slot = slots[static_cast<size_t>(token)];
    for (int64_t h = 0; h < desc_.num_heads_kv && slot >= 0; ++h) {
      load(new_key, token, h, x);
      turn(token, x);
      store(x, key, slot, h);
      load(new_value, token, h, x);
      store(x, value, slot, h);
    }
  };
  return for_each_token(args.executor, static_cast<int64_t>(slots.size()), std::max(desc_.head_dim, desc_.head_dim_v),
                        write);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status KvCache::copy(const KvTensors& pool, const Tensor& from, const Tensor& to) const try {
  Operands operands;
  const Dim n{"tokens", from.ndim == 1 ? from.dims[0] : 0};
  Status status = operands.add(Role::kInput, "from", from, integers(n));
  if (status.ok()) status = operands.add(Role::kInput, "to", to, integers(n));
  if (status.ok()) status = add_pool(operands, Role::kGradient, desc_, pool);
  Numbers sources, targets;
  if (status.ok()) status = read_slots(desc_, "from", from, false, &sources);
  if (status.ok()) status = read_slots(desc_, "to", to, false, &targets);
  if (status.ok()) status = check_distinct("to", targets);
  if (!status.ok()) return status;
  for (const PoolTensor& each : kPool) {
    const Tensor& t = pool.*each.tensor;
    if (!t.given()) continue;
    const Place place{t, desc_.page_size};
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

Status KvCache::read(const KvTensors& pool, const Tensor& slots, const Tensor& key, const Tensor& value) const try {
  Operands operands;
  const Dim n{"tokens", slots.ndim == 1 ? slots.dims[0] : 0}, heads{"num_heads_kv", desc_.num_heads_kv};
  Status status = operands.add(Role::kInput, "slots", slots, integers(n));
  if (status.ok()) status = add_pool(operands, Role::kInput, desc_, pool);
  const struct {
    const char* name;
    Place from;
    const Tensor& to;
    Dim dim;
  } parts[] = {{"key", keys_of(desc_, pool), key, {"head_dim", desc_.head_dim}},
               {"value", values_of(desc_, pool), value, {"head_dim_v", desc_.head_dim_v}}};
  for (const auto& part : parts) {
    if (!status.ok() || !part.to.given()) continue;
    status = operands.add(Role::kGradient, part.name, part.to, of_any_float(part.to, {n, heads, part.dim}));
  }
  Numbers from;
  if (status.ok()) status = read_slots(desc_, "slots", slots, false, &from);
  if (!status.ok()) return status;
  std::vector<float> x(static_cast<size_t>(std::max(desc_.head_dim, desc_.head_dim_v)));
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
