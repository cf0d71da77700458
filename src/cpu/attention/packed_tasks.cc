#include "cpu/attention/packed_tasks.h"

#include "core/threads.h"
#include "cpu/attention/call.h"
#include "cpu/attention/decode_tasks.h"
#include "cpu/attention/tiles.h"

namespace polyhead::cpu {

MemorySize packed_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return tiles_workspace_bytes(functions, desc, num_threads).rounded_up(64) +
         PackedDecode::workspace_bytes(functions, desc, num_threads);
}

void packed_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run) {
  const Problem p = problem(desc, args);
  const TileTasks tiles(functions, desc, p, sequences, run.num_threads, args.workspace);
  const size_t tiles_bytes = tiles_workspace_bytes(functions, desc, run.num_threads).rounded_up(64).value();
  PackedDecode decode({functions, desc, p, sequences, run.num_threads},
                      static_cast<char*>(args.workspace) + tiles_bytes);
  int64_t num_tiles = tiles.count();  // first, because they take longest
  while (decode.next_wave() || num_tiles > 0) {
    run_tasks(run, num_tiles + decode.count(), [&](int64_t index, int lane) {
      index < num_tiles ? tiles.run(index, lane, index + run.num_threads) : decode.run(index - num_tiles, lane);
    });
    num_tiles = 0;
  }
  for (int64_t h = 0; h < desc.num_heads; ++h) hide_rows(p, 0, h, sequences.end_q(), desc.seqlen_q);
}

}  // namespace polyhead::cpu
