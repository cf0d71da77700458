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
    tensors_[i] = as_capture(given_[i]);
    desc.captures.push_back(capture_shape(tensors_[i]));
  }
  args.captures = {tensors_.data(), captures.size()};
}

}  // namespace polyhead::python
