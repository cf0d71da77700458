// The extension module polyhead._bind: translates, computes nothing. polyhead/__init__.py has the signatures.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <new>
#include <utility>

#include "arrays.h"
#include "backward_call.h"
#include "block_call.h"
#include "cache_call.h"
#include "call.h"
#include "graph_call.h"
#include "layer_call.h"
#include "merge_call.h"
#include "place.h"
#include "plan_cache.h"
#include "polyhead/dropout.h"
#include "polyhead/kernels.h"
#include "polyhead/program_explanation.h"
#include "scalars.h"
#include "threads.h"
#include "weights_call.h"

namespace polyhead::python {
namespace {

// Runs `body`, a function that returns nb::object, with its exceptions as Python's.
template <class Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body().release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "no memory for the results");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void check_num_arguments(Py_ssize_t count, int takes) {
  if (count != takes) bad_kind("polyhead._bind takes all %d arguments by position, got %zd", takes, count);
}

// What both directions do: ForwardCall and BackwardCall.
template <class OneCall>
PyObject* planned_and_run(PyObject* const* arguments, Py_ssize_t count, int takes) noexcept {
  return guarded([&] {
    check_num_arguments(count, takes);
    OneCall call(arguments);
    const auto plan = cached_plan(call.desc(), call.kernel(), call.where());
    check(plan.status());
    return call.run(**plan);
  });
}

PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return planned_and_run<ForwardCall>(arguments, count, kNumForward);
}

PyObject* attention_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return planned_and_run<BackwardCall>(arguments, count, kNumBackward);
}

// Of a call with a program: ((expression, depends_on), ...) and (none, some, all); else () and None.
std::pair<nb::object, nb::object> explained_program(const ForwardCall& call) {
  if (call.desc().program == nullptr) return {nb::make_tuple(), nb::none()};
  nb::list values;
  for (const ProgramValue& value : explain_program(*call.desc().program)) {
    values.append(nb::make_tuple(value.expression, value.depends_on));
  }
  if (call.on_cuda()) return {nb::tuple(values), nb::none()};  // what is captured cannot be read here
  Result<MaskBlocks> counted = MaskBlocks();
  run_without_gil([&] { return (counted = count_mask_blocks(call.desc(), call.args())).status(); });
  return {nb::tuple(values), nb::make_tuple(counted->none, counted->some, counted->all)};
}

// (kernel, {name: reason}, workspace_bytes, flops, backward_workspace_bytes, backward_flops, error, measured, program,
// blocks)
PyObject* explain_arguments(PyObject*, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&]() -> nb::object {
    check_num_arguments(count, kNumForward);
    const ForwardCall call(arguments);
    const Explanation explanation = explain(call.desc(), {.kernel = call.kernel(), .where = call.where()});
    if (explanation.status.code() != StatusCode::kUnsupported) check(explanation.status);
    nb::dict reasons;
    for (const KernelReason& each : explanation.reasons) reasons[each.kernel] = each.reason;
    const auto [program, blocks] = explained_program(call);
    return nb::make_tuple(explanation.kernel, reasons, explanation.workspace_bytes, explanation.flops,
                          explanation.backward_workspace_bytes, explanation.backward_flops,
                          explanation.status.message(), explanation.measured, program, blocks);
  });
}

// (batch, num_heads, seqlen_q, seqlen_k, program, captured, block_q, block_k, table)
nb::object blocks_implied(PyObject* const* arguments) {
  AttentionDesc desc;
  ForwardArgs args;
  desc.batch = int64_argument(arguments[0], "batch");
  desc.num_heads = desc.num_heads_kv = int64_argument(arguments[1], "num_heads");
  desc.seqlen_q = int64_argument(arguments[2], "seqlen_q");
  desc.seqlen_k = int64_argument(arguments[3], "seqlen_k");
  Captures captures;
  captures.read(arguments[4], arguments[5], desc, args);
  const int64_t block_q = int64_argument(arguments[6], "block_q"), block_k = int64_argument(arguments[7], "block_k");
  constexpr ArrayArgument kTable = {"table", "int32", 4, 4, "[batch, num_heads, blocks of queries, blocks of keys]"};
  Held held;
  const Tensor table = view_of(arguments[8], kTable, held);
  Result<bool> implied = false;
  run_without_gil([&] { return (implied = mask_implies_blocks(desc, args, block_q, block_k, table)).status(); });
  return nb::bool_(*implied);
}

