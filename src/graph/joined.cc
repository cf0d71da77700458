#include "graph/joined.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>

#include "core/sentence.h"
#include "graph/affine.h"
#include "graph/layout.h"
#include "graph/new_nodes.h"
#include "graph/nodes.h"
#include "graph/product.h"
#include "graph/terms.h"

namespace polyhead::graph {
namespace {

// One of the two: its product, and the nodes between that and where both meet, the last one first.
struct Part {
  std::vector<int> passed;
  Product product;
  double factor = 1;
};

// What both give together, or why they do not.
struct Meeting {
  int node = kNone;
  Operand left;             // [lead..., rows, inner]
  Operand right[2];         // joined along `along`
  size_t along = 0;         // a dim of either
  std::vector<int> scales;  // nodes behind the product, the last one first
  std::vector<int> parts;   // that are not needed then
  std::string reason;
  bool is_one = false;
};

bool is_sorted(const std::vector<size_t>& order) { return std::is_sorted(order.begin(), order.end()); }

bool is_read_once(const Net& net, int id) { return net.value(id).users.size() == 1 && !net.value(id).is_output; }

// Past transposes, which move to behind the Concat.
Operand without_transposes(const Net& net, Operand operand) {
  for (int node = net.producer(operand.value); net.is(node, "Transpose"); node = net.producer(operand.value)) {
    const auto perm = perm_of(net, node, operand.rank());
    if (!perm) break;
    for (size_t& dim : operand.order) dim = (*perm)[dim];
    operand.value = net.input(node, 0);
  }
  return operand;
}

// A number that has no dims but ones, so that it multiplies something else as well.
bool is_scalar(const Net& net, int id) {
  const auto shape = net.shape(id);
  return net.rank(id) >= 0 && std::all_of(shape.begin(), shape.end(), [](const Size& size) { return size.is(1); });
}

// From one side of a Concat of scores up to a product, past scales.
std::optional<Part> part_above(const Net& net, int id) {
  constexpr size_t kMostPassed = 8;
  Part part;
  for (int node = net.producer(id); node != kNone && part.passed.size() < kMostPassed; node = net.producer(id)) {
    if (is_product(net, node)) {
      std::string reason;
      const auto product = scores_product(net, node, reason);
      if (!product || !is_sorted(product->out)) return std::nullopt;
      part.product = *product;
      part.factor *= product->factor;
      return part;
    }
    const auto scaled = scaled_by(net, node);
    if (!scaled || !keeps_shape(net, node, scaled->side) || !is_scalar(net, net.input(node, 1 - scaled->side)))
      return std::nullopt;
    part.factor = scaled->of(part.factor);
    part.passed.push_back(node);
    id = scaled->value;
  }
  return std::nullopt;
}

// The dims of two operands, but for the one along which they are joined.
bool fit(const Net& net, const Operand (&parts)[2], size_t along) {
  const auto a = net.shape(parts[0].value), b = net.shape(parts[1].value);
  if (a.size() != b.size() || a.size() != parts[0].rank() ||
      net.facts(parts[0].value).type != net.facts(parts[1].value).type)
    return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (i != along && a[i] != b[i]) return false;
  }
  return true;
}

Meeting meeting_of_scores(const Net& net, int node) {
  Meeting meeting;
  meeting.node = node;
  const bool joins = net.is(node, "Concat") && net.node(node).inputs.size() == 2 && net.rank(net.output(node, 0)) > 2;
  if (!joins || axis_of(integer_of(net.node(node), "axis", 0), static_cast<size_t>(net.rank(net.output(node, 0)))) !=
                    net.shape(net.output(node, 0)).size() - 1)
    return meeting;
  const auto first = part_above(net, net.input(node, 0)), second = part_above(net, net.input(node, 1));
  if (!first || !second) return meeting;
  const auto say = [&](std::string why) { return meeting.reason = std::move(why), meeting; };
  const auto same = same_numbers(net, first->product.left, second->product.left);
  if (!same || !nearly(*same, 1)) return say("they are products with different queries");
  if (!nearly(first->factor, second->factor))
    return say(sentence("they are scaled by ", first->factor, " and by ", second->factor));
  const size_t rank = first->product.right.rank();
  for (const Part* each : {&*first, &*second}) {
    std::vector<int> nodes = each->passed;
    nodes.push_back(each->product.node);
    for (int part : nodes) {
      const int id = net.output(part, 0);
      if (!is_read_once(net, id)) return say(sentence("\"", net.value(id).name, "\" is read by others too"));
    }
    meeting.parts.insert(meeting.parts.end(), nodes.begin(), nodes.end());
  }
  meeting.left = first->product.left;
  meeting.right[0] = without_transposes(net, first->product.right);
  meeting.right[1] = without_transposes(net, second->product.right);
  if (meeting.right[0].order != meeting.right[1].order) {  // as they are
    meeting.right[0] = first->product.right;
    meeting.right[1] = second->product.right;
  }
  meeting.along = meeting.right[0].order[rank - 2];
  meeting.scales = first->passed;
  const bool plain = first->product.factor == 1 && second->product.factor == 1;
  if (!plain || meeting.right[0].order != meeting.right[1].order || !fit(net, meeting.right, meeting.along))
    return say("the dims of their keys differ");
  meeting.is_one = true;
  return meeting;
}

// The part of weights that a product reads: the node that cuts it, where it begins, and the whole.
struct Cut {
  int node = kNone, whole = kNone;
  Size start = {0, {}}, size;
};
std::optional<Cut> cut_of(const Net& net, int id) {
  const int node = net.producer(id);
  const auto shape = net.shape(id);
  if (node == kNone || shape.empty()) return std::nullopt;
  Cut cut = {node, net.input(node, 0), {0, {}}, shape.back()};
  if (net.node(node).outputs.size() > 2) return std::nullopt;
  const auto whole = net.shape(cut.whole);
  if (whole.size() != shape.size() || !std::equal(shape.begin(), shape.end() - 1, whole.begin())) return std::nullopt;
  if (net.is(node, "Split")) {
    if (axis_of(integer_of(net.node(node), "axis", 0), shape.size()) != shape.size() - 1) return std::nullopt;
    for (size_t i = 0; net.output(node, i) != id; ++i) {
      const auto before = net.shape(net.output(node, i));
      if (before.empty()) return std::nullopt;
      cut.start = net.symbols().sum(cut.start, before.back());
    }
    return cut;
  }
  if (!net.is(node, "Slice")) return std::nullopt;
  const auto last_of = [&](size_t at) -> std::optional<Size> {
    const int list = net.input(node, at);
    const auto& elements = list == kNone ? std::nullopt : net.facts(list).elements;
    return elements && elements->size() == 1 ? std::optional(elements->front()) : std::nullopt;
  };
  const auto start = last_of(1), axis = last_of(3), step = last_of(4);
  const bool is_last = axis && axis->is_constant() && axis_of(axis->factor, shape.size()) == shape.size() - 1;
  if (!start || start->factor < 0 || !is_last || (net.input(node, 4) != kNone && !(step && step->is(1))))
    return std::nullopt;
  cut.start = *start;
  return cut;
}

Meeting meeting_of_outputs(const Net& net, int node) {
  Meeting meeting;
  meeting.node = node;
  if (!net.is(node, "Add") || net.node(node).inputs.size() != 2) return meeting;
  std::optional<Cut> cuts[2];
  for (size_t side = 0; side < 2; ++side) {
    const int product = net.producer(net.input(node, side));
    if (product == kNone || !is_product(net, product) || !is_read_once(net, net.output(product, 0))) return meeting;
    std::optional<Product> found;
    for (size_t at = 0; at < 2 && !found; ++at) {
      const int weights = net.input(product, at);
      std::string reason;
      cuts[side] = cut_of(net, weights);
      if (cuts[side] && is_read_once(net, weights)) found = weights_product(net, product, weights, reason);
    }
    if (!found || found->factor != 1 || !is_sorted(found->out) || !is_sorted(found->left.order)) return meeting;
    const size_t place = cuts[side]->start.is(0) ? 0 : 1;
    meeting.right[place] = found->right;
    if (place == 0) meeting.left = {cuts[side]->whole, found->left.order};
    meeting.parts.push_back(product);
    meeting.parts.push_back(cuts[side]->node);
  }
  const Cut &first = cuts[0]->start.is(0) ? *cuts[0] : *cuts[1], &second = cuts[0]->start.is(0) ? *cuts[1] : *cuts[0];
  const Size whole = net.shape(first.whole).back();
  const bool is_split = first.node == second.node && first.node != kNone && net.is(first.node, "Split") &&
                        net.node(first.node).outputs.size() == 2;
  meeting.along = meeting.right[0].order.empty() ? 0 : meeting.right[0].order[meeting.right[0].rank() - 2];
  meeting.is_one = first.whole == second.whole && first.start.is(0) && second.start == first.size &&
                   (is_split || net.symbols().sum(first.size, second.size) == whole) && meeting.right[0].rank() > 2 &&
                   meeting.right[0].order == meeting.right[1].order && fit(net, meeting.right, meeting.along);
  return meeting;
}

// The nodes in the place of a meeting.
class Writer {
 public:
  Writer(const Net& net, Names& names, const Meeting& meeting) : net_(net), names_(names), m_(meeting) {}

