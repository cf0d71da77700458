#include "cpu/attention/decode_tasks.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/threads.h"
#include "cpu/attention/call.h"

namespace polyhead::cpu {
namespace {

// Of one key and its neighbours in memory, of as many heads as a task takes at once: two pages. 16 of them, the block that
// is read and the one that is asked for, are in L2.
constexpr int64_t kRowBytes = 8192;

// How the rows of a sequence of len_q queries are cut. Runs are (sequence, key/value head, run of rows); a task is a run, or
// the only runs of neighbouring heads, and a chunk of keys.
struct Cut {
  int64_t heads_kv, rows, runs;
  int run_rows;

  Cut(const AttentionDesc& desc, int64_t len_q)
      : heads_kv(desc.num_heads_kv),
        rows(heads_kv > 0 ? desc.num_heads / heads_kv * len_q : 0),
        runs(pieces(rows, kDecodeRows)),
        run_rows(static_cast<int>(std::min<int64_t>(rows, kDecodeRows))) {}

  int64_t sequence_runs() const { return heads_kv * runs; }

  // Heads of a task at most, of all its sequences.
  int most_together() const { return run_rows > 0 ? kDecodeRows / padded_rows(run_rows) : 1; }

  // Heads of a task: as many as it may have rows of and read whole pages of, while each thread has four tasks. `chunks`: of
  // all sequences. Results do not depend on it.
  int most_heads(const AttentionDesc& desc, int64_t chunks, int num_threads) const {
    if (runs != 1 || heads_kv == 0) return 1;
    const int64_t head_bytes =
        std::max<int64_t>(1, std::max(desc.head_dim, desc.head_dim_v)) * element_bytes(desc.dtype);
    const int64_t most = std::min<int64_t>(most_together(), kRowBytes / head_bytes);
    const int64_t for_threads = num_threads < 2 ? heads_kv : chunks * heads_kv / (4 * int64_t{num_threads});
    const int64_t heads_of_task = std::clamp<int64_t>(std::min(most, for_threads), 1, heads_kv);
    return static_cast<int>(pieces(heads_kv, pieces(heads_kv, heads_of_task)));
  }
};

bool takes(const AttentionDesc& desc, int64_t len_q, int64_t len_k) {
  const bool is_short = len_k <= kMaxShortKeys && desc.head_dim >= kLeastShortDim && desc.dtype != DType::kBFloat16;
  return len_q > 0 && len_q <= (is_short ? kMaxShortQueries : kMaxDecodeQueries);
}

int64_t chunks_of(int64_t len_k) { return std::max<int64_t>(1, pieces(len_k, kDecodeChunk)); }

// Chunks of sequences [first_b, end_b) outside of which no row sees a key: at least one. `chunks`: that there are.
KeyChunks chunks_to_compute(const DecodeCall& call, int64_t first_b, int64_t end_b, int64_t chunks) {
  const AttentionDesc& desc = call.desc;
  KeyRange keys{INT64_MAX, 0};
  int64_t sinks = 0;
  program::Region region{{first_b, end_b - 1}, {0, desc.num_heads - 1}, {0, 0}, {}, {INT64_MAX, 0}};
  for (int64_t b = first_b; chunks > 1 && b < end_b; ++b) {
    const Sequence& s = call.sequences[b];
    region.offset = {std::min(region.offset.low, s.offset), std::max(region.offset.high, s.offset)};
    region.q.high = std::max(region.q.high, s.len_q - 1);
    for (int64_t i = 0; i < s.len_q; ++i) {
      const KeyRange seen = key_range(call.problem.band, s, i);
      if (seen.begin < seen.end) keys = {std::min(keys.begin, seen.begin), std::max(keys.end, seen.end)};
      sinks = std::max(sinks, sinks_end(call.problem.band, seen));
    }
  }
  if (keys.begin >= keys.end) return {0, std::max<int64_t>(1, pieces(sinks, kDecodeChunk))};
  KeyChunks range{keys.begin / kDecodeChunk, pieces(keys.end, kDecodeChunk)};
  const auto with_sinks = [&] {
    const int64_t sink_chunks = pieces(sinks, kDecodeChunk);
    if (sink_chunks < range.first) return KeyChunks{range.first, range.end, sink_chunks};
    return KeyChunks{sink_chunks > 0 ? 0 : range.first, std::max(range.end, sink_chunks)};
  };
  const auto hidden = [&](int64_t first, int64_t end) {
    region.k = {first * kDecodeChunk, std::min(end * kDecodeChunk, keys.end) - 1};
    return program::seen(call.problem.program, region) == program::Seen::kNone;
  };
  for (int64_t count = desc.program != nullptr ? range.count() : 0; count > 0; count /= 2) {
    while (count < range.count() && hidden(range.first, range.first + count)) range.first += count;
    while (count < range.count() && hidden(range.end - count, range.end)) range.end -= count;
  }
  return with_sinks();
}

// Whether rows of neighbouring heads follow each other in memory.
bool heads_side_by_side(const Operand& x, int64_t dim) {
  return x.stride_d == 1 && x.stride_h * element_bytes(x.dtype) == numbers_bytes(x.dtype, dim) &&
         x.stride_h < x.stride_s;
}

// Of keys and of values.
bool all_side_by_side(const DecodeCall& call) {
  return heads_side_by_side(call.problem.key, call.desc.head_dim) &&
         heads_side_by_side(call.problem.value, call.desc.head_dim_v);
}

// Whether keys and values of all chunks of a call are more than a core's share of caches holds.
bool reads_memory(const AttentionDesc& desc, int64_t chunks) {
  constexpr double kCacheBytes = 32.0 * 1024 * 1024;
  const double keys = static_cast<double>(chunks) * kDecodeChunk * static_cast<double>(desc.num_heads_kv);
  const int64_t row_bytes =
      numbers_bytes(key_dtype(desc), desc.head_dim) + numbers_bytes(value_dtype(desc), desc.head_dim_v);
  return keys * static_cast<double>(row_bytes) > kCacheBytes;
}

// The tasks of one sequence, and where they leave what others read.
struct Share {
  int64_t b;
  const Cut* cut;
  int64_t task_heads;
  KeyChunks chunks;
  std::atomic<int64_t>* unfinished;  // chunks, of each run; null: what a task leaves no other reads
  char* partials;                    // of each run run_bytes; null likewise
  size_t run_bytes;
  bool from_memory;

