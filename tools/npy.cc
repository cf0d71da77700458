#include "npy.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "file.h"
#include "testing/elements.h"
#include "testing/words.h"

namespace polyhead::tools {
using namespace testing;
namespace {

// {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class LiteralParser {
 public:
  LiteralParser(std::string_view text, NpyHeader& header) : text_(text), header_(header) {}

  Status parse() {
    if (!take('{')) return expected("'{'");
    while (!take('}')) {
      if (Status s = entry(); !s.ok()) return s;
      if (take('}')) break;
      if (!take(',')) return expected("',' or '}'");
    }
    skip_blanks();
    if (at_ != text_.size()) return expected("the end of the header");
    if (!has_descr_ || !has_order_ || !has_shape_) return invalid("header lacks descr, fortran_order or shape");
    return {};
  }

 private:
  Status entry() {
    std::string_view key;
    if (Status s = string(key); !s.ok()) return s;
    if (!take(':')) return expected("':'");
    bool* seen = key == "descr"           ? &has_descr_
                 : key == "fortran_order" ? &has_order_
                 : key == "shape"         ? &has_shape_
                                          : nullptr;
    if (seen == nullptr) return invalid(fmt::format("header has an unknown key {}", printable(key)));
    if (std::exchange(*seen, true)) return invalid(fmt::format("header has {} twice", printable(key)));
    if (seen == &has_descr_) return descr();
    return seen == &has_order_ ? order() : shape();
  }

  Status descr() {
    skip_blanks();
    if (at_ < text_.size() && text_[at_] == '[') return invalid("descr is a list: records with fields are not taken");
    std::string_view descr;
    if (Status s = string(descr); !s.ok()) return s;
    struct Known {
      std::string_view code;
      DType dtype;
    };
    static constexpr Known kKnown[] = {{"f4", DType::kFloat32}, {"f8", DType::kFloat64}, {"f2", DType::kFloat16},
                                       {"i4", DType::kInt32},   {"i8", DType::kInt64},   {"b1", DType::kBool},
                                       {"?", DType::kBool},     {"V2", DType::kBFloat16}};
    const char order = descr.empty() ? ' ' : descr[0];
    const bool has_order = order == '<' || order == '>' || order == '=' || order == '|';
    const std::string_view code = descr.substr(has_order ? 1 : 0);
    if (code.substr(0, 1) == "O") return invalid("descr is 'O': Python objects (pickle) are refused");
    for (const Known& known : kKnown) {
      if (known.code != code) continue;
      if (order == '>') return invalid(fmt::format("descr {} is big-endian; save it as '<{}'", printable(descr), code));
      header_.dtype = known.dtype;
      header_.is_void16 = known.dtype == DType::kBFloat16;
      return {};
    }
    return invalid(
        fmt::format("descr {} is not taken; float32 '<f4', float64, float16, bfloat16 '<V2', int32, int64 and "
                    "bool are",
                    printable(descr)));
  }

  Status order() {
    skip_blanks();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        header_.fortran_order = value;
        return {};
      }
    }
    return expected("True or False");
  }

  Status shape() {
    if (!take('(')) return expected("'(' of the shape");
    while (!take(')')) {
      int64_t size = 0;
      if (Status s = integer(size); !s.ok()) return s;
      header_.dims.push_back(size);
      if (header_.dims.size() > 32) return invalid("shape has more than 32 sizes");
      const bool comma = take(',');
      if (take(')')) {
        if (!comma && header_.dims.size() == 1) return expected("',' in a shape of one size");
        break;
      }
      if (!comma) return expected("',' or ')' in the shape");
    }
    return {};
  }

  Status integer(int64_t& value) {
    skip_blanks();
    const size_t start = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_] - '0', &value)) {
        return invalid("shape has a size beyond 2^63");
      }
    }
    return at_ == start ? expected("a size >= 0 in the shape") : Status();
  }

  Status string(std::string_view& value) {
    skip_blanks();
    const char quote = at_ < text_.size() ? text_[at_] : ' ';
    if (quote != '\'' && quote != '"') return expected("a string");
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) return expected("the end of the string");
    value = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return {};
  }

  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }

  bool take(char c) {
    skip_blanks();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Status expected(std::string_view what) {
    return invalid(
        fmt::format("header: {} expected at {}", what, printable(text_.substr(std::min(at_, text_.size()), 20))));
  }

  std::string_view text_;
  NpyHeader& header_;
  size_t at_ = 0;
  bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

// Little-endian.
uint64_t unsigned_at(std::string_view text, size_t at, size_t count) {
  uint64_t value = 0;
  for (size_t i = count; i-- > 0;) value = value << 8 | static_cast<unsigned char>(text[at + i]);
  return value;
}

std::string npy_descr(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "<f4";
    case DType::kFloat64: return "<f8";
    case DType::kFloat16: return "<f2";
    case DType::kBFloat16: return "<V2";
    case DType::kBool: return "|b1";
    case DType::kInt32: return "<i4";
    case DType::kInt64: return "<i8";
    case DType::kInt8: return "|i1";
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return "|V1";
    case DType::kInt4x2: return "|u1";
  }
  return "";
}

}  // namespace