  std::vector<Node> write() {
    const auto along = static_cast<int64_t>(m_.along);
    const std::string joined =
        add("Concat", {name_of(m_.right[0].value), name_of(m_.right[1].value)}, {integer("axis", along)});
    std::vector<size_t> of_left = m_.left.order, of_right = m_.right[0].order;
    const bool by_scores = net_.is(m_.node, "Concat");  // [lead..., columns, inner] there
    if (by_scores) std::swap(of_right[of_right.size() - 2], of_right.back());
    const std::string left =
        is_sorted(of_left) ? name_of(m_.left.value) : add("Transpose", {name_of(m_.left.value)}, {perm(of_left)});
    const std::string right = is_sorted(of_right) ? joined : add("Transpose", {joined}, {perm(of_right)});
    std::string result = add("MatMul", {left, right}, {});
    for (auto scale = m_.scales.rbegin(); scale != m_.scales.rend(); ++scale) {
      const auto scaled = scaled_by(net_, *scale);
      std::vector<std::string> inputs(2, name_of(net_.input(*scale, 1 - scaled->side)));
      inputs[scaled->side] = result;
      result = add(net_.node(*scale).op_type, std::move(inputs), {});
    }
    nodes_.back().outputs[0] = name_of(net_.output(m_.node, 0));
    nodes_.back().name = net_.node(m_.node).name;
    return std::move(nodes_);
  }

