// Forward:   q, k, v = inputs times weights     O = attention     out = dropout(O Wo + bo) + residual
// Backward, the same lines from the last to the first. g: dropout's factors and scale of the output.
//   out = g (O Wo + bo) + residual    dY = g grad_out    dO = dY Wo^T    dWo = O^T dY    dbo = sum over tokens of dY
//   O = attention(q, k, v)            dq, dk, dv: Plan::backward
//   q = query Wq + bq                 dquery = dq Wq^T    dWq = query^T dq    dbq = sum over tokens of dq
#include "layer/layer_steps.h"

#include <algorithm>

#include "cache/append.h"
#include "layer/arguments.h"

namespace polyhead {
namespace {

// And what lies on the way.
struct AllPlaces : LayerPlaces {
  Place projected[3];   // where the projections of the inputs go, or copies of them
  Place attended[3];    // what attention reads
  Place attention_out;  // [B, N, Sq, H, Dv]
  Place logsumexp;      // [N, B, H, Sq]
  Place head_grads[3];  // gradients of q, k and v
  size_t head_grads_begin = 0, head_grads_end = 0;
};

using Gives = ProductStep::Gives;
using View = Place::View;

constexpr int kOutWeight = static_cast<int>(WeightKind::kOut), kFirstBias = static_cast<int>(WeightKind::kQueryBias);
constexpr int kOutBias = static_cast<int>(WeightKind::kOutBias);
constexpr int kOutputDropout = 1;  // of Call::dropouts
constexpr ArgumentSet kOutGrads = only(kArgGradWeights + kOutWeight) | only(kArgGradWeights + kOutBias);

Place weight(int kind) { return argument(kArgWeights + kind); }
Place grad_weight(int kind) { return argument(kArgGradWeights + kind); }

DType sums_type(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

// q | k | v in one matrix if all have one input, else q, and k | v; `all`: also of projections that are off.
void take_projections(const LayerState& s, Pass pass, bool all, Memory& memory, Place* places) {
  const auto take = [&](int first, int last) {
    Memory::Columns columns[3];
    Place* to[3];
    size_t count = 0;
    for (int i = first; i <= last; ++i) {
      const Projection& p = s.projections[i];
      if (all || p.on) columns[count] = {p.heads, p.dim}, to[count++] = &places[i];
    }
    const Projection& p = s.projections[first];
    const int64_t steps = pass == Pass::kOneStep ? 1 : p.steps;
    memory.take_side_by_side(s.desc.dtype, {s.desc.batch, p.beams, steps}, {columns, count}, to);
  };
  if (s.joined) return take(kQuery, kValue);
  take(kQuery, kQuery);
  take(kKey, kValue);
}

EpiloguePlaces after_output(const LayerPlaces& places, Pass pass) {
  EpiloguePlaces epilogue;
  if (pass == Pass::kTraining) epilogue.dropout = kOutputDropout;
  epilogue.residual = places.residual;
  return epilogue;
}

EpiloguePlaces dropout_gradient() {
  EpiloguePlaces epilogue;
  epilogue.gradient = true;
  epilogue.dropout = kOutputDropout;
  return epilogue;
}

void take_activations(const LayerState& s, Pass pass, Memory& memory, AllPlaces* places) {
  const LayerDesc& d = s.desc;
  take_projections(s, pass, false, memory, places->projected);
  for (int i = kQuery; i <= kValue; ++i) {
    const Projection& p = s.projections[i];
    Place& to = places->projected[i];
    Place& read = places->attended[i];
    read = p.on ? to : places->inputs[i].seen_as(View::kSameForHeads, p.heads, 0);
    if (i == kQuery || !places->caches || has_reserve(pass)) continue;
    const int cache = i == kKey ? kArgKeyCache : kArgValueCache;
    read.heads = p.heads;
    read = read.unless_given(cache, cache, p.on ? View::kWhole : View::kKept);
    to = to.unless_given(cache, cache, View::kOneStep);
  }
  const int64_t steps = pass == Pass::kOneStep ? 1 : d.seqlen_q;
  const int64_t heads = d.num_heads, dim = s.projections[kValue].dim;
  if (has_reserve(pass) || !s.attention_writes_out()) {
    places->attention_out = memory.take(d.dtype, {d.batch, d.beam, steps, heads, dim});
  } else {
    places->attention_out = places->out.seen_as(View::kSplit, heads, dim);
  }
  if (has_reserve(pass) && d.attention.normalizer == Normalizer::kSoftmax) {
    places->logsumexp = memory.take(sums_type(d.dtype), {d.beam, d.batch, heads, steps});
  }
}

void take_head_gradients(const LayerState& s, Memory& memory, AllPlaces* places) {
  places->head_grads_begin = memory.map.bytes();
  take_projections(s, Pass::kBackward, true, memory, places->head_grads);
  places->head_grads_end = memory.map.bytes();
}

// New keys and values, to the cache. Gives the query that attention reads.
Place emit_append(const LayerState& s, const AllPlaces& places, Memory& workspace, std::vector<Step>* steps) {
  const LayerDesc& d = s.desc;
  const Projection& query = s.projections[kQuery];
  AppendStep append;
  append.cache = &*d.cache;
  Place read = places.attended[kQuery];
  if (s.turns()) {
    append.query = read;
    if (!query.on) read = workspace.take(d.dtype, {d.batch, 1, d.seqlen_q, query.heads, query.dim});
    append.query_out = read;
  }
  append.key = places.attended[kKey];
  append.value = places.attended[kValue];
  append.same_tokens = d.seqlen_new == 0;
  if (s.on_host()) {
    append.slots = workspace.take(DType::kInt64, {2, d.batch, s.projections[kKey].steps});
    append.positions = workspace.take(DType::kInt64, {d.batch, d.seqlen_q});
    append.heads = workspace.take(DType::kFloat32, {s.num_threads, longest_head(*d.cache)});
  }
  steps->emplace_back(append);
  return read;
}

void emit_forward(const LayerState& s, const AllPlaces& places, Pass pass, Memory& workspace,
                  std::vector<Step>* steps) {
  for (int i = kQuery; i <= kValue; ++i) {
    if (!s.projections[i].on) continue;
    ProductStep project = {Gives::kY, places.inputs[i], weight(i), weight(kFirstBias + i), places.projected[i]};
    project.prepacked = i;
    project.joins = i > kQuery && s.projections[i - 1].on;
    steps->emplace_back(project);
  }
  for (int i = kQuery; i <= kValue; ++i) {
    if (s.projections[i].on || !places.projected[i].somewhere()) continue;
    steps->emplace_back(PointwiseStep{places.inputs[i], places.projected[i]});
  }
  AttentionStep attention;
  attention.beams = s.desc.beam;
  attention.plan = pass == Pass::kTraining ? &*s.train : pass == Pass::kOneStep ? &*s.step : &*s.infer;
  if (s.desc.cache) {
    attention.query = emit_append(s, places, workspace, steps);
  } else {
    attention.query = places.attended[kQuery];
    attention.key = places.attended[kKey];
    attention.value = places.attended[kValue];
  }
  attention.out = places.attention_out;
  attention.logsumexp = places.logsumexp;
  if (pass == Pass::kOneStep) {
    attention.asked = &s.asked;
    attention.lengths = workspace.take(DType::kInt64, {3, s.desc.batch});
  }
  steps->emplace_back(attention);
  if (s.out_projected()) {
    ProductStep project = {Gives::kY, places.attention_out, weight(kOutWeight), weight(kOutBias), places.out};
    project.epilogue = after_output(places, pass);
    project.prepacked = kOutWeight;
    steps->emplace_back(project);
  } else if (pass == Pass::kTraining || !s.attention_writes_out()) {
    steps->emplace_back(PointwiseStep{places.attention_out, places.out, after_output(places, pass)});
  }
}

// Inputs are copied where their padding must not be seen, grad_out also where the output was dropped.
Place take_row_copies(const LayerState& s, Memory& workspace) {
  const LayerDesc& d = s.desc;
  const bool padded_q = s.asked.has_seqlens_q, padded_k = s.asked.has_seqlens_k;
  const int64_t of_query = std::max(padded_q ? d.query_size : 0, padded_q || d.output_dropout_p > 0 ? s.out_size : 0);
  const int64_t of_key = padded_k ? std::max(d.key_size, d.value_size) : 0;
  MemoryMap query_rows, key_rows;
  query_rows.take({d.batch, d.beam, d.seqlen_q, of_query}, dtype_size_bytes(d.dtype));
  key_rows.take({d.batch, d.beam_kv, d.seqlen_k, of_key}, dtype_size_bytes(d.dtype));
  Place copies = workspace.take(DType::kBool, {static_cast<int64_t>(std::max(query_rows.bytes(), key_rows.bytes()))});
  copies.shape = Tensor(nullptr, d.dtype, {d.batch, d.beam, d.seqlen_q, s.out_size});
  return copies;
}

void emit_backward_data(const LayerState& s, const AllPlaces& places, const Place& copies, Memory& workspace,
                        std::vector<Step>* steps) {
  const LayerDesc& d = s.desc;
  const int64_t heads = d.num_heads, dim = s.projections[kValue].dim;
  Place dY = places.grad_out;
  if (d.output_dropout_p > 0) {
    steps->emplace_back(PointwiseStep{dY, copies, dropout_gradient()});
    dY = copies;
  }
  Place dO = dY.seen_as(View::kSplit, heads, dim);
  if (s.out_projected()) {
    dO = workspace.take(d.dtype, {d.batch, d.beam, d.seqlen_q, heads, dim});
    steps->emplace_back(ProductStep{Gives::kX, dO, weight(kOutWeight), {}, dY});
  }
  AttentionBackwardStep attention;
  attention.plan = &*s.train;
  attention.beams = d.beam;
  attention.query = places.attended[kQuery];
  attention.key = places.attended[kKey];
  attention.value = places.attended[kValue];
  attention.out = places.attention_out;
  attention.logsumexp = places.logsumexp;
  attention.grad_out = dO;
  for (int i = kQuery; i <= kValue; ++i) {
    attention.grads[i] = places.head_grads[i];
    if (!s.projections[i].on) attention.wanted[i] = places.grads[i];
  }
  attention.room = places.head_grads[kQuery].room;
  attention.begin = places.head_grads_begin;
  attention.end = places.head_grads_end;
  if (d.beam > d.beam_kv && dtype_size_bytes(d.dtype) == 2) {
    const int64_t columns = s.projections[kKey].columns() + s.projections[kValue].columns();
    attention.shared = places.head_grads[kKey];  // and value's beside it
    attention.shared.shape = Tensor(nullptr, d.dtype, {d.batch, 1, d.seqlen_k, columns});
    attention.shared_sums = workspace.take(DType::kFloat32, {d.batch, 1, d.seqlen_k, columns});
  }
  steps->emplace_back(attention);
  for (int i = kQuery; i <= kValue; ++i) {
    if (!s.projections[i].on) continue;
    ProductStep product = {Gives::kX, places.grads[i], weight(i), {}, places.head_grads[i]};
    product.joins = i > kQuery && s.projections[i - 1].on;
    steps->emplace_back(product);
  }
  for (int i = kQuery; i <= kValue; ++i) {
    if (!s.projections[i].on) steps->emplace_back(SumHeadsStep{places.head_grads[i], places.grads[i]});
  }
}

void emit_backward_weights(const LayerState& s, const AllPlaces& places, const Place& copies,
                           std::vector<Step>* steps) {
  const ArgumentSet ends_q = s.asked.has_seqlens_q ? only(kArgLengthsQ) : 0;
  const ArgumentSet ends_k = s.asked.has_seqlens_k ? only(kArgLengthsK) : 0;
  Place dY = places.grad_out;
  if (ends_q != 0) {
    steps->emplace_back(UnpadStep{dY, copies.only_for(kOutGrads), ends_q});
    dY = copies;
  }
  if (s.desc.output_dropout_p > 0) {
    steps->emplace_back(PointwiseStep{dY, copies.only_for(kOutGrads), dropout_gradient(), grad_weight(kOutBias)});
    dY = copies;
  } else {
    steps->emplace_back(PointwiseStep{dY, {}, {}, grad_weight(kOutBias)});
  }
  if (s.out_projected()) {
    steps->emplace_back(ProductStep{Gives::kW, places.attention_out, grad_weight(kOutWeight), {}, dY});
  }
  for (int i = kQuery; i <= kValue; ++i) {
    if (!s.projections[i].on) continue;
    ProductStep product = {Gives::kW, places.inputs[i], grad_weight(i), grad_weight(kFirstBias + i),
                           places.head_grads[i]};
    product.joins = i > kQuery && s.projections[i - 1].on;
    product.lengths = i == kQuery ? ends_q : ends_k;
    product.copy = copies;
    steps->emplace_back(product);
  }
}

}  // namespace

void emit_layer(const LayerState& s, Pass pass, const LayerPlaces& given, Memory& workspace, Memory& reserve,
                Memory& head_grads, std::vector<Step>* steps) {
  AllPlaces places;
  static_cast<LayerPlaces&>(places) = given;
  take_activations(s, pass, has_reserve(pass) ? reserve : workspace, &places);
  if (!is_backward(pass)) return emit_forward(s, places, pass, workspace, steps);
  take_head_gradients(s, head_grads, &places);
  const Place copies = take_row_copies(s, workspace);
  if (pass == Pass::kBackward) emit_backward_data(s, places, copies, workspace, steps);
  if (pass == Pass::kBackwardWeights || &head_grads == &workspace) emit_backward_weights(s, places, copies, steps);
}

}  // namespace polyhead
