// What the kernels of decoding.cuh are told: plain data, for the host's compiler and nvcc.
#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace polyhead::cuda {

// An int32 or int64 for each token, [batch, time]. No data: not given.
struct TokenNumbers {
  const void* data = nullptr;
  int64_t batch = 0, time = 0;
  bool wide = false;  // int64
};

// Keys or values of a cache.
struct CacheRows : StoredRows {
  int64_t page_size = 1;
  int dim = 0;        // of a head
  float largest = 1;  // that a number with a scale may be
};

// Of cosines or sines, [positions, pairs].
struct AngleTable {
  const float* data = nullptr;
  int64_t row = 0, column = 0;
};

// AppendArgs (contract/decoding.h): of each token a query of `heads` heads, keys and values of heads_kv; 0: none are given.
struct AppendProblem {
  int64_t batch = 0, time = 0;
  int heads = 0, heads_kv = 0;
  Rows query, query_out, key, value;
  CacheRows to_key, to_value;
  int64_t num_slots = 0;
  TokenNumbers slots, positions;
  Integers lengths;
  AngleTable cos, sin;
  int64_t num_positions = 0;  // 0: nothing turns
  int pairs = 0;
  bool interleaved = false, hadamard = false;
  float hadamard_factor = 1;
};

// A tensor of a cache, whose heads are moved in units of some bytes. Strides are in bytes.
struct UnitRows {
  char* data = nullptr;
  int64_t page = 0, row = 0, head = 0, column = 0;
  int unit = 1;       // 16, of elements that lie side by side; else 4, 2 or 1
  int parts = 1;      // of an element, each a unit
  int64_t units = 0;  // of a head
  int width = 1;      // units that a block of threads moves, of each token
  unsigned blocks = 0, blocks_of_head = 0;
};

// CopyTokensArgs (contract/decoding.h)
struct CopyTokensProblem {
  UnitRows tensors[4];
  Integers from, to;
  int64_t num_slots = 0, page_size = 1;
  int tokens = 0;
  unsigned blocks = 0;  // of all tensors
  int shared_bytes = 0;
};
constexpr int kMostCopiedBytes = kEveryGpuBytes;  // that a block moves
constexpr int kLeastStaged = 2;                   // bytes of a unit in shared memory

// ReadTokensArgs (contract/decoding.h): of each token the heads of both sides, if their `to` is given.
struct ReadTokensProblem {
  CacheRows from[2];
  Rows to[2];
  Integers slots;
  int64_t num_slots = 0, tokens = 0;
  int heads_kv = 0;
};

// stand_at_step (contract/decoding.h)
struct StepProblem {
  Integers seqlens_q, seqlens_k, query_offsets;
  int64_t batch = 0, seqlen_q = 0, seqlen_k = 0;
  Diagonal diagonal = Diagonal::kFixed;
  int64_t offset = 0;  // with kFixed
  int64_t step = 0;
  bool joins = false;
  int64_t* to = nullptr;
};

}  // namespace polyhead::cuda
