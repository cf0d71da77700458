// Values that nodes compute twice, in the same way from the same.
#pragma once

#include "graph/net.h"

namespace polyhead::graph {

bool same_value(const Net& net, int a, int b);

// A boolean without the Nots ahead of it, and what it chooses: what is visible, or what is hidden.
struct Choice {
  Choice(const Net& net, int condition, bool chooses_visible) : value(condition), visible(chooses_visible) {
    for (int node = net.producer(value); net.is(node, "Not"); node = net.producer(value)) {
      value = net.input(node, 0);
      visible = !visible;
    }
  }

  int value;
  bool visible;
};

}  // namespace polyhead::graph
