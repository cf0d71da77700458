#include "linear_problem.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/sentence.h"
#include "reference/linear.h"
#include "testing/bounds.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

using linear::Activation;

std::vector<int64_t> joined(std::vector<int64_t> first, const std::vector<int64_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Which reference or kernel computes a call.
struct Operations {
  std::function<void(const linear::GemmDesc&, const linear::GemmArgs&)> gemm;
  std::function<void(const linear::PointwiseArgs&)> pointwise;
};

linear::Epilogue epilogue_args(const LinearProblem& p, const LinearInputs& in, DType out_dtype, Operands& operands) {
  const EpilogueOptions& e = p.epilogue;
  linear::Epilogue epilogue;
  epilogue.bias = operands.input("bias", in.bias, 0);
  epilogue.activation = e.activation;
  epilogue.gradient = e.gradient;
  if (e.gradient) {
    epilogue.pre_activation = operands.input("pre_activation", in.pre_activation, p.rows.size());
  } else if (e.pre_activation) {
    epilogue.pre_activation = operands.output("pre_activation", out_dtype, joined(p.rows, p.columns), p.rows.size());
  }
  epilogue.dropout = {e.dropout_p, p.seed * 0x123456789abcdef, static_cast<uint32_t>(p.seed)};
  if (!e.residual_is_out) epilogue.residual = operands.input("residual", in.residual, p.rows.size());
  return epilogue;
}

void call(const Operations& operations, const LinearProblem& p, const LinearInputs& in, DType out_dtype,
          Operands& operands, const std::function<void(linear::GemmDesc&, linear::GemmArgs&)>& prepare,
          const std::function<void(linear::PointwiseArgs&)>& prepare_pointwise) {
  linear::Epilogue epilogue = epilogue_args(p, in, out_dtype, operands);
  const size_t row_dims = p.rows.size();
  const bool reads = p.epilogue.accumulate || p.epilogue.residual_is_out;
  linear::Matrix a, c;
  if (!p.product && p.in_place) {
    a = c = operands.updated("out", in.a, row_dims);
  } else {
    a = operands.input("a", in.a, row_dims);
    if (p.out) {
      c = reads ? operands.updated("out", in.out, row_dims)
                : operands.output("out", out_dtype, joined(p.rows, p.columns), row_dims);
    }
  }
  if (p.epilogue.residual_is_out) epilogue.residual = c;
  if (p.product) {
    linear::GemmDesc desc{p.m(), p.n(), p.k(), in.a.dtype, false, p.split_k};
    linear::GemmArgs args;
    args.a = a;
    args.b = operands.input("b", in.b, p.terms.size());
    args.c = c;
    args.accumulate = p.epilogue.accumulate;
    args.epilogue = epilogue;
    prepare(desc, args);
    return operations.gemm(desc, args);
  }
  linear::PointwiseArgs args;
  args.x = a;
  args.y = c;
  args.accumulate = p.epilogue.accumulate;
  args.epilogue = epilogue;
  if (p.sums && p.accumulate_sums) args.sums = operands.updated("sums", in.sums, 0);
  if (p.sums && !p.accumulate_sums) {
    args.sums = operands.output("sums", in.sums.dtype, in.sums.dims, 0);
  }
  args.accumulate_sums = p.accumulate_sums;
  prepare_pointwise(args);
  operations.pointwise(args);
}

template <class T>
Arrays reference(const LinearProblem& p, const LinearInputs& in, DType out_dtype) {
  Operands operands({});
  const Operations operations{
      [](const linear::GemmDesc& d, const linear::GemmArgs& a) { linear::reference::gemm<T>(d, a); },
      [](const linear::PointwiseArgs& a) { linear::reference::pointwise<T>(a); }};
  call(
      operations, p, in, out_dtype, operands, [](auto&, auto&) {}, [](auto&) {});
  return operands.written().arrays;
}

template <class Change>
LinearInputs changed(const LinearInputs& in, const Change& change) {
  return {change(in.a),        change(in.b),   change(in.bias), change(in.pre_activation),
          change(in.residual), change(in.out), change(in.sums)};
}

// What tensor cores shift the sums of a product of 16-bit numbers by.
Array cut_of_product(const LinearProblem& p, const LinearInputs& in) {
  const int64_t k = p.k(), n = p.n();
  const std::vector<double> a = numbers<double>(in.a), b = numbers<double>(in.b);
  Array cut(DType::kFloat64, joined(p.rows, p.columns));
  std::vector<double> sums(static_cast<size_t>(n));
  for (int64_t i = 0; i < p.m(); ++i) {
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t t = 0; t < k; ++t) {
      const bool added = (t + 1) % kAddedAtATime == 0 || t + 1 == k;
      for (int64_t j = 0; j < n; ++j) {
        sums[j] += a[i * k + t] * b[t * n + j];
        if (added) cut.set(i * n + j, cut.at(i * n + j) - kCut * sums[j]);
      }
    }
  }
  return cut;
}

