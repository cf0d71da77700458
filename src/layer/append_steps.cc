#include "layer/append_steps.h"

#include <algorithm>

#include "cache/append.h"
#include "contract/decoding.h"
#include "contract/sequences.h"
#include "core/sentence.h"
#include "layer/arguments.h"
#include "layer/places.h"

namespace polyhead {
namespace {

int64_t* numbers_at(const Call& call, const Place& place) { return static_cast<int64_t*>(tensor_at(call, place).data); }

// The numbers of tokens [batch, time]; -1 in padding, which is not looked at where sequences end after `lengths` [batch].
Status read_tokens(const char* name, const Tensor& t, const Tensor& lengths, const NumberRange& range, int64_t* out) {
  const int64_t steps = t.dims[1];
  for (int64_t b = 0; b < t.dims[0]; ++b, out += steps) {
    const int64_t length = lengths.given() ? std::clamp<int64_t>(integer_at(lengths, b), 0, steps) : steps;
    Tensor row = t;
    row.ndim = 1, row.dims[0] = length, row.strides[0] = t.strides[1];
    if (length > 0)
      row.data = static_cast<char*>(t.data) + b * t.strides[0] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
    if (Status status = read_numbers(name, b, row, length, range, out); !status.ok()) return status;
    std::fill(out + length, out + steps, -1);
  }
  return {};
}

Status check_append(const AppendStep& step, const Call& call) {
  const Tensor &slots = call.tensors[kArgSlots], &positions = call.tensors[kArgPositions];
  const Tensor lengths = beam_of(call.tensors[kArgLengthsQ], 0);
  Status status;
  if (slots.given()) {
    const int64_t tokens = slots.dims[0] * slots.dims[1];
    int64_t* const read = numbers_at(call, step.slots);
    status = read_tokens("slots", slots, step.same_tokens ? lengths : Tensor(), slot_range(*step.cache), read);
    std::copy_n(read, status.ok() ? tokens : 0, read + tokens);
    if (status.ok()) status = check_distinct("slots", read + tokens, tokens);
  }
  if (!status.ok() || !positions.given()) return status;
  return read_tokens("positions", positions, lengths, position_range(call.tensors[kArgCos]),
                     numbers_at(call, step.positions));
}

// [batch, time, heads, dim] of the only beam.
Tensor tokens_at(const Call& call, const Place& place) { return beam_of(tensor_at(call, place), 0); }

// Their heads: a sequence lies there as a page does in a pool.
Heads heads_of(const Tensor& tokens) { return {tokens, tokens.dims[1]}; }

int64_t num_tokens(const Tensor& t) { return t.dims[0] * t.dims[1]; }

KvTensors pool_of(const Call& call) {
  const Tensor* const t = call.tensors;
  return {t[kArgPoolKey], t[kArgPoolValue], t[kArgPoolKeyScales], t[kArgPoolValueScales]};
}

void append_here(const AppendStep& step, const Call& call, const Run& run) {
  const Tensor* const t = call.tensors;
  const KvTensors pool = pool_of(call);
  const Tensor key = tokens_at(call, step.key), value = tokens_at(call, step.value);
  const Tensor query = tokens_at(call, step.query), query_out = tokens_at(call, step.query_out);
  const Heads keys = heads_of(key), values = heads_of(value), queries = heads_of(query), turned = heads_of(query_out);
  auto* const memory = static_cast<float*>(tensor_at(call, step.heads).data);
  NewTokens tokens;
  if (t[kArgPositions].given()) tokens.positions = numbers_at(call, step.positions);
  tokens.cos = &t[kArgCos], tokens.sin = &t[kArgSin];
  if (t[kArgSlots].given()) {
    tokens.count = num_tokens(key);
    tokens.slots = numbers_at(call, step.slots);
    tokens.key = &keys, tokens.value = &values;
    if (!step.same_tokens) {
      append(*step.cache, pool, tokens, memory, run);
      tokens.slots = nullptr;
    }
  }
  if (query.given()) {
    tokens.count = num_tokens(query);
    tokens.query = &queries, tokens.query_out = &turned;
  }
  if (tokens.slots != nullptr || tokens.query != nullptr) append(*step.cache, pool, tokens, memory, run);
}

// On a device, which reads numbers itself.
Status append_there(const AppendStep& step, const Machine& machine, const Call& call) {
  const Tensor* const t = call.tensors;
  AppendArgs args;
  args.pool = pool_of(call);
  args.positions = t[kArgPositions], args.cos = t[kArgCos], args.sin = t[kArgSin];
  if (t[kArgSlots].given()) {
    args.key = tokens_at(call, step.key), args.value = tokens_at(call, step.value);
    args.slots = t[kArgSlots];
    if (!step.same_tokens) {
      if (Status status = machine.linear->append(*step.cache, args, machine.run); !status.ok()) return status;
      args.key = args.value = args.slots = {};
    }
  }
  args.query = tokens_at(call, step.query), args.query_out = tokens_at(call, step.query_out);
  args.lengths = beam_of(t[kArgLengthsQ], 0);
  if (!args.key.given() && !args.query.given()) return {};
  return machine.linear->append(*step.cache, args, machine.run);
}

}  // namespace

Status check_appends(const StepList& list, const Call& call) {
  for (const Step& each : list.steps) {
    const auto* const step = std::get_if<AppendStep>(&each);
    if (step == nullptr) continue;
    if (Status status = check_append(*step, call); !status.ok()) return status;
  }
  return {};
}

Status append(const AppendStep& step, const Machine& machine, const Call& call) {
  if (machine.linear->append != nullptr) return append_there(step, machine, call);
  append_here(step, call, machine.run);
  return {};
}

Status check_call_on_cache(const LayerDesc& desc, bool is_block, Pass pass, const Call& call) {
  const auto given = [&](int argument) { return call.tensors[argument].given(); };
  if (is_backward(pass)) return invalid("backward is called, but keys and values live in desc.cache: inference alone");
  if (call.reserve != nullptr) {
    return invalid("reserve is given, but keys and values live in desc.cache: inference alone");
  }
  if (call.step != -1) {
    return invalid(sentence("step is ", call.step, ", must be -1: with desc.cache slots tell where new tokens stand"));
  }
  if (given(kArgKey) != given(kArgValue)) {
    return invalid(sentence(given(kArgKey) ? "value" : "key", " is missing: give key and value, or neither"));
  }
  if (given(kArgKey) && !given(kArgSlots)) return invalid("slots is missing: it tells where key and value go");
  if (given(kArgKey) || !given(kArgSlots)) return {};
  if (!is_block) return invalid("key and value are missing: slots is given, which tells where they go");
  if (desc.key_size == desc.query_size && desc.value_size == desc.query_size && desc.seqlen_new == 0) return {};
  return invalid("key and value are not given, but slots is, and the layer's differ from query in size or length");
}

}  // namespace polyhead
