#include "fuse_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>

#include "array.h"
#include "core/sentence.h"
#include "file.h"
#include "onnx_session.h"
#include "safetensors.h"
#include "testing/elements.h"
#include "testing/random.h"

namespace polyhead::tools {
namespace {

using testing::Random;

using SizesByName = std::map<std::string, int64_t>;

// By the largest number of an output, where none is told.
double tolerance_of(DType dtype) {
  if (dtype == DType::kFloat16) return 1e-2;
  return dtype == DType::kBFloat16 ? 5e-2 : 1e-4;
}

// What a dim without a name is called: all of these have one size.
std::string name_of(const graph::Dim& dim) { return dim.name.empty() ? "?" : dim.name; }

Result<SizesByName> told_sizes(const std::vector<std::string>& words, const SizesByName& known) {
  SizesByName sizes;
  for (const std::string& word : words) {
    const size_t at = word.find('=');
    const char *first = word.data() + std::min(at, word.size() - 1) + 1, *last = word.data() + word.size();
    int64_t size = 0;
    const auto read = std::from_chars(first, last, size);
    if (at == std::string::npos || read.ec != std::errc() || read.ptr != last || size < 0) {
      return invalid(fmt::format("--size is {}, must be NAME=SIZE", printable(word)));
    }
    const std::string name = word.substr(0, at);
    if (!known.contains(name)) {
      std::string names;
      for (const auto& [each, unused] : known) names += (names.empty() ? "" : ", ") + printable(each);
      return invalid(
          fmt::format("--size names {}; dims without a size are {}", printable(name), names.empty() ? "none" : names));
    }
    sizes[name] = size;
  }
  return sizes;
}

// One set of inputs.
struct Draw {
  SizesByName sizes;
  bool masks_of_ones = false;
};

// Each has others of every dim. First sizes that differ, so that no two are taken for each other, twice; then equal ones, as
// models may want them; then ones.
std::vector<Draw> draws_of(const SizesByName& known, const SizesByName& told) {
  constexpr int64_t kEqual = 4;
  constexpr int64_t kDifferent[][2] = {{2, 3}, {5, 6}, {7, 9}, {3, 4}, {6, 8}};
  std::vector<Draw> draws(4);
  size_t at = 0;
  for (const auto& [name, unused] : known) {
    const auto place = static_cast<int64_t>(at);
    const bool is_listed = at < std::size(kDifferent);
    const auto found = told.find(name);
    const auto size = [&, fixed = found != told.end()](int64_t otherwise) { return fixed ? found->second : otherwise; };
    draws[0].sizes[name] = size(is_listed ? kDifferent[at][0] : place + 4);
    draws[1].sizes[name] = size(is_listed ? kDifferent[at][1] : place + 8);
    draws[2].sizes[name] = size(kEqual);
    draws[3].sizes[name] = size(1);
    ++at;
  }
  draws[2].masks_of_ones = true;
  if (draws[3].sizes == draws[0].sizes) return {draws[0], draws[2]};  // all are told
  return draws;
}

// Normal numbers; integers, which may be tokens, 0 and 1; masks show three keys of four, the first one among them.
Result<OnnxTensor> random_input(const OnnxInput& input, size_t index, const Draw& draw) {
  std::vector<int64_t> dims;
  for (const graph::Dim& dim : input.dims) dims.push_back(dim.size >= 0 ? dim.size : draw.sizes.at(name_of(dim)));
  auto tensor = new_onnx_tensor(input.dtype, std::move(dims));
  if (!tensor.ok()) return tensor.status();
  Random random(1, index);
  const bool is_integer = input.dtype == DType::kInt32 || input.dtype == DType::kInt64;
  const bool is_mask = input.dtype == DType::kBool || input.name.find("mask") != std::string::npos;
  const int64_t last = tensor->dims.empty() ? 1 : tensor->dims.back();
  for (int64_t i = 0; i < tensor->num_elements(); ++i) {
    double value = 1;
    if (is_mask && !draw.masks_of_ones) value = i % last == 0 || random.chance(0.75) ? 1 : 0;
    if (!is_mask) value = is_integer ? static_cast<double>(random.below(2)) : random.normal();
    testing::set_element(input.dtype, tensor->data.get() + static_cast<size_t>(i) * dtype_size_bytes(input.dtype),
                         value);
  }
  return tensor;
}

Result<std::vector<OnnxTensor>> given_inputs(const std::string& path, const std::vector<OnnxInput>& inputs) {
  const auto file = SafetensorsFile::open(path);
  if (!file.ok()) return file.status();
  std::vector<OnnxTensor> tensors;
  for (const OnnxInput& input : inputs) {
    const auto array = file->read(input.name);
    if (!array.ok()) return array.status();
    const Tensor& from = array->tensor;
    if (from.dtype != input.dtype) {
      return invalid(fmt::format("{}: {} is {}, the model's input is {}", printable(path), printable(input.name),
                                 dtype_name(from.dtype), dtype_name(input.dtype)));
    }
    auto tensor = new_onnx_tensor(input.dtype, {from.dims, from.dims + from.ndim});
    if (!tensor.ok()) return tensor.status();
    const auto bytes = static_cast<size_t>(from.num_elements()) * dtype_size_bytes(from.dtype);
    if (bytes > 0) std::memcpy(tensor->data.get(), from.data, bytes);
    tensors.push_back(std::move(*tensor));
  }
  return tensors;
}

struct Comparison {
  double largest = 0, difference = 0;
  std::string result = "same";
};

// A NaN of the original, such as a row's that sees no key, may have become any number.
Comparison compare(const OnnxTensor& before, const OnnxTensor& after, std::optional<double> tolerance) {
  Comparison found;
  if (before.dims != after.dims || before.dtype != after.dtype) {
    found.result = fmt::format("differs: it is {} {}", dtype_name(after.dtype), dims_text(after.dims));
    return found;
  }
  const size_t bytes = dtype_size_bytes(before.dtype);
  for (int64_t i = 0; i < before.num_elements(); ++i) {
    const auto at = static_cast<size_t>(i) * bytes;
    const double a = testing::element_value(before.dtype, before.data.get() + at);
    const double b = testing::element_value(before.dtype, after.data.get() + at);
    if (std::isfinite(a) && std::isfinite(b)) {
      found.largest = std::max(found.largest, std::fabs(a));
      found.difference = std::max(found.difference, std::fabs(a - b));
    } else if (a != b && !std::isnan(a)) {
      found.result = fmt::format("differs: element {} was {} and is {}", i, a, b);
    }
  }
  const double most = tolerance.value_or(tolerance_of(before.dtype)) * found.largest;
  if (found.result == "same" && found.difference > most)
    found.result = fmt::format("differs by more than {:.3g}", most);
  return found;
}

std::string words_of(const SizesByName& sizes) {
  std::string words;
  for (const auto& [name, size] : sizes) words += fmt::format("{}{} {}", words.empty() ? "" : ", ", name, size);
  return words.empty() ? "as they are" : words;
}

class Check {
 public:
  Check(const FuseCheck& check, const OnnxSession& before, const OnnxSession& after, Report& report)
      : check_(check), before_(before), after_(after), report_(report) {
    report_.columns = {"sizes", "output", "shape", "largest", "difference", "result"};
  }

