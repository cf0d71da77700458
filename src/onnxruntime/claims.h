// What of a graph runs here: single nodes that are one of our operators, and groups of nodes that amount to one.
#pragma once

#include <string>
#include <vector>

#include "operators.h"
#include "ort_graph.h"
#include "wiring.h"

namespace polyhead::onnxruntime {

struct Claim {
  std::vector<size_t> nodes;  // of the model
  Node node;
  Wiring wiring;
  std::vector<std::string> constants =
      {};  // by the operator's inputs: what the node keeps; "": an input like others, or none
};

struct Claims {
  std::vector<Claim> claims;
  std::vector<std::string> told;  // of each candidate: what it became, or why it stays
};

// Which products around attention are claimed.
enum class Layers {
  kNone,
  kPaying,  // not those of small matrices with a bias at most: few rows take ONNX Runtime less time
  kAll
};

Claims find_claims(const OrtModel& from, Layers layers);

}  // namespace polyhead::onnxruntime
