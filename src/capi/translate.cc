#include "capi/translate.h"

#include <algorithm>
#include <cstring>

#include "capi/fields.h"
#include "core/sentence.h"

namespace polyhead::capi {
namespace {

// Layouts that never change (on 64-bit machines).
static_assert(sizeof(void*) != 8 || sizeof(polyhead_tensor) == 104);
static_assert(sizeof(polyhead_partial) == 2 * sizeof(polyhead_tensor));
static_assert(POLYHEAD_MAX_DIMS == Tensor::kMaxDims);
static_assert(sizeof(polyhead_capture_shape) == 40);
static_assert(POLYHEAD_MAX_CAPTURES == Program::kMostCaptures);

}  // namespace

Status need(const void* pointer, const char* what) {
  return pointer != nullptr ? Status() : invalid(sentence(what, " is a null pointer"));
}

Status check_struct_size(size_t size, size_t first_size, size_t size_now, const char* name) {
  if (size > size_now) {
    return invalid(sentence(name, ".struct_size is ", size, ", polyhead ", polyhead_version(), " takes at most ",
                            size_now, ": the program's polyhead.h is newer than the library"));
  }
  if (size < first_size || size % 8 != 0) {
    return invalid(
        sentence(name, ".struct_size is ", size, ", expected ", size_now, ": the init function of the struct sets it"));
  }
  return {};
}

Status translate(const polyhead_tensor& from, std::string_view prefix, std::string_view name, Tensor* to) {
  if (from.ndim == 0) return {};  // not given: the other fields say nothing
  const auto refused = [&](const char* field, int32_t value, const auto&... expected) {
    return invalid(sentence(prefix, name, ".", field, " is ", value, ", ", expected...));
  };
  constexpr auto kLastDtype = static_cast<int32_t>(Choice<DType>::kLast);
  constexpr auto kLastDevice = static_cast<int32_t>(Choice<Device>::kLast);
  if (from.ndim < 0 || from.ndim > POLYHEAD_MAX_DIMS) {
    return refused("ndim", from.ndim, "takes 0 to ", POLYHEAD_MAX_DIMS);
  }
  if (from.dtype < 0 || from.dtype > kLastDtype) {
    return refused("dtype", from.dtype, "must be a ", Choice<DType>::kName, ": 0 to ", kLastDtype);
  }
  if (from.device < 0 || from.device > kLastDevice) {
    return refused("device", from.device, "must be a ", Choice<Device>::kName, ": 0 to ", kLastDevice);
  }
  if (from.reserved != 0) return refused("reserved", from.reserved, "must be 0");
  to->data = from.data;
  to->dtype = static_cast<DType>(from.dtype);
  to->device = static_cast<Device>(from.device);
  to->ndim = from.ndim;
  std::memcpy(to->dims, from.dims, sizeof to->dims);
  std::memcpy(to->strides, from.strides, sizeof to->strides);
  return {};
}

polyhead_tensor translate_back(const Tensor& from) {
  polyhead_tensor to = {};
  to.data = from.data;
  to.dtype = static_cast<int32_t>(from.dtype);
  to.device = static_cast<int32_t>(from.device);
  to.ndim = from.ndim;
  for (int i = 0; i < from.ndim; ++i) to.dims[i] = from.dims[i], to.strides[i] = from.strides[i];
  return to;
}

Status translate(const polyhead_partial* from, const char* name, Partial* to) {
  if (Status s = need(from, name); !s.ok()) return s;
  if (Status s = translate(from->out, name, ".out", &to->out); !s.ok()) return s;
  return translate(from->logsumexp, name, ".logsumexp", &to->logsumexp);
}

Status translate(const polyhead_partial* from, size_t count, const char* name, std::vector<Partial>* to) {
  if (Status s = need(from, name); !s.ok()) return s;
  constexpr size_t kMaxParts = 65536;  // a negative number of an int is not taken for a long array
  if (count < 1 || count > kMaxParts) return invalid(sentence("num_parts is ", count, ", takes 1 to ", kMaxParts));
  to->resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (Status s = translate(from + i, sentence(name, "[", i, "]").c_str(), &(*to)[i]); !s.ok()) return s;
  }
  return {};
}

bool ProgramFields::read(const C& from, const Reading& in, AttentionDesc* to) const {
  if (from.program == nullptr && from.num_captures == 0) return true;
  if (from.program == nullptr) return in.refuse("num_captures", from.num_captures, "must be 0 where program is NULL");
  if (from.num_captures > POLYHEAD_MAX_CAPTURES) {
    return in.refuse("num_captures", from.num_captures, sentence("takes 0 to ", POLYHEAD_MAX_CAPTURES));
  }
  if (from.num_captures > 0 && from.captures == nullptr) return in.fail(need(nullptr, "desc.captures"));
  Result<SharedProgram> program = parse_program(from.program);
  if (!program.ok()) return in.fail(program.status());
  to->program = std::move(*program);
  for (size_t i = 0; i < from.num_captures; ++i) {
    const polyhead_capture_shape& shape = from.captures[i];
    const std::string name = sentence("captures[", i, "]");
    const Reading inside{{name.c_str(), name}, in.status};
    CaptureShape& own = to->captures.emplace_back();
    if (!capi::read(shape.dtype, inside, "dtype", &own.dtype)) return false;
    if (shape.ndim < 1 || shape.ndim > 4) return inside.refuse("ndim", shape.ndim, "takes 1 to 4");
    own.ndim = shape.ndim;
    std::copy_n(shape.dims, shape.ndim, own.dims);
  }
  return true;
}

}  // namespace polyhead::capi
