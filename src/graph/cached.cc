#include "graph/cached.h"

#include <algorithm>

namespace polyhead::graph {
namespace {

// The Concat over the sequence, [batch, heads, past, dim] and [batch, heads, new, dim], that makes an operand.
int concat_of(const Net& net, const Form& form) {
  constexpr size_t kSequence = 2, kRank = 4;
  const int node = net.producer(form.value);
  const bool is_joined = net.is(node, "Concat") && net.node(node).inputs.size() == 2 && net.rank(form.value) == kRank &&
                         std::is_sorted(form.order.begin(), form.order.end()) &&
                         axis_of(integer_of(net.node(node), "axis", -1), kRank) == kSequence;
  if (!is_joined) return kNone;
  const int past = net.input(node, 0), fresh = net.input(node, 1);
  const bool is_given = net.producer(past) == kNone && net.facts(past).constant == nullptr;
  return is_given && net.rank(past) == kRank && net.rank(fresh) == kRank ? node : kNone;
}

}  // namespace

std::optional<Cached> cached_of(const Net& net, const Match& match, const Arrangement& arrangement) {
  if (arrangement.kind != Arrangement::kStacks || match.backward || match.program || match.returned.value != kNone)
    return std::nullopt;
  Cached cached = {concat_of(net, arrangement.key), concat_of(net, arrangement.value)};
  if (cached.keys == kNone || cached.values == kNone) return std::nullopt;
  const auto size = [&](int node, size_t side) { return net.shape(net.input(node, side))[2]; };
  // Both are as long in all, or their products could not be.
  if (size(cached.keys, 0) != size(cached.values, 0) && size(cached.keys, 1) != size(cached.values, 1))
    return std::nullopt;
  // One new key for each query: the other order, or what has been given beside, would be taken for what is new.
  const auto scores = net.shape(match.softmax_input);
  if (size(cached.keys, 1) != scores[scores.size() - 2]) return std::nullopt;
  cached.before = size(cached.keys, 0);
  std::vector<int> read = reads(match);
  std::erase(read, match.result.right.value);
  read.insert(read.end(), {arrangement.query.value, net.input(cached.keys, 1), net.input(cached.values, 1)});
  for (int node : {cached.keys, cached.values}) {
    if (first_made_of(net, net.output(node, 0), read) != kNone) return std::nullopt;
  }
  return cached;
}

}  // namespace polyhead::graph
