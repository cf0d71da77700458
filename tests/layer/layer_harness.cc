#include "layer_harness.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "device_under_test.h"
#include "sanitizer.h"
#include "testing/bounds.h"
#include "testing/judge.h"

namespace polyhead::testing {
namespace {

const std::array<Array, kNumWeightKinds> kNoWeights;

// The tensors of a call on guarded memory.
class Placement {
 public:
  Placement(const LayerProblem& problem, const LayerInputs& in, const LayerRun& options, const Layer& layer)
      : problem_(problem),
        in_(in),
        options_(options),
        layer_(layer),
        random_(options.layout_seed),
        loan_(new_loan(options.kernel)) {}

  void place_inputs(LayerForwardArgs& args) {
    args.query = input(in_.query, next());
    args.key = problem_.key_is_query ? args.query : input(in_.key, next());
    args.value = problem_.value_is_key ? args.key : input(in_.value, next());
    args.residual = input(in_.residual, next());
    args.attn_mask = input(in_.attn_mask, next());
    args.attn_bias = input(in_.attn_bias, next());
    args.alibi_slopes = input(in_.alibi_slopes, next());
    args.sink_logits = input(in_.sink_logits, next());
    args.seqlens_q = input(in_.seqlens_q, next());
    args.seqlens_k = input(in_.seqlens_k, next());
    args.query_offsets = input(in_.query_offsets, next());
    args.window_lo = input(in_.window_lo, next());
    args.window_hi = input(in_.window_hi, next());
    args.dropout_seed = in_.dropout_seed;
    args.dropout_offset = in_.dropout_offset;
    args.output_dropout_seed = in_.output_dropout_seed;
    args.output_dropout_offset = in_.output_dropout_offset;
  }

  // In one buffer, whose gaps hold NaN; or each by itself.
  LayerWeights place_weights(const std::array<Array, kNumWeightKinds>& weights) {
    LayerWeights tensors;
    if (!problem_.separate_weights) return lent_weights(buffer_of_weights(weights), true);
    for (size_t n = 0; n < kNumWeightKinds; ++n) {
      if (weights[n].given()) tensor(tensors, n) = input(weights[n], next());
    }
    return tensors;
  }

  LayerWeights place_grad_weights() {
    LayerWeights tensors;
    if (!problem_.separate_weights) {
      grad_buffer_ = buffer_of_weights(options_.accumulate ? options_.before.grad_weights : kNoWeights);
      return lent_weights(grad_buffer_, options_.accumulate);
    }
    for (size_t n = 0; n < kNumWeightKinds; ++n) {
      if (!in_.weights[n].given()) continue;
      grad_weights_[n] = outputs_.size();
      const Layout layout = next_of_output();
      outputs_.push_back(options_.accumulate
                             ? Placed::accumulator(options_.before.grad_weights[n], layout, options_.guard)
                             : Placed::output(in_.weights[n].dtype, in_.weights[n].dims, layout, options_.guard));
      tensor(tensors, n) = lent(outputs_.back(), options_.accumulate);
    }
    return tensors;
  }

  Tensor input(const Array& array, Layout layout) {
    inputs_.push_back(Placed::input(array, layout, options_.guard));
    return lent(inputs_.back(), true);
  }
  Tensor input(const Array& array) { return input(array, next()); }

  // Its result goes to *to.
  Tensor output(const char* name, DType dtype, const std::vector<int64_t>& dims, Array* to) {
    outputs_.push_back(Placed::output(dtype, dims, next_of_output(), options_.guard));
    results_.push_back({name, to, outputs_.size() - 1});
    return lent(outputs_.back(), false);
  }

  void* memory(size_t bytes) {
    buffers_.emplace_back(bytes, Guard::kEnd, uint8_t{0xff});
    return loan_->lend_scratch(buffers_.back().data(), bytes);
  }

  // Once, after all calls. `has_grad_weights`: place_grad_weights() has been called.
  void collect(bool has_grad_weights, LayerResults* results) {
    if (const std::string wrong = loan_->finish(); !wrong.empty()) return results->faults.push_back(wrong);
    for (const auto& result : results_) *result.to = outputs_[result.at].result(result.name, &results->faults);
    for (size_t n = 0; has_grad_weights && n < kNumWeightKinds; ++n) {
      if (!in_.weights[n].given()) continue;
      if (problem_.separate_weights) {
        results->grad_weights[n] = outputs_[grad_weights_[n]].result("a weight's gradient", &results->faults);
      } else {
        LayerWeights tensors = layer_.weights_in(grad_buffer_);
        results->grad_weights[n] = dense(tensor(tensors, n));
      }
    }
    for (const Placed& placed : inputs_) {
      if (!placed.unchanged()) results->faults.push_back("an input was written");
    }
  }

