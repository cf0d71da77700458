// What is asynchronous about the products of warpgroups (wgmma), and what their four warps must do together.
//
// The sums are in their registers at once, but nobody may touch these, nor the registers of A, before wgmma.wait_group has
// waited for the product's group; nor may a product begin whose registers were written since the last wgmma.fence.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "program.h"

namespace cuda_sim {

// The products of a warp, in their order, and what they have to do with its registers.
class Products {
 public:
  explicit Products(const Kernel& kernel);

  void reset();  // before a block

  // Whether the kernel has any: else nothing of this need be asked.
  bool any() const { return !uses_.empty(); }

  // The number of the product that begins now, from 1. Its sums are those of the instruction, its A the first `num_a` args.
  uint32_t begin(const Warp& warp, const Instruction& i, int num_a);
  void fence() { ++fences_; }
  void commit() { ++committed_; }
  // Until so many groups at most have not ended; how many products have, since the block began.
  size_t wait(int groups);

  // Another instruction reads and writes its registers.
  void touch(const Warp& warp, const Instruction& i, uint32_t mask);
  // When the warp ends at i.
  void check_ended(const Warp& warp, const Instruction& i) const;

 private:
  struct Product {
    const Instruction* instruction = nullptr;
    int group = 0, fences = 0;  // before it
  };
  // Of a register.
  struct Use {
    uint32_t sum = 0, a = 0;  // the last product of which it is a sum, or a part of A; 0: none
    uint32_t fences = 0;      // wgmma.fences that a product must have behind it, since the last write
    bool constant = false;    // no register: nobody writes it
  };

  Use& use(int slot) { return uses_[static_cast<size_t>(slot)]; }
  bool in_flight(uint32_t product) const { return product > ended_; }
  void check_fence(const Warp& warp, const Instruction& i, const Use& use, const char* what) const;
  [[noreturn]] void fault(const Warp& warp, const Instruction& i, const std::string& what, uint32_t product,
                          int lane) const;

  std::vector<Use> uses_;  // [slot]
  std::vector<Product> begun_;
  size_t ended_ = 0;  // the first so many
  int committed_ = 0;
  uint32_t fences_ = 0;
};

// Four warps, of which each does the same wgmma instructions with the same operands.
class Warpgroup {
 public:
  using Operands = std::array<uint64_t, 3>;

  void reset();  // before a block

  // What a warp does next.
  void step(const Warp& warp, const Instruction& i, const Operands& operands);
  // When all have ended; `first` is the group's first warp.
  void check_complete(const Warp* first) const;

 private:
  struct Step {
    const Instruction* instruction = nullptr;
    Operands operands = {};
    int warp = 0;  // that did it first
  };

  std::vector<Step> steps_;
  size_t done_[4] = {};  // by each warp
};

}  // namespace cuda_sim
