#include "safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "testing/words.h"

namespace polyhead::tools {
using namespace testing;
namespace {

using nlohmann::json;

struct KnownType {
  const char* name;
  uint64_t size_bytes;
  std::optional<DType> dtype;
};
constexpr KnownType kTypes[] = {
    {"F32", 4, DType::kFloat32},  {"BF16", 2, DType::kBFloat16}, {"F16", 2, DType::kFloat16},
    {"F64", 8, DType::kFloat64},  {"BOOL", 1, DType::kBool},     {"I32", 4, DType::kInt32},
    {"I64", 8, DType::kInt64},    {"U8", 1, std::nullopt},       {"I8", 1, std::nullopt},
    {"U16", 2, std::nullopt},     {"I16", 2, std::nullopt},      {"U32", 4, std::nullopt},
    {"U64", 8, std::nullopt},     {"F8_E4M3", 1, std::nullopt},  {"F8_E5M2", 1, std::nullopt},
    {"F8_E8M0", 1, std::nullopt}, {"C64", 8, std::nullopt}};

// Takes exactly {name: {"dtype": string, "shape": [sizes], "data_offsets": [begin, end]}, "__metadata__": {string:
// string}}; anything nested otherwise or deeper stops the parse.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  std::vector<SafetensorsEntry> entries;
  std::string error;

  bool start_object(size_t) override {
    if (where_ == Where::kStart) return go(Where::kNames);
    if (where_ == Where::kNames && is_metadata_) return go(Where::kMetadata);
    if (where_ == Where::kNames) return go(Where::kEntry);
    return fail("an object is not expected here");
  }
  bool end_object() override {
    if (where_ == Where::kNames) return go(Where::kEnd);
    if (where_ == Where::kEntry && fields_ != kAllFields) return fail("dtype, shape or data_offsets is missing");
    return go(Where::kNames);
  }
  bool key(string_t& text) override {
    if (where_ == Where::kNames) {
      if (!names_.insert(text).second) return fail_with(fmt::format("header names tensor {} twice", printable(text)));
      is_metadata_ = text == "__metadata__";
      if (is_metadata_) return true;
      entries.emplace_back();
      entries.back().name = text;
      fields_ = 0;
      return true;
    }
    if (where_ == Where::kMetadata) {
      if (!metadata_.insert(text).second) return fail_with(fmt::format("metadata has {} twice", printable(text)));
      return true;
    }
    field_ = text == "dtype" ? kDTypeField : text == "shape" ? kShapeField : text == "data_offsets" ? kOffsetsField : 0;
    if (field_ == 0) return fail(fmt::format("{} is not a known field", printable(text)));
    if ((fields_ & field_) != 0) return fail(fmt::format("{} is given twice", printable(text)));
    fields_ |= field_;
    return true;
  }
  bool string(string_t& text) override {
    if (where_ == Where::kMetadata) return true;
    if (where_ != Where::kEntry || field_ != kDTypeField) return fail("a string is not expected here");
    entries.back().dtype_name = text;
    return true;
  }
  bool start_array(size_t) override {
    if (where_ != Where::kEntry || (field_ != kShapeField && field_ != kOffsetsField)) {
      return fail("an array is not expected here");
    }
    offsets_ = 0;
    return go(Where::kArray);
  }
  bool end_array() override {
    if (field_ == kOffsetsField && offsets_ != 2) return fail("data_offsets must be [begin, end]");
    return go(Where::kEntry);
  }
  bool number_unsigned(number_unsigned_t number) override {
    if (where_ != Where::kArray) return fail("a number is not expected here");
    SafetensorsEntry& entry = entries.back();
    if (field_ == kOffsetsField) {
      if (offsets_ == 2) return fail("data_offsets must be [begin, end]");
      (offsets_++ == 0 ? entry.begin : entry.end) = number;
      return true;
    }
    if (number > INT64_MAX) return fail("shape has a size beyond 2^63");
    if (entry.dims.size() == 32) return fail("shape has more than 32 sizes");
    entry.dims.push_back(static_cast<int64_t>(number));
    return true;
  }
  bool null() override { return fail("null is not expected"); }
  bool boolean(bool) override { return fail("true or false is not expected"); }
  bool number_integer(number_integer_t) override { return fail("sizes and offsets must not be negative"); }
  bool number_float(number_float_t, const string_t&) override { return fail("sizes and offsets must be integers"); }
  bool binary(binary_t&) override { return fail("binary data is not expected"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail_with(fmt::format("header is not JSON: mistake at byte {}", position));
  }

 private:
  enum class Where { kStart, kNames, kMetadata, kEntry, kArray, kEnd };
  static constexpr int kDTypeField = 1, kShapeField = 2, kOffsetsField = 4, kAllFields = 7;

  bool go(Where where) {
    where_ = where;
    return true;
  }
  bool fail_with(std::string message) {
    if (error.empty()) error = std::move(message);
    return false;
  }
  bool fail(const std::string& what) {
    const bool in_entry = where_ != Where::kStart && !entries.empty() && !is_metadata_;
    return fail_with((in_entry ? "tensor " + printable(entries.back().name) : std::string("header")) + ": " + what);
  }

  Where where_ = Where::kStart;
  bool is_metadata_ = false;
  int field_ = 0, fields_ = 0, offsets_ = 0;
  std::set<std::string> names_, metadata_;
};

Status check_entry(SafetensorsEntry& entry, uint64_t data_bytes) {
  const auto in_entry = [&](const std::string& what) {
    return invalid("tensor " + printable(entry.name) + ": " + what);
  };
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const KnownType& known) { return entry.dtype_name == known.name; });
  if (type == std::end(kTypes)) return in_entry("unknown dtype " + printable(entry.dtype_name));
  entry.dtype = type->dtype;
  if (entry.begin > entry.end || entry.end > data_bytes) {
    return in_entry(
        fmt::format("data_offsets [{}, {}] do not lie in the {} bytes of data", entry.begin, entry.end, data_bytes));
  }
  const auto size_bytes = checked_size_bytes(entry.dims, type->size_bytes);
  if (!size_bytes.ok()) return in_entry(size_bytes.status().message());
  if (*size_bytes != entry.end - entry.begin) {
    return in_entry(fmt::format("shape {} of {} needs {} bytes, data_offsets give {}", dims_text(entry.dims),
                                type->name, *size_bytes, entry.end - entry.begin));
  }
  return {};
}

