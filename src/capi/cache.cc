// polyhead_cache.h: translates to the C++ interface and back; computes nothing.
#include "polyhead/cache.h"

#include <memory>
#include <utility>

#include "capi/handles.h"

using polyhead::Status;
using polyhead::Tensor;
using namespace polyhead::capi;

struct polyhead_kv_cache {
  polyhead::KvCache cache;
};
struct polyhead_page_table {
  polyhead::PageTable table;
};

namespace {

using polyhead::KvTensors;

Status translate_pool(const polyhead_kv_tensors* pool, KvTensors* to) {
  Status status = need(pool, "pool");
  return status.ok() ? read_fields(*pool, {"pool", "pool", "pool."}, to) : status;
}

// A tensor that may be left out.
Status translate_tensor(const polyhead_tensor* from, const char* name, Tensor* to) {
  return from == nullptr ? Status() : translate(*from, name, "", to);
}

// A number that `made` is, or why there is none.
Status give(polyhead::Result<int64_t> made, int64_t* number) {
  if (!made.ok()) return made.status();
  *number = *made;
  return {};
}

}  // namespace

extern "C" {

polyhead_status polyhead_kv_cache_desc_init(polyhead_kv_cache_desc* desc, size_t struct_size) {
  return guarded([&] { return init(desc, struct_size, "desc"); });
}

polyhead_status polyhead_kv_append_args_init(polyhead_kv_append_args* args, size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_kv_cache_create(const polyhead_kv_cache_desc* desc, polyhead_kv_cache** cache) {
  return create(desc, nullptr, "cache", cache, [](const auto& checked, const auto&) { return kv_cache(checked); });
}

void polyhead_kv_cache_destroy(polyhead_kv_cache* cache) { delete cache; }

size_t polyhead_kv_cache_bytes(const polyhead_kv_cache* cache) {
  return ask(cache, "cache", size_t{0}, [](const auto& c) { return c.cache.bytes(); });
}

polyhead_status polyhead_kv_cache_tensors(const polyhead_kv_cache* cache, void* buffer, polyhead_kv_tensors* tensors) {
  return guarded([&]() -> Status {
    if (Status s = need(cache, "cache"); !s.ok()) return s;
    if (Status s = need(tensors, "tensors"); !s.ok()) return s;
    if (cache->cache.bytes() > 0) {
      if (Status s = need(buffer, "buffer"); !s.ok()) return s;
    }
    write_fields(cache->cache.tensors(buffer), tensors);
    return {};
  });
}

polyhead_status polyhead_kv_cache_append(const polyhead_kv_cache* cache, const polyhead_kv_tensors* pool,
                                         const polyhead_kv_append_args* args) {
  return call(cache, "cache", args, [&](const auto& c, const auto& tokens) {
    KvTensors tensors;
    Status status = translate_pool(pool, &tensors);
    return status.ok() ? c.cache.append(tensors, tokens) : status;
  });
}

polyhead_status polyhead_kv_cache_copy(const polyhead_kv_cache* cache, const polyhead_kv_tensors* pool,
                                       const polyhead_tensor* from, const polyhead_tensor* to, void* stream) {
  return guarded([&]() -> Status {
    KvTensors tensors;
    Tensor sources, targets;
    if (Status s = need(cache, "cache"); !s.ok()) return s;
    if (Status s = translate_pool(pool, &tensors); !s.ok()) return s;
    if (Status s = translate_tensor(from, "from", &sources); !s.ok()) return s;
    if (Status s = translate_tensor(to, "to", &targets); !s.ok()) return s;
    return cache->cache.copy(tensors, sources, targets, stream);
  });
}

polyhead_status polyhead_kv_cache_read(const polyhead_kv_cache* cache, const polyhead_kv_tensors* pool,
                                       const polyhead_tensor* slots, const polyhead_tensor* key,
                                       const polyhead_tensor* value, void* stream) {
  return guarded([&]() -> Status {
    KvTensors tensors;
    Tensor from, to_key, to_value;
    if (Status s = need(cache, "cache"); !s.ok()) return s;
    if (Status s = translate_pool(pool, &tensors); !s.ok()) return s;
    if (Status s = translate_tensor(slots, "slots", &from); !s.ok()) return s;
    if (Status s = translate_tensor(key, "key", &to_key); !s.ok()) return s;
    if (Status s = translate_tensor(value, "value", &to_value); !s.ok()) return s;
    return cache->cache.read(tensors, from, to_key, to_value, stream);
  });
}

polyhead_status polyhead_page_table_create(int64_t num_pages, int64_t page_size, polyhead_page_table** table) {
  return guarded([&]() -> Status {
    if (Status s = need(table, "table"); !s.ok()) return s;
    *table = nullptr;
    auto made = polyhead::page_table(num_pages, page_size);
    if (!made.ok()) return made.status();
    *table = new polyhead_page_table{std::move(*made)};
    return {};
  });
}

void polyhead_page_table_destroy(polyhead_page_table* table) { delete table; }

int64_t polyhead_page_table_num_free(const polyhead_page_table* table) {
  return ask(table, "table", int64_t{-1}, [](const auto& t) { return t.table.num_free(); });
}

polyhead_status polyhead_page_table_add(polyhead_page_table* table, int64_t* sequence) {
  return guarded([&]() -> Status {
    if (Status s = need(table, "table"); !s.ok()) return s;
    if (Status s = need(sequence, "sequence"); !s.ok()) return s;
    return give(table->table.add(), sequence);
  });
}

polyhead_status polyhead_page_table_fork(polyhead_page_table* table, int64_t parent, int64_t* sequence) {
  return guarded([&]() -> Status {
    if (Status s = need(table, "table"); !s.ok()) return s;
    if (Status s = need(sequence, "sequence"); !s.ok()) return s;
    return give(table->table.fork(parent), sequence);
  });
}

polyhead_status polyhead_page_table_remove(polyhead_page_table* table, int64_t sequence) {
  return guarded([&]() -> Status {
    if (Status s = need(table, "table"); !s.ok()) return s;
    return table->table.remove(sequence);
  });
}

polyhead_status polyhead_page_table_resize(polyhead_page_table* table, int64_t sequence, int64_t length,
                                           int64_t* copy_from, int64_t* copy_to) {
  return guarded([&]() -> Status {
    if (Status s = need(table, "table"); !s.ok()) return s;
    if (Status s = need(copy_from, "copy_from"); !s.ok()) return s;
    if (Status s = need(copy_to, "copy_to"); !s.ok()) return s;
    polyhead::PageTable::Copy copy;
    Status status = table->table.resize(sequence, length, &copy);
    *copy_from = copy.from, *copy_to = copy.to;
    return status;
  });
}

int64_t polyhead_page_table_length(const polyhead_page_table* table, int64_t sequence) {
  return ask(table, "table", int64_t{-1}, [&](const auto& t) { return t.table.length(sequence); });
}

const int64_t* polyhead_page_table_pages(const polyhead_page_table* table, int64_t sequence, size_t* num_pages) {
  return ask(table, "table", static_cast<const int64_t*>(nullptr), [&](const auto& t) {
    const auto pages = t.table.pages(sequence);
    if (num_pages != nullptr) *num_pages = pages.size();
    return pages.empty() ? nullptr : pages.data();
  });
}

int64_t polyhead_page_table_num_holders(const polyhead_page_table* table, int64_t page) {
  return ask(table, "table", int64_t{0}, [&](const auto& t) { return t.table.num_holders(page); });
}

int64_t polyhead_page_table_slot(const polyhead_page_table* table, int64_t sequence, int64_t token) {
  return ask(table, "table", int64_t{-1}, [&](const auto& t) { return t.table.slot(sequence, token); });
}

}  // extern "C"