// The same behind the epilogue, whose slope is below 1.13 times dropout's factor: as if all were shifted towards 0.
Array behind_epilogue(const LinearProblem& p, Array cut, const Array& exact) {
  const double factor = p.epilogue.dropout_p < 1 ? 1.13 / (1 - p.epilogue.dropout_p) : 0;
  for (int64_t n = 0; n < cut.size(); ++n) cut.set(n, std::copysign(factor * cut.at(n), -exact.at(n)));
  return cut;
}

const char* activation_name(Activation activation) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  return kNames[static_cast<int>(activation)];
}

}  // namespace

std::string to_string(const LinearProblem& p) {
  const auto dims = [](const std::vector<int64_t>& sizes) {
    std::string text;
    for (int64_t size : sizes) {
      if (!text.empty()) append(text, "x");
      append(text, size);
    }
    return text;
  };
  const EpilogueOptions& e = p.epilogue;
  std::string text = sentence(p.name, p.product ? " product [" : " epilogue [", dims(p.rows), " * ", dims(p.columns),
                              "] terms ", dims(p.terms), " ", dtype_name(p.dtype), " to ", dtype_name(p.out_dtype),
                              " activation ", activation_name(e.activation), " layout ", layout_name(p.layout),
                              " seed ", p.seed, " dropout ", e.dropout_p);
  const std::pair<bool, const char*> flags[] = {{p.packed, " packed"},
                                                {p.split_k, " split_k"},
                                                {p.sums, " sums"},
                                                {p.accumulate_sums, " accumulate_sums"},
                                                {!p.out, " no out"},
                                                {p.in_place, " in_place"},
                                                {e.bias, " bias"},
                                                {e.gradient, " gradient"},
                                                {e.residual, " residual"},
                                                {e.residual_is_out, " residual_is_out"},
                                                {e.accumulate, " accumulate"},
                                                {e.pre_activation, " pre_activation"}};
  for (const auto& [on, name] : flags) text += on ? name : "";
  return text;
}

LinearInputs linear_inputs(const LinearProblem& p, uint64_t seed) {
  LinearInputs in;
  auto next = [&, n = seed * 16](DType dtype, const std::vector<int64_t>& dims) mutable {
    return random_array(dtype, dims, ++n);
  };
  const EpilogueOptions& e = p.epilogue;
  const std::vector<int64_t> dims = joined(p.rows, p.columns);
  in.a = next(p.dtype, p.product ? joined(p.rows, p.terms) : dims);
  if (p.product) in.b = next(p.dtype, joined(p.terms, p.columns));
  if (e.bias) in.bias = next(e.bias_float32 ? DType::kFloat32 : p.dtype, p.columns);
  if (e.gradient) in.pre_activation = next(p.dtype, dims);
  if (e.residual) in.residual = next(p.dtype, dims);
  in.out = next(p.out_dtype, dims);
  in.sums = next(DType::kFloat32, p.columns);
  return in;
}

CallResult run(const linear::Kernel& kernel, const LinearProblem& p, const LinearInputs& in,
               const CallOptions& options) {
  Operands operands(options);
  Executor& threads = executor(options.threads);
  const Operations operations{
      [&](const linear::GemmDesc& d, const linear::GemmArgs& a) { expect_ok(kernel.gemm(d, a, threads)); },
      [&](const linear::PointwiseArgs& a) { expect_ok(kernel.pointwise(a, threads)); }};
  const auto prepare = [&](linear::GemmDesc& desc, linear::GemmArgs& args) {
    desc.prepacked = p.packed;
    if (p.packed) {
      void* packed = operands.workspace(kernel.packed_bytes(desc.k, desc.n, desc.dtype).value());
      expect_ok(kernel.pack(args.b, packed, threads));
      args.prepacked = packed;
      args.b = {};
    }
    args.workspace = operands.workspace(kernel.gemm_workspace_bytes(desc, threads.num_threads()).value());
  };
  const auto prepare_pointwise = [&](linear::PointwiseArgs& args) {
    if (p.sums) args.workspace = operands.workspace(kernel.sums_workspace_bytes(p.m(), p.n(), p.dtype).value());
  };
  call(operations, p, in, p.out_dtype, operands, prepare, prepare_pointwise);
  return operands.written();
}