 private:
  std::string name_of(int value) const { return std::string(net_.value(value).name); }

  std::string add(const std::string& op_type, std::vector<std::string> inputs, std::vector<Attribute> attributes) {
    std::string output = names_.fresh("polyhead_joined");
    nodes_.push_back({output, op_type, "", std::move(inputs), {output}, std::move(attributes)});
    return output;
  }

  const Net& net_;
  Names& names_;
  const Meeting& m_;
  std::vector<Node> nodes_;
};

}  // namespace

std::vector<Joined> join_products(const Net& net, Graph& graph, Names& names) {
  std::vector<Joined> all;
  std::map<int, std::vector<Node>> in_place;  // what stands there then
  for (int node = 0; node < static_cast<int>(graph.nodes.size()); ++node) {
    for (const auto& meeting_of : {meeting_of_scores, meeting_of_outputs}) {
      Meeting meeting = meeting_of(net, node);
      if (!meeting.is_one) continue;
      Joined joined;
      in_place[node] = Writer(net, names, meeting).write();
      for (const Node& each : in_place[node]) joined.added.push_back(each.outputs[0]);
      meeting.parts.push_back(node);
      std::sort(meeting.parts.begin(), meeting.parts.end());
      meeting.parts.erase(std::unique(meeting.parts.begin(), meeting.parts.end()), meeting.parts.end());
      for (int part : meeting.parts) {
        joined.before.push_back(net.node(part));
        in_place.try_emplace(part);
      }
      all.push_back(std::move(joined));
      break;
    }
  }
  if (all.empty()) return all;
  std::vector<Node> nodes;
  for (int i = 0; i < static_cast<int>(graph.nodes.size()); ++i) {
    const auto found = in_place.find(i);
    if (found == in_place.end()) {
      nodes.push_back(std::move(graph.nodes[static_cast<size_t>(i)]));
    } else {
      std::move(found->second.begin(), found->second.end(), std::back_inserter(nodes));
    }
  }
  graph.nodes = std::move(nodes);
  return all;
}

void part_products(Graph& graph, const std::vector<Joined>& joined) {
  for (const Joined& each : joined) {
    const auto made = std::find_if(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
      return node.outputs[0] == each.added.back() && node.name == each.before.back().name;
    });
    std::vector<std::string> unread;
    for (const Node& part : each.before) {
      for (const std::string& name : part.inputs) unread.push_back(name);
    }
    if (made == graph.nodes.end()) {
      remove_unread(graph, unread);
      continue;
    }
    graph.nodes.insert(graph.nodes.erase(made), each.before.begin(), each.before.end());
    std::erase_if(graph.nodes, [&](const Node& node) {
      return std::find(each.added.begin(), each.added.end() - 1, node.outputs[0]) != each.added.end() - 1;
    });
  }
}

std::string why_not_joined(const Net& net, int concat) { return meeting_of_scores(net, concat).reason; }

}  // namespace polyhead::graph
