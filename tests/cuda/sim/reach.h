// Where the bytes of an access lie, whatever the space; and what an access costs.
#pragma once

#include "device_memory.h"
#include "warp.h"

namespace cuda_sim {

// Faults if a lane must not touch them.
unsigned char* reach(Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes, Access access);

// Faults unless `address` is a multiple of `bytes`.
void check_aligned(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes);

// Banks of shared memory: 32, of 4 bytes. Lanes take turns, so that 128 bytes a phase are asked for.
void count_banks(Counters& counters, const uint64_t* addresses, uint32_t mask, int bytes);

// Sectors of global memory that the lanes touch, and the fewest that hold so many bytes.
void count_sectors(Counters& counters, const uint64_t* addresses, uint32_t mask, int bytes);

}  // namespace cuda_sim
