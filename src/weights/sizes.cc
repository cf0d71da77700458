// What the shapes of a checkpoint's arrays tell about the layer. Each dim of each array is an equation, as
// (num_heads + num_heads_kv) * head_dim + num_heads_kv * head_dim_v = 6144; one with a single unknown gives that.
#include <algorithm>
#include <new>
#include <optional>

#include "core/sentence.h"
#include "weights/weights.h"

namespace polyhead::stored {
namespace {

struct Given {
  const Row* row;
  Tensor tensor;
};

class Equations {
 public:
  Equations(const SourceTable& table, const std::vector<Given>& given, const Sizes& known, std::string_view prefix)
      : given_(given), sizes_(known), prefix_(prefix), same_head_dim_(!table.head_dim_v) {
    if (!table.num_heads_kv) assume_all_heads();
  }

  // An error names the first array whose shape cannot be.
  Status solve() {
    Status status = propagate();
    // What no array tells, one assumption at a time, each with all that follows from it.
    if (status.ok() && (is_unknown(Size::kHeadDimV) || is_unknown(Size::kHeadDim))) {
      same_head_dim_ = true;
      status = propagate();
    }
    if (status.ok() && is_unknown(Size::kKvHeads)) {
      assume_all_heads();
      status = propagate();
    }
    return status;
  }

  const Sizes& sizes() const { return sizes_; }

 private:
  void assume_all_heads() {
    if (is_unknown(Size::kKvHeads)) sizes_[Size::kKvHeads] = sizes_[Size::kHeads];
  }

  bool is_unknown(Size size) const { return sizes_[size] == 0; }

  Status propagate() {
    for (bool changed = true; changed;) {
      changed = false;
      if (same_head_dim_) {
        int64_t &dim = sizes_[Size::kHeadDim], &dim_v = sizes_[Size::kHeadDimV];
        if (dim == 0) dim = dim_v;
        if (dim_v == 0) dim_v = dim;
      }
      for (const Given& each : given_) {
        const Axes axes(each.row->axes);
        for (int i = 0; i < axes.count; ++i) {
          if (Status status = use(each, axes.axis[i], each.tensor.dims[i], &changed); !status.ok()) return status;
        }
      }
    }
    return {};
  }

  Status use(const Given& each, const Axis& axis, int64_t size, bool* changed) {
    const size_t parts = each.row->parts.size();
    if (axis.side_by_side) return solve_one(each, axis, 0, parts, size, changed);
    for (size_t part = 0; part < parts; ++part) {
      if (Status status = solve_one(each, axis, part, part + 1, size, changed); !status.ok()) return status;
    }
    return {};
  }

  // The sum over the parts [first, end) of the axis's product is `size`.
  Status solve_one(const Given& each, const Axis& axis, size_t first, size_t end, int64_t size, bool* changed) {
    std::optional<Size> unknown;
    for (size_t part = first; part < end; ++part) {
      int unknowns_of_term = 0;
      for (const char letter : axis.letters) {
        const std::optional<Size> symbol = symbol_of(*each.row, letter, part);
        if (!symbol || !is_unknown(*symbol)) continue;
        if (unknown && *unknown != *symbol) return {};
        if (++unknowns_of_term > 1) return {};
        unknown = symbol;
      }
    }
    if (!unknown) return {};
    // a * x + b = size
    int64_t a = 0, b = 0;
    for (size_t part = first; part < end; ++part) {
      Sizes one = sizes_;
      one[*unknown] = 1;
      const bool has_it = std::any_of(axis.letters.begin(), axis.letters.end(), [&](char letter) {
        const std::optional<Size> symbol = symbol_of(*each.row, letter, part);
        return symbol && *symbol == *unknown;
      });
      int64_t product = 0;
      if (!term(*each.row, axis, part, one, &product) ||
          __builtin_add_overflow(has_it ? a : b, product, has_it ? &a : &b)) {
        return cannot_be(each);
      }
    }
    if (a <= 0 || size <= b || (size - b) % a != 0) return cannot_be(each);
    sizes_[*unknown] = (size - b) / a;
    *changed = true;
    return {};
  }

  // None for a letter that is a number. head_dim's pairs count as head_dim.
  std::optional<Size> symbol_of(const Row& row, char letter, size_t part) const {
    if (letter == '1' || letter == 'n' || letter == 'c') return std::nullopt;
    const Size size = size_of(row.parts[part], letter == 'p' ? 'd' : letter);
    return same_head_dim_ && size == Size::kHeadDimV ? Size::kHeadDim : size;
  }

  bool term(const Row& row, const Axis& axis, size_t part, const Sizes& sizes, int64_t* product) const {
    *product = 1;
    for (const char letter : axis.letters) {
      const std::optional<Size> symbol = symbol_of(row, letter, part);
      const int64_t factor = symbol ? sizes[*symbol] : letter == 'n' ? static_cast<int64_t>(row.parts.size()) : 1;
      if (__builtin_mul_overflow(*product, factor, product)) return false;
    }
    return true;
  }

  Status cannot_be(const Given& each) const {
    std::string where;
    for (int i = 0; i < kNumSizes; ++i) {
      const auto size = static_cast<Size>(i);
      if (!is_unknown(size) && shape_text(*each.row).find(size_name(size)) != std::string::npos) {
        where += sentence(where.empty() ? ", where " : ", ", size_name(size), " is ", sizes_[size]);
      }
    }
    return invalid(sentence(prefix_, each.row->array, " is ", shape_text(each.tensor), ", expected ",
                            shape_text(*each.row), where));
  }

