// Rows of the tables that tell which field of a C++ struct each field of a C struct is (tables.h). Calls are read by
// walking a table one way; the defaults of the C structs are written by walking it the other way, from those of C++.
// Each row's type is deduced from its members, by a guide behind it: clang deduces those of aggregates from 17 on.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "capi/translate.h"
#include "core/sentence.h"
#include "polyhead/block.h"

namespace polyhead::capi {

// What a sentence calls a struct, and what stands before the names of its numbers and of its tensors.
struct Names {
  const char* object;
  std::string_view numbers = "";
  std::string_view tensors = "";
};

// For each struct of the C headers: `Cpp`, the struct that it is in C++; `kFields`, the rows; and, where it begins with
// a struct_size, `kFirstSize`, its size in the first version of the header, which a caller's struct may still have.
template <class C>
struct Table;

// The largest value of an enum, and its name in C.
template <class Enum>
struct Choice;
template <>
struct Choice<DType> {
  static constexpr DType kLast = DType::kInt4x2;
  static constexpr const char* kName = "polyhead_dtype";
};
template <>
struct Choice<Device> {
  static constexpr Device kLast = Device::kCuda;
  static constexpr const char* kName = "polyhead_device";
};
template <>
struct Choice<Align> {
  static constexpr Align kLast = Align::kBottomRight;
  static constexpr const char* kName = "polyhead_align";
};
template <>
struct Choice<ReturnWeights> {
  static constexpr ReturnWeights kLast = ReturnWeights::kMean;
  static constexpr const char* kName = "polyhead_return_weights";
};
template <>
struct Choice<Normalizer> {
  static constexpr Normalizer kLast = Normalizer::kNone;
  static constexpr const char* kName = "polyhead_normalizer";
};
template <>
struct Choice<NormKind> {
  static constexpr NormKind kLast = NormKind::kRmsNorm;
  static constexpr const char* kName = "polyhead_norm_kind";
};
template <>
struct Choice<ActivationKind> {
  static constexpr ActivationKind kLast = ActivationKind::kSilu;
  static constexpr const char* kName = "polyhead_activation_kind";
};

// Where a struct is read: its names, and the first failure.
struct Reading {
  Names names;
  Status* status;

  bool fail(Status failure) const { return *status = std::move(failure), false; }
  template <class Number>
  bool refuse(const char* name, Number value, std::string_view expected) const {
    const std::string_view in = names.numbers;
    return fail(invalid(sentence(in, in.empty() ? "" : ".", name, " is ", value, ", ", expected)));
  }
};

template <class C>
Status translate(const C* from, const Names& names, typename Table<C>::Cpp* to);
template <class C>
Status translate(const C* from, const Names& names, std::optional<typename Table<C>::Cpp>* to) {
  return translate(from, names, &to->emplace());
}

template <class C>
Status read_fields(const C& from, const Names& names, typename Table<C>::Cpp* to) {
  Status status;
  const Reading in{names, &status};
  std::apply([&](const auto&... row) { return (row.read(from, in, to) && ...); }, Table<C>::kFields);
  return status;
}

// From Table<C>::Cpp, or the public struct that it is derived from.
template <class C, class Cpp>
void write_fields(const Cpp& from, C* to) {
  std::apply([&](const auto&... row) { (row.write(from, to), ...); }, Table<C>::kFields);
}

// One value; false where it is refused. Numbers and pointers that are alike are copied.
template <class From, class To>
bool read(const From& from, const Reading& in, const char* name, To* to) {
  if constexpr (std::is_same_v<From, To> || std::is_same_v<To, std::optional<From>>) {
    *to = from;
  } else if constexpr (std::is_same_v<To, bool>) {
    if (from != 0 && from != 1) return in.refuse(name, from, "must be 0 or 1");
    *to = from == 1;
  } else if constexpr (std::is_enum_v<To>) {
    constexpr auto kLast = static_cast<int32_t>(Choice<To>::kLast);
    if (from < 0 || from > kLast) {
      return in.refuse(name, from, sentence("must be a ", Choice<To>::kName, ": 0 to ", kLast));
    }
    *to = static_cast<To>(from);
  } else if constexpr (std::is_same_v<To, std::optional<Device>> || std::is_same_v<To, std::optional<DType>>) {
    return read(from, in, name, &to->emplace());
  } else if constexpr (std::is_same_v<To, Tensor>) {
    if (from.ndim == 0) return true;  // not given: the other fields say nothing
    Status inner = translate(from, in.names.tensors, name, to);
    return inner.ok() || in.fail(std::move(inner));
  } else if constexpr (std::is_same_v<To, BroadcastOperand>) {
    const Reading inside{{name, name}, in.status};
    if (!read(from.given, inside, "given", &to->given)) return false;
    if (!to->given) return true;
    std::memcpy(to->dims, from.dims, sizeof to->dims);
    return read(from.dtype, inside, "dtype", &to->dtype);
  } else if constexpr (std::is_same_v<To, std::string_view>) {
    if (from != nullptr) *to = from;
  } else if constexpr (std::is_same_v<To, Executor*>) {
    if (from != nullptr) *to = from->executor.get();
  }
  return true;
}

template <class From, class To>
void write(const From& from, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    *to = from;
  } else if constexpr (std::is_same_v<From, Tensor>) {
    *to = translate_back(from);
  } else if constexpr (std::is_same_v<From, BroadcastOperand>) {
    *to = {from.given, static_cast<int32_t>(from.dtype), {from.dims[0], from.dims[1], from.dims[2], from.dims[3]}};
  } else if constexpr (std::is_integral_v<To> && (std::is_integral_v<From> || std::is_enum_v<From>)) {
    *to = static_cast<To>(from);
  } else {
    *to = {};  // not given
  }
}

