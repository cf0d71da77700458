// What a kernel on the device is told: plain data, for the host's compiler and nvcc.
#pragma once

#include <cstdint>

namespace polyhead::cuda {

enum class Number { kFloat32, kBFloat16, kFloat16, kFloat64, kInt8, kFloat8E4M3, kFloat8E5M2, kInt4x2 };

// A tensor [batch, rows, heads, columns]. Strides are in elements.
struct Rows {
  void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0, column = 0;
  Number number = Number::kFloat32;
  // 16 bytes that begin at a column which is a multiple of them are aligned, side by side, and hold nothing but elements as
  // the kernel computes with
  bool in_pieces = false;
};

// Keys or values as they are stored, and what the numbers are multiplied by, of which `group` share one; no scales: they are
// as they come.
struct StoredRows {
  Rows rows, scales;
  int group = 1;
};

// A float for each row of queries, [batch, heads, rows]. No data: not given, not wanted.
struct Statistic {
  float* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

// An int32 or int64 for each sequence, or for each query. No data: not given.
struct Integers {
  const void* data = nullptr;
  int64_t stride = 0;
  bool wide = false;  // int64
};

// Where keys and values lie that are [pages, page_size, heads, columns], whose Rows::batch leads from page to page: an
// int32 or int64 for each page_size keys of a sequence. No table: they lie one after the other.
struct Pages {
  const void* table = nullptr;
  int64_t batch = 0, entry = 0;
  bool wide = false;  // int64
  int64_t page_size = 1, num_pages = 0;
};

// A tensor that broadcasts to [batch, heads, queries, keys]: strides are 0 where it does. No data: not given, not wanted.
struct Broadcast {
  void* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;
  Number number = Number::kFloat32;  // of a bias; a mask has bytes
};

// A tensor that a program reads.
struct Captured {
  void* data = nullptr;
  int64_t dims[4] = {}, strides[4] = {};
};
constexpr int kMostCaptures = 8;

// Which weights are kept (polyhead/dropout.h), counted from the call's first head, query and eight keys.
struct Dropout {
  bool on = false;
  uint32_t threshold = 0, offset = 0, first_head = 0, heads = 0, first_query = 0, first_key_group = 0;
  uint64_t seed = 0;
  float factor = 1;  // of what is kept
};

// Where query i stands among the keys: at i + offset.
enum class Diagonal { kFixed, kBottomRight, kPerSequence };

// What both directions are told.
struct Problem {
  Number elements = Number::kBFloat16;  // that it is computed with
  Rows query, key, value, out;
  Statistic logsumexp;
  Integers seqlens_q, seqlens_k, query_offsets;  // for each sequence
  bool packed = false;  // rows of sequence b go from element b of cu_seqlens to b + 1, and tensors have no batch
  Integers cu_seqlens_q, cu_seqlens_k;  // no cu_seqlens_k where keys lie in pages
  Pages pages;
  int64_t batch = 0, heads = 0, heads_kv = 0, seqlen_q = 0, seqlen_k = 0;
  unsigned query_blocks = 0, key_blocks = 0;  // blocks of threads that own queries, or keys, of all heads
  int head_dim = 0, head_dim_v = 0;
  float scale = 0;
  Diagonal diagonal = Diagonal::kFixed;
  int64_t offset = 0;             // with kFixed
  int64_t left = -1, right = -1;  // query i sees keys from i + offset - left to i + offset + right; -1: open
  Integers window_lo, window_hi;  // for each query: it sees keys from lo to hi, exclusive, alone
  int64_t sink_keys = 0;          // keys below are seen whatever `left` and window_lo say
  float softcap = 0;              // 0: none
  bool softmax = true;            // else the scores are the weights, and there is no logsumexp
  Broadcast mask, bias;
  int64_t mask_keys = -1;        // the mask tells of so many last keys of a sequence alone; -1: of all
  Broadcast slopes;              // of ALiBi, float32: no queries, no keys
  const float* sinks = nullptr;  // [heads]
  int64_t sinks_stride = 0;
  Dropout dropout;
  Captured captures[kMostCaptures];

  // Whether a score is more than a product, and whether a query may see some keys of its range and not others.
  bool has_options = false, hides_pairs = false;

  // In forward: attention_forward_wide.cuh, or attention_forward_float32.cuh. In backward: attention_backward_float32.cuh.
  bool wide = false;

  // Blocks of threads of attention_forward_groups.cuh in forward, if it is taken. Of packed sequences it takes those of more than
  // kBlockRows rows, and attention_forward.cuh the others.
  unsigned group_blocks = 0;

  // Query heads whose queries share a tile in forward, side by side: a group that reads the same keys, or 1.
  int64_t tile_heads = 1;

