#include "cache_call.h"

#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "pages.h"
#include "place.h"
#include "polyhead/cache.h"
#include "scalars.h"
#include "threads.h"

namespace polyhead::python {
namespace {

constexpr const char* kOfCache = "float32, bfloat16, float16, int8, float8_e4m3, float8_e5m2 or (pairs of int4) uint8";
constexpr const char* kTokenDtypes = "float32, bfloat16 or float16";
constexpr const char* kIntegers = "int32 or int64";
constexpr ArrayArgument kPools[] = {
    {"key", kOfCache, 4, 4, "[num_pages, page_size, num_heads_kv, head_dim]", true},
    {"value", kOfCache, 4, 4, "[num_pages, page_size, num_heads_kv, head_dim_v]", true},
    {"key_scales", "float32 or float16", 4, 4, "[num_pages, page_size, num_heads_kv, groups of head_dim]"},
    {"value_scales", "float32 or float16", 4, 4, "[num_pages, page_size, num_heads_kv, groups of head_dim_v]"}};

void set_side(const Tensor& stored, const Tensor& scales, int64_t& dim, DType& dtype, int64_t& group) {
  std::optional<DType> with_scales;
  set_format(stored, scales, with_scales, group);
  dtype = with_scales.value_or(stored.dtype);
  dim = row_numbers(stored);
}

Tensor slots_view(const CacheArrays& arrays, int position, const char* name, Held& held) {
  return arrays.view(position, {name, kIntegers, 1, 1, "[tokens]"}, held);
}

}  // namespace

CacheArrays::CacheArrays(PyObject* const* arguments) : arguments_(arguments) {
  Tensor* const tensors[] = {&pool.key, &pool.value, &pool.key_scales, &pool.value_scales};
  for (int i = 0; i < 4; ++i) {
    if (i >= kPoolKeyScales && arguments[i] == Py_None) continue;
    *tensors[i] = writable_view_of(arguments[i], kPools[i], held_[i]);
  }
  KvCacheDesc desc;
  desc.num_pages = pool.key.dims[0];
  desc.page_size = pool.key.dims[1];
  desc.num_heads_kv = pool.key.dims[2];
  set_side(pool.key, pool.key_scales, desc.head_dim, desc.key_dtype, desc.key_group);
  set_side(pool.value, pool.value_scales, desc.head_dim_v, desc.value_dtype, desc.value_group);
  desc.rotary_dim = int64_argument(arguments[kRotaryDim], "rotary_dim");
  desc.interleaved = flag_argument(arguments[kInterleaved], "interleaved");
  desc.hadamard = flag_argument(arguments[kHadamard], "hadamard");
  cache_.emplace(checked(kv_cache(desc)));
}

Tensor CacheArrays::view(int position, const ArrayArgument& argument, Held& held) const {
  return arguments_[position] == Py_None ? Tensor() : view_of(arguments_[position], argument, held);
}

nb::object cache_check(PyObject* const* arguments) {
  const Place place(arguments[kPoolKey], Py_None);
  const CacheArrays arrays(arguments);
  // What append refuses of a cache is refused here, too: of no tokens.
  const KvCacheDesc& d = arrays.cache().desc();
  const auto none = [&](DType dtype, std::initializer_list<int64_t> dims) {
    Tensor t(nullptr, dtype, dims);
    t.device = arrays.pool.key.device;
    return t;
  };
  KvAppendArgs args;
  args.key = none(DType::kFloat32, {0, d.num_heads_kv, d.head_dim});
  args.value = none(DType::kFloat32, {0, d.num_heads_kv, d.head_dim_v});
  args.slots = none(DType::kInt64, {0});
  if (d.rotary_dim > 0) {
    args.positions = args.slots;
    args.cos = args.sin = none(DType::kFloat32, {0, d.rotary_dim / 2});
  }
  args.stream = place.stream();
  check(arrays.cache().append(arrays.pool, args));
  return nb::none();
}

nb::object cache_append(PyObject* const* arguments) {
  const Place place(arguments[kPoolKey], Py_None);
  const CacheArrays arrays(arguments);
  Held held[7];
  KvAppendArgs args;
  args.key = arrays.view(kNewKey, {"key", kTokenDtypes, 3, 3, "[tokens, num_heads_kv, head_dim]"}, held[0]);
  args.value = arrays.view(kNewValue, {"value", kTokenDtypes, 3, 3, "[tokens, num_heads_kv, head_dim_v]"}, held[1]);
  args.slots = slots_view(arrays, kSlots, "slots", held[2]);
  args.positions = slots_view(arrays, kPositions, "positions", held[3]);
  args.cos = arrays.view(kCos, kCosTable, held[4]);
  args.sin = arrays.view(kSin, kSinTable, held[5]);
  args.query = arrays.view(kNewQuery, {"query", kTokenDtypes, 3, 3, "[tokens, num_heads, head_dim]"}, held[6]);
  nb::object turned = nb::none();
  if (args.query.given()) {
    args.query_out = args.query;
    turned = Results("query", arguments[kNewQuery], args.query.dtype).make(args.query_out);
  }
  args.executor = chosen_executor();
  args.stream = place.stream();
  run_without_gil([&] { return arrays.cache().append(arrays.pool, args); });
  return turned;
}

nb::object cache_copy(PyObject* const* arguments) {
  const Place place(arguments[kPoolKey], Py_None);
  const CacheArrays arrays(arguments);
  Held held[2];
  const Tensor from = slots_view(arrays, kFrom, "from_slots", held[0]);
  const Tensor to = slots_view(arrays, kTo, "to_slots", held[1]);
  run_without_gil([&] { return arrays.cache().copy(arrays.pool, from, to, place.stream()); });
  return nb::none();
}

nb::object cache_read(PyObject* const* arguments) {
  const Place place(arguments[kPoolKey], Py_None);
  const CacheArrays arrays(arguments);
  Held held;
  const Tensor slots = slots_view(arrays, kReadSlots, "slots", held);
  const KvCacheDesc& d = arrays.cache().desc();
  Tensor key(nullptr, DType::kFloat32, {slots.dims[0], d.num_heads_kv, d.head_dim});
  Tensor value(nullptr, DType::kFloat32, {slots.dims[0], d.num_heads_kv, d.head_dim_v});
  nb::object keys = Results("key", arguments[kPoolKey], d.key_dtype).make(key);
  nb::object values = Results("value", arguments[kPoolValue], d.value_dtype).make(value);
  run_without_gil([&] { return arrays.cache().read(arrays.pool, slots, key, value, place.stream()); });
  return nb::make_tuple(keys, values);
}

void add_page_table(nb::module_& module) {
  nb::class_<PageTable>(module, "PageTable")
      .def("num_free", &PageTable::num_free)
      .def("add", [](PageTable& table) { return checked(table.add()); })
      .def("fork", [](PageTable& table, int64_t sequence) { return checked(table.fork(sequence)); })
      .def("remove", [](PageTable& table, int64_t sequence) { check(table.remove(sequence)); })
      .def("resize",
           [](PageTable& table, int64_t sequence, int64_t length) {
             PageTable::Copy copy;
             check(table.resize(sequence, length, &copy));
             return nb::make_tuple(copy.from, copy.to);
           })
      .def("length", &PageTable::length)
      .def("pages",
           [](const PageTable& table, int64_t sequence) {
             const auto pages = table.pages(sequence);
             return std::vector<int64_t>(pages.begin(), pages.end());
           })
      .def("slot", &PageTable::slot)
      .def("num_holders", &PageTable::num_holders);
  module.def("page_table",
             [](int64_t num_pages, int64_t page_size) { return checked(page_table(num_pages, page_size)); });
}

}  // namespace polyhead::python