// (shape, dropout_p, dropout_seed, dropout_offset, dropout_origin)
nb::object new_dropout_mask(PyObject* const* arguments) {
  PyObject* shape = arguments[0];
  Tensor kept;
  kept.dtype = DType::kBool;
  kept.ndim = 4;
  const nb::object sizes = sequence_argument(shape, "shape", 4, "four integers (B, H, Sq, Sk)");
  for (int i = 0; i < 4; ++i) {
    kept.dims[i] = int64_argument(PySequence_Fast_GET_ITEM(sizes.ptr(), i), "shape");
    if (kept.dims[i] < 0) bad_value("shape is %s, must not be negative", text_of(shape).c_str());
  }
  const double dropout_p = real_argument(arguments[1], "dropout_p");
  const uint64_t dropout_seed = seed_argument(arguments[2]);
  const uint32_t dropout_offset = dropout_offset_argument(arguments[3]);
  const DropoutOrigin origin = dropout_origin_argument(arguments[4]);
  nb::object array = new_numpy_array(kept);
  run_without_gil([&] { return dropout_mask(dropout_p, dropout_seed, dropout_offset, kept, origin); });
  return array;
}

// A function of as many arguments, all by position.
template <int Takes, nb::object (*Function)(PyObject* const*)>
PyObject* call_with(PyObject*, PyObject* const* arguments, Py_ssize_t count) noexcept {
  return guarded([&] {
    check_num_arguments(count, Takes);
    return Function(arguments);
  });
}

nb::dict build_info() {
  nb::dict info;
  info["version"] = version();
  info["compiler"] = POLYHEAD_COMPILER;
  info["cpu"] = cpu_features();
  info["threads"] = num_threads();
  return info;
}

double measured_peak_gflops(const std::string& dtype) {
  if (dtype == "float32") return measure_peak_gflops(DType::kFloat32);
  if (dtype == "bfloat16") return measure_peak_gflops(DType::kBFloat16);
  throw nb::value_error(("dtype is " + dtype + ", takes float32 or bfloat16").c_str());
}

PyCFunction fastcall(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t) noexcept) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef functions[] = {
    {"attention", fastcall(attention), METH_FASTCALL, nullptr},
    {"attention_backward", fastcall(attention_backward), METH_FASTCALL, nullptr},
    {"explain", fastcall(explain_arguments), METH_FASTCALL, nullptr},
    {"implies_blocks", fastcall(call_with<9, blocks_implied>), METH_FASTCALL, nullptr},
    {"dropout_mask", fastcall(call_with<5, new_dropout_mask>), METH_FASTCALL, nullptr},
    {"merge", fastcall(call_with<kNumMerge, merge_parts>), METH_FASTCALL, nullptr},
    {"merge_backward", fastcall(call_with<kNumMergeBackward, merge_parts_backward>), METH_FASTCALL, nullptr},
    {"attention_block", fastcall(call_with<kNumAttentionBlock, attention_block_arrays>), METH_FASTCALL, nullptr},
    {"attention_block_backward", fastcall(call_with<kNumAttentionBlockBackward, attention_block_gradients>),
     METH_FASTCALL, nullptr},
    {"feed_forward_block", fastcall(call_with<kNumFeedForward, feed_forward_arrays>), METH_FASTCALL, nullptr},
    {"feed_forward_block_backward", fastcall(call_with<kNumFeedForwardBackward, feed_forward_gradients>), METH_FASTCALL,
     nullptr},
    {"layer_forward", fastcall(call_with<kNumLayerForward, layer_forward>), METH_FASTCALL, nullptr},
    {"layer_backward", fastcall(call_with<kNumLayerBackward, layer_backward>), METH_FASTCALL, nullptr},
    {"load_weights", fastcall(call_with<kNumLoadWeights, load_weights>), METH_FASTCALL, nullptr},
    {"cache_check", fastcall(call_with<kNumCacheShared, cache_check>), METH_FASTCALL, nullptr},
    {"cache_append", fastcall(call_with<kNumCacheAppend, cache_append>), METH_FASTCALL, nullptr},
    {"cache_copy", fastcall(call_with<kNumCacheCopy, cache_copy>), METH_FASTCALL, nullptr},
    {"cache_read", fastcall(call_with<kNumCacheRead, cache_read>), METH_FASTCALL, nullptr},
    {"export_weights", fastcall(call_with<kNumExportWeights, export_arrays>), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace polyhead::python

NB_MODULE(_bind, module) {
  using namespace polyhead::python;
  arrays_init(module);
  // Without nanobind's call layer: its overload resolution would take a good part of a small call's time.
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw nb::python_error();
  module.attr("__version__") = polyhead::version();
  module.def("kernels", &polyhead::kernels);
  module.def("num_threads", &num_threads);
  module.def("set_num_threads", [](nb::handle count) { set_num_threads(int64_argument(count.ptr(), "num_threads")); });
  module.def("build_info", &build_info);
  module.def("weight_sources", &list_weight_sources);
  module.def("fuse_model", &fuse_model);
  add_page_table(module);
  add_cuda(module);
  module.def("measured_peak_gflops", &measured_peak_gflops);
}
