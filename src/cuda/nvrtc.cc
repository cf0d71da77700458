#include "cuda/nvrtc.h"

#include <dlfcn.h>

#include <vector>

#include "core/sentence.h"

namespace polyhead::cuda {
namespace {

using Program = void*;  // nvrtcProgram
using Code = int;       // nvrtcResult, 0: success

// What the kernels include of the standard library, which NVRTC comes without.
constexpr Source kStandard[] = {{"cstdint", R"(#pragma once
using int8_t = signed char; using uint8_t = unsigned char; using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned; using int64_t = long long; using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#define INT64_MIN (-9223372036854775807LL - 1)
)"},
                                {"cstddef", "#pragma once\n"},
                                {"cmath", R"(#pragma once
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
)"},
                                {"array", R"(#pragma once
namespace std {
template <class T, unsigned long long n>
struct array {
  T elements[n];
  constexpr T& operator[](unsigned long long i) { return elements[i]; }
  constexpr const T& operator[](unsigned long long i) const { return elements[i]; }
};
}  // namespace std
)"}};

struct Library {
  Code (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  Code (*compile)(Program, int, const char* const*) = nullptr;
  Code (*code_size)(Program, size_t*) = nullptr;
  Code (*code)(Program, char*) = nullptr;
  Code (*log_size)(Program, size_t*) = nullptr;
  Code (*log)(Program, char*) = nullptr;
  Code (*destroy)(Program*) = nullptr;
  bool there = false;

  Library() {
    void* library = nullptr;
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return;
    there = true;
    find(library, "nvrtcCreateProgram", create);
    find(library, "nvrtcCompileProgram", compile);
    find(library, "nvrtcGetCUBINSize", code_size);
    find(library, "nvrtcGetCUBIN", code);
    find(library, "nvrtcGetProgramLogSize", log_size);
    find(library, "nvrtcGetProgramLog", log);
    find(library, "nvrtcDestroyProgram", destroy);
  }

 private:
  template <class Function>
  void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    there = there && function != nullptr;
  }
};

const Library& library() {
  static const Library opened;
  return opened;
}

std::string text_of(Program program, Code (*size)(Program, size_t*), Code (*get)(Program, char*)) {
  size_t bytes = 0;
  if (size(program, &bytes) != 0) return "";
  std::string text(bytes, '\0');
  return get(program, text.data()) == 0 ? text : "";
}

}  // namespace

std::string why_no_compiler() {
  return library().there ? "" : "a program needs NVRTC, and no libnvrtc of CUDA 12 or 13 can be opened";
}

Result<std::string> compile(const std::string& source, std::span<const Source> includes, int capability) {
  if (std::string reason = why_no_compiler(); !reason.empty()) return Status(StatusCode::kUnsupported, reason);
  std::vector<const char*> names, texts;
  for (const std::span<const Source> list : {std::span<const Source>(kStandard), includes}) {
    for (const Source& file : list) names.push_back(file.name), texts.push_back(file.text);
  }
  Program program = nullptr;
  // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): of a library that is there all functions were found
  Code code = library().create(&program, source.c_str(), "kernel.cu", static_cast<int>(names.size()), texts.data(),
                               names.data());
  if (code != 0) return Status(StatusCode::kInternal, sentence("NVRTC takes no program: error ", code));
  const std::string architecture = sentence("--gpu-architecture=sm_", capability);
  const char* const options[] = {"--std=c++20", "--device-as-default-execution-space", architecture.c_str()};
  code = library().compile(program, static_cast<int>(std::size(options)), options);
  std::string result = code == 0 ? text_of(program, library().code_size, library().code) : "";
  const std::string log = code == 0 ? "" : text_of(program, library().log_size, library().log);
  static_cast<void>(library().destroy(&program));
  if (!result.empty()) return result;
  return Status(StatusCode::kInternal, sentence("NVRTC does not compile a program: error ", code, " ", log.c_str()));
}

}  // namespace polyhead::cuda
