// polyhead.weights: arrays of other frameworks <-> the layer's weights.
#pragma once

#include "arrays.h"

namespace polyhead::python {

// () -> {name: (module, arrays, extras, scale, norm_epsilon)}: scale is 1.0, "1/sqrt(head_dim)", or None if it is asked
nb::dict list_weight_sources();

// (arrays, source, num_heads, num_heads_kv, head_dim, head_dim_v, scale, prefix) -> {"query_weight": array, ...}
nb::object load_weights(PyObject* const* arguments);

// (weights, source, num_heads, num_heads_kv, head_dim, head_dim_v, prefix) -> {name: array}
nb::object export_arrays(PyObject* const* arguments);

constexpr int kNumLoadWeights = 8, kNumExportWeights = 7;

}  // namespace polyhead::python
