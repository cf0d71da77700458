#include "call.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "workspace.h"

namespace polyhead::python {
namespace {

constexpr const char* kFloats = "float32, bfloat16, float16 or float64";
constexpr const char* kIntegers = "int32 or int64";

constexpr ArrayArgument kQueryArray = {"query", kFloats, 4, 4, "[batch, seqlen_q, num_heads, head_dim]"};
constexpr ArrayArgument kKeyArray = {"key", kFloats, 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim]"};
constexpr ArrayArgument kValueArray = {"value", kFloats, 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim_v]"};
constexpr ArrayArgument kPackedQuery = {"query", kFloats, 3, 3, "[total_q, num_heads, head_dim] (with cu_seqlens)"};
constexpr ArrayArgument kPackedKey = {"key", kFloats, 3, 3, "[total_k, num_heads_kv, head_dim] (with cu_seqlens)"};
constexpr ArrayArgument kPackedValue = {"value", kFloats, 3, 3,
                                        "[total_k, num_heads_kv, head_dim_v] (with cu_seqlens)"};
constexpr const char* kScores = "what broadcasts to [batch, num_heads, seqlen_q, seqlen_k]";
constexpr ArrayArgument kBiasArray = {"attn_bias", kFloats, 0, 4, kScores};
constexpr ArrayArgument kMaskArray = {"attn_mask", "bool", 0, 4, kScores};
constexpr ArrayArgument kSlopesArray = {"alibi_slopes", "float32", 1, 2, "[num_heads] or [batch, num_heads]"};
constexpr ArrayArgument kOffsetsArray = {"query_offset", kIntegers, 1, 1, "[batch]"};
constexpr ArrayArgument kSeqlensQArray = {"seqlens_q", kIntegers, 1, 1, "[batch]"};
constexpr ArrayArgument kSeqlensKArray = {"seqlens_k", kIntegers, 1, 1, "[batch]"};
constexpr ArrayArgument kCuSeqlensQArray = {"cu_seqlens_q", kIntegers, 1, 1, "[batch + 1]"};
constexpr ArrayArgument kCuSeqlensKArray = {"cu_seqlens_k", kIntegers, 1, 1, "[batch + 1]"};

const char* kind_of(PyObject* object) { return Py_TYPE(object)->tp_name; }

// True, False, or NumPy's. Anything else is more likely an argument in the wrong place.
bool flag_argument(PyObject* object, const char* name) {
  if (object == Py_True) return true;
  if (object == Py_False) return false;
  if (std::strcmp(kind_of(object), "numpy.bool") == 0 || std::strcmp(kind_of(object), "numpy.bool_") == 0) {
    return PyObject_IsTrue(object) == 1;
  }
  bad_kind("%s has type %s, must be True or False", name, kind_of(object));
}

// An int of Python, NumPy, torch...: whatever has __index__.
nb::object integer_argument(PyObject* object, const char* name, const char* takes = "an integer") {
  PyObject* number = PyBool_Check(object) ? nullptr : PyNumber_Index(object);
  if (number == nullptr) {
    PyErr_Clear();
    bad_kind("%s has type %s, must be %s", name, kind_of(object), takes);
  }
  return nb::steal(number);
}

uint64_t unsigned_argument(PyObject* object, const char* name, uint64_t last, const char* last_text) {
  nb::object number = integer_argument(object, name);
  const uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() != nullptr || value > last) {
    PyErr_Clear();
    bad_value("%s is %s, must be 0 to %s", name, text_of(number.ptr()).c_str(), last_text);
  }
  return value;
}

const char* text_argument(PyObject* object, const char* name, const char* takes) {
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    bad_kind("%s has type %s, must be %s", name, kind_of(object), takes);
  }
  return text;
}

void append(nb::object& results, int& count, nb::object array) {
  PyTuple_SET_ITEM(results.ptr(), count++, array.release().ptr());
}

}  // namespace

int64_t int64_argument(PyObject* object, const char* name, const char* takes) {
  nb::object number = integer_argument(object, name, takes);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) bad_value("%s is %s, must be -2^63 to 2^63 - 1", name, text_of(number.ptr()).c_str());
  return value;
}

double real_argument(PyObject* object, const char* name) {
  const double value = PyUnicode_Check(object) ? -1 : PyFloat_AsDouble(object);
  if (PyUnicode_Check(object) || (value == -1 && PyErr_Occurred() != nullptr)) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    if (too_large) bad_value("%s is %s, must be a finite number", name, text_of(object).c_str());
    bad_kind("%s has type %s, must be a number", name, kind_of(object));
  }
  return value;
}

uint64_t seed_argument(PyObject* object) { return unsigned_argument(object, "dropout_seed", UINT64_MAX, "2^64 - 1"); }

