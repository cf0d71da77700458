#include "weights_call.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <string>
#include <vector>

#include "call.h"
#include "polyhead/weights.h"
#include "scalars.h"

namespace polyhead::python {
namespace {

// Keys of the layer's weights, by kind: the array names of the source "polyhead".
constexpr const char* kKeys[kNumWeightKinds] = {"query_weight", "key_weight", "value_weight", "out_weight",
                                                "query_bias",   "key_bias",   "value_bias",   "out_bias"};
constexpr const char* kScaleKey = "scale";

std::string text_of_argument(PyObject* object, const char* name) {
  return std::string(text_argument(object, name, "a str"));
}

// 0: not told.
int64_t size_argument(PyObject* object, const char* name) {
  if (object == Py_None) return 0;
  const int64_t size = int64_argument(object, name);
  if (size < 1) bad_value("%s is %lld, must be at least 1", name, static_cast<long long>(size));
  return size;
}

// num_heads, num_heads_kv, head_dim, head_dim_v
LayerDesc known_desc(PyObject* const* heads) {
  LayerDesc desc;
  desc.num_heads = int64_argument(heads[0], "num_heads");
  desc.num_heads_kv = size_argument(heads[1], "num_heads_kv");
  desc.query_proj_size = desc.key_proj_size = size_argument(heads[2], "head_dim");
  desc.value_proj_size = size_argument(heads[3], "head_dim_v");
  return desc;
}

const WeightSource& source_named(const std::string& name) {
  check(weight_arrays(name).status());
  for (const WeightSource& source : weight_sources()) {
    if (name == source.name) return source;
  }
  bad_value("source is \"%s\", which is not known", name.c_str());
}

bool is_extra(const WeightSource& source, const std::string& name) {
  return std::any_of(source.extras.begin(), source.extras.end(), [&](const char* extra) { return name == extra; });
}

// The arrays of a dict that have a name with `prefix` out of `names`, as tensors; all others by name alone.
class NamedArrays {
 public:
  NamedArrays(PyObject* dict, const char* argument, const std::vector<std::string>& names, const std::string& prefix) {
    if (!PyDict_Check(dict)) bad_kind("%s has type %s, must be a dict of arrays by name", argument, type_name(dict));
    for (auto [key, value] : nb::borrow<nb::dict>(dict)) {
      if (!PyUnicode_Check(key.ptr())) continue;
      const auto text = utf8_of(key.ptr());
      if (!text) continue;  // no source has such a name
      views.push_back({std::string(*text), {}});
      objects_.push_back(value.ptr());
      std::string& name = views.back().name;
      const bool wanted =
          name.starts_with(prefix) && std::find(names.begin(), names.end(), name.substr(prefix.size())) != names.end();
      if (!wanted) continue;
      const ArrayArgument array = {name.c_str(), kFloats, 1, Tensor::kMaxDims, "see polyhead.weights.sources()"};
      views.back().tensor = view_of(value.ptr(), array, held_.emplace_back());
    }
  }

  // Borrowed; null if there is none.
  PyObject* object(const std::string& name) const {
    for (size_t i = 0; i < views.size(); ++i) {
      if (views[i].name == name) return objects_[i];
    }
    return nullptr;
  }

  std::vector<NamedTensor> views;

 private:
  std::vector<PyObject*> objects_;
  std::deque<Held> held_;
};

Tensor& tensor_of(LayerWeights& w, WeightKind kind) {
  Tensor* const tensors[kNumWeightKinds] = {&w.query,      &w.key,      &w.value,      &w.out,
                                            &w.query_bias, &w.key_bias, &w.value_bias, &w.out_bias};
  return *tensors[static_cast<int>(kind)];
}

const char* key_of(WeightKind kind) { return kKeys[static_cast<int>(kind)]; }

// Of the layer's own form: the dims of each weight, by the views of "polyhead".
Tensor dims_of(const WeightView& view, DType dtype) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.ndim = view.array_ndim;
  std::copy(view.array_dims, view.array_dims + view.array_ndim, tensor.dims);
  return tensor;
}

const Tensor& tensor_named(const NamedArrays& arrays, const std::string& name) {
  static const Tensor none;
  for (const NamedTensor& each : arrays.views) {
    if (each.name == name) return each.tensor;
  }
  return none;
}

}  // namespace