  // Blocks of threads that share the keys of 64 queries in forward, and what each leaves of a row in the workspace, of rows
  // [batch, heads, queries]: see parts.cuh.
  int64_t parts = 1;
  float *part_statistics = nullptr, *part_sums = nullptr;  // [rows, parts, 4], [rows, parts, head_dim_v]
};

// Of forward, where keys or values are stored in formats with scales: what stands of both in Problem is not read.
struct StoredProblem : Problem {
  StoredRows stored_key, stored_value;
};

constexpr int kBlockThreads = 128;         // of every kernel
constexpr int kBlockRows = 64;             // of queries, or of keys, of a block of threads
constexpr int64_t kLeastKeysOfPart = 256;  // see Problem::parts

// What is summed over pairs: dS, dS (-|i + offset - j|), weights.
enum class Summed { kGradient, kSlopeGradient, kWeights, kWeightsBeforeDropout };

// A result that is such a sum, and how it is cut. No result: not wanted.
struct PairSums {
  Broadcast result;
  Summed summed = Summed::kGradient;
  float divisor = 1;                      // of the sums
  bool by_query = false, by_key = false;  // dims that the result has
  int64_t own[4] = {}, others[4] = {};    // batch, heads, tiles of queries and of keys: 1 in one of both
  int64_t tiles = 0, pairs = 0;           // of the result; of pairs that each of them sums
  int64_t parts = 1;                      // blocks that share a tile
  int64_t sequences = 1;                  // packed ones that share it: each has parts of its own
  float* partial = nullptr;               // [parts, tiles, rows, columns] in the workspace; null: there is one part

  constexpr int64_t rows() const { return by_query ? kBlockRows : 1; }
  constexpr int64_t columns() const { return by_key ? kBlockRows : 1; }
};

// The gradients of what a program read, summed as integers so that their order does not matter; the largest gradient tells
// how many units it is. All of the workspace is 0 before.
struct CaptureSums {
  Captured gradients[kMostCaptures];  // no data: not wanted
  Number numbers[kMostCaptures] = {};
  int64_t first[kMostCaptures + 1] = {};  // of the elements of a capture, among all
  int log2_terms = 0;                     // a sum has 2^log2_terms terms at most
  bool adds = false;                      // else the largest are looked for
  unsigned* largest = nullptr;            // [captures] the bits of floats
  unsigned* not_finite = nullptr;         // [elements] 1: +inf was there, 2: -inf, 4: NaN
  unsigned long long* sums = nullptr;     // [elements]
};

// Of the gradients' passes: dQ by query tiles; dK and dV by key tiles, or of many columns one of both.
enum GradientPass { kOfQuery, kOfKeyAndValue, kOfKey, kOfValue };

struct BackwardProblem : Problem {
  Rows grad_out;
  Statistic grad_logsumexp,
      given_delta;  // given_delta: sum grad_out * out, where somebody has it; `out` is not read then
  Statistic delta;  // the workspace: sum grad_out * out - grad_logsumexp
  Rows grad_query, grad_key, grad_value;  // no data: not wanted
  // P and dS meet matrices as two numbers: gradients are float32, and the elements are not, or weights need the range
  bool exact = false;
  unsigned group_query_blocks = 0, group_key_blocks = 0;  // of attention_backward_groups.cuh; 0: it is not taken
  PairSums sums[2];
  float* grad_sinks = nullptr;
  int64_t grad_sinks_stride = 0;
  bool accumulate = false;
};

// Of what forward returns of weights, where keys or values are stored in formats with scales; likewise.
struct StoredWeightsProblem : BackwardProblem {
  StoredRows stored_key;
};

constexpr int kMostHeadDim = 1024;
constexpr int kMostTileColumns = 256;
constexpr int kManyColumns = 512;  // stands for any number above that, which goes slice by slice

// Of the tiles of kernels for so many.
constexpr int tile_columns(int columns) {
  if (columns > kMostTileColumns) return kManyColumns;
  return columns <= 64 ? 64 : columns <= 128 ? 128 : kMostTileColumns;
}

constexpr int kMostWideColumns = 128;      // of problems that are wide, and of plain ones in backward
constexpr int kEveryGpuBytes = 99 * 1024;  // of shared memory, that a block may have from 8.0 on
constexpr int kWideBytes = 134 * 1024;     // that backward needs of rows above 256 bytes

// Queries of a block of threads in wide forward.
constexpr int wide_rows(Number elements, int columns) {
  return elements == Number::kFloat32 && columns > 64 ? kBlockRows : 2 * kBlockRows;
}

constexpr int kForwardGroups = 3;  // warpgroups of a block in attention_forward_groups.cuh, 64 queries each

// The same in attention_backward_groups.cuh, of a pass over keys or queries: as many as have registers for their sums.
constexpr int backward_groups(Number elements, int columns, bool keys) {
  return keys && (columns > 64 || elements == Number::kFloat16) ? 2 : 3;
}

// Keys of a block of threads in attention_backward_float32.cuh.
constexpr int wide_backward_keys(int columns) { return columns > 64 ? kBlockRows / 2 : kBlockRows; }

}  // namespace polyhead::cuda
