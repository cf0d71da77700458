// Scores that no option of the operator makes: what is done to them between the products, as the text of a score program
// (polyhead/program.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/net.h"
#include "graph/product.h"

namespace polyhead::graph {

struct ScoreProgram {
  std::string text;           // names its tensors c0, c1, ...
  std::vector<int> captures;  // which these are
  Product product;            // of queries and keys
  double factor = 1;          // what its scores are multiplied by ahead of the program
};

// Of `scores` [batch, heads, q, k], which a softmax takes. Nothing where no product stands behind them, or something else than
// numbers by numbers is done to its scores.
std::optional<ScoreProgram> score_program_of(const Net& net, int scores);

}  // namespace polyhead::graph
