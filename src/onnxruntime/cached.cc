#include "cached.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

// Where a cache is long and the queries are few, the time is that of reading it. A head's keys and values are still
// near the core when they have just been copied, so each is attended to before the next one is copied.
bool is_worth_heads(const AttentionDesc& desc, const Cached& keys) {
  constexpr int64_t kMostRows = 64, kLeastBytes = 1 << 22;  // Zen 4, D = 64: worth it from 6 MB on
  const bool is_plain = desc.program == nullptr && desc.dropout_p == 0 && !desc.has_seqlens_k &&
                        desc.return_weights == ReturnWeights::kNone;
  const int64_t num_keys = desc.batch * desc.num_heads_kv * desc.seqlen_k;
  const auto key_bytes = (desc.head_dim + desc.head_dim_v) * static_cast<int64_t>(dtype_size_bytes(desc.dtype));
  return is_plain && keys.before() > 0 && desc.batch * desc.num_heads_kv > 1 && num_keys * key_bytes >= kLeastBytes &&
         desc.seqlen_q * (desc.num_heads / desc.num_heads_kv) <= kMostRows;
}

// One head of keys and values, of one sequence.
AttentionDesc desc_of_head(const AttentionDesc& desc) {
  AttentionDesc head = desc;
  head.batch = head.num_heads_kv = 1;
  head.num_heads = desc.num_heads / desc.num_heads_kv;
  for (BroadcastOperand* mask : {&head.attn_mask, &head.attn_bias}) {
    if (!mask->given) continue;
    mask->dims[0] = 1;
    mask->dims[1] = std::min(mask->dims[1], head.num_heads);
  }
  return head;
}

struct Heads {
  const Plan* plan;
  const AttentionDesc* desc;
  const ForwardArgs* args;
  Cached *keys, *values;
  char* workspaces;
  size_t workspace_bytes;
  int pieces;
  std::vector<Status> results;

  int64_t count() const { return desc->batch * desc->num_heads_kv; }

  void run(int piece) {
    Status& status = results[static_cast<size_t>(piece)];
    for (int64_t at = count() * piece / pieces; status.ok() && at < count() * (piece + 1) / pieces; ++at)
      status = attend(at / desc->num_heads_kv, at % desc->num_heads_kv, piece);
  }

  Status attend(int64_t b, int64_t head, int piece) const {
    for (const Cached* each : {keys, values}) {
      Cached one = *each;
      one.past = part(part(one.past, 0, b, 1), 1, head, 1);
      one.fresh = part(part(one.fresh, 0, b, 1), 2, head, 1);
      one.all = part(part(one.all, 0, b, 1), 2, head, 1);
      append(here(), one);
    }
    const int64_t group = desc->num_heads / desc->num_heads_kv;
    const auto of = [&](const Tensor& tensor, int heads_dim, int64_t size) {
      if (!tensor.given()) return tensor;
      const Tensor one = tensor.dims[0] == 1 ? tensor : part(tensor, 0, b, 1);
      return one.dims[heads_dim] == 1 ? one : part(one, heads_dim, head * size, size);
    };
    ForwardArgs call = *args;
    call.query = of(args->query, 2, group);
    call.key = of(args->key, 2, 1);
    call.value = of(args->value, 2, 1);
    call.out = of(args->out, 2, group);
    call.logsumexp = of(args->logsumexp, 1, group);
    call.attn_mask = of(args->attn_mask, 1, group);
    call.attn_bias = of(args->attn_bias, 1, group);
    if (call.sink_logits.given()) call.sink_logits = part(call.sink_logits, 0, head * group, group);
    call.workspace = workspaces + static_cast<size_t>(piece) * workspace_bytes;
    call.workspace_bytes = workspace_bytes;
    call.where.executor = &here();
    return plan->forward(call);
  }
};

}  // namespace

Status read_cached(Call& call, size_t past, size_t present, const char* what, const Tensor& fresh, Cached& cached) {
  cached.fresh = fresh;
  if (Status status = call.input(past, cached.past); !status.ok()) return status;
  const Tensor& old = cached.past;
  if (old.given() && (old.ndim != 4 || old.dims[0] != fresh.dims[0] || old.dims[1] != fresh.dims[2] ||
                      old.dims[3] != fresh.dims[3] || old.dtype != fresh.dtype)) {
    return invalid(sentence(what, " is ", words_of(old), ", must be ", dtype_name(fresh.dtype), " [", fresh.dims[0],
                            ", ", fresh.dims[2], ", past, ", fresh.dims[3], "]"));
  }
  Tensor all;
  all.dtype = fresh.dtype;
  const int64_t total = cached.before() + fresh.dims[1];
  Status status = call.output(present, {fresh.dims[0], fresh.dims[2], total, fresh.dims[3]}, all);
  cached.is_copied = status.ok() && !all.given() && cached.before() == 0;
  if (cached.is_copied) {
    cached.all = fresh;
    return status;
  }
  if (status.ok() && !all.given())
    status = call.scratch(fresh.dtype, {fresh.dims[0], fresh.dims[2], total, fresh.dims[3]}, all);
  if (status.ok()) cached.all = permuted(all, {0, 2, 1, 3});
  return status;
}

void append(Executor& executor, Cached& cached) {
  if (cached.is_copied) return;
  const int64_t before = cached.before();
  const Tensor all = permuted(cached.all, {0, 2, 1, 3});
  if (before > 0) copy(executor, cached.past, part(all, 2, 0, before));
  copy(executor, permuted(cached.fresh, {0, 2, 1, 3}), part(all, 2, before, cached.fresh.dims[1]));
  cached.is_copied = true;
}

Status append_and_attend(Call& call, Plans& plans, const AttentionDesc& desc, ForwardArgs& args, Cached& keys,
                         Cached& values) {
  if (!is_worth_heads(desc, keys)) {
    append(call.executor(), keys);
    append(call.executor(), values);
    return plans.forward(call, desc, args);
  }
  const Result<std::shared_ptr<const Plan>> plan = plans.on_one_thread(desc_of_head(desc));
  if (!plan.ok()) return plan.status();
  constexpr size_t kAlignment = 64;
  constexpr int64_t kPiecesAThread = 2;
  const size_t bytes = ((*plan)->workspace_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  const auto pieces = static_cast<int>(
      std::min<int64_t>(desc.batch * desc.num_heads_kv, kPiecesAThread * call.executor().num_threads()));
  void* workspaces = nullptr;
  if (Status status = call.scratch(bytes * static_cast<size_t>(pieces), workspaces); !status.ok()) return status;
  Heads heads = {plan->get(), &desc,   &args,
                 &keys,       &values, static_cast<char*>(workspaces),
                 bytes,       pieces,  std::vector<Status>(static_cast<size_t>(pieces))};
  call.executor().parallel_for(
      pieces, [](void* self, int piece) { static_cast<Heads*>(self)->run(piece); }, &heads);
  keys.is_copied = values.is_copied = true;
  const auto failed =
      std::find_if(heads.results.begin(), heads.results.end(), [](const Status& each) { return !each.ok(); });
  return failed == heads.results.end() ? Status() : *failed;
}

}  // namespace polyhead::onnxruntime
