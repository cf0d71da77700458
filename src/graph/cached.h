// Keys and values that a graph joins to those of earlier runs: past_key and past_value of the operator.
#pragma once

#include <string>

#include "graph/arrange.h"
#include "graph/match.h"

namespace polyhead::graph {

struct Cached {
  int keys = kNone, values = kNone;  // nodes: Concat of an input of the graph and what is new
  Size before = {};                  // how many keys stand ahead of the new ones
  std::string reason = {};           // why the operator cannot join them itself
};

// Nothing where the graph joins no keys.
std::optional<Cached> cached_of(const Net& net, const Match& match, const Arrangement& arrangement);

// Whether anything but the products, which the operator replaces, needs joined keys or values.
bool is_read_elsewhere(const Net& net, const Match& match, int joined);

}  // namespace polyhead::graph