// A field of both.
template <class C, class Cpp, class From, class To>
struct Field {
  static constexpr size_t kBytes = sizeof(From);
  const char* name;
  From C::*c;
  To Cpp::*cpp;

  bool read(const C& from, const Reading& in, Cpp* to) const { return capi::read(from.*c, in, name, &(to->*cpp)); }
  void write(const Cpp& from, C* to) const { capi::write(from.*cpp, &(to->*c)); }
};
template <class C, class Cpp, class From, class To>
Field(const char*, From C::*, To Cpp::*) -> Field<C, Cpp, From, To>;

// A field of a struct within the C++ struct.
template <class C, class Cpp, class Inner, class From, class To>
struct FieldWithin {
  static constexpr size_t kBytes = sizeof(From);
  const char* name;
  From C::*c;
  Inner Cpp::*within;
  To Inner::*cpp;

  bool read(const C& from, const Reading& in, Cpp* to) const {
    return capi::read(from.*c, in, name, &(to->*within.*cpp));
  }
  void write(const Cpp& from, C* to) const { capi::write(from.*within.*cpp, &(to->*c)); }
};
template <class C, class Cpp, class Inner, class From, class To>
FieldWithin(const char*, From C::*, Inner Cpp::*, To Inner::*) -> FieldWithin<C, Cpp, Inner, From, To>;

// One of several tensors in an array.
template <class C, class Cpp, size_t kCount>
struct Element {
  static constexpr size_t kBytes = sizeof(polyhead_tensor);
  const char* name;
  polyhead_tensor (C::*c)[kCount];
  int index;
  Tensor Cpp::*cpp;

  bool read(const C& from, const Reading& in, Cpp* to) const {
    return capi::read((from.*c)[index], in, name, &(to->*cpp));
  }
  void write(const Cpp& from, C* to) const { capi::write(from.*cpp, &(to->*c)[index]); }
};
template <class C, class Cpp, size_t kCount>
Element(const char*, polyhead_tensor (C::*)[kCount], int, Tensor Cpp::*) -> Element<C, Cpp, kCount>;

// A number that counts where a boolean beside it is 1; else it must be 0.
template <class C, class Cpp, class Number, class Optional>
struct OptionalField {
  static constexpr size_t kBytes = sizeof(Number) + sizeof(int32_t);
  const char* name;
  Number C::*c;
  const char* has_name;
  int32_t C::*has;
  Optional Cpp::*cpp;

  bool read(const C& from, const Reading& in, Cpp* to) const {
    bool given = false;
    if (!capi::read(from.*has, in, has_name, &given)) return false;
    if (given) return capi::read(from.*c, in, name, &(to->*cpp));
    return from.*c == 0 || in.refuse(name, from.*c, sentence("must be 0 where ", has_name, " is 0"));
  }
  void write(const Cpp&, C* to) const { to->*has = 0, to->*c = 0; }
};
template <class C, class Cpp, class Number, class Optional>
OptionalField(const char*, Number C::*, const char*, int32_t C::*, Optional Cpp::*)
    -> OptionalField<C, Cpp, Number, Optional>;

// A field without a meaning.
template <class C, class Number>
struct Reserved {
  static constexpr size_t kBytes = sizeof(Number);
  const char* name;
  Number C::*c;

  template <class Cpp>
  bool read(const C& from, const Reading& in, Cpp*) const {
    return from.*c == 0 || in.refuse(name, from.*c, "must be 0");
  }
  template <class Cpp>
  void write(const Cpp&, C* to) const {
    to->*c = 0;
  }
};
template <class C, class Number>
Reserved(const char*, Number C::*) -> Reserved<C, Number>;

// A struct within the C struct.
template <class C, class Cpp, class From, class To>
struct Struct {
  static constexpr size_t kBytes = sizeof(From);
  Names names;
  From C::*c;
  To Cpp::*cpp;

  bool read(const C& from, const Reading& in, Cpp* to) const {
    Status inner = read_fields(from.*c, names, &(to->*cpp));
    return inner.ok() || in.fail(std::move(inner));
  }
  void write(const Cpp& from, C* to) const { write_fields(from.*cpp, &(to->*c)); }
};
template <class C, class Cpp, class From, class To>
Struct(Names, From C::*, To Cpp::*) -> Struct<C, Cpp, From, To>;

