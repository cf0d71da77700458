// Attention sinks: one more logit of each row, joined to the scores ahead of the softmax and dropped from the weights behind it.
#pragma once

#include <optional>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

struct Sinks {
  int scores = kNone;     // without the logit
  int weights = kNone;    // likewise
  int joined = kNone;     // scores with it
  int logits = kNone;     // one for each head, in dims of 1, or the same for each batch and row
  bool is_ahead = false;  // of the keys, else behind them
};

// What is joined to the input of a softmax over the last dim, if its output is cut accordingly.
std::optional<Sinks> sinks_of(const Net& net, int input, int output);

// A node that gives the dims of joined scores, with zeros in the place of the logit.
struct Padded {
  int value = kNone;
  bool keys_first = false;  // value and result have their first and last dims in each other's places
};
std::optional<Padded> padded_by(const Net& net, int node, const Sinks& sinks);

// The logits [heads] of a constant that has them for each batch and row alike.
std::optional<std::vector<double>> constant_logits(const Net& net, const Sinks& sinks);

// The logits' own dims: those of the scores' heads alone are not 1.
bool are_of_heads(const Net& net, const Sinks& sinks);

}  // namespace polyhead::graph
