// The path of few queries: chunks of keys as tasks, then what they found merged. functions.h's decode_chunk and
// decode_merge do the work.
#pragma once

#include <atomic>

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "cpu/attention/functions.h"
#include "cpu/attention/shared_chunks.h"

namespace polyhead::cpu {

// Of few keys more queries than of many: beginning and ending a tile of the general path costs what its fuller lanes save.
// Its time over this one's (Xeon, family 6 model 106, float32, D = 64, one thread, medians; AVX2 behind the stroke): 16 of 16
// 1.16 / 1.1, causal 1.43, 17 of 17 1.08 / 1.14, 20 of 20 1.11 / 1.14, 20 of 32 1.21 / 1.16, 16 of 32 1.03 to 1.14 / 1.02;
// but 24 of 24 1.02 / 0.99, and 16 of 16 of D = 48 0.98. Not of bfloat16, whose tiles may go by registers tmm.
constexpr int64_t kMaxDecodeQueries = 12, kMaxShortQueries = 20, kMaxShortKeys = 32, kLeastShortDim = 64;

// Whether this path computes `desc`: told by its shape alone, so that the batch and the threads change no bit.
bool decode_takes(const AttentionDesc& desc);

// Whether it computes a sequence of a packed call: told by its own lengths, as of a batch that holds it alone.
bool decode_takes(const AttentionDesc& desc, const Sequence& s);

MemorySize decode_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void decode_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run);

// What the tasks of a call share.
struct DecodeCall {
  const IsaFunctions& functions;
  const AttentionDesc& desc;
  const Problem& problem;
  const Sequences& sequences;
  int num_threads;
  SharedChunks shared = {};
};

// Chunks [0, sinks) and [first, end) of keys.
struct KeyChunks {
  int64_t first, end, sinks = 0;
  int64_t count() const { return sinks + end - first; }
  int64_t at(int64_t index) const { return index < sinks ? index : first + index - sinks; }
  int64_t index_of(int64_t chunk) const { return chunk < sinks ? chunk : chunk - first + sinks; }
  bool has(int64_t chunk) const { return chunk < sinks || (chunk >= first && chunk < end); }
};

// The sequences of a packed call that decode_takes, in waves: the partial results of one fit the workspace.
class PackedDecode {
 public:
  static MemorySize workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);

  PackedDecode(const DecodeCall& call, void* workspace);

  // Prepares the tasks of the next wave, which [0, count()) run in any order; false: all sequences had theirs.
  bool next_wave();
  int64_t count() const { return count_; }
  void run(int64_t index, int lane) const;

 private:
  struct Place {
    int64_t b, first_task, first_run;
    size_t first_partial;
    KeyChunks chunks;
    int64_t task_heads;
  };
  struct Workspace;

  const Place& place_of(int64_t b) const;  // of the wave
  void find_shared();

  DecodeCall call_;
  Place* places_;
  std::atomic<int64_t>* unfinished_;
  char *partials_, *lanes_;
  size_t partials_bytes_, scratch_bytes_, lane_bytes_;
  int64_t num_places_ = 0, chunks_ = 0;
  int64_t first_ = 0, end_ = 0, count_ = 0;  // places of the wave, and their tasks
};

}  // namespace polyhead::cpu
