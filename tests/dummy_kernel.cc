// A backend of a test's own: this file, and the line of CMakeLists.txt that names it to kernel_list.cc. It stands for a
// device whose memory the host can read, computes as the definition does and counts its calls.
#include <atomic>

#include "contract/kernel.h"
#include "reference/attention.h"

namespace polyhead {

std::atomic<int> dummy_calls = 0;

extern const Kernel kDummy;
const Kernel kDummy = {
    "dummy",
    Device::kCpu,
    [](const AttentionDesc& desc) {
      return desc.dtype == DType::kFloat32 ? std::string() : std::string("dtype is not float32");
    },
    [](const AttentionDesc& desc, int) { return reference::workspace_bytes<float>(desc); },
    [](const AttentionDesc& desc, int) { return reference::backward_workspace_bytes<float>(desc); },
    [](const AttentionDesc& desc, const ForwardArgs& args, const Run&) {
      ++dummy_calls;
      return reference::forward_checked<float>(desc, args, args.workspace);
    },
    [](const AttentionDesc& desc, const BackwardArgs& args, const Run&) {
      ++dummy_calls;
      return reference::backward_checked<float>(desc, args, args.forward.workspace);
    },
};

}  // namespace polyhead
