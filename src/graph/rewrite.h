// What is put in the place of a match, and how it gets into the graph.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph/arrange.h"
#include "graph/match.h"

namespace polyhead::graph {

// Values by what they are: an operator with its inputs, a constant. Names of new nodes' outputs that others may share.
using Made = std::unordered_map<std::string, std::string>;

struct Rewrite {
  int at = kNone;  // new nodes stand where this one stood
  std::vector<Node> nodes;
  std::vector<Constant> constants;
  std::vector<ValueInfo> values;
  std::vector<int> removed;
  std::string reason;  // why there is none
  std::string became, pattern;
  Made made;  // by these nodes and constants
  int64_t saved_bytes = 0;
};

// Names that nobody has yet.
class Names {
 public:
  explicit Names(const Graph& graph) { add(graph); }
  std::string fresh(const std::string& wish);

 private:
  void add(const Graph& graph);

  std::unordered_set<std::string> taken_;
  std::unordered_map<std::string, int> last_;
};

struct Emission {
  Model& model;
  const Net& net;
  Names& names;
  const FuseOptions& options;
  int64_t opset;     // that the model will have
  const Made& made;  // by rewrites that are accepted
};

Rewrite rewrite(const Emission& emission, const Match& match);

// For a picture, without attributes: what a rewrite replaces, and what nobody reads then; without one, what is around the
// softmax.
std::vector<Node> nodes_before(const Net& net, const Match& match, const Rewrite* rewrite);

// Puts rewrites, which belong to the graph itself and not to its bodies, into it; what nobody reads any more goes away.
void apply(Graph& graph, std::vector<Rewrite>& rewrites);

// Removes what gives these, and then what was made for them alone, where nobody reads it.
void remove_unread(Graph& graph, const std::vector<std::string>& names);

}  // namespace polyhead::graph
