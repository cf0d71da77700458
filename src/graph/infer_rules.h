// How the shape of a node's result follows from those of its inputs: what rules of inference share.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "graph/net.h"

namespace polyhead::graph::rules {

constexpr size_t kMostDims = 64;

using Shape = std::optional<Sizes>;

// One node, its inputs' facts, and the place of its results.
struct At {
  const Net& net;
  int index;
  std::vector<Facts>& results;

  const Node& node() const { return net.node(index); }
  Symbols& symbols() const { return net.symbols(); }
  const Facts& in(size_t at) const {
    static const Facts nothing;
    const int id = net.input(index, at);
    return id == kNone ? nothing : net.facts(id);
  }
  // The integers of an input whose elements are all known.
  std::optional<std::vector<int64_t>> integers(size_t at) const {
    if (!in(at).elements) return std::nullopt;
    std::vector<int64_t> list;
    for (const Size& each : *in(at).elements) {
      if (!each.is_constant()) return std::nullopt;
      list.push_back(each.factor);
    }
    return list;
  }
};

inline Sizes fresh(Symbols& symbols, size_t count) {
  Sizes sizes(std::min(count, kMostDims));
  for (Size& size : sizes) size = symbols.fresh();
  return sizes;
}

Shape broadcast(Symbols& symbols, const Shape& a, const Shape& b);

// Which of `rank` dims the node's axes name; nothing where they are not told, not known, or outside.
std::optional<std::vector<bool>> marked_axes(const At& at, size_t rank);

// The type and the shape of the first input.
inline void same(const At& at) {
  at.results[0].type = at.in(0).type;
  at.results[0].shape = at.in(0).shape;
}

// Nodes that move elements, or repeat them.
void transpose(const At& at);
void reshape(const At& at);
void flatten(const At& at);
void squeeze(const At& at);
void unsqueeze(const At& at);
void concat(const At& at);
void split(const At& at);
void slice(const At& at);
void pad(const At& at);
void gather(const At& at);
void gather_nd(const At& at);
void gather_elements(const At& at);
void expand(const At& at);
void tile(const At& at);

}  // namespace polyhead::graph::rules
