#include "cpu/attention/backward_tasks.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "cpu/attention/call.h"
#include "cpu/attention/capture_gradient_tasks.h"

namespace polyhead::cpu {
namespace {

constexpr int64_t kKeyStep = 128;  // chunks are whole blocks of this many keys

// Keys whose share of dQ is summed by itself: from the sequence's own size alone, so that it changes no bit who computes
// which chunk. Eight chunks, if they come out at 128 to 1024 keys.
int64_t chunk_keys(int64_t num_keys) {
  const int64_t eighth = pieces(num_keys, 8 * kKeyStep) * kKeyStep;
  return std::clamp<int64_t>(eighth, kKeyStep, 1024);
}
int64_t most_chunks(int64_t num_keys) { return std::max<int64_t>(8, pieces(num_keys, 1024)); }

// How many tiles go through the keys together: more write dK and dV less often. They change no bit of these; captures are
// summed in this order too, which the desc alone tells.
int tiles_at_once(const AttentionDesc& desc) {
  const MemorySize tile_bytes =
      (MemorySize(desc.head_dim) * 3 + desc.head_dim_v + 2 * kKeyStep) * (kTileQueries * sizeof(float));
  const size_t cache_bytes = 448 * 1024;  // of a 1 MiB L2: the rest is for keys, values and their sums
  return static_cast<int>(std::clamp<size_t>(cache_bytes / tile_bytes.value(), 1, kMaxTiles));
}

// Queries of a head that are computed together, where its keys are cut into chunks: whole groups of tiles, as long as they
// fit. Fewer need less memory for dQ.
int64_t queries_at_once(int64_t num_queries) {
  constexpr int64_t kGroups = kTileQueries * 6;  // of 1, 2 or 3 tiles
  return pieces(num_queries, kGroups * std::max<int64_t>(1, pieces(num_queries, 4096))) * kGroups;
}

// How a call is cut. Whole heads need sums of dK and dV for one head a thread; chunks need them for the heads that are
// computed together (a wave), and dQ of those heads' queries and of each chunk of theirs that is computed at once.
struct Cut {
  bool whole_heads;
  int64_t heads_at_once = 1;  // of a wave
  int64_t chunks_at_once = 1;
  int64_t queries_at_once = 0;
  MemorySize scratch_bytes, sums_floats, partial_floats;

  MemorySize workspace_bytes(int num_threads) const {
    const MemorySize floats =
        whole_heads ? sums_floats * num_threads : (sums_floats + partial_floats * (chunks_at_once + 1)) * heads_at_once;
    return scratch_bytes * num_threads + floats * sizeof(float);
  }
};

// Floats of the sums of keys, in whole lines of the cache.
MemorySize sum_floats(const IsaFunctions& functions, int64_t num_keys, int64_t dim) {
  constexpr int64_t kPadding = 128;  // at most, of keys to blocks and of dims to vectors: rounding up cannot wrap
  if (!((MemorySize(num_keys) + kPadding) * (MemorySize(dim) + kPadding)).fits()) return MemorySize::too_large();
  return MemorySize(functions.backward_sum_floats(num_keys, dim)).rounded_up(16);
}

// Whether whole heads, which read their queries once and not for each chunk, keep the threads busy to the end: many of them,
// or so many that take equally long that at most a tenth of the threads' time is left over.
bool end_together(const AttentionDesc& desc, int64_t heads, int num_threads) {
  const bool alike = !has_lengths(desc);
  const int64_t rounds = pieces(heads, num_threads);
  return num_threads == 1 || heads >= 3 * int64_t{num_threads} || (alike && 10 * rounds * num_threads <= 11 * heads);
}

// in_order: no two sequences at once, because all add to one bias.
Cut cut(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads, bool in_order) {
  Cut c;
  const int64_t heads = (in_order ? 1 : desc.batch) * desc.num_heads_kv;
  c.scratch_bytes = scratch_bytes(functions.backward_scratch_bytes, desc, tiles_at_once(desc), desc.attn_bias.given,
                                  desc.softcap > 0) +
                    program_bytes(desc, true);
  c.sums_floats =
      sum_floats(functions, desc.seqlen_k, desc.head_dim) + sum_floats(functions, desc.seqlen_k, desc.head_dim_v);
  c.queries_at_once = queries_at_once(desc.seqlen_q);
  c.partial_floats =
      MemorySize(pieces(std::min(c.queries_at_once, desc.seqlen_q), kTileQueries)) * desc.head_dim * kTileQueries;
  c.whole_heads = end_together(desc, heads, num_threads);
  if (c.whole_heads) return c;
  const int64_t tasks = 4 * int64_t{num_threads};  // of a wave: enough to end evenly
  c.chunks_at_once = std::min(most_chunks(desc.seqlen_k), tasks);
  c.heads_at_once = std::min(heads, pieces(tasks, c.chunks_at_once));
  return c;
}

struct Call {
  const IsaFunctions& functions;
  const AttentionDesc& desc;
  const ForwardArgs& args;
  const Sequences& sequences;
  const BackwardProblem problem;
  const bool bias;                   // grad_bias is written here
  const bool in_order;               // no two sequences at once
  const CaptureGradients* captures;  // null: heads do not add to them as they go
  const Cut cut;
  const Run& run;

