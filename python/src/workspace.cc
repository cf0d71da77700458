#include "workspace.h"

#include <cstdlib>
#include <memory>
#include <string>

namespace polyhead::python {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kMostKeptBytes = size_t{64} << 20;

void* allocate(size_t bytes) {
  return std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

struct Workspace {
  std::unique_ptr<void, Free> memory;
  size_t bytes = 0;
};

Workspace& kept_workspace() {
  thread_local Workspace kept;
  return kept;
}

}  // namespace

Scratch::Scratch(size_t bytes) {
  if (bytes > kMostKeptBytes) {
    own_ = allocate(bytes);
    memory_ = own_;
  } else {
    Workspace& kept = kept_workspace();
    if (bytes > kept.bytes) {
      kept.memory.reset();
      kept.memory.reset(allocate(bytes));
      kept.bytes = kept.memory ? bytes : 0;
    }
    memory_ = kept.memory.get();
  }
  if (bytes > 0 && memory_ == nullptr) {
    status_ = {StatusCode::kOutOfMemory, "no memory for a workspace of " + std::to_string(bytes) + " bytes"};
  }
}

Scratch::~Scratch() { std::free(own_); }

}  // namespace polyhead::python
