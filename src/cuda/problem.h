// What a kernel on the device is told: plain data, for the host's compiler and nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace polyhead::cuda {

// A tensor [batch, rows, heads, columns]. Strides are in elements.
struct Rows {
  void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0, column = 0;
  // 16 bytes that begin at a column which is a multiple of them are aligned, side by side, and hold nothing but elements
  bool in_pieces = false;
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

enum class Number { kFloat32, kBFloat16, kFloat16 };

// A tensor that broadcasts to [batch, heads, queries, keys]: strides are 0 where it does. No data: not given, not wanted.
struct Broadcast {
  void* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;
  Number number = Number::kFloat32;  // of a bias; a mask has bytes
};

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
  Number elements = Number::kBFloat16;  // of query, key, value, out and grad_out
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
  Broadcast mask, bias;
  Broadcast slopes;              // of ALiBi, float32: no queries, no keys
  const float* sinks = nullptr;  // [heads]
  int64_t sinks_stride = 0;
  Dropout dropout;

  // Whether a score is more than a product, and whether a query may see some keys of its range and not others.
  bool has_options = false, hides_pairs = false;

  // Blocks of threads that share the keys of 64 queries in forward, and what each leaves of a row in the workspace, of rows
  // [batch, heads, queries]: see parts.cuh.
  int64_t parts = 1;
  float *part_statistics = nullptr, *part_sums = nullptr;  // [rows, parts, 4], [rows, parts, head_dim_v]
};

constexpr int kBlockRows = 64;             // of queries, or of keys, of a block of threads
constexpr int64_t kLeastKeysOfPart = 256;  // see Problem::parts

// A gradient of what is added to scores, and how its sums over pairs are cut. No gradient: not wanted.
struct PairSums {
  Broadcast gradient;
  bool by_distance = false;               // times -|i + offset - j|
  bool by_query = false, by_key = false;  // dims that the gradient has
  int64_t own[4] = {}, summed[4] = {};    // batch, heads, tiles of queries and of keys: 1 in one of both
  int64_t tiles = 0, pairs = 0;           // of the gradient; of pairs that each of them sums
  int64_t parts = 1;                      // blocks that share a tile
  int64_t sequences = 1;                  // packed ones that share it: each has parts of its own
  float* partial = nullptr;               // [parts, tiles, rows, columns] in the workspace; null: there is one part

  constexpr int64_t rows() const { return by_query ? kBlockRows : 1; }
  constexpr int64_t columns() const { return by_key ? kBlockRows : 1; }
};

struct BackwardProblem : Problem {
  Rows grad_out;
  Statistic grad_logsumexp,
      given_delta;  // given_delta: sum grad_out * out, where somebody has it; `out` is not read then
  Statistic delta;  // the workspace: sum grad_out * out - grad_logsumexp
  Rows grad_query, grad_key, grad_value;  // no data: not wanted
  bool wide_gradients = false;            // these are float32, and the elements are not
  PairSums bias_sums, slope_sums;
  float* grad_sinks = nullptr;
  int64_t grad_sinks_stride = 0;
  bool accumulate = false;
};

constexpr int kMostHeadDim = 256, kMostHeadDimFloat32 = 128;  // more would not fit in the registers of a thread
constexpr int kEveryGpuBytes = 99 * 1024;                     // of shared memory, that a block may have from 8.0 on
constexpr int kWideBytes = 134 * 1024;                        // that backward needs of rows above 256 bytes

// Put the kernels on the stream. At least one query, head and sequence; their blocks fit in a grid (2^31 - 1).
cudaError_t launch_forward(const Problem& problem, cudaStream_t stream);
cudaError_t launch_backward(const BackwardProblem& problem, cudaStream_t stream);
cudaError_t launch_score_gradients(const BackwardProblem& problem, cudaStream_t stream);  // after launch_backward

}  // namespace polyhead::cuda
