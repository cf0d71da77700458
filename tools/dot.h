// Pictures in the language of Graphviz.
#pragma once

#include <string>

#include "polyhead/graph.h"

namespace polyhead::tools {

// A candidate's nodes before, and if it is fused after; values from elsewhere as ellipses. Of one that stays the label is the
// reason, and the node that it names is red.
std::string dot_of(const graph::Candidate& candidate);

}  // namespace polyhead::tools
