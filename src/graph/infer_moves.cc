// Shapes behind nodes that move elements, or repeat them.
#include "graph/infer_rules.h"

namespace polyhead::graph::rules {

void transpose(const At& at) {
  same(at);
  const Attribute* perm = attribute_of(at.node(), "perm");
  if (!at.in(0).shape && perm != nullptr) at.results[0].shape = fresh(at.symbols(), perm->integers.size());
  if (!at.in(0).shape) return;
  const Sizes& in = *at.in(0).shape;
  Sizes& out = *at.results[0].shape;
  for (size_t i = 0; i < in.size(); ++i) {
    const auto from = perm == nullptr             ? static_cast<int64_t>(in.size() - 1 - i)
                      : i < perm->integers.size() ? perm->integers[i]
                                                  : -1;
    if (from < 0 || from >= static_cast<int64_t>(in.size())) return at.results[0].shape.reset();
    out[i] = in[static_cast<size_t>(from)];
  }
}

void reshape(const At& at) {
  same(at);
  at.results[0].shape.reset();
  const Facts& told = at.in(1);
  if (!told.elements) {
    if (told.shape && told.shape->size() == 1 && told.shape->front().is_constant()) {
      at.results[0].shape = fresh(at.symbols(), static_cast<size_t>(told.shape->front().factor));
    }
    return;
  }
  const Shape& in = at.in(0).shape;
  const bool zero_is_zero = integer_of(at.node(), "allowzero", 0) != 0;
  Sizes out = *told.elements;
  std::optional<size_t> open;
  Size rest;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].is(0) && !zero_is_zero) out[i] = in && i < in->size() ? (*in)[i] : at.symbols().fresh();
    if (out[i].is_constant() && out[i].factor < 0) {
      open = i;
    } else {
      rest = at.symbols().product(rest, out[i]);
    }
  }
  if (open) {
    const auto exact = in ? at.symbols().quotient(at.symbols().product(*in), rest) : std::nullopt;
    out[*open] = exact ? *exact : at.symbols().fresh();
  }
  at.results[0].shape = std::move(out);
}

void flatten(const At& at) {
  same(at);
  at.results[0].shape = fresh(at.symbols(), 2);
  if (!at.in(0).shape) return;
  const Sizes& in = *at.in(0).shape;
  const int64_t axis = integer_of(at.node(), "axis", 1);
  const auto cut = axis == static_cast<int64_t>(in.size()) ? in.size() : axis_of(axis, in.size()).value_or(0);
  const auto middle = in.begin() + static_cast<std::ptrdiff_t>(cut);
  at.results[0].shape = Sizes{at.symbols().product({in.begin(), middle}), at.symbols().product({middle, in.end()})};
}

void squeeze(const At& at) {
  same(at);
  at.results[0].shape.reset();
  if (!at.in(0).shape) return;
  const Sizes& in = *at.in(0).shape;
  const bool told = attribute_of(at.node(), "axes") != nullptr || at.node().inputs.size() > 1;
  const auto gone = marked_axes(at, in.size());
  if (told ? !gone : !std::all_of(in.begin(), in.end(), [](const Size& size) { return size.is_constant(); })) return;
  Sizes out;
  for (size_t i = 0; i < in.size(); ++i) {
    if (told ? !(*gone)[i] : !in[i].is(1)) out.push_back(in[i]);
  }
  at.results[0].shape = std::move(out);
}

void unsqueeze(const At& at) {
  same(at);
  const auto axes = axes_of(at.net, at.index);
  at.results[0].shape.reset();
  if (!at.in(0).shape || !axes || axes->size() > kMostDims) return;
  const Sizes& in = *at.in(0).shape;
  const auto added = marked_axes(at, in.size() + axes->size());
  if (!added || std::count(added->begin(), added->end(), false) != static_cast<std::ptrdiff_t>(in.size())) return;
  Sizes out;
  for (size_t i = 0, next = 0; i < added->size(); ++i) out.push_back((*added)[i] ? Size{1, {}} : in[next++]);
  at.results[0].shape = std::move(out);
}

void concat(const At& at) {
  same(at);
  if (!at.in(0).shape) return;
  Sizes& out = *at.results[0].shape;
  const auto axis = axis_of(integer_of(at.node(), "axis", 0), out.size());
  if (!axis) return at.results[0].shape.reset();
  for (size_t i = 1; i < at.node().inputs.size(); ++i) {
    const Shape& in = at.in(i).shape;
    out[*axis] = in && in->size() == out.size() ? at.symbols().sum(out[*axis], (*in)[*axis]) : at.symbols().fresh();
  }
}

void split(const At& at) {
  const size_t count = at.results.size();
  const Attribute* told = attribute_of(at.node(), "split");
  Shape sizes = at.in(1).elements;
  if (told != nullptr) {
    sizes.emplace();
    for (int64_t each : told->integers) sizes->push_back({each, {}});
  }
  for (size_t i = 0; i < count; ++i) {
    Facts& result = at.results[i];
    result.type = at.in(0).type;
    result.shape = at.in(0).shape;
    if (!result.shape) continue;
    const auto axis = axis_of(integer_of(at.node(), "axis", 0), result.shape->size());
    if (!axis) return result.shape.reset();
    Size& size = (*result.shape)[*axis];
    const auto equal = at.symbols().quotient(size, {static_cast<int64_t>(count), {}});
    const bool is_told = told != nullptr || at.net.input(at.index, 1) != kNone;
    if (is_told) {
      size = sizes && i < sizes->size() ? (*sizes)[i] : at.symbols().fresh();
    } else {
      size = equal ? *equal : at.symbols().fresh();
    }
  }
}

