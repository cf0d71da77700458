// A fault planted in a kernel, and the sentence that finds it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "one_kernel.h"

namespace cuda_sim {

struct Planted {
  const char* name;
  const char* body;
  const char* fault;      // what its sentence begins with; "": none
  const char* more = "";  // and has besides
  Shape shape = {{1, 1, 1}, {64, 1, 1}, 0};
};

// Of a kernel that has two buffers of 64 words, of which the second was never written; "" if it runs.
inline std::string fault_of(const std::string& text, const Shape& shape) {
  try {
    OneKernel kernel(text);
    std::vector<OneKernel::Words> buffers = {OneKernel::Words(64), {}};
    kernel.run(buffers, shape);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

inline void expect(const Planted& planted, const std::string& fault) {
  const std::string begin = planted.fault;
  EXPECT_EQ(fault.substr(0, begin.size()), begin) << planted.name << ": " << fault;
  EXPECT_EQ(fault.empty(), begin.empty()) << planted.name << ": " << fault;
  EXPECT_NE(fault.find(planted.more), std::string::npos) << planted.name << ": " << fault << "\nlacks " << planted.more;
}

}  // namespace cuda_sim
