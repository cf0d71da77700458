#include "program_call.h"

#include <cstddef>

#include "call.h"
#include "program_cache.h"
#include "scalars.h"

namespace polyhead::python {
namespace {

const char* dtypes_of(ValueType type) {
  return type == ValueType::kFloat ? kFloats : type == ValueType::kInt ? "int32 or int64" : "bool";
}

}  // namespace

Tensor as_capture(Tensor given) {
  if (given.ndim > 0) return given;
  given.ndim = 1;
  given.dims[0] = given.strides[0] = 1;
  return given;
}

void Captures::read(PyObject* program, PyObject* captured, AttentionDesc& desc, ForwardArgs& args) {
  if (program == Py_None) return;
  desc.program = *checked(cached_program(text_argument(program, "program", "the text of a program")));
  const std::span<const Capture> captures = desc.program->captures();
  for (size_t i = 0; i < captures.size(); ++i) {
    const Capture& capture = captures[i];
    const char* const name = capture.name.c_str();
    if (captured != Py_None) arrays_[i] = nb::borrow(PyDict_GetItemString(captured, name));
    if (!arrays_[i].is_valid()) bad_value("the program reads %s, which captured does not hold", name);
    given_[i] = view_of(arrays_[i].ptr(), {name, dtypes_of(capture.type), 0, 4, "as the program indexes it"}, held_[i]);
    const Tensor& tensor = tensors_[i] = as_capture(given_[i]);
    CaptureShape shape{.dtype = tensor.dtype, .ndim = tensor.ndim};
    for (int d = 0; d < tensor.ndim; ++d) shape.dims[d] = tensor.dims[d];
    desc.captures.push_back(shape);
  }
  args.captures = {tensors_.data(), captures.size()};
}

}  // namespace polyhead::python
