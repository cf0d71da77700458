#include "operators.h"

namespace polyhead::onnxruntime {
namespace {

using Shapes = std::vector<std::optional<Shape>>;

// The input's shape, if it has so many dims.
const Shape* with_dims(const Shapes& inputs, size_t index, size_t ndim) {
  if (index >= inputs.size() || !inputs[index] || inputs[index]->size() != ndim) return nullptr;
  return &*inputs[index];
}

Dim times(const Dim& dim, int64_t count) { return {dim.size < 0 ? -1 : dim.size * count}; }
Dim over(const Dim& dim, int64_t count) { return {dim.size < 0 || count < 1 ? -1 : dim.size / count}; }

// The dim of keys behind a cache.
Dim behind(const Shapes& inputs, size_t past, const Dim& fresh) {
  if (past >= inputs.size() || !inputs[past]) return fresh;
  const Shape* old = with_dims(inputs, past, 4);
  if (old == nullptr || (*old)[2].size < 0 || fresh.size < 0) return {};
  return {(*old)[2].size + fresh.size};
}

// [batch, heads, sequence, dim] of an operand, or nothing.
std::optional<Shape> heads_apart(const Shapes& inputs, size_t index, int64_t num_heads) {
  if (const Shape* stacks = with_dims(inputs, index, 4)) return *stacks;
  const Shape* flat = with_dims(inputs, index, 3);
  if (flat == nullptr || num_heads < 1) return std::nullopt;
  return Shape{(*flat)[0], {num_heads}, (*flat)[1], over((*flat)[2], num_heads)};
}

void attention(const Shapes& inputs, const Attributes& attributes, std::vector<Shape>& outputs) {
  constexpr size_t kPastKey = 4;
  const auto query = heads_apart(inputs, 0, attributes.integer("q_num_heads").value_or(0));
  const auto key = heads_apart(inputs, 1, attributes.integer("kv_num_heads").value_or(0));
  const auto value = heads_apart(inputs, 2, attributes.integer("kv_num_heads").value_or(0));
  if (!query || !key || !value) return;
  const bool flat = with_dims(inputs, 0, 3) != nullptr;
  const Dim dim = (*value)[3], keys = behind(inputs, kPastKey, (*key)[2]);
  outputs[0] = flat ? Shape{(*query)[0], (*query)[2], times(dim, (*query)[1].size)}
                    : Shape{(*query)[0], (*query)[1], (*query)[2], dim};
  outputs[1] = Shape{(*key)[0], (*key)[1], keys, (*key)[3]};
  outputs[2] = Shape{(*value)[0], (*value)[1], keys, dim};
  outputs[3] = Shape{(*query)[0], (*query)[1], (*query)[2], keys};
  outputs[kLogsumexp] = Shape{(*query)[0], (*query)[1], (*query)[2]};
}

void attention_grad(const Shapes& inputs, std::vector<Shape>& outputs) {
  // Of query, key, value, mask, sinks and what a program reads.
  constexpr size_t kOperands[] = {0, 1, 2, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  outputs.resize(std::size(kOperands));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t from = kOperands[i];
    outputs[i] = from < inputs.size() && inputs[from] ? *inputs[from] : i < 3 ? Shape(outputs[0].size()) : Shape();
  }
}

void linear(const Shapes& inputs, const Attributes& attributes, std::vector<Shape>& outputs) {
  outputs.clear();
  const Shape* weight = with_dims(inputs, Linear::kWeight, 2);
  if (inputs.empty() || !inputs[0] || inputs[0]->empty()) return;
  Shape rows = *inputs[0];
  rows.back() = weight == nullptr ? Dim() : (*weight)[attributes.integer("transB").value_or(0) == 0 ? 1 : 0];
  outputs.assign(2, rows);
}

void multi_head(const Shapes& inputs, const Attributes& attributes, std::vector<Shape>& outputs) {
  constexpr size_t kPastKey = 6;
  const int64_t heads = attributes.integer("num_heads").value_or(0);
  if (const Shape* packed = with_dims(inputs, 0, 5)) {
    outputs[0] = Shape{(*packed)[0], (*packed)[1], times((*packed)[4], heads)};
    return;
  }
  const Shape* query = with_dims(inputs, 0, 3);
  if (query == nullptr) return;
  outputs[0] = Shape{(*query)[0], (*query)[1], {}};
  const auto key = heads_apart(inputs, 1, heads), value = heads_apart(inputs, 2, heads);
  if (with_dims(inputs, 1, 5) != nullptr) outputs[0].back() = (*query)[2];
  if (!key || !value) return;
  outputs[0].back() = times((*value)[3], heads);
  const Dim keys = behind(inputs, kPastKey, (*key)[2]);
  outputs[1] = Shape{(*key)[0], {heads}, keys, (*key)[3]};
  outputs[2] = Shape{(*value)[0], {heads}, keys, (*value)[3]};
}

void group_query(const Shapes& inputs, const Attributes& attributes, std::vector<Shape>& outputs) {
  const int64_t heads = attributes.integer("num_heads").value_or(0),
                kv = attributes.integer("kv_num_heads").value_or(0);
  const Shape* query = with_dims(inputs, 0, 3);
  if (query == nullptr) return;
  const bool packed = inputs.size() < 2 || !inputs[1];
  const Dim dim = over((*query)[2], packed ? heads + 2 * kv : heads);
  outputs[0] = Shape{(*query)[0], (*query)[1], packed ? times(dim, heads) : (*query)[2]};
  outputs[1] = outputs[2] = Shape{(*query)[0], {kv}, {}, dim};
}

}  // namespace

std::vector<Shape> output_shapes(Operator op, const Shapes& inputs, const Attributes& attributes) {
  // What is known without shapes: heads that are told are those of 3-D operands.
  const bool is_attention = op == Operator::kAttention || op == Operator::kAttentionGrad;
  const bool flat = !is_attention || attributes.integer("q_num_heads").value_or(0) > 0;
  std::vector<Shape> outputs = {Shape(flat ? 3 : 4), Shape(4), Shape(4), Shape(4), Shape(3), Shape{{2}}};
  switch (op) {
    case Operator::kAttention: attention(inputs, attributes, outputs); break;
    case Operator::kAttentionGrad: attention_grad(inputs, outputs); break;
    case Operator::kMultiHead: multi_head(inputs, attributes, outputs); break;
    case Operator::kGroupQuery: group_query(inputs, attributes, outputs); break;
    case Operator::kLinear: linear(inputs, attributes, outputs); break;
  }
  return outputs;
}

}  // namespace polyhead::onnxruntime
