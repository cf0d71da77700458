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
};

struct Claims {
  std::vector<Claim> claims;
  std::vector<std::string> told;  // of each candidate: what it became, or why it stays
};

Claims find_claims(const OrtModel& from);

}  // namespace polyhead::onnxruntime
