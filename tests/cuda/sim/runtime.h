// What the parts of the simulated runtime share: streams and their tasks, memory, devices, the last error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cudart.h"

namespace cuda_sim {

struct Binary {
  const void* fatbin = nullptr;
  Module module;
  bool parsed = false;
};

// A kernel as the program knows it; parsed at the first launch of its binary.
struct Entry {
  Binary* binary = nullptr;
  std::string name;
  int most_dynamic_shared = 48 * 1024;  // cudaFuncSetAttribute raises it
};

struct Task {
  uint64_t number = 0;  // in the order in which they were given
  std::function<void()> run;
};

// Tasks that nobody has waited for. The null stream waits for the earlier tasks of those that are not non-blocking, and
// they for its.
struct Stream {
  std::deque<Task> tasks;
  int device = 0;
  bool blocking = true;
};

// Where a stream was when the event was recorded.
struct Event {
  cudaStream_t stream = nullptr;
  uint64_t number = 0;  // of the first task behind
};

struct Configuration {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};

struct Runtime {
  Runtime();

  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<Binary>> binaries;
  std::map<const void*, Entry> entries;  // by the host's function
  std::map<cudaStream_t, Stream> streams{{nullptr, {}}, {cudaStreamPerThread, {}}};
  std::map<cudaEvent_t, Event> events;
  std::vector<Configuration> configurations;  // of launches that are being made
  DeviceMemory memory;
  std::map<const void*, int> elsewhere;  // allocations of other devices than 0, by their beginning
  Counters counters;
  std::map<std::string, Counters> of_kernels;
  std::string fault;
  cudaError_t error = cudaSuccess;  // the last, until it is asked for
  uint64_t tasks = 0;
  int most_shared = 163 * 1024;
  std::vector<SimulatedDevice> devices{{}};
  int driver_version = CUDART_VERSION;
};

Runtime& runtime();

using Lock = std::lock_guard<std::recursive_mutex>;

// Remember the error, and give it back.
cudaError_t failed(cudaError_t error);
cudaError_t failed(const Fault& fault);

// Puts a kernel of the file POLYHEAD_SIMULATED_PTX, if there is one of that name, in the place of the program's own; the launches
// of such are told on stderr at the end.
void replace(Entry& entry);
void count_if_replaced(const Entry& entry);

// Of the calling thread.
int current_device();

// Whether that one can run a module.
cudaError_t check_runs_here(const Module& module);

// Puts a task on the stream.
cudaError_t give(cudaStream_t stream, std::function<void()> run);

// Runs all tasks of the stream before `number`; all tasks there are.
cudaError_t drain(cudaStream_t stream, uint64_t number);
cudaError_t drain_all();

}  // namespace cuda_sim
