#include "graph/new_nodes.h"

#include <cstdio>

#include "core/sentence.h"
#include "graph/tensors.h"

namespace polyhead::graph {

constexpr int64_t kAxesAreInputs = 13;  // of Unsqueeze and Squeeze, since that opset

Attribute integer(std::string name, int64_t value) {
  Attribute made;
  made.name = std::move(name), made.integer = value;
  return made;
}

Attribute number(std::string name, double value) {
  Attribute made;
  made.name = std::move(name), made.number = static_cast<float>(value);
  return made;
}

Attribute text(std::string name, std::string value) {
  Attribute made;
  made.name = std::move(name), made.text = std::move(value);
  return made;
}

Attribute list(std::string name, std::vector<int64_t> values) {
  Attribute made;
  made.name = std::move(name), made.integers = std::move(values);
  return made;
}

Attribute perm(const std::vector<size_t>& order) {
  return list("perm", std::vector<int64_t>(order.begin(), order.end()));
}

std::string NewNodes::add(const char* op_type, std::vector<std::string> inputs, std::vector<Attribute> attributes) {
  std::string what = op_type;
  for (const std::string& input : inputs) what += sentence(" ", input);
  for (const Attribute& each : attributes) {
    what += sentence(" ", each.name, each.integer.value_or(0));
    for (int64_t element : each.integers) what += sentence(" ", element);
  }
  return once(what, [&] {
    return add_as(e_.names.fresh(std::string("polyhead_") + op_type), op_type, std::move(inputs),
                  std::move(attributes));
  });
}

std::string NewNodes::add_as(std::string output, const char* op_type, std::vector<std::string> inputs,
                             std::vector<Attribute> attributes) {
  const std::string name = e_.names.fresh(std::string("polyhead_") + op_type);
  rewrite_.nodes.push_back({name, op_type, "", std::move(inputs), {output}, std::move(attributes)});
  return output;
}

std::string NewNodes::integers(const std::vector<int64_t>& elements) {
  std::string what = "integers";
  for (int64_t each : elements) what += sentence(" ", each);
  return once(what, [&] {
    std::string name = e_.names.fresh("polyhead_integers");
    rewrite_.constants.push_back(tensor_of_integers(e_.model, name, elements));
    return name;
  });
}

std::string NewNodes::constant(double scalar) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%a", scalar);
  return once(sentence("number ", static_cast<int32_t>(type_), " ", digits), [&] {
    std::string name = e_.names.fresh("polyhead_number");
    rewrite_.constants.push_back(tensor_of_numbers(e_.model, name, type_, {}, {scalar}));
    return name;
  });
}

std::string NewNodes::numbers(const std::vector<double>& elements) {
  std::string name = e_.names.fresh("polyhead_numbers");
  rewrite_.constants.push_back(
      tensor_of_numbers(e_.model, name, type_, {static_cast<int64_t>(elements.size())}, elements));
  return name;
}

std::string NewNodes::unsqueeze(const std::string& name, std::vector<int64_t> axes) {
  if (e_.opset < kAxesAreInputs) return add("Unsqueeze", {name}, {list("axes", std::move(axes))});
  return add("Unsqueeze", {name, integers(axes)});
}

std::string NewNodes::shape_of(const std::string& name, int64_t start, int64_t end) {
  constexpr int64_t kShapeHasRange = 15;
  if (e_.opset >= kShapeHasRange) return add("Shape", {name}, {integer("start", start), integer("end", end)});
  const auto place = [&](int64_t at) { return integers({at}); };
  return add("Slice", {add("Shape", {name}), place(start), place(end)});
}

}  // namespace polyhead::graph