namespace {

// The size of [start, end) with a step, of a dim.
Size slice_size(Symbols& symbols, const Size& dim, const Size& start, const Size& end, int64_t step) {
  if (step != 1) return symbols.fresh();
  Size first = start, last = end;
  if (first.is_constant() && first.factor < 0) first = symbols.sum(dim, first);
  if (last.is_constant() && last.factor < 0) last = symbols.sum(dim, last);
  const bool to_the_end = last == dim || (last.is_constant() && last.factor >= (int64_t{1} << 30));
  if (to_the_end && first.is(0)) return dim;
  if (!dim.is_constant()) {
    if (to_the_end) return symbols.difference(dim, first);
    return first.is(0) && !last.is_constant() ? last : symbols.fresh();
  }
  if (!first.is_constant()) return symbols.fresh();
  if (!last.is_constant()) return first.is(0) ? last : symbols.fresh();
  const int64_t size = dim.factor;
  const int64_t from = std::clamp<int64_t>(first.factor, 0, size), to = std::clamp<int64_t>(last.factor, 0, size);
  return {std::max<int64_t>(to - from, 0), {}};
}

}  // namespace

void slice(const At& at) {
  same(at);
  if (!at.in(0).shape) return;
  Sizes& out = *at.results[0].shape;
  const auto &starts = at.in(1).elements, &ends = at.in(2).elements;
  const auto axes = at.integers(3), steps = at.integers(4);
  const bool with_axes = at.net.input(at.index, 3) != kNone;
  if (!starts || !ends || starts->size() != ends->size() || (with_axes && !axes)) {
    if (with_axes && axes) {  // the other dims are as they were
      for (int64_t each : *axes) {
        if (const auto axis = axis_of(each, out.size())) out[*axis] = at.symbols().fresh();
      }
      return;
    }
    out = fresh(at.symbols(), out.size());
    return;
  }
  for (size_t i = 0; i < starts->size(); ++i) {
    const auto axis = axis_of(axes && i < axes->size() ? (*axes)[i] : static_cast<int64_t>(i), out.size());
    if (!axis) return at.results[0].shape.reset();
    const bool with_steps = at.net.input(at.index, 4) != kNone;
    const int64_t step = !with_steps ? 1 : steps && i < steps->size() ? (*steps)[i] : 0;
    out[*axis] = slice_size(at.symbols(), out[*axis], (*starts)[i], (*ends)[i], step);
  }
}

void pad(const At& at) {
  same(at);
  if (!at.in(0).shape) return;
  Sizes& out = *at.results[0].shape;
  const auto& pads = at.in(1).elements;
  const auto axes = at.integers(3);
  const bool with_axes = at.net.input(at.index, 3) != kNone;
  const size_t count = with_axes ? (axes ? axes->size() : 0) : out.size();
  if (!pads || pads->size() != 2 * count || (with_axes && !axes)) {
    out = fresh(at.symbols(), out.size());
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const auto axis = axis_of(with_axes ? (*axes)[i] : static_cast<int64_t>(i), out.size());
    if (!axis) return at.results[0].shape.reset();
    out[*axis] = at.symbols().sum(out[*axis], at.symbols().sum((*pads)[i], (*pads)[count + i]));
  }
}

void gather(const At& at) {
  same(at);
  at.results[0].shape.reset();
  if (!at.in(0).shape || !at.in(1).shape) return;
  const Sizes& in = *at.in(0).shape;
  const auto axis = axis_of(integer_of(at.node(), "axis", 0), in.size());
  if (!axis) return;
  Sizes out(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(*axis));
  out.insert(out.end(), at.in(1).shape->begin(), at.in(1).shape->end());
  out.insert(out.end(), in.begin() + static_cast<std::ptrdiff_t>(*axis) + 1, in.end());
  at.results[0].shape = std::move(out);
}

// Slices of the data, one for each last dim of the places.
void gather_nd(const At& at) {
  at.results[0].type = at.in(0).type;
  const Shape &data = at.in(0).shape, &places = at.in(1).shape;
  if (!data || !places || places->empty() || !places->back().is_constant()) return;
  const int64_t taken = places->back().factor, batches = integer_of(at.node(), "batch_dims", 0);
  const auto rank = static_cast<int64_t>(data->size());
  if (taken < 1 || batches < 0 || batches > rank || taken > rank - batches) return;
  Sizes dims(places->begin(), places->end() - 1);
  dims.insert(dims.end(), data->begin() + taken + batches, data->end());
  if (dims.size() <= kMostDims) at.results[0].shape = std::move(dims);
}

void gather_elements(const At& at) {
  at.results[0].type = at.in(0).type;
  at.results[0].shape = at.in(1).shape;
}

void expand(const At& at) {
  at.results[0].type = at.in(0).type;
  if (at.in(1).elements) at.results[0].shape = broadcast(at.symbols(), at.in(0).shape, *at.in(1).elements);
}

void tile(const At& at) {
  same(at);
  if (!at.in(0).shape) return;
  Sizes& out = *at.results[0].shape;
  const auto& repeats = at.in(1).elements;
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = repeats && i < repeats->size() ? at.symbols().product(out[i], (*repeats)[i]) : at.symbols().fresh();
  }
}

}  // namespace polyhead::graph::rules