nb::dict list_weight_sources() {
  nb::dict all;
  for (const WeightSource& source : weight_sources()) {
    nb::list arrays, extras;
    for (const std::string& name : checked(weight_arrays(source.name))) arrays.append(name.c_str());
    for (const char* name : source.extras) extras.append(name);
    nb::object scale = nb::none();
    if (source.scale == SourceScale::kOne) scale = nb::float_(1.0);
    if (source.scale == SourceScale::kInverseRoot) scale = nb::str("1/sqrt(head_dim)");
    all[source.name] = nb::make_tuple(source.module, nb::tuple(arrays), nb::tuple(extras), scale, source.norm_epsilon);
  }
  return all;
}

nb::object load_weights(PyObject* const* arguments) {
  const std::string name = text_of_argument(arguments[1], "source"), prefix = text_of_argument(arguments[7], "prefix");
  const WeightSource& source = source_named(name);
  const NamedArrays arrays(arguments[0], "arrays", checked(weight_arrays(name)), prefix);
  LayerDesc desc = checked(layer_desc_of(name, arrays.views, known_desc(arguments + 2), prefix));
  PyObject* scale_of_file = source.scale == SourceScale::kOwn ? arrays.object(prefix + kScaleKey) : nullptr;
  if (scale_of_file != nullptr) desc.attention.scale = real_argument(scale_of_file, kScaleKey);
  if (arguments[6] != Py_None) desc.attention.scale = real_argument(arguments[6], kScaleKey);

  LayerWeights weights;
  nb::dict result;
  const std::vector<WeightView> own = checked(weight_views("polyhead", desc));
  for (const WeightView& view : checked(weight_views(name, desc))) {
    const auto target =
        std::find_if(own.begin(), own.end(), [&](const WeightView& each) { return each.kind == view.kind; });
    const std::string array = prefix + view.array;
    const DType dtype = tensor_named(arrays, array).dtype;
    Tensor& tensor = tensor_of(weights, view.kind) = dims_of(*target, dtype);
    result[key_of(view.kind)] = Results(array.c_str(), arrays.object(array), dtype).make(tensor);
  }
  run_without_gil([&] { return import_weights(name, desc, arrays.views, weights, prefix); });
  const int64_t head_dim = std::max(desc.query_proj_size, desc.key_proj_size);
  if (desc.attention.scale || head_dim > 0) {
    result[kScaleKey] = desc.attention.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  }
  for (const char* extra : source.extras) {
    if (PyObject* array = arrays.object(prefix + extra)) result[extra] = nb::borrow(array);
  }
  return result;
}

nb::object export_arrays(PyObject* const* arguments) {
  const std::string name = text_of_argument(arguments[1], "source"), prefix = text_of_argument(arguments[6], "prefix");
  const WeightSource& source = source_named(name);
  const NamedArrays given(arguments[0], "weights", checked(weight_arrays("polyhead")), "");
  for (const NamedTensor& each : given.views) {
    if (each.tensor.given() || each.name == kScaleKey || is_extra(source, each.name)) continue;
    bad_value("weights has \"%.100s\", for which %s has no place", each.name.c_str(), name.c_str());
  }
  LayerDesc desc = checked(layer_desc_of("polyhead", given.views, known_desc(arguments + 2)));
  if (PyObject* scale = given.object(kScaleKey)) desc.attention.scale = real_argument(scale, "weights[\"scale\"]");
  LayerWeights weights;
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    tensor_of(weights, static_cast<WeightKind>(kind)) = tensor_named(given, kKeys[kind]);
  }

  std::vector<NamedTensor> arrays;
  nb::dict result;
  for (const WeightView& view : checked(weight_views(name, desc))) {
    const std::string array = prefix + view.array;
    const DType dtype = tensor_named(given, key_of(view.kind)).dtype;
    const auto made =
        std::find_if(arrays.begin(), arrays.end(), [&](const NamedTensor& each) { return each.name == array; });
    if (made != arrays.end()) {
      if (made->tensor.dtype == dtype) continue;
      bad_value("%s is %s, must be %s: %s holds several weights", key_of(view.kind), dtype_name(dtype),
                dtype_name(made->tensor.dtype), view.array);
    }
    arrays.push_back({array, dims_of(view, dtype)});
    Results results(key_of(view.kind), given.object(key_of(view.kind)), dtype);
    result[array.c_str()] = results.make(arrays.back().tensor);
  }
  run_without_gil([&] { return export_weights(name, desc, weights, arrays, prefix); });
  for (const char* extra : source.extras) {
    if (PyObject* array = given.object(extra)) result[(prefix + extra).c_str()] = nb::borrow(array);
  }
  return result;
}

}  // namespace polyhead::python