uint32_t dropout_offset_argument(PyObject* object) {
  return static_cast<uint32_t>(unsigned_argument(object, "dropout_offset", UINT32_MAX, "2^32 - 1"));
}

Call::Call(PyObject* const* arguments) : arguments_(arguments) {
  read_operands();
  read_positions();
  read_scores();
  read_lengths();
  read_results();
}

Tensor Call::optional_array(Position position, const ArrayArgument& argument) {
  if (arguments_[position] == Py_None) return {};
  return view_of(arguments_[position], argument, held_[position]);
}

void Call::read_operands() {
  args_.cu_seqlens_q = optional_array(kCuSeqlensQ, kCuSeqlensQArray);
  args_.cu_seqlens_k = optional_array(kCuSeqlensK, kCuSeqlensKArray);
  desc_.packed = args_.cu_seqlens_q.given() || args_.cu_seqlens_k.given();
  if (args_.cu_seqlens_q.given() != args_.cu_seqlens_k.given()) {
    bad_value("cu_seqlens_%s is given without cu_seqlens_%s, packed operands need both",
              args_.cu_seqlens_q.given() ? "q" : "k", args_.cu_seqlens_q.given() ? "k" : "q");
  }
  const bool packed = desc_.packed;
  args_.query = view_of(arguments_[kQuery], packed ? kPackedQuery : kQueryArray, held_[kQuery]);
  args_.key = view_of(arguments_[kKey], packed ? kPackedKey : kKeyArray, held_[kKey]);
  args_.value = view_of(arguments_[kValue], packed ? kPackedValue : kValueArray, held_[kValue]);

  if (packed && args_.cu_seqlens_q.dims[0] == 0) bad_value("cu_seqlens_q is empty, must be [batch + 1]");
  const int rows = packed ? 0 : 1;  // the dimension that counts tokens; heads and head_dim follow
  desc_.batch = packed ? args_.cu_seqlens_q.dims[0] - 1 : args_.query.dims[0];
  desc_.seqlen_q = args_.query.dims[rows];
  desc_.seqlen_k = args_.key.dims[rows];
  desc_.num_heads = args_.query.dims[rows + 1];
  desc_.num_heads_kv = args_.key.dims[rows + 1];
  desc_.head_dim = args_.query.dims[rows + 2];
  desc_.head_dim_v = args_.value.dims[rows + 2];
  desc_.dtype = args_.query.dtype;
}

// NumPy's rule: missing leading dimensions are 1.
void Call::read_broadcast(Position position, const ArrayArgument& argument, Tensor& view, BroadcastOperand& operand) {
  if (arguments_[position] == Py_None) return;
  const Tensor given = view_of(arguments_[position], argument, held_[position]);
  view = given;
  view.ndim = 4;
  for (int i = 0; i < 4; ++i) {
    const int from = i - (4 - given.ndim);
    view.dims[i] = from < 0 ? 1 : given.dims[from];
    view.strides[i] = from < 0 ? 0 : given.strides[from];
    operand.dims[i] = view.dims[i];
  }
  operand.given = true;
  operand.dtype = given.dtype;
}

void Call::read_positions() {
  desc_.causal = flag_argument(arguments_[kCausal], "causal");
  if (PyObject* window = arguments_[kWindow]; window != Py_None) {
    constexpr const char* kTakes = "a pair of integers (left, right)";
    PyObject* pair = PyUnicode_Check(window) ? nullptr : PySequence_Fast(window, "");
    if (pair == nullptr) {
      PyErr_Clear();
      bad_kind("window has type %s, must be %s", kind_of(window), kTakes);
    }
    nb::object items = nb::steal(pair);
    if (PySequence_Fast_GET_SIZE(pair) != 2) {
      bad_value("window has %zd elements, must be %s", PySequence_Fast_GET_SIZE(pair), kTakes);
    }
    desc_.window_left = int64_argument(PySequence_Fast_GET_ITEM(pair, 0), "window[0]");
    desc_.window_right = int64_argument(PySequence_Fast_GET_ITEM(pair, 1), "window[1]");
  }
  if (PyObject* align = arguments_[kAlign]; align != Py_None) {
    constexpr const char* kTakes = "\"top_left\" or \"bottom_right\"";
    const std::string_view name = text_argument(align, "align", kTakes);
    if (name == "top_left") {
      desc_.align = Align::kTopLeft;
    } else if (name == "bottom_right") {
      desc_.align = Align::kBottomRight;
    } else {
      bad_value("align is \"%s\", must be %s", text_of(align).c_str(), kTakes);
    }
  }
  if (PyObject* offset = arguments_[kQueryOffset]; offset != Py_None) {
    if (!PyLong_Check(offset) && is_array(offset) && PyObject_HasAttrString(offset, "ndim") &&
        nb::cast<int>(nb::handle(offset).attr("ndim")) != 0) {
      args_.query_offsets = view_of(offset, kOffsetsArray, held_[kQueryOffset]);
      desc_.has_query_offsets = true;
    } else {
      desc_.query_offset = int64_argument(offset, "query_offset", "an integer or an integer array [batch]");
    }
  }
}

