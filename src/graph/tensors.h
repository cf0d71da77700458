// Constant tensors of an ONNX file: read, made, and their elements as numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/graph.h"

namespace polyhead::graph {

// Bytes of an element that are whole; 0: strings, types with less than a byte, or not known.
int64_t element_bytes(ElementType type);
bool is_float(ElementType type);
std::string text_of(ElementType type);

// Keeps bytes as long as the model lives.
std::string_view keep(Model& model, std::string bytes);

// A TensorProto. Its data is read if it is at hand and not large.
Result<Constant> read_tensor(Model& model, std::string_view encoded, const std::string& folder);

// Every element as a number, or nothing if its data was not read, or there are more than `most`.
std::optional<std::vector<double>> numbers_of(const Constant& constant, size_t most);

// f(first, end, number) for each run of equal elements, in order, until it gives false. False: its data was not read.
bool for_each_run(const Constant& constant, const std::function<bool(int64_t first, int64_t end, double number)>& f);

// Tensors of our own.
Constant tensor_of_integers(Model& model, std::string name, const std::vector<int64_t>& elements);
Constant tensor_of_numbers(Model& model, std::string name, ElementType type, std::vector<int64_t> dims,
                           const std::vector<double>& numbers);

}  // namespace polyhead::graph
