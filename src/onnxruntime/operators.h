// The operators by name, and the shapes of their outputs.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "node.h"

namespace polyhead::onnxruntime {

struct OperatorNames {
  const char* domain;
  const char* name;
  Operator op;
  int first_version, last_version;
  size_t num_inputs, required_inputs, num_outputs, required_outputs;
};

constexpr OperatorNames kOperators[] = {
    {"", "Attention", Operator::kAttention, 1, 25, 7, 3, 4, 1},
    {"polyhead", "Attention", Operator::kAttention, 1, 1, 16, 3, 6, 1},
    {"polyhead", "AttentionGrad", Operator::kAttentionGrad, 1, 1, 17, 6, 13, 0},
    {"polyhead", "Linear", Operator::kLinear, 1, 1, 6, 2, 2, 1},
    {"com.microsoft", "MultiHeadAttention", Operator::kMultiHead, 1, 1, 10, 1, 4, 1},
    {"com.microsoft", "GroupQueryAttention", Operator::kGroupQuery, 1, 1, 16, 1, 4, 1},
};

// A dim that is known, or has a name, or neither.
struct Dim {
  int64_t size = -1;
  std::string name = {};
};
using Shape = std::vector<Dim>;

// The shape of each output that the operator can have, empty where nothing is known; of all of them the type of the first input, but those named here.
constexpr size_t kLogsumexp = 4;  // of Attention: float32, or float64 if the operands are
constexpr size_t kDropout = 5;    // int64
std::vector<Shape> output_shapes(Operator op, const std::vector<std::optional<Shape>>& inputs,
                                 const Attributes& attributes);

}  // namespace polyhead::onnxruntime
