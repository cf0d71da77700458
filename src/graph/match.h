// One attention in a graph: everything between the two products, as numbers and terms.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/flow.h"
#include "graph/net.h"
#include "graph/product.h"
#include "graph/score_program.h"
#include "graph/sinks.h"

namespace polyhead::graph {

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

// What each score is multiplied or divided by, one number for all keys of a row: the query can take it in their place.
struct RowFactor {
  int value = kNone;
  bool divides = false;
};

// Scores on their way from the product to the softmax, and what still becomes of them.
struct Score {
  int value = kNone;
  double factor = 1;        // up to the softmax, or to the tanh of a softcap
  bool before_cap = false;  // a softcap
  size_t num_terms = 0;     // of the mask, that are still to come
};

// A tensor of scores or weights that others read: the operator gives one of them, after the step that its mode tells.
struct Returned {
  enum Mode { kScores, kCapped, kMasked, kWeights };  // as qk_matmul_output_mode
  int value = kNone;
  Mode mode = kWeights;
};

// What the backward computes of one operand, or of what amounts to it.
struct Gradient {
  int value = kNone;
  std::vector<size_t> order = {};  // dim i of the value is dim order[i] of [lead..., sequence, dim]
  double factor = 1;               // the value by the gradient
};

// The nodes behind a forward that make gradients of its operands.
struct Backward {
  std::vector<int> nodes = {};
  Operand grad_out = {};  // [lead..., rows, dim]
  Gradient query = {}, key = {}, value = {};
  int bias = kNone;  // the gradient of the one mask that is added
  int sinks = kNone;
  std::vector<int> captures = {};  // of the program, or kNone
  int64_t saved_bytes = 0;         // of what the forward keeps for it, where sizes are numbers
  std::string reason = {};         // why it is none of this forward
};

struct Match {
  std::vector<int> nodes;  // that the operator replaces
  Product scores, result;
  double scale = 1, softcap = 0, out_factor = 1;
  std::vector<RowFactor> row_factors;
  std::vector<MaskTerm> terms;
  Dropped dropped;  // of the weights
  std::optional<Sinks> sinks;
  std::optional<ScoreProgram> program;  // what stands between the products, in the place of scale, softcap and terms
  int softmax = kNone;                  // the node that gives the weights, sinks among them
  int softmax_input = kNone, softmax_output = kNone, weights = kNone, out = kNone;
  std::vector<Score> passed;  // from the softmax upwards
  Returned returned;
  std::vector<int> shapes;  // nodes that read the shape of what goes away, and nothing else of it
  std::optional<Backward> backward;
  std::vector<std::string> words;
  std::string reason;        // why it is none
  bool is_attention = true;  // reason is about something that looks like attention
};

// What the operator reads beside query and key.
std::vector<int> reads(const Match& match);

// The first of `values` that is computed from another value, or kNone.
int first_made_of(const Net& net, int from, const std::vector<int>& values);

// Whether a product of two stacks stands before or behind a value, whatever is between: it may be an attention's.
enum class Side { kBefore, kBehind };
bool meets_product(const Net& net, int value, Side side);

// Whether an operator that adds all masks together has the gradient of the one that the backward asks for, if it does.
bool tells_bias(const Net& net, const Match& match);

// From the softmax up to the product of queries and keys.
void climb_scores(const Net& net, Match& match);

// The backward of what is matched so far; nothing where there is none. Where it is no gradient of this, with a reason.
std::optional<Backward> find_backward(const Net& net, const Match& match, Flow& forward);

// The attention around a softmax that is, or begins, at a node; nothing if none does.
std::optional<Match> match_at(const Net& net, int node, const FuseOptions& options);

}  // namespace polyhead::graph
