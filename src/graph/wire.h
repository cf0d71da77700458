// Protocol buffers' wire format: fields, each a number, a type and a payload, one behind the other.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace polyhead::graph {

enum class Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct Field {
  uint32_t number = 0;
  Wire wire = Wire::kVarint;
  uint64_t value = 0;      // of a varint or a fixed number
  std::string_view bytes;  // of kBytes
  std::string_view whole;  // the field as it stands, its key included

  bool is(uint32_t n, Wire w) const { return number == n && wire == w; }
  int64_t integer() const { return static_cast<int64_t>(value); }
  float number32() const { return std::bit_cast<float>(static_cast<uint32_t>(value)); }
};

// Takes one off the front; false if `rest` is truncated.
bool take_varint(std::string_view& rest, uint64_t& value);

// Of a repeated field of integers: one of them, or many in a row.
void add_integers(const Field& field, std::vector<int64_t>& list);

// The fields of a message. Nothing behind the end is ever looked at.
class FieldReader {
 public:
  explicit FieldReader(std::string_view message) : rest_(message) {}

  // False at the end, and where the message is broken, which broken() then tells.
  bool next(Field& field);
  bool broken() const { return broken_; }

 private:
  bool fixed(size_t count, uint64_t& value);

  std::string_view rest_;
  bool broken_ = false;
};

class FieldWriter {
 public:
  void varint(uint32_t number, uint64_t value) {
    key(number, Wire::kVarint);
    put(value);
  }
  void bytes(uint32_t number, std::string_view payload) {
    key(number, Wire::kBytes);
    put(payload.size());
    text_.append(payload);
  }
  void number32(uint32_t number, float value);
  void copy(std::string_view whole) { text_.append(whole); }
  const std::string& text() const { return text_; }

 private:
  void key(uint32_t number, Wire wire) { put(uint64_t{number} << 3 | static_cast<uint32_t>(wire)); }
  void put(uint64_t value);

  std::string text_;
};

}  // namespace polyhead::graph
