// OneKernel's twin on a GPU: the same PTX text, compiled and run by NVIDIA's driver, which is opened at run time.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "one_kernel.h"

namespace cuda_sim {

// The driver's functions that are used; throws where there is no driver or no GPU.
class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  // Why there is none; "" if there is.
  static std::string why_not() try {
    get();
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }

  int capability = 0;  // of the GPU, 90 for 9.0
  decltype(&cuModuleLoadDataEx) load = nullptr;
  decltype(&cuModuleGetFunction) find = nullptr;
  decltype(&cuModuleUnload) unload = nullptr;
  decltype(&cuMemAlloc) allocate = nullptr;
  decltype(&cuMemFree) release = nullptr;
  decltype(&cuMemcpyHtoD) to_device = nullptr;
  decltype(&cuMemcpyDtoH) to_host = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;
  decltype(&cuCtxSynchronize) wait = nullptr;
  decltype(&cuGetErrorString) words = nullptr;

  void check(CUresult result, const char* what) const {
    if (result == CUDA_SUCCESS) return;
    const char* text = "";
    words(result, &text);
    throw std::runtime_error(std::string(what) + ": " + text);
  }

 private:
  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error("no NVIDIA driver is installed here");
    const auto load_name = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
    };
    decltype(&cuInit) init = nullptr;
    decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
    decltype(&cuCtxSetCurrent) set_current = nullptr;
    decltype(&cuDeviceGetAttribute) attribute = nullptr;
    load_name(init, "cuInit");
    load_name(retain, "cuDevicePrimaryCtxRetain");
    load_name(set_current, "cuCtxSetCurrent");
    load_name(attribute, "cuDeviceGetAttribute");
    load_name(load, "cuModuleLoadDataEx");
    load_name(find, "cuModuleGetFunction");
    load_name(unload, "cuModuleUnload");
    load_name(allocate, "cuMemAlloc_v2");
    load_name(release, "cuMemFree_v2");
    load_name(to_device, "cuMemcpyHtoD_v2");
    load_name(to_host, "cuMemcpyDtoH_v2");
    load_name(launch, "cuLaunchKernel");
    load_name(wait, "cuCtxSynchronize");
    load_name(words, "cuGetErrorString");
    CUcontext context = nullptr;
    check(init(0), "the driver finds no GPU");
    check(retain(&context, 0), "the GPU cannot be used");
    check(set_current(context), "the GPU cannot be used");
    int minor = 0;
    check(attribute(&capability, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0), "the GPU cannot be used");
    check(attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0), "the GPU cannot be used");
    capability = 10 * capability + minor;
  }
};

// The first of its text's kernels, "k".
class DeviceKernel {
 public:
  using Words = OneKernel::Words;

  explicit DeviceKernel(const std::string& text) {
    char log[2000] = {};
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
    const CUresult result = driver_.load(&module_, text.c_str(), 2, options, values);
    driver_.check(result, (std::string("PTX is refused: ") + log + text).c_str());
    driver_.check(driver_.find(&function_, module_, "k"), "there is no kernel k");
  }
  ~DeviceKernel() { driver_.unload(module_); }
  DeviceKernel(const DeviceKernel&) = delete;
  DeviceKernel& operator=(const DeviceKernel&) = delete;

  std::set<std::string> instructions() const { return {}; }  // only the interpreter knows

  // As OneKernel's.
  void run(std::vector<Words>& buffers, const Shape& shape, size_t unwritten = 64) {
    std::vector<CUdeviceptr> memory(buffers.size());
    std::vector<void*> arguments;
    for (size_t n = 0; n < buffers.size(); ++n) {
      if (buffers[n].empty()) buffers[n].resize(unwritten);
      driver_.check(driver_.allocate(&memory[n], 8 * buffers[n].size()), "no memory on the GPU");
      driver_.check(driver_.to_device(memory[n], buffers[n].data(), 8 * buffers[n].size()), "a copy failed");
      arguments.push_back(&memory[n]);
    }
    const auto& [grid, block] = std::pair(shape.grid, shape.block);
    driver_.check(driver_.launch(function_, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                 static_cast<unsigned>(shape.dynamic_shared_bytes), nullptr, arguments.data(), nullptr),
                  "the kernel was not launched");
    driver_.check(driver_.wait(), "the kernel erred");
    for (size_t n = 0; n < buffers.size(); ++n) {
      driver_.check(driver_.to_host(buffers[n].data(), memory[n], 8 * buffers[n].size()), "a copy failed");
      driver_.release(memory[n]);
    }
  }

 private:
  const Driver& driver_ = Driver::get();
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace cuda_sim