const char* type_name(DType dtype) {
  for (const KnownType& known : kTypes) {
    if (known.dtype == dtype) return known.name;
  }
  return "";
}

}  // namespace

Result<std::vector<SafetensorsEntry>> parse_safetensors_header(std::string_view json_text, uint64_t data_bytes) {
  if (json_text.substr(0, 1) != "{") return invalid("header does not begin with '{'");
  HeaderReader reader;
  if (!json::sax_parse(json_text.begin(), json_text.end(), &reader)) return invalid(reader.error);
  std::vector<SafetensorsEntry>& entries = reader.entries;
  for (SafetensorsEntry& entry : entries) {
    if (Status s = check_entry(entry, data_bytes); !s.ok()) return s;
  }
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uint64_t reached = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != reached) {
      return invalid(fmt::format("tensor {} begins at byte {}, {} the tensor before it at {}", printable(entry.name),
                                 entry.begin, entry.begin < reached ? "inside" : "behind a gap after", reached));
    }
    reached = entry.end;
  }
  if (reached != data_bytes) {
    return invalid(fmt::format("the file has {} bytes of data, its tensors {}", data_bytes, reached));
  }
  return std::move(entries);
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  auto input = InputFile::open(path);
  if (!input.ok()) return input.status();
  SafetensorsFile file(path, std::move(*input));
  if (Status s = file.read_header(); !s.ok()) return file.in_file(s);
  return file;
}

