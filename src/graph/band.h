// What a mask says by the distance of a key to its query alone: causal masks and sliding windows, however they are made.
#pragma once

#include <optional>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

// A condition on each score, of query i and key j: lower <= j - i <= upper, and whatever else has to hold.
struct Shown {
  std::optional<Size> lower = {}, upper = {};  // none: open
  struct Part {
    int value = kNone;  // broadcasts to the scores
    bool negated = false;
  };
  std::vector<Part> rest = {};

  bool is_band() const { return lower || upper; }
};

// A boolean value, or its negation, which broadcasts to scores whose last two dims are those. What is not understood is a
// part of the rest: in the end the value itself.
Shown shown_by(const Net& net, int value, bool negated, const Size& num_queries, const Size& num_keys);

// Numbers that are added to such scores: where they are `fill`, a score is hidden, elsewhere they are 0.
struct Hiding {
  Shown shown;
  double fill = 0;
};
std::optional<Hiding> hidden_by(const Net& net, int value, const Size& num_queries, const Size& num_keys);

}  // namespace polyhead::graph
