#include "graph/layout.h"

#include <algorithm>
#include <cmath>

#include "graph/nodes.h"

namespace polyhead::graph {

Atoms joined(const Atoms& a, const Atoms& b) {
  Atoms both = a;
  both.insert(both.end(), b.begin(), b.end());
  return both;
}

std::vector<Atoms> as_four(const std::vector<Atoms>& dims) {
  return {dims[0], joined(dims[1], dims[2]), dims[3], dims[4]};
}

std::vector<Atoms> as_flat(const std::vector<Atoms>& stack) { return {stack[0], stack[2], joined(stack[1], stack[3])}; }

Layout::Layout(const Net& net, int value) : net_(&net), value_(value) {
  for (const Size& size : net.shape(value)) {
    dims_.emplace_back();
    if (size.is(1)) continue;
    dims_.back().push_back(static_cast<int>(atoms_.size()));
    atoms_.push_back(size);
  }
}

Sizes Layout::sizes(const Atoms& atoms) const {
  Sizes list;
  for (int each : atoms) list.push_back(atom(each));
  return list;
}

// Replaces an atom by two, everywhere.
void Layout::cut(int index, const Size& first, const Size& second, Atoms& sequence) {
  atoms_[static_cast<size_t>(index)] = first;
  atoms_.push_back(second);
  const int minor = static_cast<int>(atoms_.size()) - 1;
  const auto in = [&](Atoms& list) {
    const auto at = std::find(list.begin(), list.end(), index);
    if (at != list.end()) list.insert(at + 1, minor);
  };
  for (Atoms& list : dims_) in(list);
  for (Atoms& list : watched) in(list);
  in(sequence);
}

// Moves atoms of the size `wanted` from the front of a sequence to a dim.
bool Layout::take(const Size& wanted, Atoms& sequence, Atoms& dim) {
  const Symbols& symbols = net_->symbols();
  for (Size rest = wanted; !rest.is(1);) {
    if (sequence.empty()) return false;
    const int first = sequence.front();
    if (const auto quotient = symbols.quotient(rest, atom(first))) {
      rest = *quotient;
    } else if (const auto minor = symbols.quotient(atom(first), rest)) {
      cut(first, Size(rest), Size(*minor), sequence);
      rest = {};
    } else {
      return false;
    }
    dim.push_back(first);
    sequence.erase(sequence.begin());
  }
  return true;
}

bool Layout::regroup(std::span<const Size> wanted) {
  const Layout before = *this;
  Atoms sequence;
  for (const Atoms& dim : dims_) sequence.insert(sequence.end(), dim.begin(), dim.end());
  std::vector<Atoms> dims(wanted.size());
  bool good = true;
  for (size_t i = 0; i < wanted.size() && good; ++i) good = take(wanted[i], sequence, dims[i]);
  if (good && sequence.empty()) {
    dims_ = std::move(dims);
    return true;
  }
  dims_ = before.dims_;
  atoms_ = before.atoms_;
  watched = before.watched;
  return false;
}

bool Layout::up() {
  const int node = net_->producer(value_);
  return node != kNone && pass(node, net_->input(node, 0), false);
}

bool Layout::down(int node) {
  return node != kNone && net_->input(node, 0) == value_ && pass(node, net_->output(node, 0), true);
}

bool Layout::pass(int node, int other, bool down) {
  if (net_->is(node, "Transpose")) {
    const auto perm = perm_of(*net_, node, dims_.size());
    if (!perm) return false;
    std::vector<Atoms> turned(dims_.size());
    for (size_t i = 0; i < dims_.size(); ++i) {
      if (down) turned[i] = dims_[(*perm)[i]];
      if (!down) turned[(*perm)[i]] = dims_[i];
    }
    dims_ = std::move(turned);
  } else if (reshapes(*net_, node)) {
    if (net_->rank(other) < 0 || !regroup(net_->shape(other))) return false;
  } else if (!net_->is(node, "Identity")) {
    return false;
  }
  value_ = other;
  return true;
}

std::optional<double> Layout::up_number() {
  const int node = net_->producer(value_);
  const auto scaled = scaled_by(*net_, node);
  if (!scaled || !keeps_shape(*net_, node, scaled->side) || !std::isfinite(scaled->of(1))) return std::nullopt;
  value_ = scaled->value;
  return scaled->of(1);
}

std::optional<double> Layout::down_number(int node) {
  const auto scaled = scaled_by(*net_, node);
  if (!scaled || scaled->value != value_ || !keeps_shape(*net_, node, scaled->side) || !std::isfinite(scaled->of(1)))
    return std::nullopt;
  value_ = net_->output(node, 0);
  return scaled->of(1);
}

std::optional<Atoms> Layout::down_sum(int node) {
  const auto axes = net_->is(node, "ReduceSum") && net_->input(node, 0) == value_ ? axes_of(*net_, node) : std::nullopt;
  const auto axis = axes && axes->size() == 1 ? axis_of(axes->front(), dims_.size()) : std::nullopt;
  if (!axis) return std::nullopt;
  const Atoms summed = dims_[*axis];
  dims_[*axis].clear();
  if (integer_of(net_->node(node), "keepdims", 1) == 0) dims_.erase(dims_.begin() + static_cast<std::ptrdiff_t>(*axis));
  value_ = net_->output(node, 0);
  return summed;
}

std::vector<std::vector<Atoms>> Layout::stacks() const {
  if (watched.size() != 3) return {watched};
  std::vector<std::vector<Atoms>> all;
  for (auto cut = watched[0].end();; --cut) {
    all.push_back({{watched[0].begin(), cut}, {cut, watched[0].end()}, watched[1], watched[2]});
    if (cut == watched[0].begin()) return all;
  }
}

std::optional<std::vector<size_t>> Layout::order_of(const std::vector<Atoms>& wanted) const {
  if (wanted.size() != dims_.size()) return std::nullopt;
  std::vector<bool> taken(dims_.size());
  std::vector<size_t> order;
  for (size_t i = 0; i < wanted.size(); ++i) {
    size_t at = i;  // dims of size 1 are all alike: better where it is wanted
    for (size_t k = 0; k < dims_.size() && (taken[at] || dims_[at] != wanted[i]); ++k) at = k;
    if (taken[at] || dims_[at] != wanted[i]) return std::nullopt;
    taken[at] = true;
    order.push_back(at);
  }
  return order;
}

int Layout::up_repeat() {
  const int node = net_->producer(value_);
  if (!net_->is(node, "Expand")) return kNone;
  const int input = net_->input(node, 0);
  const auto before = net_->shape(input);
  if (before.size() != dims_.size()) return kNone;
  std::optional<size_t> widened;
  for (size_t i = 0; i < dims_.size(); ++i) {
    if (before[i] == size(dims_[i])) continue;
    if (!before[i].is(1) || widened || dims_[i].size() != 1) return kNone;
    widened = i;
  }
  if (!widened) return kNone;
  const int repeat = dims_[*widened].front();
  dims_[*widened].clear();
  value_ = input;
  return repeat;
}

namespace {

// Follows one operand up and writes down each form that it meets.
class FormFinder {
 public:
  FormFinder(const Net& net, const Operand& operand, const Size& repeats)
      : layout_(net, operand.value), merged_(operand.rank() == 3) {
    for (size_t dim : operand.order) layout_.watched.push_back(layout_.dims()[dim]);
    if (operand.rank() != 5) return;
    if (layout_.watched[2].empty()) repeats_ = repeats;
    layout_.watched = as_four(layout_.watched);
  }

