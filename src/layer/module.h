// What a layer and both blocks of a transformer are inside: lists of steps over one memory, made once from a desc, and the
// calls that walk them. Each of the three says in emit() what the calls of a pass are given and what their steps are; all
// else stands here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "contract/where.h"
#include "layer/steps.h"

namespace polyhead {

enum class Pass {
  kTraining,
  kInference,
  kOneStep,          // of decoding
  kBackward,         // gradients of the inputs; of a block, all of them
  kBackwardWeights,  // of a layer, after kBackward
};
inline constexpr int kNumPasses = 5;

constexpr bool is_backward(Pass pass) { return pass == Pass::kBackward || pass == Pass::kBackwardWeights; }
// Whether what lies on the way is in the reserve.
constexpr bool has_reserve(Pass pass) { return pass == Pass::kTraining || is_backward(pass); }

// A matrix of weights [in, out] or a bias.
struct Parameter {
  const char *name, *grad_name;  // in sentences
  OperandShape shape;            // without dims: there is none
};

struct Module {
  virtual ~Module() = default;

  // Adds to `list` what calls of this pass are given, and their steps, over places in the workspace and the reserve. What
  // a pass finds in the reserve must lie where the one before has taken it.
  virtual void emit(Pass pass, Memory& workspace, Memory& reserve, StepList* list) const = 0;
  // What a list cannot tell about a call.
  virtual Status check(Pass pass, const Call& call) const = 0;

  Machine machine(const Where& call = {}) const { return {linear, run_at(where, call, num_threads), &prepacked}; }
  // Whether the host can look at what lies in a call's tensors and memory.
  bool on_host() const { return *where.device == Device::kCpu; }
  const StepList& steps(Pass pass) const { return lists[static_cast<int>(pass)]; }

  const char* name = "block";                         // in sentences
  const char* without = "the plan was made without";  // likewise: a parameter that is not there
  DType dtype = DType::kFloat32;
  std::vector<Parameter> parameters;  // as arguments from kArgWeights and kArgGradWeights on
  size_t num_matrices = 0;            // which come first
  AttentionDesc asked;                // of the attention inside, with its sizes; asks for nothing, if there is none
  int64_t beams = 1;                  // each with lengths of its own
  const linear::Kernel* linear = nullptr;
  Where where;  // as planned
  int num_threads = 1;
  uint64_t fingerprint = 0;

  PrepackedLayout prepacked;  // of the matrices
  size_t workspace_bytes = 0, backward_workspace_bytes = 0, reserve_bytes = 0;
  StepList lists[kNumPasses];
  StepList pack;  // no steps: what prepack_weights() is given
};

// Sets where and num_threads.
Status set_where(const Where& asked, Module* module);

// Fills in what emit() and the fields above it decide. An error if it leaves the address space.
Status make_lists(Module& module, std::span<const Pass> passes);

enum class ParameterUse { kForward, kBackward, kMatrices, kGradients };
void expect_parameters(const Module& module, ParameterUse use, StepList* list);

// Checks the call, begins the reserve or looks into it, and walks the list of the pass. The pass of a forward call is told
// by its reserve and its step.
Status compute(const Module& module, Pass pass, const Call& call);
Status forward(const Module& module, const Call& call);
Status prepack_weights(const Module& module, const Call& call, void* prepacked, size_t bytes);

}  // namespace polyhead
