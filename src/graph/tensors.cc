#include "graph/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/dtype.h"
#include "core/sentence.h"
#include "graph/external_data.h"
#include "graph/onnx_fields.h"
#include "graph/wire.h"

namespace polyhead::graph {
namespace {

namespace fields = onnx::tensor;

constexpr int kFirstWithoutSize = 21;        // uint4 and what came behind it: less than a byte, or yet to be known
constexpr uint64_t kMostElements = 1 << 16;  // of tensors that are decoded because their data is not raw

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

double number_at(ElementType type, const char* from) {
  switch (static_cast<int>(type)) {
    case 1: return static_cast<double>(load<float>(from));
    case 2: return static_cast<double>(load<uint8_t>(from));
    case 3: return static_cast<double>(load<int8_t>(from));
    case 4: return static_cast<double>(load<uint16_t>(from));
    case 5: return static_cast<double>(load<int16_t>(from));
    case 6: return static_cast<double>(load<int32_t>(from));
    case 7: return static_cast<double>(load<int64_t>(from));
    case 9: return load<uint8_t>(from) != 0 ? 1.0 : 0.0;
    case 10: return static_cast<double>(to_float(load<Float16>(from)));
    case 11: return load<double>(from);
    case 12: return static_cast<double>(load<uint32_t>(from));
    case 13: return static_cast<double>(load<uint64_t>(from));
    case 16: return static_cast<double>(to_float(load<BFloat16>(from)));
    default: return std::nan("");
  }
}

template <class Bits>
size_t run_length_of(const char* data, size_t count) {
  const Bits first = load<Bits>(data);
  size_t length = 1;
  while (length < count && load<Bits>(data + length * sizeof(Bits)) == first) ++length;
  return length;
}

// How many of the elements, from the first one on, have its bits.
size_t run_length(const char* data, size_t size, size_t count) {
  switch (size) {
    case 1: return run_length_of<uint8_t>(data, count);
    case 2: return run_length_of<uint16_t>(data, count);
    case 4: return run_length_of<uint32_t>(data, count);
    case 8: return run_length_of<uint64_t>(data, count);
    default: return 1;
  }
}

// The product, or nothing if it passes 2^62.
std::optional<uint64_t> num_elements(const std::vector<int64_t>& dims) {
  uint64_t count = 1;
  for (int64_t dim : dims) {
    if (dim == 0) return 0;
  }
  for (int64_t dim : dims) {
    if (dim < 0 || count > (uint64_t{1} << 62) / static_cast<uint64_t>(dim)) return std::nullopt;
    count *= static_cast<uint64_t>(dim);
  }
  return count;
}

// What a TensorProto says of itself.
struct Parts {
  Constant constant;
  std::optional<std::string_view> raw = {};
  std::string typed = {};  // elements of the fields that have a type, as raw bytes
  uint64_t num_typed = 0;
  bool elsewhere = false;
  ExternalPlace place = {};
  std::string problem = {};
};

void add_typed(Parts& parts, const Field& field, size_t bytes) {
  const auto add = [&](uint64_t value) {
    ++parts.num_typed;
    if (parts.num_typed > kMostElements) return;
    for (size_t i = 0; i < bytes; ++i) parts.typed.push_back(static_cast<char>(value >> (8 * i)));
  };
  if (field.wire != Wire::kBytes) return add(field.value);
  const bool fixed = field.number == fields::kFloatData || field.number == fields::kDoubleData;
  if (fixed) {
    const size_t stride = field.number == fields::kFloatData ? 4 : 8;
    if (field.bytes.size() % stride != 0) parts.problem = "has data that ends in the middle of a number";
    for (size_t at = 0; at + stride <= field.bytes.size(); at += stride) {
      add(stride == 4 ? load<uint32_t>(field.bytes.data() + at) : load<uint64_t>(field.bytes.data() + at));
    }
    return;
  }
  std::string_view rest = field.bytes;
  for (uint64_t value = 0; !rest.empty();) {  // packed
    if (!take_varint(rest, value)) {
      parts.problem = "has data that ends in the middle of a number";
      return;
    }
    add(value);
  }
}

Status check_size(const Parts& parts) {
  const Constant& constant = parts.constant;
  const auto fault = [&](auto... words) { return invalid(sentence("tensor \"", constant.name, "\" ", words...)); };
  if (!parts.problem.empty()) return fault(parts.problem);
  const auto count = num_elements(constant.dims);
  if (!count) return fault("has dims that are negative, or more than 2^62 elements");
  const auto size = static_cast<uint64_t>(element_bytes(constant.type));
  if (size == 0) return {};  // strings and what has no whole bytes: carried along
  if (*count > (uint64_t{1} << 62) / size) return fault("has dims of more than 2^62 bytes");
  if (parts.elsewhere) {
    const auto told = parts.place.length;
    return !told || *told == *count * size
               ? Status()
               : fault("needs ", *count * size, " bytes, ", *told, " are told of its external data");
  }
  if (parts.raw && parts.raw->size() != *count * size) {
    return fault("needs ", *count * size, " bytes, has ", parts.raw->size());
  }
  const uint64_t numbers =
      *count * (static_cast<int>(constant.type) == 14 || static_cast<int>(constant.type) == 15 ? 2 : 1);
  if (!parts.raw && parts.num_typed != numbers) return fault("needs ", numbers, " numbers, has ", parts.num_typed);
  return {};
}

Status read_parts(Parts& parts) {
  Constant& constant = parts.constant;
  FieldReader reader(constant.encoded);
  for (Field field; reader.next(field);) {
    switch (field.number) {
      case fields::kDims: add_integers(field, constant.dims); break;
      case fields::kDataType: constant.type = static_cast<ElementType>(static_cast<int32_t>(field.value)); break;
      case fields::kName: constant.name = field.bytes; break;
      case fields::kRawData: parts.raw = field.bytes; break;
      case fields::kDataLocation: parts.elsewhere = field.value == fields::kElsewhere; break;
      case fields::kExternalData: add_entry(parts.place, field.bytes); break;
      default: break;
    }
  }
  if (reader.broken()) return invalid(sentence("tensor \"", constant.name, "\" is truncated or not a message"));
  FieldReader again(constant.encoded);  // its type is known now
  const auto size = static_cast<size_t>(element_bytes(constant.type));
  for (Field field; again.next(field);) {
    switch (field.number) {
      case fields::kFloatData: add_typed(parts, field, 4); break;
      case fields::kDoubleData: add_typed(parts, field, 8); break;
      case fields::kInt32Data:
      case fields::kInt64Data:
      case fields::kUint64Data: add_typed(parts, field, size); break;
      default: break;
    }
  }
  return {};
}

Constant made(Model& model, std::string name, ElementType type, std::vector<int64_t> dims, std::string data) {
  FieldWriter writer;
  for (int64_t dim : dims) writer.varint(fields::kDims, static_cast<uint64_t>(dim));
  writer.varint(fields::kDataType, static_cast<uint64_t>(type));
  writer.bytes(fields::kName, name);
  writer.bytes(fields::kRawData, data);
  return {std::move(name), type, std::move(dims), keep(model, std::move(data)), keep(model, writer.text())};
}

}  // namespace

int64_t element_bytes(ElementType type) {
  constexpr int kSizes[kFirstWithoutSize] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 8, 16, 2, 1, 1, 1, 1};
  const auto number = static_cast<int32_t>(type);
  return number > 0 && number < kFirstWithoutSize ? kSizes[number] : 0;
}

