// A graph of ONNX Runtime as plain data, for src/graph.
#pragma once

#include <unordered_map>
#include <vector>

#include "api.h"
#include "polyhead/graph.h"

namespace polyhead::onnxruntime {

struct OrtModel {
  graph::Model model;                                         // each of its nodes has a name of its own
  std::vector<const OrtNode*> nodes;                          // in the model's order
  std::unordered_map<std::string, graph::ElementType> types;  // of values
};

// What the graph says. Values of graphs around it, and initialisers that a caller may change, are inputs. Bodies are
// not entered, for ONNX Runtime asks about each of them by itself; a node that has one reads what they read.
Result<OrtModel> read_graph(const OrtGraph* graph);

// The list that one function counts and another one fills.
template <class T, class Owner, class Count, class Fill>
Result<std::vector<T>> list_of(Owner* owner, const Count& count_of, const Fill& fill) {
  size_t count = 0;
  Status status = call(count_of, owner, &count);
  std::vector<T> list(count);
  if (status.ok() && count > 0) status = call(fill, owner, list.data(), count);
  if (!status.ok()) return status;
  return list;
}

Result<std::string> name_of(const OrtValueInfo* value);

}  // namespace polyhead::onnxruntime
