#include "graph/wire.h"

namespace polyhead::graph {

bool take_varint(std::string_view& rest, uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70 && !rest.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(rest.front());
    rest.remove_prefix(1);
    if (shift == 63 && byte > 1) return false;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

void add_integers(const Field& field, std::vector<int64_t>& list) {
  if (field.wire == Wire::kVarint) list.push_back(field.integer());
  std::string_view rest = field.bytes;
  for (uint64_t value = 0; take_varint(rest, value);) list.push_back(static_cast<int64_t>(value));
}

bool FieldReader::fixed(size_t count, uint64_t& value) {
  if (rest_.size() < count) return false;
  value = 0;
  for (size_t i = 0; i < count; ++i) value |= uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
  rest_.remove_prefix(count);
  return true;
}

bool FieldReader::next(Field& field) {
  if (broken_ || rest_.empty()) return false;
  const char* start = rest_.data();
  uint64_t key = 0, size = 0;
  bool good = take_varint(rest_, key) && key >> 3 > 0 && key >> 3 < (uint64_t{1} << 29);
  if (good) {
    field = {static_cast<uint32_t>(key >> 3), static_cast<Wire>(key & 7), 0, {}, {}};
    switch (field.wire) {
      case Wire::kVarint: good = take_varint(rest_, field.value); break;
      case Wire::kFixed64: good = fixed(8, field.value); break;
      case Wire::kFixed32: good = fixed(4, field.value); break;
      case Wire::kBytes:
        good = take_varint(rest_, size) && size <= rest_.size();
        if (good) {
          field.bytes = rest_.substr(0, size);
          rest_.remove_prefix(size);
        }
        break;
      default: good = false;  // groups, which ONNX never had
    }
  }
  broken_ = !good;
  if (good) field.whole = {start, static_cast<size_t>(rest_.data() - start)};
  return good;
}

void FieldWriter::put(uint64_t value) {
  for (; value >= 0x80; value >>= 7) text_.push_back(static_cast<char>(value | 0x80));
  text_.push_back(static_cast<char>(value));
}

void FieldWriter::number32(uint32_t number, float value) {
  key(number, Wire::kFixed32);
  const auto bits = std::bit_cast<uint32_t>(value);
  for (int i = 0; i < 4; ++i) text_.push_back(static_cast<char>(bits >> (8 * i)));
}

}  // namespace polyhead::graph
