// Import and export: everything is checked first, then each weight is one strided copy.
#include "polyhead/weights.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>

#include "core/layout.h"
#include "core/sentence.h"
#include "weights/weights.h"

namespace polyhead::stored {
namespace {

// A name out of a file, for a sentence: nothing that a terminal could interpret, not too long.
std::string printable(std::string_view name) {
  constexpr size_t kLongest = 100;
  std::string text = "\"";
  for (const char c : name.substr(0, kLongest)) text += c >= 0x20 && c < 0x7f ? c : '?';
  return text + (name.size() > kLongest ? "...\"" : "\"");
}

std::string full_name(std::string_view prefix, const char* array) { return std::string(prefix) + array; }

bool is_named(std::span<const NamedTensor> arrays, std::string_view name) {
  return std::any_of(arrays.begin(), arrays.end(), [&](const NamedTensor& each) { return each.name == name; });
}

// The first source all of whose weights have a name in `arrays`; null if there is none.
const char* source_of_names(std::span<const NamedTensor> arrays, std::string_view prefix) {
  for (const WeightSource& source : public_sources()) {
    Status status;
    const SourceTable* table = find_source(source.name, &status);
    const bool all = std::all_of(table->rows.begin(), table->rows.end(), [&](const Row& row) {
      return is_bias(row.parts[0]) || is_named(arrays, full_name(prefix, row.array));
    });
    if (all) return source.name;
  }
  return nullptr;
}

// What there is instead of the missing array.
Status missing(const SourceTable& table, const char* array, std::span<const NamedTensor> arrays,
               std::string_view prefix) {
  const std::string what =
      sentence("array ", printable(full_name(prefix, array)), " of ", table.source.name, " is missing");
  if (const char* other = source_of_names(arrays, prefix); other != nullptr && other != table.source.name) {
    return invalid(sentence(what, "; the arrays have the names of ", other));
  }
  for (const NamedTensor& each : arrays) {
    const std::string_view name = each.name, end = array;
    if (name.size() > end.size() && name.ends_with(end)) {
      const std::string_view before = name.substr(0, name.size() - end.size());
      if (before.back() != '.' && before.back() != '/') continue;
      return invalid(sentence(what, "; with prefix ", printable(before), " there is one"));
    }
  }
  std::string there;
  for (size_t i = 0; i < std::min<size_t>(arrays.size(), 5); ++i) {
    there += sentence(i > 0 ? ", " : "; there are ", printable(arrays[i].name));
  }
  return invalid(what + there + (arrays.size() > 5 ? ", ..." : arrays.empty() ? "; there is none" : ""));
}

// One weight on both sides: the layer's and the array's.
struct Pair {
  Tensor weight, view;
};

// A tensor that is written or read, whole.
struct Operand {
  std::string name;
  Tensor tensor;
};

Status check_dims(const std::string& name, const Tensor& t, std::initializer_list<int64_t> dims) {
  if (t.ndim == static_cast<int32_t>(dims.size()) && std::equal(dims.begin(), dims.end(), t.dims)) return {};
  return invalid(sentence(name, " is ", shape_text(t), ", expected ", shape_text(Tensor(nullptr, t.dtype, dims))));
}

// Of the dims first .. last; no more than the array has elements.
int64_t product(const WeightView& view, int first, int last) {
  int64_t size = 1;
  for (int i = first; i <= last; ++i) size *= view.dims[i];
  return size;
}

// The layer's side of a view: [size of x, size of y], of a bias [size of y].
Status check_weight(const LayerWeights& weights, const WeightView& view, std::string* name) {
  static constexpr const char* kNames[kNumWeightKinds] = {
      "weights.query",      "weights.key",      "weights.value",      "weights.out",
      "weights.query_bias", "weights.key_bias", "weights.value_bias", "weights.out_bias"};
  *name = kNames[static_cast<int>(view.kind)];
  const Tensor& t = weights[view.kind];
  if (Status status = check_array(*name, t); !status.ok()) return status;
  const int last = view.ndim - 1;
  if (is_bias(view.kind)) return check_dims(*name, t, {product(view, 0, last)});
  if (view.kind == WeightKind::kOut) return check_dims(*name, t, {product(view, 0, last - 1), view.dims[last]});
  return check_dims(*name, t, {view.dims[0], product(view, 1, last)});
}

// No output shares memory with itself, another output, or an input.
Status check_apart(const std::vector<Operand>& outputs, const std::vector<Operand>& inputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Operand& out = outputs[i];
    if (overlaps_itself(out.tensor)) {
      return invalid(sentence(out.name, " overlaps itself: two indices name one element"));
    }
    for (size_t j = 0; j < i; ++j) {
      if (may_share_memory(out.tensor, outputs[j].tensor)) {
        return invalid(sentence(out.name, " overlaps ", outputs[j].name));
      }
    }
    for (const Operand& in : inputs) {
      if (may_share_memory(out.tensor, in.tensor)) return invalid(sentence(out.name, " overlaps ", in.name));
    }
  }
  return {};
}

// T5 and cuDNN do not divide by the root of head_dim: a layer with their weights has to say its scale.
Status check_scale_to_import(const SourceTable& table, const LayerDesc& desc) {
  const SourceScale scale = table.source.scale;
  if ((scale != SourceScale::kOne && scale != SourceScale::kAsked) || desc.attention.scale.has_value()) return {};
  return invalid(sentence(table.source.name, scale == SourceScale::kOne ? " has scale 1" : " has its caller's scale",
                          ", the layer 1 / sqrt(head_dim): set attention.scale"));
}

Status check_scale_to_export(const SourceTable& table, const LayerDesc& desc) {
  if (table.source.scale == SourceScale::kAsked || table.source.scale == SourceScale::kOwn) return {};
  const double inverse_root = 1 / std::sqrt(static_cast<double>(sizes_of(desc)[Size::kHeadDim]));
  const double theirs = table.source.scale == SourceScale::kOne ? 1 : inverse_root;
  const double ours = desc.attention.scale.value_or(inverse_root);
  if (std::fabs(ours - theirs) <= 1e-6 * theirs) return {};
  return invalid(sentence("the scale is ", ours, ", that of ", table.source.name, " is ", theirs,
                          ": multiply the query weight and bias by ", ours / theirs, " first"));
}

// Both sides of a copy, all of it checked but for overlaps.
struct Transfer {
  const SourceTable* table;
  std::vector<Pair> pairs;
  std::vector<Operand> weights, arrays;
};

// The array of each view, as it lies; views of one array follow each other in a source's rows.
Status collect_arrays(const SourceTable& table, const std::vector<WeightView>& views,
                      std::span<const NamedTensor> arrays, std::string_view prefix,
                      const std::function<Status(const WeightView&, const Tensor&)>& use, std::vector<Operand>* used) {
  for (const Row& row : table.rows) {
    bool found = false;
    Tensor tensor;
    for (const WeightView& view : views) {
      if (view.array != row.array) continue;
      if (!found) {
        const Result<Tensor> array = find_array(table, row, arrays, prefix);
        if (!array.ok()) return array.status();
        tensor = *array;
        if (tensor.ndim != view.array_ndim || !std::equal(tensor.dims, tensor.dims + tensor.ndim, view.array_dims)) {
          return invalid(sentence(prefix, row.array, " is ", shape_text(tensor), ", expected ", shape_text(view), ": ",
                                  shape_text(row)));
        }
        used->push_back({full_name(prefix, row.array), tensor});
        found = true;
      }
      if (Status status = use(view, tensor); !status.ok()) return status;
    }
  }
  return {};
}

Result<Transfer> transfer(std::string_view source, const LayerDesc& desc, std::span<const NamedTensor> arrays,
                          const LayerWeights& weights, std::string_view prefix) {
  Status status;
  const SourceTable* table = find_source(source, &status);
  if (table == nullptr) return status;
  const Result<std::vector<WeightView>> views = views_of(*table, desc);
  if (!views.ok()) return views.status();
  Transfer all;
  all.table = table;
  status = collect_arrays(
      *table, *views, arrays, prefix,
      [&](const WeightView& view, const Tensor& array) {
        std::string name;
        if (Status wrong = check_weight(weights, view, &name); !wrong.ok()) return wrong;
        all.pairs.push_back({weights[view.kind], view.in(array)});
        all.weights.push_back({std::move(name), weights[view.kind]});
        return Status();
      },
      &all.arrays);
  if (!status.ok()) return status;
  return all;
}

// [a, b, c] as [a, b * c] or [a * b, c], or [a, b] as [a * b]: the dims that `heads` and its neighbour become one.
bool merge_heads(int heads, Tensor* view) {
  const int64_t size = view->dims[heads + 1], stride = view->strides[heads + 1];
  if (size > 1 && view->dims[heads] > 1 && view->strides[heads] != size * stride) return false;
  if (size <= 1) view->strides[heads + 1] = view->strides[heads];
  view->dims[heads + 1] *= view->dims[heads];
  for (int i = heads; i + 1 < view->ndim; ++i) {
    view->dims[i] = view->dims[i + 1];
    view->strides[i] = view->strides[i + 1];
  }
  --view->ndim;
  return true;
}

Result<LayerWeights> bound(std::string_view source, const LayerDesc& desc, std::span<const NamedTensor> arrays,
                           std::string_view prefix) {
  Status status;
  const SourceTable* table = find_source(source, &status);
  if (table == nullptr) return status;
  const Result<std::vector<WeightView>> views = views_of(*table, desc);
  if (!views.ok()) return views.status();
  if (status = check_scale_to_import(*table, desc); !status.ok()) return status;
  LayerWeights weights;
  std::vector<Operand> used;
  status = collect_arrays(
      *table, *views, arrays, prefix,
      [&](const WeightView& view, const Tensor& array) {
        if (array.dtype != desc.dtype) {
          return invalid(sentence(prefix, view.array, " is ", dtype_name(array.dtype), ", the layer's weights are ",
                                  dtype_name(desc.dtype), ": import it"));
        }
        Tensor& bound = weights[view.kind] = view.in(array);
        if (view.kind == WeightKind::kOutBias) return Status();
        const int heads = view.kind == WeightKind::kOut || is_bias(view.kind) ? 0 : 1;
        const bool in_order = view.ndim == (is_bias(view.kind) ? 2 : 3);
        if (in_order && merge_heads(heads, &bound)) return Status();
        return invalid(sentence("the ", weight_name(view.kind), " in ", prefix, view.array,
                                " has its heads in an order that no two-dimensional view can have: import it"));
      },
      &used);
  if (!status.ok()) return status;
  return weights;
}

}  // namespace

