// What single nodes do to a value: the questions that several rules ask.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph {

// "name" (MatMul)
std::string words_of(const Net& net, int node);

bool contains(const std::vector<int>& list, int id);

bool same_shape(std::span<const Size> a, std::span<const Size> b);

// Whether a list of names between blanks has this one.
bool lists(std::string_view names, std::string_view name);

// Whether the node reads its input `side` and gives as many dims, none of them widened from 1.
bool keeps_shape(const Net& net, int node, size_t side);

// Whether it puts elements into other dims, or other such lists, where they lie; and the last two dims stay as they are.
bool reshapes(const Net& net, int node);
bool keeps_matrix(const Net& net, int node);

// x * number or x / number; x is the node's input `side`.
struct Scaled {
  size_t side;
  int value;
  double number;
  bool divides;

  double of(double x) const { return divides ? x / number : x * number; }
};
std::optional<Scaled> scaled_by(const Net& net, int node);

// Whether a node reduces over the last dim alone.
bool reduces_last(const Net& net, int node);

// A Dropout that does nothing, for it is no training.
bool is_idle_dropout(const Net& net, int node);

// perm of a Transpose of so many dims, checked.
std::optional<std::vector<size_t>> perm_of(const Net& net, int node, size_t rank);

// The perm of the Transpose that undoes one.
std::vector<size_t> inverse_of(const std::vector<size_t>& perm);

// The nodes on ways from what `first` gives to what `last` reads, these two included; ways through `ends`, values, do not count.
std::vector<int> nodes_between(const Net& net, int first, int last, const std::vector<int>& ends);

}  // namespace polyhead::graph