Draws draws_of(const LinearProblem& p) {
  return {p.seed, [p](uint64_t seed) { return expected(p, linear_inputs(p, seed)); }};
}

std::string judge(const linear::Kernel& kernel, const LinearProblem& p, const CallOptions& options, Draws& draws) {
  const bool cut = std::string_view(kernel.name).find("cuda") != std::string_view::npos;
  return draws.judge([&](uint64_t seed) { return run(kernel, p, linear_inputs(p, seed), options); }, cut);
}

ExpectedArrays expected(const LinearProblem& p, const LinearInputs& in) {
  ExpectedArrays d;
  d.naive = reference<float>(p, in, p.out_dtype);
  d.exact = reference<double>(p, changed(in, widened), DType::kFloat64);
  // No activation has a slope beyond 1.13, which the bound's 4 ulp take in.
  LinearProblem plain = p;
  plain.epilogue.activation = Activation::kNone;
  d.magnitude = reference<double>(plain, changed(in, magnitudes), DType::kFloat64);
  if (p.product && p.dtype != DType::kFloat32) {
    d.cut["pre_activation"] = cut_of_product(p, in);
    d.cut["out"] = behind_epilogue(p, d.cut["pre_activation"], d.exact.at("out"));
  }
  return d;
}

LinearProblem random_linear_problem(uint64_t seed) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  Random random(seed);
  LinearProblem p;
  p.name = "random";
  p.seed = seed;
  p.dtype = kTypes[random.integer(0, 3)];
  p.out_dtype = random.chance(0.7) ? p.dtype : kTypes[random.integer(1, 3)];
  p.product = random.chance(0.7);
  p.rows = random_axis(random, 400, 2);
  p.columns = random_axis(random, 400, 2);
  const int64_t area = std::max<int64_t>(1, p.m() * p.n());
  if (p.product) p.terms = random_axis(random, std::max<int64_t>(1, std::min<int64_t>(2000, 2000000 / area)), 2);
  p.packed = random.chance(0.3);
  p.split_k = random.chance(0.3);
  p.sums = !p.product && random.chance(0.5);
  p.accumulate_sums = p.sums && random.chance(0.3);
  p.out = p.product || !p.sums || random.chance(0.7);
  EpilogueOptions& e = p.epilogue;
  if (random.chance(0.8)) {
    e.bias = random.chance(0.4);
    e.bias_float32 = random.chance(0.5);
    e.activation = static_cast<Activation>(random.integer(0, 4));
    e.gradient = random.chance(0.4);
    e.pre_activation = !e.gradient && random.chance(0.4);
    if (random.chance(0.3)) e.dropout_p = random.chance(0.1) ? 1.0 : random.uniform();
    e.residual = random.chance(0.3);
    e.accumulate = p.out && random.chance(0.2);
    e.residual_is_out = p.out && !e.residual && !e.accumulate && random.chance(0.2);
  }
  p.in_place =
      !p.product && p.out && !e.accumulate && !e.residual_is_out && p.out_dtype == p.dtype && random.chance(0.3);
  return p;
}

LinearInputs rows_of(const LinearProblem& p, const LinearInputs& in, int64_t first, int64_t last) {
  const auto part = [&](Array array) {
    if (!array.given()) return array;
    const std::vector<int64_t> dims(array.dims.begin() + static_cast<ptrdiff_t>(p.rows.size()), array.dims.end());
    array.dims = joined({p.m()}, dims);
    return rows(array, first, last);
  };
  return {part(in.a), in.b, in.bias, part(in.pre_activation), part(in.residual), part(in.out), in.sums};
}

}  // namespace polyhead::testing
