// Attention found in models that others exported, and replaced by one operator.
//
//   Result<graph::Model> model = graph::read_model("model.onnx");
//   const graph::Report report = graph::fuse(*model);     // each candidate: what it became, or why it stays
//   const std::string bytes = graph::encode_model(*model);
//
// A graph is plain data. What fuse() does not touch is written back byte for byte.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/status.h"

namespace polyhead::graph {

/// Of elements, by ONNX's numbers; others than these are carried along as numbers.
enum class ElementType : int32_t {
  kUnknown = 0,
  kFloat32 = 1,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kFloat64 = 11,
  kBFloat16 = 16,
};

/// One dim of a value's shape.
struct Dim {
  int64_t size = -1;  ///< -1: not known when the model was made
  std::string name;   ///< dims of the same name are equal; "": nothing is told
};

/// What is told of a value: an input, an output, or one between nodes.
struct ValueInfo {
  std::string name;
  ElementType type = ElementType::kUnknown;
  std::optional<std::vector<Dim>> shape;  ///< none: not even the number of dims is told
  std::string_view encoded = {};          ///< as the file has it; empty: made by us
};

/// A constant tensor: an initialiser, or an attribute.
struct Constant {
  std::string name;
  ElementType type = ElementType::kUnknown;
  std::vector<int64_t> dims;
  std::string_view data = {};     ///< row-major, little-endian; empty where it was not read (large, or in another file)
  std::string_view encoded = {};  ///< as the file has it
};

struct Graph;

struct Attribute {
  std::string name;
  std::optional<int64_t> integer = {};
  std::optional<float> number = {};
  std::optional<std::string> text = {};
  std::vector<int64_t> integers = {};
  std::vector<float> numbers = {};
  std::vector<Constant> tensors = {};
  std::vector<Graph> graphs;      ///< bodies of If, Loop, Scan
  std::string_view encoded = {};  ///< as the file has it; empty: made by us
  bool changed = false;           ///< in one of its graphs
};

struct Node {
  std::string name, op_type, domain;
  std::vector<std::string> inputs, outputs;  ///< "": left out
  std::vector<Attribute> attributes = {};
  std::string_view encoded = {};  ///< as the file has it; empty: made by us
  bool changed = false;           ///< since it was read
};

/// Nodes in an order in which each stands behind those whose outputs it reads.
struct Graph {
  std::string name;
  std::vector<Node> nodes = {};
  std::vector<ValueInfo> inputs = {}, outputs = {}, values = {};
  std::vector<Constant> initializers = {};
  std::string_view encoded = {};
};

struct OpsetImport {
  std::string domain;  ///< "": ONNX's own
  int64_t version = 0;
  bool operator==(const OpsetImport&) const = default;
};

struct Model {
  int64_t ir_version = 0;
  std::vector<OpsetImport> opsets;
  Graph graph;
  int64_t num_functions = 0;       ///< of the model's own; they are carried along, and not searched
  bool has_external_data = false;  ///< tensors in other files, which are named relative to the model's folder
  std::string_view encoded = {};
  std::vector<std::shared_ptr<const std::string>> storage;  ///< what the views above look at
};

/// A model from the bytes of an .onnx file. `folder` is where its external data lies; "" if there may be none. An error
/// if something in it is truncated or contradicts itself, names files outside of the folder, or is not known to us.
POLYHEAD_API Result<Model> parse_model(std::string bytes, const std::string& folder);

/// parse_model of a file of at most 2 GiB.
POLYHEAD_API Result<Model> read_model(const std::string& path);

/// The bytes of an .onnx file. A model that nobody changed: those it was read from.
POLYHEAD_API std::string encode_model(const Model& model);

/// The operator that attention becomes.
enum class Target {
  kOnnx,  ///< Attention of ONNX's own domain, version 23; an older model's opset is raised, if all its nodes allow that
  kPolyhead,  ///< Attention of the domain "polyhead", version 1, in a model of any opset: the same signature, and inputs for
              ///< sinks and for what a score program reads, whose text is the attribute `score`
};

/// A row of scores of which a mask hides every one by a finite number, such as float's lowest, so that all keys weigh alike.
enum class UnseenRows {
  kKeep,  ///< it keeps the mean over all values
  kZero,  ///< it gives 0, as if -inf hid it: masks become boolean, and more of them options of the operator
};

/// Who makes the gradients of an attention.
enum class Backwards {
  kOfGraph,     ///< the graph, perhaps: a backward beside the forward is replaced with it
  kOfOperator,  ///< who runs the operator: it takes dropout, and gives neither scores nor weights, which have no gradients
  kOfNobody,  ///< nobody: a backward reads the weights as anybody may
};

struct FuseOptions {
  Target target = Target::kOnnx;
  UnseenRows unseen_rows = UnseenRows::kKeep;
  Backwards backwards = Backwards::kOfGraph;
  bool splits_masks = true;  ///< false: a mask is an input as it stands, or as a whole an option; no part of it is read
  /// Of a graph with a fused attention, products with constant matrices too, each with what is done to its result: bias,
  /// activation, residual, norm. Needs kPolyhead.
  bool layers = false;
};

/// A Softmax, or what amounts to one, or a product with a constant matrix, and what became of it.
struct Candidate {
  std::string place;         ///< the node's name, behind those of the nodes in whose bodies it stands
  bool is_attention = true;  ///< false: nothing that looks like attention is around it, or it is a product
  bool fused = false;
  std::string pattern = {};  ///< in words
  std::string became = {};   ///< fused: the new node
  std::string reason = {};   ///< not fused: the first condition that failed, with the name of the node where it did
  std::vector<Node> before =
      {};                        ///< the nodes around the softmax, without attributes; all that go away, if it is fused
  std::vector<Node> after = {};  ///< fused: what stands in their place
  int64_t saved_bytes = 0;  ///< fused with its backward: what a step keeps between both no more; 0: sizes are not known
};

struct Report {
  std::vector<Candidate> candidates;
  std::vector<Candidate> products;                    ///< with FuseOptions::layers; `before` and `after` are empty
  int64_t num_nodes_before = 0, num_nodes_after = 0;  ///< bodies included
  int64_t opset_before = 0, opset_after = 0;
};

/// Replaces every attention that is found and understood; all others stay as they are.
POLYHEAD_API Report fuse(Model& model, const FuseOptions& options = {});

}  // namespace polyhead::graph
