// One attention in a graph: everything between the two products, as numbers and terms.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/net.h"
#include "graph/product.h"

namespace polyhead::graph {

// What amounts to a softmax over the last dim.
struct Anchor {
  int node = kNone;  // the last of its nodes
  int input = kNone, output = kNone;
  std::vector<int> nodes;
  std::string words;
  std::string reason;  // why it is none over the last dim
};

std::optional<Anchor> anchor_at(const Net& net, int node);

struct MaskTerm {
  enum Kind {
    kAdded,    // number * value is added to the scores
    kVisible,  // where value is false, the score becomes number
    kHidden,   // where it is true
  };
  Kind kind = kAdded;
  int value = kNone;
  double number = 1;
  int node = kNone;
  size_t rank_of_scores = 0;
};

struct Match {
  std::vector<int> nodes;  // that the operator replaces
  Product scores, result;
  double scale = 1, softcap = 0, out_factor = 1;
  std::vector<MaskTerm> terms;
  int softmax_input = kNone, weights = kNone, out = kNone;
  int guarding_mask = kNone;     // rows of which this is -inf give 0
  bool returns_weights = false;  // others read the weights too
  std::vector<std::string> words;
  std::string reason;        // why it is none
  bool is_attention = true;  // reason is about something that looks like attention
};

// From the softmax up to the product of queries and keys.
void climb_scores(const Net& net, const Anchor& anchor, Match& match);

// From the softmax down to the product with the values.
void follow_weights(const Net& net, const Anchor& anchor, Match& match);

Match match_attention(const Net& net, const Anchor& anchor);

}  // namespace polyhead::graph