bool is_float(ElementType type) {
  return type == ElementType::kFloat32 || type == ElementType::kFloat16 || type == ElementType::kBFloat16 ||
         type == ElementType::kFloat64;
}

std::string text_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return "float32";
    case ElementType::kFloat16: return "float16";
    case ElementType::kBFloat16: return "bfloat16";
    case ElementType::kFloat64: return "float64";
    case ElementType::kBool: return "bool";
    default: return sentence("element type ", static_cast<int32_t>(type));
  }
}

std::string_view keep(Model& model, std::string bytes) {
  return *model.storage.emplace_back(std::make_shared<const std::string>(std::move(bytes)));
}

Result<Constant> read_tensor(Model& model, std::string_view encoded, const std::string& folder) {
  Parts parts;
  parts.constant.encoded = encoded;
  if (Status status = read_parts(parts); !status.ok()) return status;
  if (Status status = check_size(parts); !status.ok()) return status;
  Constant& constant = parts.constant;
  if (parts.elsewhere) {
    model.has_external_data = true;
    const auto size = *num_elements(constant.dims) * static_cast<uint64_t>(element_bytes(constant.type));
    auto data = read_external(parts.place, folder, size);
    if (!data.ok()) return invalid(sentence("tensor \"", constant.name, "\": ", data.status().message()));
    if (!data->empty()) constant.data = keep(model, std::move(*data));
  } else if (parts.raw) {
    constant.data = *parts.raw;
  } else if (parts.num_typed <= kMostElements && !parts.typed.empty()) {
    constant.data = keep(model, std::move(parts.typed));
  }
  return std::move(parts.constant);
}

