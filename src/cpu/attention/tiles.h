// The general path: any problem, tile by tile. functions.h's forward_tiles does the work; here it is cut into tasks.
#pragma once

#include "contract/kernel.h"
#include "contract/sequences.h"
#include "core/memory_size.h"
#include "cpu/attention/functions.h"

namespace polyhead::cpu {

MemorySize tiles_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads);
void tiles_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                   const Sequences& sequences, const Run& run);

// The tasks of a call; of a packed one, those of sequences that decode_takes does not. What is given outlives them.
class TileTasks {
 public:
  TileTasks(const IsaFunctions& functions, const AttentionDesc& desc, const Problem& problem,
            const Sequences& sequences, int num_threads, void* workspace);

  int64_t count() const;
  void run(int64_t index, int lane, int64_t next) const;  // next: the index that the thread will probably take then

 private:
  struct At {
    int64_t b, h, first_query;
  };
  int64_t chunks_of(int64_t queries) const { return pieces(queries, chunk_queries_); }
  At at(int64_t index) const;
  NextRows next_rows(const At& now, const At& then) const;

  const IsaFunctions& functions_;
  const AttentionDesc& desc_;
  const Problem& problem_;
  const Sequences& sequences_;
  int64_t chunk_queries_;  // of a task at most, padding included
  bool share_bias_;        // sequences do, [queries, keys] of a head
  int64_t* first_chunk_;   // [batch + 1], only when packed: counts the chunks of a head in the sequences before
  char* lanes_;
  size_t lane_bytes_;
};

}  // namespace polyhead::cpu
