#include "workspace.h"

#include <cstdlib>
#include <memory>

namespace polyhead::python {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kMostKeptBytes = size_t{64} << 20;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(size_t bytes) {
  return Memory(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
}

struct Workspace {
  Memory memory;
  size_t bytes = 0;
};

Workspace& kept_workspace() {
  thread_local Workspace kept;
  return kept;
}

// run() with args.workspace being `bytes` of memory.
template <class Run>
Status with_workspace(size_t bytes, ForwardArgs& args, Run run) {
  Workspace& kept = kept_workspace();
  Memory own;
  if (bytes > kMostKeptBytes) {
    own = allocate(bytes);
    args.workspace = own.get();
  } else {
    if (bytes > kept.bytes) {
      kept.memory.reset();
      kept.memory = allocate(bytes);
      kept.bytes = kept.memory ? bytes : 0;
    }
    args.workspace = kept.memory.get();
  }
  if (bytes > 0 && args.workspace == nullptr) {
    return {StatusCode::kOutOfMemory, "no memory for a workspace of " + std::to_string(bytes) + " bytes"};
  }
  args.workspace_bytes = bytes;
  return run();
}

}  // namespace

Status forward_with_workspace(const Plan& plan, ForwardArgs& args) {
  return with_workspace(plan.workspace_bytes(), args, [&] { return plan.forward(args); });
}

Status backward_with_workspace(const Plan& plan, BackwardArgs& args) {
  return with_workspace(plan.backward_workspace_bytes(), args.forward, [&] { return plan.backward(args); });
}

}  // namespace polyhead::python
