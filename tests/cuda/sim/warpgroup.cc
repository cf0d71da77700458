#include "warpgroup.h"

#include <algorithm>

#include "warp.h"

namespace cuda_sim {

Products::Products(const Kernel& kernel) {
  const auto& code = kernel.code;
  if (std::none_of(code.begin(), code.end(), [](const Instruction& i) { return i.kind == Kind::kGroup; })) return;
  uses_.resize(static_cast<size_t>(kernel.num_slots));
  for (const Constant& constant : kernel.constants) use(constant.slot).constant = true;
  for (const SpecialSlot& special : kernel.specials) use(special.slot).constant = true;
}

void Products::reset() {
  for (Use& each : uses_) each = {0, 0, 0, each.constant};
  begun_.clear();
  ended_ = 0;
  committed_ = 0;
  fences_ = 0;
}

void Products::fault(const Warp& warp, const Instruction& i, const std::string& what, uint32_t product,
                     int lane) const {
  const Instruction& there = *begun_[product - 1].instruction;
  warp.fault(i, what + ", " + *there.name + " at " + warp.launch.module.place(there.place), lane);
}

void Products::check_fence(const Warp& warp, const Instruction& i, const Use& use, const char* what) const {
  if (fences_ == 0) warp.fault(i, "no wgmma.fence before the first product");
  if (use.fences > fences_) warp.fault(i, std::string("register of ") + what + " written since the last wgmma.fence");
}

uint32_t Products::begin(const Warp& warp, const Instruction& i, int num_a) {
  const auto number = static_cast<uint32_t>(begun_.size() + 1);
  for (int n = 0; n < num_a; ++n) {
    Use& a = use(i.args[n]);
    if (in_flight(a.sum)) fault(warp, i, "register of A is a sum of a product that was not waited for", a.sum, -1);
    check_fence(warp, i, a, "A");
    a.a = number;
  }
  for (const int slot : i.sums) {
    Use& sum = use(slot);
    if (in_flight(sum.a)) fault(warp, i, "sum is a register of A of a product that was not waited for", sum.a, -1);
    check_fence(warp, i, sum, "a sum");
    if (in_flight(sum.sum)) {
      const Product& other = begun_[sum.sum - 1];
      if (other.instruction->variant != i.variant && other.fences == static_cast<int>(fences_)) {
        fault(warp, i, "sum of a product of another shape, without wgmma.fence between", sum.sum, -1);
      }
    }
    sum.sum = number;
  }
  begun_.push_back({&i, committed_, static_cast<int>(fences_)});
  return number;
}

size_t Products::wait(int groups) {
  while (ended_ < begun_.size() && begun_[ended_].group < committed_ - groups) ++ended_;
  return ended_;
}

// A mov touches nothing: what it writes is the same register to the assembler, which takes it away.
void Products::touch(const Warp& warp, const Instruction& i, uint32_t mask) {
  const int lane = first_lane(mask);
  for (int n = i.num_results; n < i.num_args && !i.moves; ++n) {
    const Use& read = use(i.args[n]);
    if (in_flight(read.sum)) fault(warp, i, "sum read before its product was waited for", read.sum, lane);
    if (in_flight(read.a)) fault(warp, i, "register of A read before its product was waited for", read.a, lane);
  }
  for (int n = 0; n < i.num_results; ++n) {
    Use& written = use(i.args[n]);
    if (in_flight(written.sum)) fault(warp, i, "sum written before its product was waited for", written.sum, lane);
    if (in_flight(written.a))
      fault(warp, i, "register of A written before its product was waited for", written.a, lane);
    written = {0, 0, fences_ + 1, false};
    if (!i.moves || use(i.args[1]).constant) continue;
    written = use(i.args[1]);
    written.a = 0;
  }
}

void Products::check_ended(const Warp& warp, const Instruction& i) const {
  if (ended_ == begun_.size()) return;
  const bool committed = begun_[ended_].group < committed_;
  fault(warp, i, std::string("the warp ends before it has ") + (committed ? "waited for" : "committed") + " a product",
        static_cast<uint32_t>(ended_ + 1), -1);
}

void Warpgroup::reset() {
  steps_.clear();
  std::fill(std::begin(done_), std::end(done_), 0);
}

void Warpgroup::step(const Warp& warp, const Instruction& i, const Operands& operands) {
  const unsigned first = static_cast<unsigned>(warp.index) / 4 * 4;
  if (warp.launch.block.count() < (first + 4) * kLanes) {
    warp.fault(i, "the warpgroup is not whole: a block of " + std::to_string(warp.launch.block.count()) + " threads");
  }
  size_t& done = done_[warp.index % 4];
  if (done == steps_.size()) steps_.push_back({&i, operands, warp.index});
  const Step& step = steps_[done++];
  const std::string others = "warp " + std::to_string(step.warp) + " of the warpgroup";
  if (step.instruction != &i) {
    warp.fault(i, "divergence: " + others + " is at " + *step.instruction->name + ", " +
                      warp.launch.module.place(step.instruction->place));
  }
  if (step.operands != operands) warp.fault(i, "operands differ from those of " + others);
}

void Warpgroup::check_complete(const Warp* first) const {
  for (int n = 0; n < 4; ++n) {
    if (done_[n] == steps_.size()) continue;
    const Step& step = steps_[done_[n]];
    first[n].fault(*step.instruction, "divergence: the warp has ended without it, warp " + std::to_string(step.warp) +
                                          " of the warpgroup has not");
  }
}

}  // namespace cuda_sim