bool has_array(const char* name, std::span<const NamedTensor> arrays, std::string_view prefix) {
  return std::any_of(arrays.begin(), arrays.end(), [&](const NamedTensor& each) {
    return each.tensor.given() && each.name == full_name(prefix, name);
  });
}

Result<Tensor> find_array(const SourceTable& table, const Row& row, std::span<const NamedTensor> arrays,
                          std::string_view prefix) {
  const std::string name = full_name(prefix, row.array);
  const NamedTensor* found = nullptr;
  for (const NamedTensor& each : arrays) {
    if (each.name != name || !each.tensor.given()) continue;
    if (found != nullptr) return invalid(sentence("array ", printable(name), " is given twice"));
    found = &each;
  }
  if (found == nullptr) return missing(table, row.array, arrays, prefix);
  if (Status status = check_array(name, found->tensor); !status.ok()) return status;
  return found->tensor;
}

Status check_array(std::string_view name, const Tensor& t) {
  if (!t.given()) return invalid(sentence(name, " is missing"));
  if (t.dtype != DType::kFloat32 && t.dtype != DType::kBFloat16 && t.dtype != DType::kFloat16 &&
      t.dtype != DType::kFloat64) {
    return invalid(sentence(name, " is ", dtype_name(t.dtype), ", takes float32, bfloat16, float16 or float64"));
  }
  if (t.device != Device::kCpu) return invalid(sentence(name, " is not on the CPU"));
  if (t.ndim > Tensor::kMaxDims) {
    return invalid(sentence(name, " has ", t.ndim, " dims, at most ", Tensor::kMaxDims, " are taken"));
  }
  for (int i = 0; i < t.ndim; ++i) {
    if (t.dims[i] < 0) return invalid(sentence(name, " dim ", i, " is ", t.dims[i], ", must not be negative"));
  }
  if (t.num_elements() == 0) return {};
  if (t.data == nullptr) return invalid(sentence(name, " is null, has ", t.num_elements(), " elements"));
  MemoryRange range;
  if (!memory_range(t, &range)) {
    return invalid(sentence(name, " reaches beyond the address space, by its strides"));
  }
  if (reinterpret_cast<uintptr_t>(t.data) % dtype_size_bytes(t.dtype) != 0) {
    return invalid(sentence(name, " is not aligned to its elements of ", dtype_size_bytes(t.dtype), " bytes"));
  }
  return {};
}

}  // namespace polyhead::stored