  std::vector<Form> find() {
    do {
      note();
    } while (step());
    return std::move(forms_);
  }

 private:
  bool step() {
    if (layout_.up()) return true;
    if (const auto number = layout_.up_number()) {
      scale_ *= *number;
      return true;
    }
    const Layout before = layout_;
    const int repeat = layout_.up_repeat();
    Atoms& heads = layout_.watched[merged_ ? 0 : 1];
    if (repeat == kNone || heads.empty() || heads.back() != repeat || !repeats_.is(1)) {
      layout_ = before;
      return false;
    }
    repeats_ = layout_.atom(repeat);
    heads.pop_back();
    return true;
  }

  void note() {
    std::optional<Form> turned;
    for (const auto& stack : layout_.stacks()) {
      Form form = {layout_.dims().size() == 3, layout_.value(), {}, scale_, repeats_};
      const auto order = layout_.order_of(form.flat ? as_flat(stack) : stack);
      if (!order) continue;
      form.order = *order;
      form.batch = layout_.size(stack[0]);
      form.heads = layout_.size(stack[1]);
      if (std::is_sorted(order->begin(), order->end())) return forms_.push_back(form);
      if (!turned) turned = form;
    }
    if (turned) forms_.push_back(*turned);
  }

  Layout layout_;
  bool merged_ = false;  // batch and heads are one dim
  double scale_ = 1;
  Size repeats_;
  std::vector<Form> forms_;
};

}  // namespace

std::vector<Form> forms_of(const Net& net, const Operand& operand, const Size& repeats) {
  return FormFinder(net, operand, repeats).find();
}

namespace {

// An operand as far up as it goes: places among the atoms of what stands there, major first.
struct View {
  explicit View(const Net& net, const Operand& operand) {
    Layout layout(net, operand.value);
    layout.watched.resize(3);
    for (size_t i = 0; i < operand.rank(); ++i) {
      const size_t part = i + 2 < operand.rank() ? 0 : i + 3 - operand.rank();
      layout.watched[part] = joined(layout.watched[part], layout.dims()[operand.order[i]]);
    }
    while (true) {
      if (layout.up()) continue;
      const auto number = layout.up_number();
      if (!number) break;
      factor *= *number;
    }
    value = layout.value();
    Atoms all;
    for (const Atoms& dim : layout.dims()) all = joined(all, dim);
    for (int atom : all) sizes.push_back(layout.atom(atom));
    for (const Atoms& part : layout.watched) {
      places.emplace_back();
      for (int atom : part) places.back().push_back(std::find(all.begin(), all.end(), atom) - all.begin());
    }
  }

  int value = kNone;
  double factor = 1;
  Sizes sizes;
  std::vector<std::vector<std::ptrdiff_t>> places;  // of lead dims, sequence and dim
};

}  // namespace

std::optional<double> same_numbers(const Net& net, const Operand& a, const Operand& b) {
  const auto is_stack = [&](const Operand& each) {
    return each.rank() >= 2 && static_cast<int>(each.rank()) == net.rank(each.value);
  };
  if (!is_stack(a) || !is_stack(b)) return std::nullopt;
  const View left(net, a), right(net, b);
  if (left.value != right.value || left.sizes != right.sizes || left.places != right.places) return std::nullopt;
  return left.factor / right.factor;
}

}  // namespace polyhead::graph
