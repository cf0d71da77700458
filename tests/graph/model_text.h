// Small ONNX models, written field by field.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace polyhead::testing {

struct NodeText {
  std::string op_type;
  std::vector<std::string> inputs, outputs;
  std::vector<std::pair<std::string, std::vector<int64_t>>> lists = {};  // attributes
  std::vector<std::pair<std::string, int64_t>> integers = {};
  std::vector<std::pair<std::string, std::string>> bodies = {};  // encoded graphs
};

// [name, dims]: float32; a dim of -1 has the name "n".
using Values = std::vector<std::pair<std::string, std::vector<int64_t>>>;

struct ModelText {
  int64_t opset = 17;
  Values inputs, outputs;
  std::vector<NodeText> nodes = {};
  std::vector<std::string> tensors = {};  // encoded
  std::string more = {};                  // fields of the graph that are appended

  std::string graph() const;
  std::string model() const;
};

std::string tensor_text(const std::string& name, const std::vector<int64_t>& dims, const std::vector<float>& numbers);
std::string external_tensor_text(const std::string& name, const std::vector<int64_t>& dims,
                                 const std::vector<std::pair<std::string, std::string>>& entries);

// softmax(0.5 q k^T + mask) v with q, k, v [2, 3, n, 4], k transposed by a node.
ModelText attention_text();

}  // namespace polyhead::testing
