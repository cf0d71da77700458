// Streams and events of the simulated runtime.
#include <utility>

#include "runtime.h"

namespace cuda_sim {
namespace {

cudaStream_t plain(cudaStream_t stream) { return stream == cudaStreamLegacy ? nullptr : stream; }

// Whether tasks of the first wait for earlier ones of the second, and the other way round.
bool ordered(const std::pair<const cudaStream_t, Stream>& a, const std::pair<const cudaStream_t, Stream>& b) {
  if (a.first && b.first) return false;
  return a.second.blocking && b.second.blocking;
}

}  // namespace

cudaError_t give(cudaStream_t stream, std::function<void()> run) {
  const Lock lock(runtime().mutex);
  const auto found = runtime().streams.find(plain(stream));
  if (found == runtime().streams.end()) return failed(cudaErrorInvalidResourceHandle);
  found->second.tasks.push_back({runtime().tasks++, std::move(run)});
  return cudaSuccess;
}

cudaError_t drain(cudaStream_t stream, uint64_t number) {
  const auto found = runtime().streams.find(stream);
  if (found == runtime().streams.end()) return cudaSuccess;  // destroyed: it has run
  std::deque<Task>& tasks = found->second.tasks;
  while (!tasks.empty() && tasks.front().number < number) {
    const Task task = std::move(tasks.front());
    tasks.pop_front();
    for (auto& other : runtime().streams) {
      if (other.first == stream || !ordered(*found, other)) continue;
      if (const cudaError_t error = drain(other.first, task.number)) return error;
    }
    try {
      task.run();
    } catch (const Fault& fault) {
      tasks.clear();
      return failed(fault);
    }
  }
  return cudaSuccess;
}

cudaError_t drain_all() {
  cudaError_t first = cudaSuccess;
  for (auto& [stream, unused] : runtime().streams) {
    const cudaError_t error = drain(stream, UINT64_MAX);
    if (!first) first = error;
  }
  return first;
}

}  // namespace cuda_sim

using namespace cuda_sim;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Lock lock(runtime().mutex);
  *stream = reinterpret_cast<cudaStream_t>(new char);
  runtime().streams[*stream] = {{}, current_device(), (flags & cudaStreamNonBlocking) == 0};
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  const cudaError_t error = drain(stream, UINT64_MAX);
  if (runtime().streams.erase(stream) == 0) return failed(cudaErrorInvalidResourceHandle);
  delete reinterpret_cast<char*>(stream);
  return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  return drain(plain(stream), UINT64_MAX);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  const Lock lock(runtime().mutex);
  const auto found = runtime().streams.find(plain(stream));
  if (found == runtime().streams.end()) return failed(cudaErrorInvalidResourceHandle);
  *device = found->second.device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const Lock lock(runtime().mutex);
  return drain_all();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Lock lock(runtime().mutex);
  *event = reinterpret_cast<cudaEvent_t>(new char);
  runtime().events[*event];
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  if (runtime().streams.count(plain(stream)) == 0) return failed(cudaErrorInvalidResourceHandle);
  runtime().events.at(event) = {plain(stream), runtime().tasks};
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(runtime().mutex);
  const Event there = runtime().events.at(event);
  return give(stream, [there] { drain(there.stream, there.number); });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(runtime().mutex);
  runtime().events.erase(event);
  delete reinterpret_cast<char*>(event);
  return cudaSuccess;
}

}  // extern "C"
