// Shapes out of letters: of which sizes the dims of an array are made, and where each weight lies in it.
#include <algorithm>
#include <new>

#include "core/layout.h"
#include "core/sentence.h"
#include "weights/weights.h"

namespace polyhead::stored {

const char* size_name(Size size) {
  static constexpr const char* kNames[kNumSizes] = {"query_size", "key_size",     "value_size", "out_proj_size",
                                                    "num_heads",  "num_heads_kv", "head_dim",   "head_dim_v"};
  return kNames[static_cast<int>(size)];
}

const char* weight_name(WeightKind kind) {
  static constexpr const char* kNames[kNumWeightKinds] = {"query weight", "key weight", "value weight", "out weight",
                                                          "query bias",   "key bias",   "value bias",   "out bias"};
  return kNames[static_cast<int>(kind)];
}

Size size_of(WeightKind kind, char letter) {
  const int part = static_cast<int>(kind) % 4;  // query, key, value, out
  const bool of_keys = part == 1 || part == 2;
  if (letter == 'e') return static_cast<Size>(part);
  if (letter == 'h') return of_keys ? Size::kKvHeads : Size::kHeads;
  return part >= 2 ? Size::kHeadDimV : Size::kHeadDim;
}

Axes::Axes(const char* axes) {
  const std::string_view text = axes;
  for (size_t at = 0; at < text.size() && count < Tensor::kMaxDims;) {
    const bool several = text[at] == '(' || text[at] == '[';
    const size_t end = several ? text.find_first_of(")]", at) : at + 1;
    const size_t first = several ? at + 1 : at;
    axis[count++] = {text.substr(first, end - first), text[at] == '['};
    at = several ? end + 1 : end;
  }
}

namespace {

int64_t letter_size(const Row& row, char letter, size_t part, const Sizes& sizes) {
  switch (letter) {
    case '1': return 1;
    case 'c': return 2;
    case 'n': return static_cast<int64_t>(row.parts.size());
    case 'p': return sizes[size_of(row.parts[part], 'd')] / 2;
    default: return sizes[size_of(row.parts[part], letter)];
  }
}

}  // namespace

bool axis_product(const Row& row, const Axis& axis, size_t part, const Sizes& sizes, int64_t* product) {
  *product = 1;
  for (const char letter : axis.letters) {
    if (__builtin_mul_overflow(*product, letter_size(row, letter, part, sizes), product)) return false;
  }
  return true;
}

namespace {

std::string product_text(const Row& row, const Axis& axis, size_t part) {
  std::string text;
  for (const char letter : axis.letters) {
    if (letter == 'c') continue;  // with p it is head_dim
    if (!text.empty()) text += " * ";
    if (letter == '1') {
      append(text, 1);
    } else if (letter == 'n') {
      append(text, row.parts.size());
    } else {
      append(text, size_name(size_of(row.parts[part], letter == 'p' ? 'd' : letter)));
    }
  }
  return text;
}

std::string dims_text(const int64_t* dims, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += sentence(i > 0 ? ", " : "", dims[i]);
  return text + "]";
}

}  // namespace

std::string shape_text(const Row& row) {
  const Axes axes(row.axes);
  std::string text;
  for (int i = 0; i < axes.count; ++i) {
    if (i > 0) text += ", ";
    const size_t terms = axes.axis[i].side_by_side ? row.parts.size() : 1;
    for (size_t part = 0; part < terms; ++part) {
      text += sentence(part > 0 ? " + " : "", product_text(row, axes.axis[i], part));
    }
  }
  return "[" + text + "]";
}

std::string shape_text(const Tensor& tensor) { return dims_text(tensor.dims, tensor.ndim); }
std::string shape_text(const WeightView& view) { return dims_text(view.array_dims, view.array_ndim); }

bool has_weight(const LayerDesc& desc, WeightKind kind) {
  switch (kind) {
    case WeightKind::kQuery: return desc.query_proj_size > 0;
    case WeightKind::kKey: return desc.key_proj_size > 0;
    case WeightKind::kValue: return desc.value_proj_size > 0;
    case WeightKind::kOut: return desc.out_proj_size > 0;
    case WeightKind::kQueryBias: return desc.query_bias;
    case WeightKind::kKeyBias: return desc.key_bias;
    case WeightKind::kValueBias: return desc.value_bias;
    case WeightKind::kOutBias: return desc.out_bias;
  }
  return false;
}

Sizes sizes_of(const LayerDesc& desc) {
  Sizes sizes;
  sizes[Size::kQuery] = desc.query_size;
  sizes[Size::kKey] = desc.key_size;
  sizes[Size::kValue] = desc.value_size;
  sizes[Size::kOut] = desc.out_proj_size;
  sizes[Size::kHeads] = desc.num_heads;
  sizes[Size::kKvHeads] = desc.num_heads_kv;
  sizes[Size::kHeadDim] = desc.query_proj_size > 0 ? desc.query_proj_size : desc.query_size;
  sizes[Size::kHeadDimV] = desc.value_proj_size > 0 ? desc.value_proj_size : desc.value_size;
  return sizes;
}

namespace {

Status beyond(const Row& row) {
  return invalid(sentence(row.array, " ", shape_text(row), " would have more than 2^63 elements"));
}

// Sizes that no array could have, and those that this source has no room for.
Status check_sizes(const SourceTable& table, const LayerDesc& d, const Sizes& sizes) {
  const char* name = table.source.name;
  if (d.num_heads < 1 || d.num_heads_kv < 1 || d.num_heads % d.num_heads_kv != 0) {
    return invalid(sentence("num_heads_kv is ", d.num_heads_kv, ", must divide num_heads ", d.num_heads));
  }
  const struct {
    const char* name;
    int64_t size;
  } fields[] = {{"query_size", d.query_size},       {"key_size", d.key_size},
                {"value_size", d.value_size},       {"query_proj_size", d.query_proj_size},
                {"key_proj_size", d.key_proj_size}, {"value_proj_size", d.value_proj_size},
                {"out_proj_size", d.out_proj_size}};
  for (const auto& field : fields) {
    if (field.size < 0) return invalid(sentence(field.name, " is ", field.size, ", must not be negative"));
  }
  const int64_t key_head = d.key_proj_size > 0 ? d.key_proj_size : d.key_size;
  if (key_head != sizes[Size::kHeadDim]) {
    return invalid(sentence("a head of q has ", sizes[Size::kHeadDim], " elements, one of k has ", key_head,
                            ": query_proj_size and key_proj_size must be equal"));
  }
  if (!table.num_heads_kv && d.num_heads_kv != d.num_heads) {
    return invalid(
        sentence(name, " keeps num_heads_kv equal to num_heads, not ", d.num_heads_kv, " and ", d.num_heads));
  }
  if (!table.head_dim_v && sizes[Size::kHeadDimV] != sizes[Size::kHeadDim]) {
    return invalid(sentence(name, " keeps head_dim_v equal to head_dim, not ", sizes[Size::kHeadDimV], " and ",
                            sizes[Size::kHeadDim]));
  }
  return {};
}

// Every weight of the desc has a place in the source, and every weight that the source always has is there.
Status check_kinds(const SourceTable& table, const LayerDesc& desc) {
  for (int k = 0; k < kNumWeightKinds; ++k) {
    const auto kind = static_cast<WeightKind>(k);
    const bool wanted = has_weight(desc, kind);
    if (wanted && is_bias(kind) && !has_weight(desc, static_cast<WeightKind>(k - 4))) {
      return invalid(sentence("the layer has no projection for its ", weight_name(kind)));
    }
    bool stored = false;
    for (const Row& row : table.rows) {
      stored = stored || std::find(row.parts.begin(), row.parts.end(), kind) != row.parts.end();
    }
    if (wanted && !stored) return invalid(sentence(table.source.name, " has no ", weight_name(kind)));
    if (!wanted && stored && !is_bias(kind) && !table.optional) {
      return invalid(sentence(table.source.name, " always has the ", weight_name(kind), ", the layer has none"));
    }
  }
  return {};
}

// The dims of a row's array; parts that share it must agree on the dims in which they do not lie side by side.
Status array_shape(const Row& row, const Sizes& sizes, WeightView* view) {
  const Axes axes(row.axes);
  view->array = row.array;
  view->array_ndim = axes.count;
  int64_t elements = 1;
  for (int i = 0; i < axes.count; ++i) {
    int64_t total = 0;
    for (size_t part = 0; part < row.parts.size(); ++part) {
      int64_t size = 0;
      if (!axis_product(row, axes.axis[i], part, sizes, &size)) return beyond(row);
      if (axes.axis[i].side_by_side || part == 0) {
        if (__builtin_add_overflow(total, size, &total)) return beyond(row);
      } else if (size != total) {
        return invalid(sentence(row.array, " holds several weights: ", product_text(row, axes.axis[i], part), " is ",
                                size, ", must be ", product_text(row, axes.axis[i], 0), " ", total));
      }
    }
    view->array_dims[i] = total;
    if (__builtin_mul_overflow(elements, std::max<int64_t>(total, 1), &elements)) return beyond(row);
  }
  return {};
}

// Where letters of a part run in the array; its start, if others lie before it. The array's shape has passed.
void place_part(const Row& row, size_t part, const Sizes& sizes, WeightView* view) {
  const Axes axes(row.axes);
  const WeightKind kind = row.parts[part];
  const std::string_view all = row.axes;
  const bool pairs = all.find('p') != std::string_view::npos;
  const std::string_view order = kind == WeightKind::kOutBias ? "e"
                                 : is_bias(kind)              ? (pairs ? "hcp" : "hd")
                                 : kind == WeightKind::kOut   ? (pairs ? "hcpe" : "hde")
                                                              : (pairs ? "ehcp" : "ehd");
  view->kind = kind;
  view->ndim = static_cast<int32_t>(order.size());
  for (int i = 0; i < axes.count; ++i) {
    const Axis& axis = axes.axis[i];
    if (axis.side_by_side) {
      view->start_axis = i;
      for (size_t before = 0; before < part; ++before) {
        int64_t size = 0;
        if (axis_product(row, axis, before, sizes, &size)) view->start += size;  // has passed array_shape
      }
    }
    int64_t step = 1;
    for (size_t at = axis.letters.size(); at-- > 0;) {
      const char letter = axis.letters[at];
      if (letter == 'n') {
        view->start_axis = i;
        view->start = static_cast<int64_t>(part) * step;
      } else if (const size_t dim = order.find(letter); dim != std::string_view::npos) {
        view->dims[dim] = letter_size(row, letter, part, sizes);
        view->axis[dim] = i;
        view->step[dim] = step;
      }
      step *= letter_size(row, letter, part, sizes);
    }
  }
}

}  // namespace

Result<std::vector<WeightView>> views_of(const SourceTable& table, const LayerDesc& desc) {
  const Sizes sizes = sizes_of(desc);
  Status status = check_sizes(table, desc, sizes);
  if (status.ok()) status = check_kinds(table, desc);
  if (!status.ok()) return status;
  std::vector<WeightView> views;
  for (const Row& row : table.rows) {
    const auto wanted = [&](WeightKind kind) { return has_weight(desc, kind); };
    if (std::none_of(row.parts.begin(), row.parts.end(), wanted)) continue;
    for (const WeightKind kind : row.parts) {
      if (wanted(kind)) continue;
      return invalid(sentence(row.array, " of ", table.source.name, " holds several weights, the layer has no ",
                              weight_name(kind)));
    }
    WeightView shape;
    if (status = array_shape(row, sizes, &shape); !status.ok()) return status;
    for (size_t part = 0; part < row.parts.size(); ++part) {
      if (std::string_view(row.axes).find('p') != std::string_view::npos &&
          sizes[size_of(row.parts[part], 'd')] % 2 != 0) {
        return invalid(sentence("head_dim is ", sizes[size_of(row.parts[part], 'd')],
                                ", must be even: ", table.source.name, " keeps its columns in pairs"));
      }
      WeightView view = shape;
      place_part(row, part, sizes, &view);
      views.push_back(view);
    }
  }
  std::sort(views.begin(), views.end(), [](const WeightView& a, const WeightView& b) { return a.kind < b.kind; });
  return views;
}

}  // namespace polyhead::stored

namespace polyhead {

Tensor WeightView::in(const Tensor& tensor) const {
  const bool empty = tensor.num_elements() == 0;  // its strides may be any numbers
  Tensor view = tensor;
  view.ndim = ndim;
  for (int i = 0; i < Tensor::kMaxDims; ++i) {
    view.dims[i] = i < ndim ? dims[i] : 0;
    view.strides[i] = i < ndim && !empty ? step[i] * tensor.strides[axis[i]] : 0;
  }
  if (!empty && tensor.data != nullptr) {
    view.data = static_cast<char*>(tensor.data) +
                start * tensor.strides[start_axis] * static_cast<int64_t>(dtype_size_bytes(tensor.dtype));
  }
  return view;
}

}  // namespace polyhead
