#include "contract/where.h"

#include "core/sentence.h"

namespace polyhead {

Status check_where(const Where& planned, const Where& call) {
  const Device device = *planned.device;
  if (call.device && *call.device != device) {
    return invalid(
        sentence("where.device is ", device_name(*call.device), ", the plan was made for ", device_name(device)));
  }
  if (call.stream != nullptr && device == Device::kCpu) return invalid("stream is given, but the CPU has no streams");
  return {};
}

Result<Where> planned_where(const Where& asked) {
  Where planned = asked;
  if (!planned.device) planned.device = Device::kCpu;
  if (planned.executor == nullptr) planned.executor = &default_executor();
  if (Status status = check_where(planned, asked); !status.ok()) return status;
  return planned;
}

Run run_at(const Where& planned, const Where& call, int num_threads) {
  return {call.executor != nullptr ? call.executor : planned.executor, num_threads,
          call.stream != nullptr ? call.stream : planned.stream};
}

Status check_place(const linear::Kernel& kernel, const Operands& operands, const void* workspace,
                   size_t workspace_bytes, const Run& run) {
  if (kernel.check_place == nullptr) return {};
  linear::NamedMemory memory[Operands::kMost + 1];
  size_t count = 0;
  operands.for_each([&](const char* name, const void* data) { memory[count++] = {name, data}; });
  if (workspace_bytes > 0) memory[count++] = {"workspace", workspace};
  return kernel.check_place({memory, count}, run);
}

}  // namespace polyhead