  int64_t groups() const { return pieces(cut->sequence_runs(), task_heads); }
  int64_t count() const { return groups() * chunks.count(); }
};

DecodeTask task_at(const DecodeCall& call, const Share& share, int64_t run, int64_t heads) {
  const Cut& cut = *share.cut;
  DecodeTask task;
  task.b = share.b;
  task.kv_head = run / cut.runs;
  task.num_heads = static_cast<int>(std::min(heads, cut.heads_kv - task.kv_head));
  task.sequence = call.sequences[share.b];
  task.first_row = run % cut.runs * kDecodeRows;
  const int64_t computed = call.desc.num_heads / cut.heads_kv * task.sequence.len_q;
  task.num_rows = static_cast<int>(std::clamp<int64_t>(computed - task.first_row, 0, kDecodeRows));
  task.from_memory = share.from_memory;
  return task;
}

// What a run's last chunk to end does: merge. Then padding behind the queries.
void end_run(const DecodeCall& call, const DecodeTask& task, float* partials, int64_t num_partials) {
  const Problem& p = call.problem;
  const AttentionDesc& desc = call.desc;
  if (task.num_rows > 0) call.functions.decode_merge(p, task, partials, num_partials);
  if (task.first_row > 0 || desc.packed || task.sequence.len_q == desc.seqlen_q) return;
  for (int64_t h = task.kv_head * p.group; h < (task.kv_head + 1) * p.group; ++h) {
    hide_rows(p, task.b, h, task.sequence.len_q, desc.seqlen_q);
  }
}

size_t run_bytes(const DecodeCall& call, const Cut& cut, KeyChunks chunks) {
  return call.functions.decode_partial_bytes(call.desc.head_dim_v, cut.run_rows) * static_cast<size_t>(chunks.count());
}

// Computes a chunk of `heads` runs of heads, from `run` on, of sequences that share it, or of one; and ends runs of which
// that was the last. `scratch` of a thread; `own`: behind it, where there are no partials.
void run_chunk(const DecodeCall& call, const Share* shares, DecodePart* parts, int num_shares, int64_t run,
               int64_t heads, int64_t chunk, char* scratch, char* own) {
  for (int n = 0; n < num_shares; ++n) {
    const Share& share = shares[n];
    parts[n].task = task_at(call, share, run, heads);
    char* const partials =
        share.partials != nullptr ? share.partials + static_cast<size_t>(run) * share.run_bytes : own;
    const size_t bytes = call.functions.decode_partial_bytes(call.desc.head_dim_v, parts[n].task.num_rows);
    parts[n].partial = reinterpret_cast<float*>(partials + static_cast<size_t>(share.chunks.index_of(chunk)) * bytes);
    parts[n].head_stride = static_cast<int64_t>(share.run_bytes / sizeof(float));
  }
  if (parts[0].task.num_rows > 0) call.functions.decode_chunk(call.problem, parts, num_shares, chunk, scratch);
  for (int n = 0; n < num_shares; ++n) {
    const Share& share = shares[n];
    char* partials = share.partials != nullptr ? share.partials + static_cast<size_t>(run) * share.run_bytes : own;
    DecodeTask head = parts[n].task;
    head.num_heads = 1;
    for (int h = 0; h < parts[n].task.num_heads; ++h, ++head.kv_head, partials += share.run_bytes) {
      // The one that takes the last of them sees what all others wrote.
      if (share.unfinished != nullptr && share.unfinished[run + h].fetch_sub(1, std::memory_order_acq_rel) != 1) {
        continue;
      }
      end_run(call, head, reinterpret_cast<float*>(partials), share.chunks.count());
    }
  }
}

// Task `index` of a sequence; share_of(b): what another one's tasks are. The tasks of sequences that share a chunk are cut
// anew: each computes all of these sequences, of fewer heads, or as many of both as a task may have rows of.
template <class ShareOf>
void run_task(const DecodeCall& call, const Share& share, int64_t index, const ShareOf& share_of, char* scratch,
              char* own) {
  const Problem& p = call.problem;
  const bool heads_inside_rows = p.key.stride_h < p.key.stride_s;
  const int64_t groups = share.groups(), chunks = share.chunks.count();
  const int64_t group = heads_inside_rows ? index % groups : index / chunks;
  const int64_t chunk = share.chunks.at(heads_inside_rows ? index / groups : index % chunks);
  const int64_t run = group * share.task_heads;
  const std::span<const int32_t> together = call.shared.with(share.b, chunk);
  if (together.empty()) {
    DecodePart part;
    return run_chunk(call, &share, &part, 1, run, share.task_heads, chunk, scratch, own);
  }
  const auto sequences = static_cast<int64_t>(together.size());
  const int64_t runs = std::min(share.task_heads, share.cut->sequence_runs() - run), most = share.cut->most_together();
  const int64_t at_once = pieces(sequences, pieces(sequences, most));
  const int64_t heads = std::min(runs, most / at_once);
  const int64_t of_heads = pieces(runs, heads), count = pieces(sequences, at_once) * of_heads;
  int64_t task = std::find(together.begin(), together.end(), share.b) - together.begin();
  for (; task < count; task += sequences) {
    Share shares[kDecodeRows];
    const int64_t first = task / of_heads * at_once, end = std::min(first + at_once, sequences);
    for (int64_t n = first; n < end; ++n) {
      shares[n - first] = share_of(together[static_cast<size_t>(n)]);
      shares[n - first].from_memory = false;  // all but the first read from caches
    }
    const int64_t first_run = run + task % of_heads * heads;
    DecodePart parts[kDecodeRows];
    run_chunk(call, shares, parts, static_cast<int>(end - first), first_run, std::min(heads, run + runs - first_run),
              chunk, scratch, own);
  }
}

MemorySize chunk_scratch_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int rows, int heads) {
  if (SharedChunks::bytes(desc).value() > 0) heads = std::max(heads, kDecodeRows / padded_rows(std::max(rows, 1)));
  return scratch_bytes(functions.decode_scratch_bytes, desc, rows, heads) + program_bytes(desc, false);
}

// Where things lie in the workspace of a call whose sequences have as many rows, one as the other.
struct Workspace {
  Cut cut;
  int heads;
  int64_t chunks;                           // of a sequence at most; more than one: runs are merged
  MemorySize partial_bytes, scratch_bytes;  // of a chunk; of a thread
  size_t counters = 0, shared = 0, partials = 0, lanes = 0, lane_bytes = 0;
  MemorySize bytes;

