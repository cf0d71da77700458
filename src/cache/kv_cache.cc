// Writing to caches of keys and values, and reading them back.
//   x [D] one head of one token   c, s [R / 2] cosines and sines of its position
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

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
  const struct {
    const char* name;
    DType dtype;
  } dtypes[] = {{"key_dtype", d.key_dtype}, {"value_dtype", d.value_dtype}};
  for (const auto& [name, dtype] : dtypes) {
    if (is_float_of_cache(dtype)) continue;
    return invalid(sentence(name, " is ", dtype_name(dtype), ", takes float32, bfloat16 or float16"));
  }
  return {};
}

OperandShape of_any_float(const Tensor& t, const Dim (&dims)[3]) {
  return {is_float_of_cache(t.dtype) ? t.dtype : DType::kFloat32, dims};
}

OperandShape integers(Dim count) {
  OperandShape shape(DType::kInt64, {count});
  shape.takes = OperandShape::Takes::kInt32OrInt64;
  return shape;
}

// The pool, whose tokens are written (kGradient: any strides whose elements lie apart) or read.
Status add_pool(Operands& operands, Role role, const KvCacheDesc& d, const KvTensors& pool) {
  const Dim pages{"num_pages", d.num_pages}, rows{"page_size", d.page_size}, heads{"num_heads_kv", d.num_heads_kv};
  Status status =
      operands.add(role, "pool.key", pool.key, {d.key_dtype, {pages, rows, heads, {"head_dim", d.head_dim}}});
  if (!status.ok()) return status;
  return operands.add(role, "pool.value", pool.value,
                      {d.value_dtype, {pages, rows, heads, {"head_dim_v", d.head_dim_v}}});
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

// Where head `h` of token i begins, in a [n, heads, dim] tensor or in the pool.
struct Place {
  const Tensor& tensor;
  int64_t page_size = 0;  // 0: a [n, heads, dim] tensor

  int64_t at(int64_t i, int64_t h) const {
    const int64_t* s = tensor.strides;
    if (page_size == 0) return i * s[0] + h * s[1];
    return i / page_size * s[0] + i % page_size * s[1] + h * s[2];
  }
  int64_t stride() const { return tensor.strides[tensor.ndim - 1]; }
  int64_t heads() const { return tensor.dims[tensor.ndim - 2]; }
  int64_t dim() const { return tensor.dims[tensor.ndim - 1]; }
};

void load(const Place& from, int64_t i, int64_t h, float* x) {
  const int64_t at = from.at(i, h), stride = from.stride(), dim = from.dim();
  with_element_type(from.tensor.dtype, [&]<class E>(E) {
    const E* const elements = static_cast<const E*>(from.tensor.data) + at;
    for (int64_t d = 0; d < dim; ++d) x[d] = widen<float>(elements[d * stride]);
  });
}

void store(const float* x, const Place& to, int64_t i, int64_t h) {
  const int64_t at = to.at(i, h), stride = to.stride(), dim = to.dim();
  with_element_type(to.tensor.dtype, [&]<class E>(E) {
    E* const elements = static_cast<E*>(to.tensor.data) + at;
    for (int64_t d = 0; d < dim; ++d) elements[d * stride] = narrow<E>(x[d]);
  });
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
  MemoryMap map;
  map.take({desc.num_pages, desc.page_size, desc.num_heads_kv, desc.head_dim}, dtype_size_bytes(desc.key_dtype));
  cache.value_at_ = map.take({desc.num_pages, desc.page_size, desc.num_heads_kv, desc.head_dim_v},
                             dtype_size_bytes(desc.value_dtype));
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
  const KvCacheDesc& d = desc_;
  return {Tensor(buffer, d.key_dtype, {d.num_pages, d.page_size, d.num_heads_kv, d.head_dim}),
          Tensor(static_cast<char*>(buffer) + value_at_, d.value_dtype,
                 {d.num_pages, d.page_size, d.num_heads_kv, d.head_dim_v})};
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
  const Place key{pool.key, desc_.page_size}, value{pool.value, desc_.page_size};
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
  for (const Tensor* tensor : {&pool.key, &pool.value}) {
    const Place place{*tensor, desc_.page_size};
    const int64_t row = place.heads() * place.dim();
    std::vector<float> staged(sources.size() * static_cast<size_t>(row));  // float32 holds every stored element
    for (size_t i = 0; i < sources.size(); ++i) {
      for (int64_t h = 0; h < place.heads(); ++h) {
        load(place, sources[i], h, staged.data() + static_cast<int64_t>(i) * row + h * place.dim());
      }
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      for (int64_t h = 0; h < place.heads(); ++h) {
        store(staged.data() + static_cast<int64_t>(i) * row + h * place.dim(), place, targets[i], h);
      }
    }
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
    const Tensor &from, &to;
    Dim dim;
  } parts[] = {{"key", pool.key, key, {"head_dim", desc_.head_dim}},
               {"value", pool.value, value, {"head_dim_v", desc_.head_dim_v}}};
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
        load({part.from, desc_.page_size}, from[i], h, x.data());
        store(x.data(), {part.to}, static_cast<int64_t>(i), h);
      }
    }
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