void Call::read_scores() {
  read_broadcast(kAttnBias, kBiasArray, args_.attn_bias, desc_.attn_bias);
  read_broadcast(kAttnMask, kMaskArray, args_.attn_mask, desc_.attn_mask);
  if (arguments_[kScale] != Py_None) desc_.scale = real_argument(arguments_[kScale], "scale");
  desc_.softcap = real_argument(arguments_[kSoftcap], "softcap");
  args_.alibi_slopes = optional_array(kAlibiSlopes, kSlopesArray);
  desc_.alibi_slopes_ndim = args_.alibi_slopes.ndim;

  desc_.dropout_p = real_argument(arguments_[kDropoutP], "dropout_p");
  if (arguments_[kDropoutSeed] != Py_None) {
    args_.dropout_seed = seed_argument(arguments_[kDropoutSeed]);
  } else if (desc_.dropout_p > 0) {
    bad_value("dropout_p is %s, so dropout_seed must be given: 0 to 2^64 - 1", text_of(arguments_[kDropoutP]).c_str());
  }
  args_.dropout_offset = dropout_offset_argument(arguments_[kDropoutOffset]);
}

void Call::read_lengths() {
  args_.seqlens_q = optional_array(kSeqlensQ, kSeqlensQArray);
  args_.seqlens_k = optional_array(kSeqlensK, kSeqlensKArray);
  desc_.has_seqlens_q = args_.seqlens_q.given();
  desc_.has_seqlens_k = args_.seqlens_k.given();
}

void Call::read_results() {
  return_logsumexp_ = flag_argument(arguments_[kReturnLogsumexp], "return_logsumexp");
  desc_.return_column_sums = flag_argument(arguments_[kReturnColumnSums], "return_column_sums");
  PyObject* weights = arguments_[kReturnWeights];
  if (PyUnicode_Check(weights)) {
    if (PyUnicode_CompareWithASCIIString(weights, "mean") != 0) {
      bad_value("return_weights is \"%s\", must be True, False or \"mean\"", text_of(weights).c_str());
    }
    desc_.return_weights = ReturnWeights::kMean;
  } else if (flag_argument(weights, "return_weights")) {
    desc_.return_weights = ReturnWeights::kPerHead;
  }
  if (PyObject* kernel = arguments_[kKernel]; kernel != Py_None) {
    kernel_ = text_argument(kernel, "kernel", "a name out of polyhead.kernels()");
    if (kernel_.empty()) bad_value("kernel is \"\", must be a name out of polyhead.kernels()");
  }
}

nb::object Call::run(const Plan& plan) {
  const AttentionDesc& d = desc_;
  const DType sums = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Results results(arguments_[kQuery], d.dtype);

  args_.out = d.packed ? Tensor(nullptr, d.dtype, {d.seqlen_q, d.num_heads, d.head_dim_v})
                       : Tensor(nullptr, d.dtype, {d.batch, d.seqlen_q, d.num_heads, d.head_dim_v});
  nb::object returned = results.make(args_.out);
  const int num_extra =
      int{return_logsumexp_} + int{d.return_weights != ReturnWeights::kNone} + int{d.return_column_sums};
  if (num_extra > 0) {
    nb::object all = nb::steal(PyTuple_New(1 + num_extra));
    if (!all.is_valid()) throw nb::python_error();
    int count = 0;
    append(all, count, std::move(returned));
    if (return_logsumexp_) {
      args_.logsumexp = d.packed ? Tensor(nullptr, sums, {d.num_heads, d.seqlen_q})
                                 : Tensor(nullptr, sums, {d.batch, d.num_heads, d.seqlen_q});
      append(all, count, results.make(args_.logsumexp));
    }
    if (d.return_weights != ReturnWeights::kNone) {
      args_.weights = d.return_weights == ReturnWeights::kMean
                          ? Tensor(nullptr, d.dtype, {d.batch, d.seqlen_q, d.seqlen_k})
                          : Tensor(nullptr, d.dtype, {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k});
      append(all, count, results.make(args_.weights));
    }
    if (d.return_column_sums) {
      args_.column_sums = Tensor(nullptr, sums, {d.batch, d.num_heads, d.seqlen_k});
      append(all, count, results.make(args_.column_sums));
    }
    returned = std::move(all);
  }

  Status status;
  {
    nb::gil_scoped_release without_gil;
    status = forward_with_workspace(plan, args_);
  }
  check(status);
  return returned;
}

}  // namespace polyhead::python