std::optional<std::vector<double>> numbers_of(const Constant& constant, size_t most) {
  const auto size = static_cast<size_t>(element_bytes(constant.type));
  const auto count = num_elements(constant.dims);
  if (size == 0 || !count || *count > most || constant.data.size() != *count * size) return std::nullopt;
  std::vector<double> numbers(*count);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = number_at(constant.type, constant.data.data() + i * size);
  return numbers;
}

bool for_each_run(const Constant& constant, const std::function<bool(int64_t, int64_t, double)>& f) {
  const auto size = static_cast<size_t>(element_bytes(constant.type));
  const auto count = num_elements(constant.dims);
  if (size == 0 || !count || constant.data.size() != *count * size) return false;
  const char* data = constant.data.data();
  for (size_t first = 0, end = 0; first < *count; first = end) {
    end = first + run_length(data + first * size, size, *count - first);
    const double number = number_at(constant.type, data + first * size);
    if (!f(static_cast<int64_t>(first), static_cast<int64_t>(end), number)) break;
  }
  return true;
}

Constant tensor_of_integers(Model& model, std::string name, const std::vector<int64_t>& elements) {
  std::string data(elements.size() * sizeof(int64_t), '\0');
  if (!data.empty()) std::memcpy(data.data(), elements.data(), data.size());
  return made(model, std::move(name), ElementType::kInt64, {static_cast<int64_t>(elements.size())}, std::move(data));
}

Constant tensor_of_numbers(Model& model, std::string name, ElementType type, std::vector<int64_t> dims,
                           const std::vector<double>& numbers) {
  const auto [dtype, most] = type == ElementType::kFloat64
                                 ? std::pair(DType::kFloat64, std::numeric_limits<double>::max())
                             : type == ElementType::kFloat16  ? std::pair(DType::kFloat16, 65504.0)
                             : type == ElementType::kBFloat16 ? std::pair(DType::kBFloat16, 0x1.fep127)
                                                              : std::pair(DType::kFloat32, 0x1.fffffep127);
  std::string data(numbers.size() * static_cast<size_t>(element_bytes(type)), '\0');
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double number =
        std::isfinite(numbers[i]) ? std::clamp(numbers[i], -most, most) : numbers[i];  // finite stays so
    store_element(data.data(), dtype, static_cast<int64_t>(i), number);
  }
  return made(model, std::move(name), type, std::move(dims), std::move(data));
}

}  // namespace polyhead::graph
