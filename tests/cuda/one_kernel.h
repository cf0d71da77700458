// A kernel from PTX text, and what a grid of it made of its buffers.
#pragma once

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "sim/fault.h"
#include "sim/run.h"

namespace cuda_sim {

inline std::string head(const std::string& target = "sm_80") {
  return ".version 9.0\n.target " + target + "\n.address_size 64\n";
}

// Instructions that no GPU before compute capability 9.0 has, and those that go with them.
inline bool is_of_sm90(const std::string& name) {
  return name.starts_with("wgmma.") || name.starts_with("mbarrier.") || name.starts_with("stmatrix.") ||
         name.starts_with("setmaxnreg.") || name.starts_with("fence.proxy.");
}

// Of a kernel whose parameters are `num_buffers` pointers, p0, p1, ..., which %rd0, %rd1, ... hold. Registers to use:
// 16 bits %h0..99, 32 bits %r0..99 and %f0..99, 64 bits %rd10..99, predicates %p0..19; 1 KB of shared memory `smem`.
inline std::string kernel_text(const std::string& body, int num_buffers, const std::string& target = "sm_80") {
  std::string parameters, loads;
  for (int n = 0; n < num_buffers; ++n) {
    const std::string number = std::to_string(n);
    parameters += (n ? ", .param .u64 p" : ".param .u64 p") + number;
    loads += "ld.param.u64 %rd" + number + ", [p" + number + "];\n";
  }
  return head(target) + (".visible .entry k(" + parameters + ")\n{\n") +
         ".reg .b16 %h<100>; .reg .b32 %r<100>; .reg .f32 %f<100>; .reg .b64 %rd<100>; .reg .pred %p<20>; .shared "
         ".align 16 .b8 "
         "smem[1024];\n" +
         loads + body + "\nret;\n}\n\t.file 1 \"/src/k.cu\"\n";
}

// Buffers of 64-bit words in device memory.
class OneKernel {
 public:
  using Words = std::vector<uint64_t>;

  explicit OneKernel(const std::string& text) : module_(parse(text)) {}

  // Each of `buffers` is what it holds before, and afterwards; an empty one is `unwritten` words that nobody has
  // written.
  void run(std::vector<Words>& buffers, const Shape& shape, size_t unwritten = 64) {
    std::vector<unsigned char> parameters(8 * buffers.size());
    std::vector<void*> memory;
    for (size_t n = 0; n < buffers.size(); ++n) {
      const bool written = !buffers[n].empty();
      if (!written) buffers[n].resize(unwritten);
      memory.push_back(memory_.allocate(8 * buffers[n].size()));
      std::memcpy(memory[n], buffers[n].data(), 8 * buffers[n].size());
      if (written) memory_.set_written(memory[n], 8 * buffers[n].size());
      std::memcpy(&parameters[8 * n], &memory[n], 8);
    }
    cuda_sim::run(module_, module_.kernels.at("k"), shape, parameters, memory_, counters_);
    for (size_t n = 0; n < buffers.size(); ++n) {
      std::memcpy(buffers[n].data(), memory[n], 8 * buffers[n].size());
      memory_.release(memory[n]);
    }
  }

  const Counters& counters() const { return counters_; }

  // The names of those that its text has.
  std::set<std::string> instructions() const {
    std::set<std::string> names;
    for (const auto& [name, opcode] : module_.used) names.insert(name);
    return names;
  }

 private:
  const Module module_;
  DeviceMemory memory_;
  Counters counters_;
};

}  // namespace cuda_sim