 private:
  struct Result {
    const char* name;
    Array* to;
    size_t at;
  };

  // With these, on the host.
  uint8_t* buffer_of_weights(const std::array<Array, kNumWeightKinds>& weights) {
    buffers_.emplace_back(layer_.weights_bytes(), options_.guard, uint8_t{0xff});
    LayerWeights tensors = layer_.weights_in(buffers_.back().data());
    for (size_t n = 0; n < kNumWeightKinds; ++n) {
      if (weights[n].given()) copy(weights[n], tensor(tensors, n));
    }
    return buffers_.back().data();
  }
  LayerWeights lent_weights(uint8_t* buffer, bool written) {
    return layer_.weights_in(loan_->lend(buffer, layer_.weights_bytes(), written));
  }
  Tensor lent(const Placed& placed, bool written) {
    Tensor t = placed.tensor();
    loan_->lend(t, written);
    return t;
  }

  Layout next() {
    if (options_.layout != Layout::kMixed) return options_.layout;
    return static_cast<Layout>(random_.integer(0, kNumLayouts - 1));
  }
  Layout next_of_output() {
    const Layout layout = next();
    return layout == Layout::kExpanded ? Layout::kBshd : layout;
  }

  static Tensor& tensor(LayerWeights& weights, size_t n) {
    Tensor* const all[] = {&weights.query,      &weights.key,      &weights.value,      &weights.out,
                           &weights.query_bias, &weights.key_bias, &weights.value_bias, &weights.out_bias};
    return *all[n];
  }

  template <class Visit>
  static void for_each_element(const Tensor& t, Visit visit) {
    const int64_t rows = t.ndim == 2 ? t.dims[0] : 1, columns = t.dims[t.ndim - 1];
    for (int64_t n = 0; n < rows * columns; ++n) {
      const int64_t at = (t.ndim == 2 ? n / columns * t.strides[0] : 0) + n % columns * t.strides[t.ndim - 1];
      visit(n, static_cast<char*>(t.data) + at * static_cast<int64_t>(dtype_size_bytes(t.dtype)));
    }
  }
  static void copy(const Array& from, const Tensor& to) {
    const size_t element = dtype_size_bytes(to.dtype);
    for_each_element(to, [&](int64_t n, char* at) {
      std::memcpy(at, from.bytes.data() + static_cast<size_t>(n) * element, element);
    });
  }
  static Array dense(const Tensor& from) {
    Array array(from.dtype, std::vector<int64_t>(from.dims, from.dims + from.ndim));
    const size_t element = dtype_size_bytes(from.dtype);
    for_each_element(from, [&](int64_t n, const char* at) {
      std::memcpy(array.bytes.data() + static_cast<size_t>(n) * element, at, element);
    });
    return array;
  }