// A struct that the C struct points to. Null: the defaults, unless it is needed.
enum class Null { kAllowed, kRefused };
template <class C, class Cpp, class From, class To>
struct Pointer {
  static constexpr size_t kBytes = sizeof(From*);
  Names names;
  Null null;
  const From* C::*c;
  To Cpp::*cpp;

  bool read(const C& from, const Reading& in, Cpp* to) const {
    if (from.*c == nullptr && null == Null::kAllowed) return true;
    Status inner = need(from.*c, names.object);
    if (inner.ok()) inner = translate(from.*c, names, &(to->*cpp));
    return inner.ok() || in.fail(std::move(inner));
  }
  template <class Base>
  void write(const Base&, C* to) const {
    to->*c = nullptr;
  }
};
template <class C, class Cpp, class From, class To>
Pointer(Names, Null, const From* C::*, To Cpp::*) -> Pointer<C, Cpp, From, To>;

// A program's text, and what its tensors look like.
struct ProgramFields {
  using C = polyhead_attention_desc;
  static constexpr size_t kBytes = sizeof(C::program) + sizeof(C::captures) + sizeof(C::num_captures);

  bool read(const C& from, const Reading& in, AttentionDesc* to) const;
  void write(const AttentionDesc&, C* to) const { to->program = nullptr, to->captures = nullptr, to->num_captures = 0; }
};

// An array of tensors, one for each capture, that lives in `tensors` while the call runs.
template <class C, class Cpp, class Owner>
struct CapturedTensors {
  static constexpr size_t kBytes = sizeof(polyhead_tensor*) + sizeof(size_t);
  const char* name;
  const polyhead_tensor* C::*c;
  const char* count_name;
  size_t C::*count;
  std::span<const Tensor> Cpp::*cpp;
  Tensor (Owner::*tensors)[Program::kMostCaptures];

  bool read(const C& from, const Reading& in, Owner* to) const {
    const size_t number = from.*count;
    if (number > Program::kMostCaptures) {
      return in.refuse(count_name, number, sentence("takes 0 to ", Program::kMostCaptures));
    }
    if (number > 0 && from.*c == nullptr) return in.fail(need(nullptr, name));
    for (size_t i = 0; i < number; ++i) {
      if (!capi::read((from.*c)[i], in, sentence(name, "[", i, "]").c_str(), &(to->*tensors)[i])) return false;
    }
    to->*cpp = {to->*tensors, number};
    return true;
  }
  void write(const Cpp&, C* to) const { to->*c = nullptr, to->*count = 0; }
};
template <class C, class Cpp, class Owner>
CapturedTensors(const char*, const polyhead_tensor* C::*, const char*, size_t C::*, std::span<const Tensor> Cpp::*,
                Tensor (Owner::*)[Program::kMostCaptures]) -> CapturedTensors<C, Cpp, Owner>;

// ---- Whole structs ----

// Whether every byte of C has a row, but for struct_size and flags.
template <class C, class Fields>
constexpr bool is_whole(const Fields& fields) {
  const size_t bytes = std::apply([](const auto&... row) { return (row.kBytes + ...); }, fields);
  if constexpr (requires { &C::flags; }) return bytes + sizeof(C::struct_size) + sizeof(C::flags) == sizeof(C);
  return bytes == sizeof(C);
}

// With the defaults of C++.
template <class C>
C defaults() {
  C c = {};
  write_fields(typename Table<C>::Cpp(), &c);
  c.struct_size = sizeof c;
  return c;
}

// Fills the caller's struct, as large as its header knew it, with the defaults.
template <class C>
Status init(C* to, size_t struct_size, const char* name) {
  if (Status s = need(to, name); !s.ok()) return s;
  if (Status s = check_struct_size(struct_size, Table<C>::kFirstSize, sizeof(C), name); !s.ok()) return s;
  C c = defaults<C>();
  c.struct_size = struct_size;
  std::memcpy(to, &c, struct_size);
  return {};
}

// `from` is not null. Of what its caller's header did not know, the defaults are taken.
template <class C>
Status translate(const C* from, const Names& names, typename Table<C>::Cpp* to) {
  if constexpr (requires { Table<C>::kFirstSize; }) {
    const size_t size = from->struct_size;
    if (Status s = check_struct_size(size, Table<C>::kFirstSize, sizeof(C), names.object); !s.ok()) return s;
    C filled;
    if (size < sizeof filled) {
      static const C kDefaults = defaults<C>();
      filled = kDefaults;
      std::memcpy(&filled, from, size);
      from = &filled;
    }
    if (from->flags == 0) return read_fields(*from, names, to);
    return invalid(sentence(names.object, ".flags is ", from->flags, ", must be 0: no flag is known here"));
  } else {
    return read_fields(*from, names, to);
  }
}

}  // namespace polyhead::capi
