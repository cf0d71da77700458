#include "cuda/program_kernels.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/sentence.h"
#include "cuda/call.h"
#include "cuda/nvrtc.h"
#include "cuda/program_text.h"
#include "cuda/sources.h"

namespace polyhead::cuda {
namespace {

// What a kernel is given, and the file of the class that it runs.
struct Unit {
  const char *file, *parameters, *arguments;
};
constexpr Unit kForward = {"attention_forward.cuh", "const __grid_constant__ Problem p", "p"};
constexpr Unit kStoredForward = {"attention_forward.cuh", "const __grid_constant__ StoredProblem p", "p"};
constexpr Unit kBackward = {"attention_backward.cuh", "const __grid_constant__ BackwardProblem p", "p"};
constexpr Unit kPairSums = {"attention_pair_sums.cuh",
                            "const __grid_constant__ BackwardProblem p, const __grid_constant__ PairSums sums",
                            "p, sums"};
constexpr Unit kStoredWeights = {
    "attention_pair_sums.cuh", "const __grid_constant__ StoredWeightsProblem p, const __grid_constant__ PairSums sums",
    "p, sums"};
constexpr Unit kCaptures = {"attention_pair_sums.cuh",
                            "const __grid_constant__ BackwardProblem p, const __grid_constant__ CaptureSums sums",
                            "p, sums"};

// Equal programs are one object, which is kept too.
struct Key {
  SharedProgram program;
  uint64_t variant = 0;  // of its text
  std::string kernel;
  int device = 0;

  auto operator<=>(const Key&) const = default;
};
struct Cache {
  std::mutex mutex;
  std::map<Key, const void*> kernels;
};
Cache& cache() {
  static Cache& made = *new Cache;
  return made;
}

int capability(int device) {
  int major = 0, minor = 0;
  static_cast<void>(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  static_cast<void>(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

// Kernel `kernel` of a source.
Result<const void*> compiled(const AttentionDesc& desc, const std::string& source, int device) {
  const std::string program = program_text(desc);
  std::vector<Source> files(kSources.begin(), kSources.end());
  files.push_back({"cuda/program.cuh", program.c_str()});
  const Result<std::string> code = compile(source, files, capability(device));
  if (!code.ok()) return code.status();
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  cudaError_t error = cudaLibraryLoadData(&library, code->data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error == cudaSuccess) error = cudaLibraryGetKernel(&kernel, library, "kernel");
  if (error == cudaSuccess) return static_cast<const void*>(kernel);
  static_cast<void>(cudaGetLastError());  // the caller's next question is not answered with it
  return Status(StatusCode::kInternal, sentence("CUDA does not load a compiled program: ", cudaGetErrorString(error)));
}

// Finds one kernel after the other, as long as none fails.
class Finder {
 public:
  Finder(const AttentionDesc& desc, Number elements) : desc_(desc), variant_(text_variant(desc)) {
    const char* const names[] = {"Float32", "BFloat16", "Float16"};
    columns_ = tile_columns(static_cast<int>(std::max(desc.head_dim, desc.head_dim_v)));
    tile_ = sentence(names[static_cast<int>(elements)], ", ", columns_);
    static_cast<void>(cudaGetDevice(&device_));
  }

  // A template that takes the type and columns of a tile, and `more`.
  std::string of_tile(const char* name, const std::string& more = "") const {
    return sentence(name, "<", tile_, more, ">");
  }

  // `runs`: a class; `blocks`: that a multiprocessor should hold.
  void find(const Unit& unit, const std::string& runs, int blocks, const void** kernel) {
    if (!status_.ok()) return;
    const std::lock_guard<std::mutex> lock(cache().mutex);
    const void*& known = cache().kernels[{desc_.program, variant_, runs, device_}];
    if (known == nullptr) {
      const std::string source =
          sentence("#include \"cuda/", unit.file, "\"\nusing namespace polyhead::cuda;\nextern \"C\" __global__ void ",
                   "__launch_bounds__(kThreads, ", blocks, ") kernel(", unit.parameters, ") {\n  using Runs = ", runs,
                   ";\n  Runs(", unit.arguments, ", dynamic_shared<Runs::Memory>()).run();\n}\n");
      const Result<const void*> made = compiled(desc_, source, device_);
      if (made.ok()) known = *made;
      status_ = made.status();
    }
    *kernel = known;
  }

  int columns() const { return columns_; }
  const Status& status() const { return status_; }

 private:
  const AttentionDesc& desc_;
  const uint64_t variant_;
  std::string tile_;
  int columns_ = 0, device_ = 0;
  Status status_;
};

}  // namespace

Result<ProgramKernels> forward_kernels(const AttentionDesc& desc, Number elements) {
  ProgramKernels kernels;
  if (desc.program == nullptr) return kernels;
  Finder finder(desc, elements);
  const bool stored = is_stored(desc);
  finder.find(stored ? kStoredForward : kForward, finder.of_tile("Forward", stored ? ", true, true" : ", true"), 2,
              &kernels.forward);
  if (desc.return_weights != ReturnWeights::kNone || desc.return_column_sums) {
    finder.find(stored ? kStoredWeights : kPairSums, stored ? "StoredWeights" : finder.of_tile("SumsOfPairs"), 1,
                &kernels.pair_sums);
  }
  if (!finder.status().ok()) return finder.status();
  return kernels;
}

Result<ProgramKernels> backward_kernels(const AttentionDesc& desc, const BackwardProblem& problem,
                                        const CaptureSums& captures) {
  ProgramKernels kernels;
  if (desc.program == nullptr) return kernels;
  Finder finder(desc, problem.elements);
  const bool wide = finder.columns() > 128, exact = problem.exact && problem.elements != Number::kFloat32;
  const auto find = [&](GradientPass pass) {
    const std::string more = sentence(", ", static_cast<int>(pass), ", ", exact, ", true");
    finder.find(kBackward, finder.of_tile("Backward", more), wide ? 1 : 2, &kernels.backward[pass]);
  };
  const bool of_key = problem.grad_key.data != nullptr, of_value = problem.grad_value.data != nullptr;
  if (problem.grad_query.data != nullptr) find(kOfQuery);
  if (of_key && wide) find(kOfKey);
  if (of_value && wide) find(kOfValue);
  if ((of_key || of_value) && !wide) find(kOfKeyAndValue);
  if (problem.sums[0].result.data != nullptr || problem.sums[1].result.data != nullptr) {
    finder.find(kPairSums, finder.of_tile("SumsOfPairs"), 1, &kernels.pair_sums);
  }
  if (captures.first[kMostCaptures] > 0) {
    finder.find(kCaptures, finder.of_tile("CaptureGradients"), 1, &kernels.capture_gradients);
  }
  if (!finder.status().ok()) return finder.status();
  return kernels;
}

}  // namespace polyhead::cuda