  // Of inputs on which the model itself runs.
  void compare_all(const std::string& sizes, const std::vector<OnnxTensor>& inputs) {
    const auto expected = before_.run(inputs);
    if (!expected.ok()) return add(sizes, "the model itself does not run: " + expected.status().message());
    const auto got = after_.run(inputs);
    ++num_runs_;
    if (!got.ok()) {
      same_ = false;
      return add(sizes, "differs: it does not run: " + got.status().message());
    }
    for (size_t i = 0; i < expected->size(); ++i) {
      const OnnxTensor& each = (*expected)[i];
      const Comparison found = compare(each, (*got)[i], check_.tolerance);
      same_ = same_ && found.result == "same";
      report_.rows.push_back({sizes, before_.outputs()[i],
                              fmt::format("{} {}", dtype_name(each.dtype), dims_text(each.dims)), found.largest,
                              found.difference, found.result});
    }
  }

  bool passed() const { return same_ && num_runs_ > 0; }

 private:
  void add(const std::string& sizes, std::string result) {
    report_.rows.push_back({sizes, {}, {}, {}, {}, std::move(result)});
  }

  const FuseCheck& check_;
  const OnnxSession &before_, &after_;
  Report& report_;
  bool same_ = true;
  int num_runs_ = 0;
};

}  // namespace

Result<bool> check_fused(const FuseCheck& check, const std::string& before, const std::string& after,
                         const std::string& folder, Report& report) {
  if (Status status = load_onnxruntime(check.library); !status.ok()) return status;
  const auto original = OnnxSession::open(before, folder);
  if (!original.ok()) return invalid("the model itself does not run: " + original.status().message());
  const auto rewritten = OnnxSession::open(after, folder);
  if (!rewritten.ok()) return invalid("the new model does not run: " + rewritten.status().message());
  SizesByName known;
  for (const OnnxInput& input : original->inputs()) {
    for (const graph::Dim& dim : input.dims) {
      if (dim.size < 0) known[name_of(dim)] = 0;
    }
  }
  const auto told = told_sizes(check.sizes, known);
  if (!told.ok()) return told.status();
  Check all(check, *original, *rewritten, report);
  if (!check.inputs.empty()) {
    const auto inputs = given_inputs(check.inputs, original->inputs());
    if (!inputs.ok()) return inputs.status();
    all.compare_all("given", *inputs);
    return all.passed();
  }
  for (const Draw& draw : draws_of(known, *told)) {
    std::vector<OnnxTensor> inputs;
    for (size_t i = 0; i < original->inputs().size(); ++i) {
      auto tensor = random_input(original->inputs()[i], i, draw);
      if (!tensor.ok()) return tensor.status();
      inputs.push_back(std::move(*tensor));
    }
    all.compare_all(words_of(draw.sizes), inputs);
  }
  return all.passed();
}

}  // namespace polyhead::tools
