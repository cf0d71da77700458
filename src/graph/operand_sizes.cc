#include "graph/operand_sizes.h"

#include <algorithm>

#include "core/sentence.h"
#include "graph/nodes.h"

namespace polyhead::graph {

// Of what the operator joins: by what goes into it.
std::string OperandSizes::of(const Form& form, size_t dim) {
  constexpr size_t kSequence = 2;
  const auto at = static_cast<int64_t>(dim);
  const auto size = [&](int value) { return new_.shape_of(std::string(net_.value(value).name), at, at + 1); };
  const int concat = joins_ && (&form == &plan_.key || &form == &plan_.value) ? net_.producer(form.value) : kNone;
  if (concat == kNone) return size(form.value);
  const std::string fresh = size(net_.input(concat, 1));
  return dim == kSequence ? new_.add("Add", {size(net_.input(concat, 0)), fresh}) : fresh;
}

// Nodes that read the shape of an operand, or of what it is made of, while `reader` alone reads its elements.
std::vector<int> OperandSizes::shapes_of(const Operand& operand, int reader, const Form& form) const {
  std::vector<int> found;
  for (int id = operand.value; id != form.value;) {
    for (int user : net_.value(id).users) {
      if (user == reader) continue;
      if (!net_.is(user, "Shape")) return found;
      found.push_back(user);
    }
    reader = net_.producer(id);
    const auto scaled = scaled_by(net_, reader);
    id = scaled ? scaled->value : net_.input(reader, 0);
  }
  return found;
}

// The shape that a node gives, of numbers and of the operands' sizes; nothing where it has others.
std::vector<std::string> OperandSizes::sizes_of(int shape) {
  const auto& elements = net_.facts(net_.output(shape, 0)).elements;
  std::vector<std::pair<const Form*, size_t>> places;
  for (const Size& each : elements.value_or(Sizes())) {
    places.emplace_back(nullptr, 0);
    for (const Form* form : {&plan_.value, &plan_.key, &plan_.query}) {
      const auto dims = net_.shape(form->value);
      const auto dim = std::find(dims.begin(), dims.end(), each);
      if (dim != dims.end()) places.back() = {form, static_cast<size_t>(dim - dims.begin())};
    }
    if (places.back().first == nullptr && !each.is_constant()) return {};
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < places.size(); ++i) {
    const Size& size = (*elements)[i];
    names.push_back(size.is_constant() ? new_.integers({size.factor}) : of(*places[i].first, places[i].second));
  }
  return names;
}

std::string OperandSizes::tell(const Match& match, Rewrite& rewrite) {
  std::vector<int> nodes = match.shapes;
  const auto add = [&](const std::vector<int>& more) { nodes.insert(nodes.end(), more.begin(), more.end()); };
  add(shapes_of(match.scores.left, match.scores.node, plan_.query));
  add(shapes_of(match.scores.right, match.scores.node, plan_.key));
  add(shapes_of(match.result.right, match.result.node, plan_.value));
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::vector<std::string> sizes = sizes_of(nodes[i]);
    if (sizes.empty() && i < match.shapes.size())
      return sentence("the sizes that ", words_of(net_, nodes[i]), " gives are not those of query and key");
    if (sizes.empty()) continue;
    new_.add_as(std::string(net_.value(net_.output(nodes[i], 0)).name), "Concat", sizes, {integer("axis", 0)});
    rewrite.removed.push_back(nodes[i]);
  }
  return "";
}

}  // namespace polyhead::graph
