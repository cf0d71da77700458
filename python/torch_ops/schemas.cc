#include "schemas.h"

#include "stable_abi.h"

namespace polyhead::torch_ops {
namespace {

constexpr const char* kSchemas[] = {
#include "schemas.inc"  // of polyhead/torch/schemas.txt, by python/CMakeLists.txt
};

}  // namespace

const char* define_operators() {
  TorchLibraryHandle library = nullptr;  // never deleted: that would take the definitions away
  if (aoti_torch_library_init_def("polyhead", __FILE__, __LINE__, &library) != 0) return "the namespace";
  for (const char* schema : kSchemas) {
    if (aoti_torch_library_def(library, schema) != 0) return schema;
  }
  return nullptr;
}

}  // namespace polyhead::torch_ops
