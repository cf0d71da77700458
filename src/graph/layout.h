// A value seen through transposes, reshapes and repeats of heads: which other value holds the same numbers, and how.
//
// Dims are lists of atoms: a dim of size H * D that a reshape cuts in two is the atoms H and D. A transpose permutes the
// lists, a reshape groups the atoms anew.
#pragma once

#include <optional>
#include <vector>

#include "graph/net.h"
#include "graph/product.h"

namespace polyhead::graph {

using Atoms = std::vector<int>;  // of one dim, major first; a dim of size 1 has none

Atoms joined(const Atoms& a, const Atoms& b);

// Dims that are made of atoms.
class Layout {
 public:
  Layout(const Net& net, int value);

  int value() const { return value_; }
  const std::vector<Atoms>& dims() const { return dims_; }
  Size size(const Atoms& atoms) const { return net_->symbols().product(sizes(atoms)); }
  const Size& atom(int index) const { return atoms_[static_cast<size_t>(index)]; }

  // To the input of the node that computes the value, or to the output of the one that reads it. False, and nothing has
  // changed, where the node does more than to move elements.
  bool up();
  bool down(int node);
  // The same past a node that multiplies or divides every element by a number: what it multiplies by.
  std::optional<double> up_number();
  std::optional<double> down_number(int node);
  // The same elements in dims of these sizes.
  bool regroup(std::span<const Size> wanted);
  // To the sum over one dim, whose atoms are told.
  std::optional<Atoms> down_sum(int node);
  // Past an Expand: the dim's last atoms repeat what is in the input. The atom, or kNone.
  int up_repeat();

  // Lists of atoms that are kept up to date while atoms are cut in two.
  std::vector<Atoms> watched;

  // The ways to tell what is watched, [lead..., sequence, dim], as [batch, heads, sequence, dim].
  std::vector<std::vector<Atoms>> stacks() const;
  // wanted[i] is dim order[i].
  std::optional<std::vector<size_t>> order_of(const std::vector<Atoms>& wanted) const;

 private:
  Sizes sizes(const Atoms& atoms) const;
  bool pass(int node, int other, bool down);
  bool take(const Size& wanted, Atoms& sequence, Atoms& dim);
  void cut(int atom, const Size& first, const Size& second, Atoms& sequence);

  const Net* net_;
  int value_;
  std::vector<Atoms> dims_;
  Sizes atoms_;
};

// One way to give a tensor to the operator: 4-D [batch, heads, sequence, dim], or flat, [batch, sequence, heads * dim].
struct Form {
  bool flat = false;
  int value = kNone;
  std::vector<size_t> order = {};  // dim i is the value's dim order[i]
  double scale = 1;                // of the numbers that were passed on the way
  Size repeats = {};               // each head is read that many times in a row
  Size batch = {}, heads = {};
};

// All forms of an operand [batch, heads, sequence, dim], [batch, heads, repeats, sequence, dim] or [batch * heads, sequence,
// dim]; the last is the one that stands furthest above. `repeats`: of a head whose five dims have 1 there.
std::vector<Form> forms_of(const Net& net, const Operand& operand, const Size& repeats = {});

// [batch, heads, sequence, dim] as [batch, sequence, heads * dim].
std::vector<Atoms> as_flat(const std::vector<Atoms>& stack);

// Five dims, [batch, heads, repeats, sequence, dim], as four.
std::vector<Atoms> as_four(const std::vector<Atoms>& dims);

// a / b, if these two, both [lead..., sequence, dim], are one tensor times numbers; the lead dims may be merged.
std::optional<double> same_numbers(const Net& net, const Operand& a, const Operand& b);

}  // namespace polyhead::graph
