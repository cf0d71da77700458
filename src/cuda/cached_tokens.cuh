// Tokens that lie in a cache: copied from slot to slot as they are stored, and read as numbers. No slot that lies on the
// device is trusted: what is none is copied nowhere, and read as zeros.
#pragma once

#include "cuda/band.cuh"
#include "cuda/decoding_problem.h"
#include "cuda/stored.cuh"

namespace polyhead::cuda {

struct CopiedUnits {
  alignas(16) unsigned char bytes[kMostCopiedBytes];
};

// Units [first, first + width) of a head, of every token: all are read before one is written, and no other block has them.
template <class Unit, class Staged>
__device__ void copy_units(const CopyTokensProblem& p, const UnitRows& rows, int64_t head, int64_t first,
                           Staged* staged) {
  const int width = rows.units - first < rows.width ? static_cast<int>(rows.units - first) : rows.width;
  const int count = p.tokens * width;
  // Of unit n in shared memory; null: there is no such slot.
  const auto place = [&](const Integers& slots, int n) -> Unit* {
    const int64_t slot = element(slots, n / width), unit = first + n % width;
    if (slot < 0 || slot >= p.num_slots) return nullptr;
    const int64_t at = slot / p.page_size * rows.page + slot % p.page_size * rows.row + head * rows.head +
                       unit / rows.parts * rows.column + unit % rows.parts * static_cast<int64_t>(sizeof(Unit));
    return reinterpret_cast<Unit*>(rows.data + at);
  };
  for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads) {
    const Unit* const from = place(p.from, n);
    if (from != nullptr) staged[n] = *from;
  }
  __syncthreads();
  for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads) {
    Unit* const to = place(p.to, n);
    if (to != nullptr && place(p.from, n) != nullptr) *to = static_cast<Unit>(staged[n]);
  }
}

__device__ inline void copy_tokens(const CopyTokensProblem& p, CopiedUnits& memory) {
  unsigned block = blockIdx.x;
  int i = 0;
  for (; block >= p.tensors[i].blocks; ++i) block -= p.tensors[i].blocks;
  const UnitRows& rows = p.tensors[i];
  const int64_t head = block / rows.blocks_of_head, first = int64_t{block % rows.blocks_of_head} * rows.width;
  const auto copy = [&]<class Unit, class Staged>(Unit, Staged) {
    copy_units<Unit>(p, rows, head, first, reinterpret_cast<Staged*>(memory.bytes));
  };
  switch (rows.unit) {
    case 16: copy(uint4{}, uint4{}); break;
    case 4: copy(uint32_t{}, uint32_t{}); break;
    case 2: copy(uint16_t{}, uint16_t{}); break;
    default: copy(uint8_t{}, uint16_t{});
  }
}

// A head of a token, of keys or of values, a warp. What is multiplied and rounded is what src/cache/heads.h does.
__device__ inline void read_tokens(const ReadTokensProblem& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t n = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32, token = n / (2 * p.heads_kv);
  if (token >= p.tokens) return;
  const int64_t head = n % (2 * p.heads_kv), h = head % p.heads_kv;
  const int side = head < p.heads_kv ? 0 : 1;
  const CacheRows& from = p.from[side];
  const Rows& to = p.to[side];
  if (to.data == nullptr) return;
  const int64_t slot = element(p.slots, token);
  const bool there = slot >= 0 && slot < p.num_slots;
  const StoredHead stored{from, h};
  const StoredPlace place{slot / from.page_size, slot % from.page_size};
  const int64_t first = token * to.row + h * to.head;
  for (int d = lane; d < from.dim; d += 32) {
    const float x = there ? stored.number(place, d) * stored.scale(place, d / from.group) : 0;
    store_number(to.data, to.number, first + d * to.column, x);
  }
}

}  // namespace polyhead::cuda
