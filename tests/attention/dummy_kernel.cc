// A backend of a test's own: this file, and the line of CMakeLists.txt that names it to kernel_list.cc. It stands for a
// device whose memory the host can read, computes as the definition does and counts its calls.
#include <atomic>

#include "contract/kernel.h"
#include "reference/attention.h"

namespace polyhead {

std::atomic<int> dummy_calls = 0;

static bool wide(const AttentionDesc& desc) { return desc.dtype == DType::kFloat64; }

extern const Kernel kExtraKernel;
const Kernel kExtraKernel = {
    "dummy",
    Device::kCpu,
    [](const AttentionDesc& desc) {
      if (desc.dtype != DType::kFloat32 && !wide(desc)) return std::string("dtype is not float32 or float64");
      return std::string();
    },
    [](const AttentionDesc& desc, int) {
      return wide(desc) ? reference::workspace_bytes<double>(desc) : reference::workspace_bytes<float>(desc);
    },
    [](const AttentionDesc& desc, int) {
      return wide(desc) ? reference::backward_workspace_bytes<double>(desc)
                        : reference::backward_workspace_bytes<float>(desc);
    },
    [](const AttentionDesc& desc, const ForwardArgs& args, const Run&) {
      ++dummy_calls;
      return wide(desc) ? reference::forward_checked<double>(desc, args, args.workspace)
                        : reference::forward_checked<float>(desc, args, args.workspace);
    },
    [](const AttentionDesc& desc, const BackwardArgs& args, const Run&) {
      ++dummy_calls;
      return wide(desc) ? reference::backward_checked<double>(desc, args, args.forward.workspace)
                        : reference::backward_checked<float>(desc, args, args.forward.workspace);
    },
};

}  // namespace polyhead