  Workspace(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads)
      : cut(desc, desc.seqlen_q),
        heads(cut.most_heads(desc, desc.batch * chunks_of(desc.seqlen_k), num_threads)),
        chunks(chunks_of(desc.seqlen_k)),
        scratch_bytes(chunk_scratch_bytes(functions, desc, cut.run_rows, heads)) {
    partial_bytes =
        scratch_bytes.fits() ? functions.decode_partial_bytes(desc.head_dim_v, cut.run_rows) : scratch_bytes;
    const MemorySize lane = scratch_bytes + (merges() ? 0 : partial_bytes * heads);
    const int64_t runs = desc.batch * cut.sequence_runs();
    MemoryMap map;
    counters = map.take_bytes(merges() ? MemorySize(runs) * sizeof(std::atomic<int64_t>) : 0);
    shared = map.take_bytes(SharedChunks::bytes(desc));
    partials = map.take_bytes(merges() ? partial_bytes * runs * chunks : 0);
    lanes = map.take_bytes(lane * num_threads);
    lane_bytes = lane.value();
    bytes = map.bytes();
  }

  bool merges() const { return chunks > 1; }
};

// Partial results of a wave for each thread, unless one sequence needs more. A step for 8 sequences of 4,096 keys, 32 heads of
// 128, needs 1.1 MB.
constexpr int64_t kWaveBytes = 4 * 1024 * 1024;

}  // namespace

