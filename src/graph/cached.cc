#include "graph/cached.h"

#include <algorithm>

#include "core/sentence.h"
#include "graph/nodes.h"

namespace polyhead::graph {
namespace {

constexpr size_t kSequence = 2, kRank = 4;  // of [batch, heads, sequence, dim]

// The Concat over the sequence that makes an operand, through transposes, or kNone.
int concat_of(const Net& net, const Form& form) {
  size_t sequence = form.order[form.flat ? 1 : kSequence];
  int node = net.producer(form.value);
  for (; net.is(node, "Transpose"); node = net.producer(net.input(node, 0))) {
    const auto perm = perm_of(net, node, form.order.size());
    if (!perm) return kNone;
    sequence = (*perm)[sequence];
  }
  const auto axis = net.is(node, "Concat") ? axis_of(integer_of(net.node(node), "axis", 0), form.order.size())
                                           : std::optional<size_t>();
  return axis == sequence ? node : kNone;
}

// Why a Concat is not that of [batch, heads, past, dim], an input of the graph, and [batch, heads, new, dim]; "" if it is.
std::string why_no_cache(const Net& net, const Form& form, int node) {
  const bool is_stacked = !form.flat && std::is_sorted(form.order.begin(), form.order.end()) &&
                          form.value == net.output(node, 0) && net.rank(net.input(node, 0)) == kRank;
  if (!is_stacked) return "their dims are not [batch, heads, sequence, dim]";
  if (const size_t count = net.node(node).inputs.size(); count != 2)
    return sentence("it joins ", count, " tensors, must be two");
  const int past = net.input(node, 0);
  const std::string name(net.value(past).name);
  if (net.facts(past).constant != nullptr) return sentence("\"", name, "\" is a constant");
  const int made_by = net.producer(past);
  return made_by == kNone ? "" : sentence("\"", name, "\" is computed, by ", words_of(net, made_by));
}

std::string why_not(const Net& net, const Match& match, const Arrangement& arrangement, const Cached& cached) {
  if (match.backward) return "its backward is in the graph too";
  if (match.program) return "a score program counts the keys that it is given";
  if (match.returned.value != kNone) return "its scores or weights are read by others too";
  if (cached.values == kNone) return "the values are not joined like them";
  if (cached.values == cached.keys) return "they are the values too";
  for (const auto& [form, node] :
       {std::pair(&arrangement.key, cached.keys), std::pair(&arrangement.value, cached.values)}) {
    const std::string why = why_no_cache(net, *form, node);
    if (!why.empty()) return node == cached.keys ? why : sentence("of the values, ", words_of(net, node), ": ", why);
  }
  const auto size = [&](int node, size_t side) { return net.shape(net.input(node, side))[kSequence]; };
  // Both are as long in all, or their products could not be.
  if (size(cached.keys, 0) != size(cached.values, 0) && size(cached.keys, 1) != size(cached.values, 1))
    return "keys and values are not known to have the same past";
  // One new key for each query: the other order, or what has been given beside, would be taken for what is new.
  const auto scores = net.shape(match.softmax_input);
  if (size(cached.keys, 1) != scores[scores.size() - 2])
    return sentence("\"", net.value(net.input(cached.keys, 1)).name, "\" is not known to hold one key for each query");
  std::vector<int> read = reads(match);
  std::erase(read, match.result.right.value);
  read.insert(read.end(), {arrangement.query.value, net.input(cached.keys, 1), net.input(cached.values, 1)});
  for (int node : {cached.keys, cached.values}) {
    const int joined = net.output(node, 0), made = first_made_of(net, joined, read);
    if (made == kNone) continue;
    return sentence("the attention reads \"", net.value(made).name, "\", which is made of \"", net.value(joined).name,
                    "\" or its shape");
  }
  return "";
}

}  // namespace

std::optional<Cached> cached_of(const Net& net, const Match& match, const Arrangement& arrangement) {
  Cached cached = {concat_of(net, arrangement.key), concat_of(net, arrangement.value)};
  if (cached.keys == kNone) return std::nullopt;
  cached.reason = why_not(net, match, arrangement, cached);
  if (cached.reason.empty()) cached.before = net.shape(net.input(cached.keys, 0))[kSequence];
  return cached;
}

bool is_read_elsewhere(const Net& net, const Match& match, int joined) {
  const NetValue& value = net.value(joined);
  return value.is_output || std::any_of(value.users.begin(), value.users.end(), [&](int user) {
           const bool goes = contains(match.nodes, user);
           const bool moves = net.is(user, "Transpose") || net.is(user, "Expand") || reshapes(net, user);
           return !goes && (!moves || is_read_elsewhere(net, match, net.output(user, 0)));
         });
}

}  // namespace polyhead::graph