  char* memory() const { return static_cast<char*>(args.workspace); }
  void* scratch(int lane) const { return memory() + cut.scratch_bytes.value() * static_cast<size_t>(lane); }
  // Sums of the keys of head `index` of those that are computed at once.
  float* sums(int64_t index) const {
    const size_t scratch_bytes = cut.scratch_bytes.value() * static_cast<size_t>(run.num_threads);
    return reinterpret_cast<float*>(memory() + scratch_bytes) + cut.sums_floats.value() * static_cast<size_t>(index);
  }
  // dQ^T of such a head, of all chunks so far; behind it that of each chunk computed at once.
  float* grad_query(int64_t index) const {
    return sums(cut.heads_at_once) + cut.partial_floats.value() * static_cast<size_t>(index * (cut.chunks_at_once + 1));
  }
  float* partial(int64_t index, int64_t chunk) const {
    return grad_query(index) + cut.partial_floats.value() * static_cast<size_t>(chunk + 1);
  }
  // Whether the first who comes to an element of grad_bias writes it; else it holds something before.
  bool begins_bias() const { return bias && !problem.accumulate && !has_lengths(desc) && desc.batch > 0; }
};

// The task of keys [first, end) of key/value head `head` (counted b * num_heads_kv + g), whose sums start at `sums`.
BackwardTask keys_task(const Call& call, int64_t head, int64_t first, int64_t end, float* sums) {
  const AttentionDesc& desc = call.desc;
  BackwardTask task;
  task.b = head / desc.num_heads_kv;
  task.kv_head = head % desc.num_heads_kv;
  task.sequence = call.sequences[task.b];
  task.first_key = first;
  task.end_key = end;
  task.chunk_keys = chunk_keys(desc.packed ? task.sequence.len_k : desc.seqlen_k);
  const size_t key_floats = sum_floats(call.functions, desc.seqlen_k, desc.head_dim).value();
  const auto at = [&](float* all, int64_t dim) {  // sums of all keys -> those from `first` on
    return all + (first > 0 ? call.functions.backward_sum_floats(first, dim) : 0);
  };
  if (call.problem.grad_key.data != nullptr) task.key_sums = at(sums, desc.head_dim);
  if (call.problem.grad_value.data != nullptr) task.value_sums = at(sums + key_floats, desc.head_dim_v);
  task.bias = call.bias;
  task.begins_bias = call.begins_bias() && (!call.in_order || task.b == 0);
  return task;
}

void clear_sums(const Call& call, const BackwardTask& task) {
  const int64_t keys = std::min(task.end_key, task.sequence.len_k) - task.first_key;
  if (keys <= 0) return;
  const auto clear = [&](float* sums, int64_t dim) {
    if (sums != nullptr) std::memset(sums, 0, call.functions.backward_sum_floats(keys, dim) * sizeof(float));
  };
  clear(task.key_sums, call.desc.head_dim);
  clear(task.value_sums, call.desc.head_dim_v);
}

NextRows next_head(int64_t b, int64_t h, const Sequence& s) { return {s, b, h, 0, s.len_q}; }

// Key/value heads [first_head, end), counted b * num_heads_kv + g.
void run_whole_heads(const Call& call, int64_t first_head, int64_t end) {
  const int64_t at_once = tasks_of_turn(end - first_head, call.desc, call.desc.seqlen_k, 1, call.run.num_threads);
  run_in_turns(call.run, end - first_head, at_once, [&](int64_t index, int lane, int64_t then) {
    const int64_t head = first_head + index, next = first_head + then;
    BackwardTask task = keys_task(call, head, 0, call.desc.seqlen_k, call.sums(lane));
    clear_sums(call, task);
    const int64_t group = call.problem.forward.group;
    float* sums[kMostGathers];
    for (int64_t r = 0; r < group; ++r) {
      task.h = task.kv_head * group + r;
      if (call.captures != nullptr) task.captures = start_head(*call.captures, task.b, task.h, sums);
      if (r + 1 < group) {
        task.next = next_head(task.b, task.h + 1, task.sequence);
      } else if (next < end) {
        const int64_t b = next / call.desc.num_heads_kv;
        task.next = next_head(b, next % call.desc.num_heads_kv * group, call.sequences[b]);
      }
      call.functions.backward_head(call.problem, task, tiles_at_once(call.desc), call.scratch(lane));
    }
    call.functions.backward_keys(call.problem, task);
  });
}

// Query head `r` of the groups of key/value heads [first_head, first_head + heads), queries from first_query and chunks
// from first_chunk on, as many as are computed at once, then their share of dQ.
void run_wave(const Call& call, int64_t first_head, int64_t heads, int64_t r, int64_t first_query,
              int64_t first_chunk) {
  const AttentionDesc& desc = call.desc;
  const int64_t group = call.problem.forward.group, chunks = call.cut.chunks_at_once;
  const int64_t end_query = first_query + call.cut.queries_at_once;
  run_tasks(call.run, heads * chunks, [&](int64_t index, int lane) {
    const int64_t head = index % heads, chunk = index / heads;  // causal: the first chunks have the most work
    const int64_t keys = keys_task(call, first_head + head, 0, 0, nullptr).chunk_keys;
    const int64_t first = (first_chunk + chunk) * keys;
    BackwardTask task = keys_task(call, first_head + head, first, first + keys, call.sums(head));
    if (task.first_key >= task.sequence.len_k) return;
    if (r == 0 && first_query == 0) clear_sums(call, task);
    task.h = task.kv_head * group + r;
    task.first_query = first_query;
    task.end_query = end_query;
    task.partial = call.partial(head, chunk);
    call.functions.backward_head(call.problem, task, tiles_at_once(desc), call.scratch(lane));
    if (r == group - 1 && end_query >= desc.seqlen_q) call.functions.backward_keys(call.problem, task);
  });
  if (call.problem.grad_query.data == nullptr) return;
  const int64_t tiles = pieces(std::min(end_query, desc.seqlen_q) - first_query, kTileQueries);
  run_tasks(call.run, heads * tiles, [&](int64_t index, int) {
    const int64_t head = index / tiles, tile = index % tiles, tile_query = first_query + tile * kTileQueries;
    BackwardTask task = keys_task(call, first_head + head, 0, 0, nullptr);
    task.first_key = first_chunk * task.chunk_keys;
    task.end_key = task.first_key + chunks * task.chunk_keys;
    // A sequence without keys has no chunk: its dQ is written with the first.
    const bool over = first_chunk > 0 && task.first_key >= task.sequence.len_k;
    if (tile_query >= task.sequence.len_q || over) return;
    task.h = task.kv_head * group + r;
    const int64_t at = tile * kTileQueries * desc.head_dim;
    call.functions.backward_queries(call.problem, task, tile_query, call.grad_query(head) + at,
                                    call.partial(head, 0) + at,
                                    static_cast<ptrdiff_t>(call.cut.partial_floats.value()));
  });
}

// All queries of query head `r`, and all chunks of its keys. Without a query, dK and dV are written all the same.
void run_queries(const Call& call, int64_t first_head, int64_t heads, int64_t r) {
  int64_t query = 0;
  do {
    for (int64_t chunk = 0; chunk < most_chunks(call.desc.seqlen_k); chunk += call.cut.chunks_at_once) {
      run_wave(call, first_head, heads, r, query, chunk);
    }
    query += call.cut.queries_at_once;
  } while (query < call.desc.seqlen_q);
}

void run_chunks(const Call& call, int64_t first_head, int64_t end) {
  for (int64_t first = first_head; first < end; first += call.cut.heads_at_once) {
    const int64_t at_once = std::min(call.cut.heads_at_once, end - first);
    for (int64_t r = 0; r < call.problem.forward.group; ++r) run_queries(call, first, at_once, r);
  }
}

// What captures are given, by a pass of its own: where their heads cannot run as those of the other gradients do, or nobody
// asks for these.
void run_captures(const Call& call, const CaptureGradients& captures) {
  BackwardProblem problem = call.problem;
  problem.grad_query.data = problem.grad_key.data = problem.grad_value.data = nullptr;
  const Apart may = apart(captures);
  const int64_t batch = call.desc.batch, heads = call.desc.num_heads, heads_at_once = may.heads ? heads : 1;
  run_tasks(call.run, (may.batches ? batch : 1) * heads_at_once, [&](int64_t index, int lane) {
    const int64_t first_b = index / heads_at_once, first_h = index % heads_at_once;
    float* sums[kMostGathers];
    for (int64_t b = first_b; b < (may.batches ? first_b + 1 : batch); ++b) {
      for (int64_t h = first_h; h < (may.heads ? first_h + 1 : heads); ++h) {
        BackwardTask task;
        task.b = b;
        task.h = h;
        task.kv_head = h / problem.forward.group;
        task.sequence = call.sequences[b];
        task.end_key = task.chunk_keys = std::max<int64_t>(task.sequence.len_k, 1);
        task.captures = start_head(captures, b, h, sums);
        call.functions.backward_head(problem, task, tiles_at_once(call.desc), call.scratch(lane));
      }
    }
  });
}

// Rows that nobody computes: padding, and those behind the last packed sequence.
void clear_padding(const Call& call) {
  const AttentionDesc& desc = call.desc;
  const BackwardProblem& p = call.problem;
  if (p.accumulate || !has_lengths(desc)) return;
  const auto clear = [&](const Operand& x, int64_t b, int64_t heads, int64_t first, int64_t end, int64_t dim) {
    for (int64_t h = 0; h < heads && x.data != nullptr; ++h) clear_rows(x, b, h, first, end, dim);
  };
  run_tasks(call.run, desc.packed ? 1 : desc.batch, [&](int64_t b, int) {
    int64_t first_q = 0, first_k = 0;
    if (desc.packed) {
      first_q = call.sequences.end_q();
      first_k = call.sequences.end_k();
    } else {
      const Sequence& s = call.sequences[b];
      first_q = s.len_q;
      first_k = s.len_k;
    }
    clear(p.grad_query, b, desc.num_heads, first_q, desc.seqlen_q, desc.head_dim);
    clear(p.grad_key, b, desc.num_heads_kv, first_k, desc.seqlen_k, desc.head_dim);
    clear(p.grad_value, b, desc.num_heads_kv, first_k, desc.seqlen_k, desc.head_dim_v);
  });
}

// Of sequences with lengths no tile may come to an element.
void clear_bias(const Call& call) {
  const AttentionDesc& desc = call.desc;
  const Broadcast& bias = call.problem.grad_bias;
  const Operand rows{
      const_cast<void*>(bias.data), bias.dtype, bias.stride_b, bias.stride_q, bias.stride_h, bias.stride_k};
  run_tasks(call.run, desc.attn_bias.dims[0] * desc.num_heads, [&](int64_t index, int) {
    clear_rows(rows, index / desc.num_heads, index % desc.num_heads, 0, desc.seqlen_q, desc.seqlen_k);
  });
}

void compute_products(const Call& call) {
  const int64_t heads = call.desc.batch * call.desc.num_heads_kv;
  const int64_t at_once = call.in_order ? call.desc.num_heads_kv : heads;
  for (int64_t first = 0; first < heads; first += at_once) {
    if (call.cut.whole_heads) {
      run_whole_heads(call, first, first + at_once);
    } else {
      run_chunks(call, first, first + at_once);
    }
  }
}

bool sums_over_batch(const AttentionDesc& desc) { return desc.attn_bias.dims[0] != desc.batch; }

// Of the gradients alone: sums of captures lie behind it.
MemorySize products_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  const MemorySize bytes = cut(functions, desc, num_threads, false).workspace_bytes(num_threads);
  if (!desc.attn_bias.given || !sums_over_batch(desc)) return bytes.rounded_up(64);
  return std::max(bytes, cut(functions, desc, num_threads, true).workspace_bytes(num_threads)).rounded_up(64);
}

}  // namespace