bool decode_takes(const AttentionDesc& desc) { return !desc.packed && takes(desc, desc.seqlen_q, desc.seqlen_k); }

bool decode_takes(const AttentionDesc& desc, const Sequence& s) {
  return takes(desc, s.len_q, desc.page_size > 0 ? desc.seqlen_k : s.len_k);  // of pages a batch has as many keys
}

MemorySize decode_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return Workspace(functions, desc, num_threads).bytes;
}

void decode_forward(const IsaFunctions& functions, const AttentionDesc& desc, const ForwardArgs& args,
                    const Sequences& sequences, const Run& run) {
  const Problem p = problem(desc, args);
  const Workspace workspace(functions, desc, run.num_threads);
  char* const memory = static_cast<char*>(args.workspace);
  DecodeCall call{functions, desc, p, sequences, run.num_threads, {desc, p, sequences, memory + workspace.shared}};
  auto* const unfinished = reinterpret_cast<std::atomic<int64_t>*>(memory + workspace.counters);
  const KeyChunks chunks = chunks_to_compute(call, 0, desc.batch, workspace.chunks);
  const int64_t sequence_runs = workspace.cut.sequence_runs();
  for (int64_t i = 0; workspace.merges() && i < desc.batch * sequence_runs; ++i) {
    std::construct_at(unfinished + i, chunks.count());
  }
  const size_t run_bytes = workspace.partial_bytes.value() * static_cast<size_t>(workspace.chunks);
  const int64_t task_heads = all_side_by_side(call) ? workspace.heads : 1;
  const bool from_memory = reads_memory(desc, desc.batch * chunks.count());
  const Share all{0, &workspace.cut, task_heads, chunks, nullptr, nullptr, run_bytes, from_memory};
  const auto share_of = [&](int64_t b) {
    Share share = all;
    share.b = b;
    if (!workspace.merges()) return share;
    share.unfinished = unfinished + b * sequence_runs;
    share.partials = memory + workspace.partials + static_cast<size_t>(b * sequence_runs) * run_bytes;
    return share;
  };
  if (workspace.cut.most_together() > 1) {
    call.shared.find(0, desc.batch, [&](int64_t, int64_t chunk) { return chunks.has(chunk); });
  }
  const int64_t count = all.count(), tasks = desc.batch * count;
  const int64_t keys = std::min(desc.seqlen_k, int64_t{kDecodeChunk});
  const int64_t at_once = tasks_of_turn(tasks, desc, keys, task_heads, run.num_threads);
  run_in_turns(run, tasks, at_once, [&](int64_t index, int lane, int64_t /*next*/) {
    char* const scratch = memory + workspace.lanes + workspace.lane_bytes * static_cast<size_t>(lane);
    run_task(call, share_of(index / count), index % count, share_of, scratch,
             scratch + workspace.scratch_bytes.value());
  });
}

