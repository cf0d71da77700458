#include "lent.h"

#include "reach.h"
#include "sim/cudart.h"

namespace polyhead {

Lent::~Lent() {
  for (const Part& part : parts_) cuda_sim::take_back(part.host);
}

void Lent::lend(Tensor& t, bool written) {
  t.device = Device::kCuda;
  if (!t.given() || t.num_elements() == 0) return;
  for (const Reach& part : parts_of(t)) {
    parts_.push_back({static_cast<char*>(t.data) + part.first, nullptr, part.bytes()});
    cuda_sim::lend(parts_.back().host, part.bytes(), written);
  }
}

void Lent::lend(void*& pointer, size_t bytes) {
  if (bytes == 0) return;
  parts_.push_back({pointer, nullptr, bytes});
  cuda_sim::lend(pointer, bytes, false);
}

std::string take_fault() { return cuda_sim::take_fault(); }

}  // namespace polyhead