bool gives_bias(const AttentionDesc& desc, const BackwardArgs& args) {
  const int64_t* dims = desc.attn_bias.dims;
  if (!args.grad_attn_bias.given() || dims[1] != desc.num_heads || dims[2] != desc.seqlen_q ||
      dims[3] != desc.seqlen_k) {
    return false;
  }
  // Sums in memory are float32's only, and, so that they have the same bits by whatever way, begin at 0.
  if (sums_over_batch(desc) && (desc.attn_bias.dtype != DType::kFloat32 || args.accumulate)) return false;
  return asks_for_products(args);
}

MemorySize gradients_workspace_bytes(const IsaFunctions& functions, const AttentionDesc& desc, int num_threads) {
  return products_bytes(functions, desc, num_threads) + capture_sums_bytes(desc);
}

void gradients_backward(const IsaFunctions& functions, const AttentionDesc& desc, const BackwardArgs& args,
                        const Sequences& sequences, const Run& run) {
  const bool products = asks_for_products(args), asks = asks_for_captures(args);
  if (!products && !asks) return;
  const bool bias = gives_bias(desc, args), in_order = bias && sums_over_batch(desc);
  const BackwardProblem problem = backward_problem(desc, args);
  const Cut how = cut(functions, desc, run.num_threads, in_order);
  char* const behind =
      static_cast<char*>(args.forward.workspace) + products_bytes(functions, desc, run.num_threads).value();
  const CaptureGradients captures{desc, args, sequences, problem.forward.program, reinterpret_cast<float*>(behind)};
  if (asks) clear_captures(captures);
  const auto heads_are_apart = [](Apart may) { return may.batches && may.heads; };
  const bool together =
      asks && products && how.whole_heads && (run.num_threads == 1 || heads_are_apart(apart(captures)));
  const Call call{functions, desc, args.forward, sequences, problem, bias, in_order, together ? &captures : nullptr,
                  how,       run};
  if (products) {
    clear_padding(call);
    if (bias && !args.accumulate && !call.begins_bias()) clear_bias(call);
    compute_products(call);
  }
  if (asks && !together) run_captures(call, captures);
  if (asks) finish_captures(captures, run);
}

}  // namespace polyhead::cpu