// Sizes of a packed call are those of all its sequences: what one of them may need is bounded here.
struct PackedDecode::Workspace {
  MemorySize partials_bytes, scratch_bytes;
  size_t places = 0, counters = 0, shared = 0, partials = 0, lanes = 0, lane_bytes = 0;
  MemorySize bytes;

  Workspace(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads)
      : scratch_bytes(chunk_scratch_bytes(functions, desc, kDecodeRows, 1)) {
    const Cut widest(desc, std::min(desc.seqlen_q, kMaxDecodeQueries));
    const auto partial_bytes = [&](int rows) {
      return scratch_bytes.fits() ? functions.decode_partial_bytes(desc.head_dim_v, rows) : scratch_bytes;
    };
    // A sequence of one chunk leaves nothing, as all of more queries. All others have at most as many chunks as all keys,
    // and one more each.
    const int64_t chunks = pieces(desc.seqlen_k, kDecodeChunk);
    const MemorySize chunk_bytes = partial_bytes(widest.run_rows) * widest.sequence_runs();
    const MemorySize all_chunks =
        desc.page_size > 0 ? MemorySize(desc.batch) * chunks : MemorySize(chunks) + std::min(desc.batch, chunks);
    partials_bytes =
        std::max(chunk_bytes * chunks, std::min(chunk_bytes * all_chunks, MemorySize(kWaveBytes) * num_threads));
    const MemorySize lane = scratch_bytes + partial_bytes(1) * kDecodeRows;  // as many heads of one row each at most
    MemoryMap map;
    places = map.take_bytes(MemorySize(desc.batch) * sizeof(Place));
    counters = map.take_bytes(MemorySize(desc.batch) * widest.sequence_runs() * sizeof(std::atomic<int64_t>));
    shared = map.take_bytes(SharedChunks::bytes(desc));
    partials = map.take_bytes(partials_bytes);
    lanes = map.take_bytes(lane * num_threads);
    lane_bytes = lane.value();
    bytes = map.bytes();
  }
};

MemorySize PackedDecode::workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return Workspace(functions, desc, num_threads).bytes;
}