Result<NpyHeader> parse_npy_header(std::string_view start, uint64_t file_bytes) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  if (start.size() < 10 || start.substr(0, 6) != kMagic)
    return invalid("not a .npy file: it does not begin with \\x93NUMPY");
  const auto version = static_cast<unsigned char>(start[6]);
  if (version < 1 || version > 3 || start[7] != 0) {
    return invalid(
        fmt::format("format version {}.{}; 1.0, 2.0 and 3.0 are known", version, static_cast<unsigned char>(start[7])));
  }
  const size_t length_bytes = version == 1 ? 2 : 4;
  if (start.size() < 8 + length_bytes) return invalid("file ends inside its header");
  const uint64_t length = unsigned_at(start, 8, length_bytes);
  NpyHeader header;
  header.data_offset = 8 + length_bytes + length;
  if (header.data_offset > kMaxNpyHeaderBytes) {
    return invalid(fmt::format("header of {} bytes, at most {} are taken", header.data_offset, kMaxNpyHeaderBytes));
  }
  if (header.data_offset > start.size() || header.data_offset > file_bytes)
    return invalid("file ends inside its header");
  if (Status s = LiteralParser(start.substr(8 + length_bytes, length), header).parse(); !s.ok()) return s;
  const auto data_bytes = checked_size_bytes(header.dims, dtype_size_bytes(header.dtype));
  if (!data_bytes.ok()) return data_bytes.status();
  header.data_bytes = *data_bytes;
  if (header.data_bytes != file_bytes - header.data_offset) {
    return invalid(fmt::format("shape {} of {} needs {} bytes of data, the file has {}", dims_text(header.dims),
                               npy_descr(header.dtype), header.data_bytes, file_bytes - header.data_offset));
  }
  return header;
}

namespace {

Result<Array> read_checked(const InputFile& file) {
  std::string start(std::min(file.size_bytes(), kMaxNpyHeaderBytes), '\0');
  if (Status s = file.read_at(0, start.data(), start.size()); !s.ok()) return s;
  const auto header = parse_npy_header(start, file.size_bytes());
  if (!header.ok()) return header.status();
  const auto tensor = view_of(header->dims, header->dtype, header->fortran_order);
  if (!tensor.ok()) return tensor.status();
  Array array{*tensor, new_buffer(header->data_bytes), header->is_void16};
  if (array.data == nullptr) return Status(StatusCode::kOutOfMemory, "not enough memory for its data");
  array.tensor.data = array.data.get();
  if (Status s = file.read_at(header->data_offset, array.data.get(), header->data_bytes); !s.ok()) return s;
  if (Status s = check_elements(array); !s.ok()) return s;
  return array;
}

}  // namespace

Result<Array> read_npy(const std::string& path) {
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  auto array = read_checked(*file);
  if (!array.ok()) return Status(array.status().code(), printable(path) + ": " + array.status().message());
  return array;
}

Status write_npy(const std::string& path, const Tensor& tensor, bool overwrite) {
  std::string shape;
  for (int i = 0; i < tensor.ndim; ++i)
    shape += fmt::format("{}{}", tensor.dims[i], tensor.ndim == 1 ? "," : i + 1 < tensor.ndim ? ", " : "");
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", npy_descr(tensor.dtype), shape);
  // The data begin at a multiple of 64.
  header.append((64 - (10 + header.size() + 1) % 64) % 64, ' ');
  header += '\n';
  std::string start = "\x93NUMPY";
  start += {'\x01', '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
  auto file = OutputFile::create(path, overwrite);
  if (!file.ok()) return file.status();
  if (Status s = file->write((start + header).data(), start.size() + header.size()); !s.ok()) return s;
  if (Status s = write_elements(*file, tensor); !s.ok()) return s;
  return file->commit();
}

}  // namespace polyhead::tools
