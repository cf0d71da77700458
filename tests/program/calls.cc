#include "calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels_to_test.h"
#include "reference/attention.h"

namespace polyhead::testing {

bool is_float_dtype(DType dtype) { return dtype != DType::kBool && dtype != DType::kInt32 && dtype != DType::kInt64; }

namespace {

Array drawn(DType dtype, std::vector<int64_t> dims, Random& random) {
  Array a(dtype, std::move(dims));
  a.fill([&] { return random.normal(); });
  return a;
}

Array like(const Array& a) { return a.given() ? Array(a.dtype, a.dims) : Array(); }

Array cast(const Array& a, DType dtype) {
  if (!a.given()) return a;
  Array b(dtype, a.dims);
  for (int64_t n = 0; n < a.size(); ++n) b.set(n, a.at(n));
  return b;
}

// What computes: a plan, or the reference in some arithmetic.
struct Computes {
  std::function<Status(const ForwardArgs&)> forward;
  std::function<Status(const BackwardArgs&)> backward;
};

ProgramResults compute(const ProgramCall& call, const Computes& by) {
  const AttentionDesc& d = call.desc;
  std::vector<Tensor> captures, grad_captures;
  for (const Array& a : call.captures) captures.push_back(view(a));
  ProgramResults r;
  const DType statistics = d.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  r.out = like(call.in.query);
  r.logsumexp = Array(statistics, {d.batch, d.num_heads, d.seqlen_q});
  ForwardArgs args = dense_args(call.in);
  args.captures = captures;
  args.out = view(r.out);
  args.logsumexp = view(r.logsumexp);
  Status status = by.forward(args);
  EXPECT_TRUE(status.ok()) << status.message();
  r.grad_query = like(call.in.query);
  r.grad_key = like(call.in.key);
  r.grad_value = like(call.in.value);
  r.grad_bias = like(call.in.attn_bias);
  r.grad_slopes = like(call.in.alibi_slopes);
  for (const Array& a : call.captures) r.grad_captures.push_back(is_float_dtype(a.dtype) ? like(a) : Array());
  BackwardArgs back;
  back.forward = args;
  if (call.out.given()) {
    back.forward.out = view(call.out);
    back.forward.logsumexp = view(call.logsumexp);
  }
  back.grad_out = view(call.grad_out);
  back.grad_query = view(r.grad_query);
  back.grad_key = view(r.grad_key);
  back.grad_value = view(r.grad_value);
  back.grad_attn_bias = view(r.grad_bias);
  back.grad_alibi_slopes = view(r.grad_slopes);
  for (const Array& a : r.grad_captures) grad_captures.push_back(view(a));
  back.grad_captures = grad_captures;
  status = by.backward(back);
  EXPECT_TRUE(status.ok()) << status.message();
  return r;
}

}  // namespace

std::vector<const Array*> ProgramResults::all() const {
  std::vector<const Array*> list = {&out, &logsumexp, &grad_query, &grad_key, &grad_value, &grad_bias, &grad_slopes};
  for (const Array& a : grad_captures) list.push_back(&a);
  return list;
}

std::string ProgramResults::name(size_t n) {
  static const char* const kNames[] = {"out",        "logsumexp", "grad_query", "grad_key",
                                       "grad_value", "grad_bias", "grad_slopes"};
  return n < 7 ? kNames[n] : "grad_captures " + std::to_string(n - 7);
}

ProgramCall make_call(const NamedProgram& program, const Shape& shape, uint64_t seed) {
  Random random(seed);
  ProgramCall call;
  AttentionDesc& d = call.desc;
  d.batch = shape.sizes.batch;
  d.num_heads = shape.sizes.heads;
  d.num_heads_kv = shape.heads_kv;
  d.seqlen_q = shape.sizes.seqlen_q;
  d.seqlen_k = shape.sizes.seqlen_k;
  d.head_dim = shape.dim;
  d.head_dim_v = shape.dim;
  d.dtype = shape.dtype;
  call.in.query = drawn(d.dtype, {d.batch, d.seqlen_q, d.num_heads, d.head_dim}, random);
  call.in.key = drawn(d.dtype, {d.batch, d.seqlen_k, d.num_heads_kv, d.head_dim}, random);
  call.in.value = drawn(d.dtype, {d.batch, d.seqlen_k, d.num_heads_kv, d.head_dim}, random);
  if (shape.with_options) {
    d.softcap = 3;
    d.query_offset = 2;
    d.window_left = 70;
    d.alibi_slopes_ndim = 1;
    call.in.alibi_slopes = Array(DType::kFloat32, {d.num_heads});
    call.in.alibi_slopes.fill([&] { return 0.02 * random.uniform(); });
    d.attn_mask = {true, DType::kBool, {1, d.num_heads, d.seqlen_q, d.seqlen_k}};
    call.in.attn_mask = Array(DType::kBool, {1, d.num_heads, d.seqlen_q, d.seqlen_k});
    call.in.attn_mask.fill([&] { return random.integer(0, 7) != 0; });
    d.attn_bias = {true, DType::kFloat32, {1, 1, d.seqlen_q, d.seqlen_k}};
    call.in.attn_bias = Array(DType::kFloat32, {1, 1, d.seqlen_q, d.seqlen_k});
    call.in.attn_bias.fill([&] { return random.integer(0, 30) == 0 ? -HUGE_VAL : random.normal(); });
  }
  call.grad_out = drawn(d.dtype, call.in.query.dims, random);
  Result<SharedProgram> parsed = parse_program(program.text);
  EXPECT_TRUE(parsed.ok()) << program.name << ": " << parsed.status().message();
  d.program = *parsed;
  for (const CaptureOf& capture : program.captures(shape.sizes)) {
    Array a(capture.dtype, capture.dims);
    for (int64_t n = 0; n < a.size(); ++n) a.set(n, capture.element(n, random));
    call.captures.push_back(a);
    CaptureShape told{capture.dtype, static_cast<int>(capture.dims.size()), {}};
    std::copy(capture.dims.begin(), capture.dims.end(), told.dims);
    d.captures.push_back(told);
  }
  return call;
}

ProgramCall in_double(const ProgramCall& call) {
  ProgramCall wide = call;
  wide.desc.dtype = DType::kFloat64;
  for (Array ProgramCall::*a : {&ProgramCall::grad_out, &ProgramCall::out, &ProgramCall::logsumexp})
    wide.*a = cast(call.*a, DType::kFloat64);
  for (Array Inputs::*a : {&Inputs::query, &Inputs::key, &Inputs::value})
    wide.in.*a = cast(call.in.*a, DType::kFloat64);
  for (size_t i = 0; i < wide.captures.size(); ++i) {
    if (!is_float_dtype(wide.captures[i].dtype)) continue;
    wide.captures[i] = cast(wide.captures[i], DType::kFloat64);
    wide.desc.captures[i].dtype = DType::kFloat64;
  }
  return wide;
}

ProgramResults by_kernel(const ProgramCall& call, const char* kernel, Executor& executor) {
  PlanOptions options;
  options.kernel = kernel;
  options.where.executor = &executor;
  const Result<Plan> made = plan(call.desc, options);
  EXPECT_TRUE(made.ok()) << made.status().message();
  const size_t bytes = std::max(made->workspace_bytes(), made->backward_workspace_bytes());
  const GuardedBytes workspace(bytes / 64 * 64 + 64, Guard::kStart, 0xff);
  const auto give = [&](ForwardArgs& args, size_t needed) {
    args.workspace = workspace.data();
    args.workspace_bytes = needed;
  };
  return compute(call, {[&](ForwardArgs args) { return give(args, made->workspace_bytes()), made->forward(args); },
                        [&](BackwardArgs args) {
                          return give(args.forward, made->backward_workspace_bytes()), made->backward(args);
                        }});
}

ProgramResults in_float(const ProgramCall& call) {
  std::vector<int64_t> memory(
      (reference::workspace_bytes<float>(call.desc) + reference::backward_workspace_bytes<float>(call.desc)).value() /
          8 +
      8);
  return compute(
      call,
      {[&](const ForwardArgs& args) { return reference::forward_checked<float>(call.desc, args, memory.data()); },
       [&](const BackwardArgs& args) { return reference::backward_checked<float>(call.desc, args, memory.data()); }});
}

double epsilon(DType dtype) {
  return dtype == DType::kBFloat16  ? 0x1p-8
         : dtype == DType::kFloat16 ? 0x1p-11
         : dtype == DType::kFloat32 ? 0x1p-23
                                    : 0x1p-52;
}

double largest_difference(const Array& a, const Array& b, double* magnitude) {
  double largest = 0;
  for (int64_t n = 0; n < a.size(); ++n) {
    const double x = a.at(n), y = b.at(n);
    if (x == y || (x != x && y != y)) continue;
    const double difference = std::fabs(x - y);
    largest = std::max(largest, difference == difference ? difference : HUGE_VAL);
    if (magnitude != nullptr && std::isfinite(y)) *magnitude = std::max(*magnitude, std::fabs(y));
  }
  return largest;
}

std::vector<double> largest_terms(const ProgramCall& call) {
  BackwardInputs in;
  in.forward = call.in;
  in.forward.captures = call.captures;
  in.grad_out = call.grad_out;
  in.out = call.out;
  in.logsumexp = call.logsumexp;
  Gradients terms = gradient_magnitudes(call.desc, in, Visibility(call.desc, in.forward));
  std::vector<const Array*> arrays = {&terms.query, &terms.key, &terms.value, &terms.attn_bias, &terms.alibi_slopes};
  for (const Array& a : terms.captures) arrays.push_back(&a);
  // L = m + log l, and log l is log Sk at most: either may be larger than L.
  std::vector<double> largest = {0, std::log(static_cast<double>(std::max<int64_t>(call.desc.seqlen_k, 1)))};
  for (const Array* a : arrays) {
    largest.push_back(0);
    for (int64_t n = 0; n < a->size(); ++n) largest.back() = std::max(largest.back(), a->at(n));
  }
  return largest;
}

void give_exact_out(ProgramCall& call) {
  const ProgramResults forward = by_kernel(in_double(call), "reference", executor(1));
  call.out = cast(forward.out, call.desc.dtype);
  call.logsumexp = cast(forward.logsumexp, DType::kFloat32);
}

}  // namespace polyhead::testing