PackedDecode::PackedDecode(const DecodeCall& call, void* memory) : call_(call) {
  const Workspace workspace(call.functions, call.desc, call.num_threads);
  char* const bytes = static_cast<char*>(memory);
  call_.shared = SharedChunks(call.desc, call.problem, call.sequences, bytes + workspace.shared);
  places_ = reinterpret_cast<Place*>(bytes + workspace.places);
  unfinished_ = reinterpret_cast<std::atomic<int64_t>*>(bytes + workspace.counters);
  partials_ = bytes + workspace.partials, lanes_ = bytes + workspace.lanes;
  partials_bytes_ = workspace.partials_bytes.value();
  scratch_bytes_ = workspace.scratch_bytes.value(), lane_bytes_ = workspace.lane_bytes;
  for (int64_t b = 0; b < call.desc.batch; ++b) {
    const Sequence& s = call.sequences[b];
    if (!decode_takes(call.desc, s)) continue;
    const KeyChunks chunks = chunks_to_compute(call_, b, b + 1, chunks_of(s.len_k));
    std::construct_at(places_ + num_places_++, Place{b, 0, 0, 0, chunks, 1});
    chunks_ += chunks.count();
  }
}

bool PackedDecode::next_wave() {
  const bool side_by_side = all_side_by_side(call_);
  first_ = end_;
  count_ = 0;
  int64_t runs = 0;
  size_t partials = 0;
  for (; end_ < num_places_; ++end_) {
    Place& place = places_[end_];
    const Cut cut(call_.desc, call_.sequences[place.b].len_q);
    const int64_t chunks = place.chunks.count(), sequence_runs = chunks > 1 ? cut.sequence_runs() : 0;
    const size_t bytes = run_bytes(call_, cut, place.chunks) * static_cast<size_t>(sequence_runs);
    if (end_ > first_ && partials + bytes > partials_bytes_) break;
    place.first_task = count_, place.first_run = runs, place.first_partial = partials;
    if (side_by_side) place.task_heads = cut.most_heads(call_.desc, chunks_, call_.num_threads);
    for (int64_t i = 0; i < sequence_runs; ++i) std::construct_at(unfinished_ + runs + i, chunks);
    runs += sequence_runs, partials += bytes;
    count_ += pieces(cut.sequence_runs(), place.task_heads) * chunks;
  }
  if (first_ < end_) find_shared();
  return first_ < end_;
}

void PackedDecode::find_shared() {
  call_.shared.find(places_[first_].b, places_[end_ - 1].b + 1, [&](int64_t b, int64_t chunk) {
    const Sequence& s = call_.sequences[b];
    if (!decode_takes(call_.desc, s) || Cut(call_.desc, s.len_q).most_together() < 2) return false;
    const KeyChunks& chunks = place_of(b).chunks;
    return chunks.count() > 1 && chunks.has(chunk);
  });
}

void PackedDecode::run(int64_t index, int lane) const {
  const auto before = [](int64_t task, const Place& place) { return task < place.first_task; };
  const Place& place = *(std::upper_bound(places_ + first_, places_ + end_, index, before) - 1);
  const Cut cut(call_.desc, call_.sequences[place.b].len_q);
  const auto share_of = [&](const Place& of) {
    Share share{of.b,
                &cut,
                of.task_heads,
                of.chunks,
                nullptr,
                nullptr,
                run_bytes(call_, cut, of.chunks),
                reads_memory(call_.desc, chunks_)};
    if (of.chunks.count() == 1) return share;
    share.unfinished = unfinished_ + of.first_run;
    share.partials = partials_ + of.first_partial;
    return share;
  };
  char* const scratch = lanes_ + lane_bytes_ * static_cast<size_t>(lane);
  run_task(
      call_, share_of(place), index - place.first_task, [&](int64_t b) { return share_of(place_of(b)); }, scratch,
      scratch + scratch_bytes_);
}

const PackedDecode::Place& PackedDecode::place_of(int64_t b) const {
  return *std::lower_bound(places_ + first_, places_ + end_, b,
                           [](const Place& place, int64_t of) { return place.b < of; });
}

}  // namespace polyhead::cpu
