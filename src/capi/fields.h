// How the structs of the C interface are read field by field: what translate.cc and layer.cc share.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "capi/translate.h"
#include "core/sentence.h"

namespace polyhead::capi {

// Fills the caller's struct, as large as its header knew it, with the defaults.
template <class T>
Status init_struct(T* to, size_t struct_size, size_t first_size, const char* name, T defaults) {
  if (Status s = need(to, name); !s.ok()) return s;
  if (Status s = check_struct_size(struct_size, first_size, sizeof(T), name); !s.ok()) return s;
  defaults.struct_size = struct_size;
  std::memcpy(to, &defaults, struct_size);
  return {};
}

// Copies as much of `from` as its caller's header knew over the defaults in `to`.
template <class T>
Status take(const T* from, size_t first_size, const char* name, T* to) {
  if (Status s = check_struct_size(from->struct_size, first_size, sizeof(T), name); !s.ok()) return s;
  std::memcpy(to, from, from->struct_size);
  if (to->flags != 0) return invalid(sentence(name, ".flags is ", to->flags, ", must be 0: no flag is known here"));
  return {};
}

// Translates fields one by one and keeps the first failure. Builds no string before something fails.
class Fields {
 public:
  explicit Fields(std::string_view owner = "") : owner_(owner) {}
  Status status;

  void boolean(int32_t from, std::string_view name, bool* to) {
    if (from != 0 && from != 1) return refuse(name, from, "must be 0 or 1");
    *to = from == 1;
  }

  template <class Enum>
  void choice(int32_t from, Enum last, std::string_view name, std::string_view what, Enum* to) {
    const auto last_value = static_cast<int32_t>(last);
    if (from < 0 || from > last_value) {
      return refuse(name, from, sentence("must be a ", what, ": 0 to ", last_value));
    }
    *to = static_cast<Enum>(from);
  }

  template <class Number>
  void zero(Number from, std::string_view name, std::string_view where = "") {
    if (from != 0) refuse(name, from, sentence("must be 0", where));
  }

  void broadcast(const polyhead_broadcast_operand& from, std::string_view name, BroadcastOperand* to) {
    Fields fields(name);
    fields.boolean(from.given, "given", &to->given);
    if (to->given) fields.choice(from.dtype, DType::kInt64, "dtype", "polyhead_dtype", &to->dtype);
    if (to->given) std::memcpy(to->dims, from.dims, sizeof to->dims);
    if (status.ok()) status = std::move(fields.status);
  }

 private:
  template <class Number>
  void refuse(std::string_view name, Number value, std::string_view expected) {
    if (!status.ok()) return;
    status = invalid(sentence(owner_, owner_.empty() ? "" : ".", name, " is ", value, ", ", expected));
  }

  std::string_view owner_;
};

struct TensorField {
  const polyhead_tensor& from;
  const char* name;
  Tensor* to;
};

inline Status translate_all(std::span<const TensorField> fields) {
  for (const TensorField& field : fields) {
    if (Status s = translate(field.from, field.name, field.to); !s.ok()) return s;
  }
  return {};
}

// The memory that forward calls of layer and feed-forward block are given.
template <class From, class To>
void translate_memory(const From& from, To* to) {
  to->reserve = from.reserve;
  to->reserve_bytes = from.reserve_bytes;
  to->workspace = from.workspace;
  to->workspace_bytes = from.workspace_bytes;
  to->packed_weights = from.packed_weights;
  to->packed_weights_bytes = from.packed_weights_bytes;
}

// What comes in and the gradients of the inputs, which the backward calls of attention, layer and block have in common.
template <class From, class To>
Status translate_gradients(const From& from, To* to) {
  const TensorField tensors[] = {
      {from.grad_out, "grad_out", &to->grad_out},
      {from.grad_query, "grad_query", &to->grad_query},
      {from.grad_key, "grad_key", &to->grad_key},
      {from.grad_value, "grad_value", &to->grad_value},
      {from.grad_attn_bias, "grad_attn_bias", &to->grad_attn_bias},
      {from.grad_alibi_slopes, "grad_alibi_slopes", &to->grad_alibi_slopes},
  };
  return translate_all(tensors);
}

}  // namespace polyhead::capi
