// A number that tells fields apart: FNV-1a.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace polyhead {

class Fingerprint {
 public:
  uint64_t value() const { return value_; }

  template <class... Fields>
  void add(const Fields&... fields) {
    (add_field(fields), ...);
  }

  void add_field(std::integral auto number) {
    const auto bits = static_cast<uint64_t>(number);
    for (int shift = 0; shift < 64; shift += 8) value_ = (value_ ^ (bits >> shift & 0xff)) * 0x100000001b3;
  }
  void add_field(double number) { add_field(std::bit_cast<uint64_t>(number)); }
  template <class Enum>
  requires std::is_enum_v<Enum>
  void add_field(Enum value) { add_field(static_cast<int64_t>(value)); }
  template <class T>
  void add_field(const std::optional<T>& field) {
    add(field.has_value(), field.value_or(0));
  }
  void add_field(std::string_view name) {
    for (const char letter : name) add_field(letter);
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace polyhead