  const std::vector<Given>& given_;
  Sizes sizes_;
  std::string_view prefix_;
  bool same_head_dim_;  // head_dim_v is head_dim
};

// The arrays that are there; those that must be, are.
Status collect(const SourceTable& table, std::span<const NamedTensor> arrays, std::string_view prefix,
               std::vector<Given>* given) {
  for (const Row& row : table.rows) {
    if ((is_bias(row.parts[0]) || table.optional) && !has_array(row.array, arrays, prefix)) continue;
    const Result<Tensor> tensor = find_array(table, row, arrays, prefix);
    if (!tensor.ok()) return tensor.status();
    if (tensor->ndim != Axes(row.axes).count) {
      return invalid(sentence(prefix, row.array, " is ", shape_text(*tensor), ", expected ", shape_text(row)));
    }
    given->push_back({&row, *tensor});
  }
  return {};
}

Status check_known(const LayerDesc& known) {
  if (known.num_heads < 1) return invalid(sentence("num_heads is ", known.num_heads, ", must be at least 1"));
  const int64_t sizes[] = {known.num_heads_kv,    known.query_size,    known.key_size,        known.value_size,
                           known.query_proj_size, known.key_proj_size, known.value_proj_size, known.out_proj_size};
  static constexpr const char* kNames[] = {"num_heads_kv",    "query_size",    "key_size",        "value_size",
                                           "query_proj_size", "key_proj_size", "value_proj_size", "out_proj_size"};
  for (size_t i = 0; i < std::size(sizes); ++i) {
    if (sizes[i] < 0) return invalid(sentence(kNames[i], " is ", sizes[i], ", must not be negative"));
  }
  return {};
}

bool has_part(const std::vector<Given>& given, WeightKind kind) {
  return std::any_of(given.begin(), given.end(), [&](const Given& each) {
    return std::find(each.row->parts.begin(), each.row->parts.end(), kind) != each.row->parts.end();
  });
}

LayerDesc described(const LayerDesc& known, const Sizes& sizes, const std::vector<Given>& given) {
  LayerDesc desc = known;
  desc.num_heads_kv = sizes[Size::kKvHeads];
  const auto input = [&](WeightKind kind, Size size, int64_t told) {
    return has_part(given, kind) ? sizes[size] : told;
  };
  desc.query_size = input(WeightKind::kQuery, Size::kQuery, known.query_size);
  desc.key_size = input(WeightKind::kKey, Size::kKey, known.key_size);
  desc.value_size = input(WeightKind::kValue, Size::kValue, known.value_size);
  desc.query_proj_size = input(WeightKind::kQuery, Size::kHeadDim, 0);
  desc.key_proj_size = input(WeightKind::kKey, Size::kHeadDim, 0);
  desc.value_proj_size = input(WeightKind::kValue, Size::kHeadDimV, 0);
  desc.out_proj_size = input(WeightKind::kOut, Size::kOut, 0);
  desc.query_bias = has_part(given, WeightKind::kQueryBias);
  desc.key_bias = has_part(given, WeightKind::kKeyBias);
  desc.value_bias = has_part(given, WeightKind::kValueBias);
  desc.out_bias = has_part(given, WeightKind::kOutBias);
  return desc;
}

Result<LayerDesc> solved_desc(const SourceTable& table, std::span<const NamedTensor> arrays, const LayerDesc& known,
                              std::string_view prefix) {
  if (Status status = check_known(known); !status.ok()) return status;
  std::vector<Given> given;
  if (Status status = collect(table, arrays, prefix, &given); !status.ok()) return status;
  if (given.empty()) {
    return invalid(
        sentence("none of the arrays of ", table.source.name, " is there: \"", prefix, table.rows[0].array, "\", ..."));
  }
  for (const char* extra : table.source.extras) {
    if (!has_array(extra, arrays, prefix)) continue;
    return invalid(sentence(prefix, extra, " is there: it changes what ", table.source.name,
                            " computes, and a layer has no place for it; apply it outside and leave it out"));
  }
  Sizes sizes;
  sizes[Size::kQuery] = known.query_size;
  sizes[Size::kKey] = known.key_size;
  sizes[Size::kValue] = known.value_size;
  sizes[Size::kOut] = known.out_proj_size;
  sizes[Size::kHeads] = known.num_heads;
  sizes[Size::kKvHeads] = known.num_heads_kv;
  sizes[Size::kHeadDim] = std::max(known.query_proj_size, known.key_proj_size);
  sizes[Size::kHeadDimV] = known.value_proj_size;
  Equations equations(table, given, sizes, prefix);
  if (Status status = equations.solve(); !status.ok()) return status;
  const LayerDesc desc = described(known, equations.sizes(), given);
  const Result<std::vector<WeightView>> views = views_of(table, desc);
  if (!views.ok()) return views.status();
  for (const Given& each : given) {
    for (const WeightView& view : *views) {
      if (view.array == each.row->array &&
          !std::equal(view.array_dims, view.array_dims + view.array_ndim, each.tensor.dims)) {
        return invalid(sentence(prefix, each.row->array, " is ", shape_text(each.tensor), ", expected ",
                                shape_text(view), ": ", shape_text(*each.row)));
      }
    }
  }
  return desc;
}

}  // namespace
}  // namespace polyhead::stored

namespace polyhead {

Result<LayerDesc> layer_desc_of(std::string_view source, std::span<const NamedTensor> arrays, const LayerDesc& known,
                                std::string_view prefix) try {
  Status status;
  const stored::SourceTable* table = stored::find_source(source, &status);
  if (table == nullptr) return status;
  Result<LayerDesc> desc = stored::solved_desc(*table, arrays, known, prefix);
  if (desc.ok() && table->source.scale == SourceScale::kOne) desc->attention.scale = 1;
  return desc;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