  const LayerProblem& problem_;
  const LayerInputs& in_;
  const LayerRun& options_;
  const Layer& layer_;
  Random random_;
  std::unique_ptr<Loan> loan_;
  uint8_t* grad_buffer_ = nullptr;
  std::deque<Placed> inputs_, outputs_;
  std::deque<GuardedBytes> buffers_;
  std::vector<Result> results_;
  size_t grad_weights_[kNumWeightKinds] = {};
};

std::vector<int64_t> attn_weights_dims(const LayerDesc& d, int64_t steps) {
  if (d.attention.return_weights == ReturnWeights::kMean) return {d.batch, d.beam, steps, d.seqlen_k};
  return {d.batch, d.beam, d.num_heads, steps, d.seqlen_k};
}

// [batch, beam, time, vector] at one time.
Tensor time_step(const Tensor& t, int64_t step) {
  Tensor one = t;
  if (!t.given()) return one;
  one.dims[2] = 1;
  one.data = static_cast<char*>(t.data) + step * t.strides[2] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  return one;
}

// Copies an array whose dim `dim` is 1 to one place of that dim.
void put_step(const Array& from, size_t dim, int64_t step, Array* to) {
  int64_t inner = static_cast<int64_t>(dtype_size_bytes(from.dtype));
  for (size_t n = dim + 1; n < from.dims.size(); ++n) inner *= from.dims[n];
  if (inner == 0) return;
  const int64_t outer = static_cast<int64_t>(from.bytes.size()) / inner;
  for (int64_t n = 0; n < outer; ++n) {
    std::memcpy(to->bytes.data() + (n * to->dims[dim] + step) * inner, from.bytes.data() + n * inner,
                static_cast<size_t>(inner));
  }
}

void backward(const LayerProblem& problem, const LayerInputs& in, const LayerRun& options, const Layer& layer,
              const LayerForwardArgs& forward, Placement& memory, LayerResults* results) {
  const LayerDesc& d = problem.desc;
  LayerBackwardArgs args;
  args.forward = forward;
  args.forward.out = args.forward.attn_weights = {};
  args.forward.workspace_bytes = layer.backward_workspace_bytes();
  args.forward.workspace = memory.memory(args.forward.workspace_bytes);
  args.grad_out = memory.input(in.grad_out);
  auto& inputs = results->grad_inputs;
  args.grad_query = memory.output("grad_query", d.dtype, in.query.dims, &inputs[0]);
  args.grad_key = problem.key_is_query ? args.grad_query : memory.output("grad_key", d.dtype, in.key.dims, &inputs[1]);
  args.grad_value =
      problem.value_is_key ? args.grad_key : memory.output("grad_value", d.dtype, in.value.dims, &inputs[2]);
  if (in.attn_bias.given()) {
    args.grad_attn_bias =
        memory.output("grad_attn_bias", in.attn_bias.dtype, in.attn_bias.dims, &results->grad_attn_bias);
  }
  if (in.alibi_slopes.given()) {
    args.grad_alibi_slopes =
        memory.output("grad_alibi_slopes", DType::kFloat32, in.alibi_slopes.dims, &results->grad_alibi_slopes);
  }
  if (in.sink_logits.given()) {
    args.grad_sink_logits =
        memory.output("grad_sink_logits", in.sink_logits.dtype, in.sink_logits.dims, &results->grad_sink_logits);
  }
  if (Status status = layer.backward_data(args); !status.ok()) results->faults.push_back(status.message());

  bool any = false;
  for (const Array& weight : in.weights) any = any || weight.given();
  if (any) {
    args.forward.workspace = memory.memory(args.forward.workspace_bytes);
    args.grad_weights = memory.place_grad_weights();
    args.accumulate = options.accumulate;
    if (Status status = layer.backward_weights(args); !status.ok()) results->faults.push_back(status.message());
  }
  memory.collect(any, results);
}

}  // namespace

std::string why_not(const LayerProblem& problem, const std::string& kernel) {
  const Result<Layer> made = layer(problem.desc, options_of(kernel, 1));
  return made.ok() || made.status().code() != StatusCode::kUnsupported ? "" : made.status().message();
}

LayerResults run(const LayerProblem& problem, const LayerInputs& in, const LayerRun& options) {
  LayerResults results;
  const Result<Layer> made = layer(problem.desc, options_of(options.kernel, options.threads));
  if (!made.ok()) {
    results.faults.push_back(made.status().message());
    return results;
  }
  const LayerDesc& d = problem.desc;
  Placement memory(problem, in, options, *made);
  LayerForwardArgs args;
  memory.place_inputs(args);
  args.weights = memory.place_weights(in.weights);
  args.out = memory.output("out", d.dtype, in.grad_out.dims, &results.out);
  if (d.attention.return_weights != ReturnWeights::kNone) {
    args.attn_weights = memory.output("attn_weights", d.dtype, attn_weights_dims(d, d.seqlen_q), &results.attn_weights);
  }
  args.workspace_bytes = made->workspace_bytes();
  args.workspace = memory.memory(args.workspace_bytes);
  if (options.training) {
    args.reserve_bytes = made->reserve_bytes();
    args.reserve = memory.memory(args.reserve_bytes);
  }
  if (Status status = made->forward(args); !status.ok()) results.faults.push_back(status.message());
  if (options.training) {
    backward(problem, in, options, *made, args, memory, &results);
  } else {
    memory.collect(false, &results);
  }
  return results;
}

LayerProblem inference(LayerProblem problem) {
  problem.desc.output_dropout_p = problem.desc.attention.dropout_p = 0;
  return problem;
}

LayerResults run_steps(const LayerProblem& problem, const LayerInputs& in, const LayerRun& options, bool append) {
  LayerResults results;
  const Result<Layer> made = layer(problem.desc, options_of(options.kernel, options.threads));
  if (!made.ok()) return results.faults.push_back(made.status().message()), results;
  const LayerDesc& d = problem.desc;
  results.out = Array(d.dtype, in.grad_out.dims);
  if (d.attention.return_weights != ReturnWeights::kNone) {
    results.attn_weights = Array(d.dtype, attn_weights_dims(d, d.seqlen_q));
  }
  const auto cache = [&](bool projected, int64_t dim) {
    return Placed::output(d.dtype, {d.batch, d.beam_kv, d.seqlen_k, projected ? d.num_heads_kv : 1, dim},
                          Layout::kPadded, options.guard);
  };
  const Placed key_cache = cache(d.key_proj_size > 0, head_dim_of(d));
  const Placed value_cache = cache(d.value_proj_size > 0, head_dim_v_of(d));
  const std::unique_ptr<Loan> loan = new_loan(options.kernel);
  Tensor caches[] = {key_cache.tensor(), value_cache.tensor()};
  for (Tensor& each : caches) loan->lend(each, false);
  for (int64_t step = append ? 0 : -1; step < d.seqlen_q; ++step) {
    Placement memory(problem, in, options, *made);
    LayerForwardArgs args;
    memory.place_inputs(args);
    args.weights = memory.place_weights(in.weights);
    args.key_cache = caches[0], args.value_cache = caches[1];
    args.step = step;
    if (step >= 0) {
      for (Tensor* t : {&args.query, &args.residual}) *t = time_step(*t, step);
      args.key = append ? time_step(args.key, step) : Tensor();
      args.value = append ? time_step(args.value, step) : Tensor();
    }
    Array out, weights;
    const int64_t steps = step < 0 ? d.seqlen_q : 1;
    args.out = memory.output("out", d.dtype, {d.batch, d.beam, steps, out_size_of(d)}, &out);
    if (results.attn_weights.given()) {
      args.attn_weights = memory.output("attn_weights", d.dtype, attn_weights_dims(d, steps), &weights);
    }
    args.workspace_bytes = made->workspace_bytes();
    args.workspace = memory.memory(args.workspace_bytes);
    if (Status status = made->forward(args); !status.ok()) results.faults.push_back(status.message());
    memory.collect(false, &results);
    if (step < 0) continue;
    put_step(out, 2, step, &results.out);
    if (weights.given()) put_step(weights, weights.dims.size() - 2, step, &results.attn_weights);
  }
  return results;
}

std::string difference(const LayerResults& a, const LayerResults& b) {
  if (!a.faults.empty() || !b.faults.empty()) return a.faults.empty() ? b.faults[0] : a.faults[0];
  const std::vector<NamedResult> x = named(a), y = named(b);
  for (size_t n = 0; n < x.size(); ++n) {
    if (const std::string text = difference(x[n].name, *x[n].array, *y[n].array); !text.empty()) return text;
  }
  return "";
}

const LayerDraws::Draw& LayerDraws::draw(int64_t n) {
  if (static_cast<size_t>(n) == draws_.size()) {
    Draw& draw = draws_.emplace_back();
    draw.problem = problem_;
    draw.problem.seed = seed_of_draw(problem_.seed, n);
    draw.in = random_inputs(draw.problem);
    LayerInputs in = draw.in;
    if (!training_) in.grad_out = {};
    if (!memory_alone()) draw.want = expected(draw.problem, in);
  }
  return draws_[static_cast<size_t>(n)];
}

std::string LayerDraws::judge(const LayerRun& options) {
  return judge([&](const LayerProblem& drawn, const LayerInputs& in) { return run(drawn, in, options); });
}

std::string LayerDraws::judge(const std::function<LayerResults(const LayerProblem&, const LayerInputs&)>& run) {
  std::map<std::string, Errors> errors;
  const LayerDesc& d = problem_.desc;
  const int64_t draws = num_draws(d.batch * d.beam * d.num_heads * d.seqlen_q, kLayerRows);
  for (int64_t n = 0; n < draws; ++n) {
    const Draw& drawn = draw(n);
    const LayerResults got = run(drawn.problem, drawn.in);
    if (!got.faults.empty()) return got.faults[0];
    if (memory_alone()) return "";
    const std::vector<NamedResult> g = named(got), exact = named(drawn.want.exact), naive = named(drawn.want.naive),
                                   magnitude = named(drawn.want.magnitude);
    for (size_t r = 0; r < g.size(); ++r) {
      const bool output = r < 2;
      if (!output && !training_) continue;
      auto [found, added] = errors.try_emplace(g[r].name, g[r].name, layer_bound(g[r].name));
      add_errors(found->second, *g[r].array, *exact[r].array, *naive[r].array, numbers<double>(*magnitude[r].array));
    }
  }
  std::string verdict;
  for (const auto& [name, of_result] : errors) verdict += text_of(of_result);
  return verdict;
}

}  // namespace polyhead::testing