Status SafetensorsFile::in_file(const Status& status) const {
  return {status.code(), printable(path_) + ": " + status.message()};
}

Status SafetensorsFile::read_header() {
  if (file_.size_bytes() < 8) return invalid("not a safetensors file: it has less than 8 bytes");
  unsigned char length_bytes[8];
  if (Status s = file_.read_at(0, length_bytes, 8); !s.ok()) return s;
  uint64_t length = 0;
  for (int i = 8; i-- > 0;) length = length << 8 | length_bytes[i];
  if (length > kMaxSafetensorsHeaderBytes) {
    return invalid(fmt::format("header of {} bytes, at most {} are taken", length, kMaxSafetensorsHeaderBytes));
  }
  if (length > file_.size_bytes() - 8) {
    return invalid(fmt::format("header of {} bytes in a file of {}", length, file_.size_bytes()));
  }
  std::string text(length, '\0');
  if (Status s = file_.read_at(8, text.data(), length); !s.ok()) return s;
  data_offset_ = 8 + length;
  auto entries = parse_safetensors_header(text, file_.size_bytes() - data_offset_);
  if (!entries.ok()) return entries.status();
  entries_ = std::move(*entries);
  return {};
}

Result<Array> SafetensorsFile::read(std::string_view name) const {
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const auto& e) { return e.name == name; });
  if (entry == entries_.end()) {
    std::string known;
    for (size_t i = 0; i < std::min<size_t>(entries_.size(), 10); ++i) known += " " + printable(entries_[i].name);
    return in_file(invalid(fmt::format("has no tensor {}; {} tensors:{}{}", printable(name), entries_.size(), known,
                                       entries_.size() > 10 ? " ..." : "")));
  }
  const auto in_entry = [&](const Status& s) {
    return in_file({s.code(), "tensor " + printable(entry->name) + ": " + s.message()});
  };
  if (!entry->dtype) return in_entry(invalid("dtype " + entry->dtype_name + " is not taken here"));
  const auto tensor = view_of(entry->dims, *entry->dtype, /*column_major=*/false);
  if (!tensor.ok()) return in_entry(tensor.status());
  const size_t size_bytes = entry->end - entry->begin;
  Array array{*tensor, new_buffer(size_bytes)};
  if (array.data == nullptr) return in_entry({StatusCode::kOutOfMemory, "not enough memory for its data"});
  array.tensor.data = array.data.get();
  if (Status s = file_.read_at(data_offset_ + entry->begin, array.data.get(), size_bytes); !s.ok()) return in_entry(s);
  if (Status s = check_elements(array); !s.ok()) return in_entry(s);
  return array;
}

Status write_safetensors(const std::string& path, const NamedTensors& tensors, bool overwrite) {
  NamedTensors sorted = tensors;  // widest elements first keeps each tensor aligned
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return dtype_size_bytes(a.second.dtype) > dtype_size_bytes(b.second.dtype);
  });
  json header = json::object();
  uint64_t at = 0;
  for (const auto& [name, tensor] : sorted) {
    const uint64_t end = at + static_cast<uint64_t>(tensor.num_elements()) * dtype_size_bytes(tensor.dtype);
    header[name] = {{"dtype", type_name(tensor.dtype)},
                    {"shape", std::vector<int64_t>(tensor.dims, tensor.dims + tensor.ndim)},
                    {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string start(8, '\0');
  for (size_t i = 0; i < 8; ++i) start[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  auto file = OutputFile::create(path, overwrite);
  if (!file.ok()) return file.status();
  if (Status s = file->write((start + text).data(), 8 + text.size()); !s.ok()) return s;
  for (const auto& [name, tensor] : sorted) {
    if (Status s = write_elements(*file, tensor); !s.ok()) return s;
  }
  return file->commit();
}

}  // namespace polyhead::tools
