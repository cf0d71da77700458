// What a graph makes of a softmax, forward and backward: each value behind it as a sum of products, node by node.
#pragma once

#include <set>
#include <unordered_map>
#include <vector>

#include "graph/net.h"
#include "graph/same.h"
#include "graph/sinks.h"
#include "graph/terms.h"
#include "polyhead/graph.h"

namespace polyhead::graph {

// What is known of a value that has the scores' dims, or one number for each row of them.
struct Seen {
  Terms terms;
  // [lead..., rows, keys]; [lead..., keys, rows]; or the first and the last dim in each other's places.
  enum Order { kStraight, kTransposed, kKeysFirst } order = kStraight;
  bool full = true;  // false: one number for each row, in dims of any kind
  // Where a sink is joined to the scores: without it, with it, or it alone; what has dP in it is zero in its place.
  enum Columns { kKeys, kJoined, kSink } columns = kKeys;
};

// Dropout in training.
struct Dropped {
  int node = kNone;
  double p = 0;

  explicit operator bool() const { return node != kNone; }
  double keep() const { return 1 / (1 - p); }  // what it multiplies by
};

class Flow {
 public:
  // `scores`: what the softmax is of, but for sinks.
  Flow(const Net& net, int scores, Backwards backwards, const std::optional<Sinks>& sinks)
      : net_(net), scores_(scores), backwards_(backwards), sinks_(sinks) {}

  // What a value is; and all that follows from it and from what was told before.
  void tell(int value, Terms terms, Seen::Columns columns = Seen::kKeys) {
    add(value, {std::move(terms), Seen::kStraight, true, columns});
    run();
  }
  // Where a condition chooses a zero instead, a value is zero already.
  void tell(const Choice& choice) {
    choices_.push_back(choice);
    todo_ = readers_;
    run();
  }

  const Seen* find(int value) const;
  const Dropped& dropped() const { return dropped_; }
  // The weights, as they are multiplied with values.
  Terms weights() const { return weights_of(static_cast<bool>(dropped_)); }
  // Nodes that read what is known, in the graph's order.
  const std::set<int>& readers() const { return readers_; }
  // Nodes that set the weights of rows to 0 that see no key; and which mask tells that, or kNone.
  const std::unordered_map<int, int>& guards() const { return guards_; }

 private:
  void add(int value, Seen seen);
  void run();
  std::optional<Seen> evaluate(int node);
  std::optional<Seen> of_dropout(int node, const Seen& x);
  std::optional<Seen> of_dims(int node, const Seen& x) const;
  std::optional<Seen> of_two(int node) const;
  std::optional<Seen> of_sum(int node) const;
  std::optional<Seen> of_slice(int node, const Seen& x) const;
  std::optional<Seen> of_zeros(int node) const;
  std::optional<Terms> sum_over_keys(const Terms& terms, Seen::Columns columns) const;
  std::optional<Seen> of_where(int node);
  std::optional<Seen> of_microsoft(int node) const;
  bool guards(int node, size_t side);

  const Net& net_;
  int scores_;
  Backwards backwards_;
  std::optional<Sinks> sinks_;
  std::unordered_map<int, Seen> seen_;
  std::set<int> readers_, todo_;
  std::unordered_map<int, int> guards_;
  std::vector<Choice> choices_;
  Dropped dropped_;
};

}  // namespace polyhead::graph