namespace polyhead {

using namespace stored;  // NOLINT

std::span<const WeightSource> weight_sources() { return public_sources(); }

Result<std::vector<std::string>> weight_arrays(std::string_view source) try {
  Status status;
  const SourceTable* table = find_source(source, &status);
  if (table == nullptr) return status;
  std::vector<std::string> names;
  for (const Row& row : table->rows) names.emplace_back(row.array);
  return names;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<std::vector<WeightView>> weight_views(std::string_view source, const LayerDesc& desc) try {
  Status status;
  const SourceTable* table = find_source(source, &status);
  if (table == nullptr) return status;
  return views_of(*table, desc);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status import_weights(std::string_view source, const LayerDesc& desc, std::span<const NamedTensor> arrays,
                      const LayerWeights& weights, std::string_view prefix) try {
  const Result<Transfer> all = transfer(source, desc, arrays, weights, prefix);
  if (!all.ok()) return all.status();
  if (Status status = check_scale_to_import(*all->table, desc); !status.ok()) return status;
  if (Status status = check_apart(all->weights, all->arrays); !status.ok()) return status;
  for (const Pair& pair : all->pairs) copy_weight(pair.view, pair.weight);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status export_weights(std::string_view source, const LayerDesc& desc, const LayerWeights& weights,
                      std::span<const NamedTensor> arrays, std::string_view prefix) try {
  const Result<Transfer> all = transfer(source, desc, arrays, weights, prefix);
  if (!all.ok()) return all.status();
  if (Status status = check_scale_to_export(*all->table, desc); !status.ok()) return status;
  if (Status status = check_apart(all->arrays, all->weights); !status.ok()) return status;
  for (const Pair& pair : all->pairs) copy_weight(pair.weight, pair.view);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<LayerWeights> bind_weights(std::string_view source, const LayerDesc& desc, std::span<const NamedTensor> arrays,
                                  std::string_view prefix) try {
  return bound(source, desc, arrays, prefix);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
