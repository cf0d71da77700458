#include "linear.h"

#include <sys/mman.h>

#include <cstring>

#include "core/dtype.h"
#include "core/sentence.h"
#include "node.h"

namespace polyhead::onnxruntime {
namespace {

template <class Kind>
struct Named {
  const char* name;
  Kind kind;
};
constexpr Named<ActivationKind> kActivations[] = {
    {"", ActivationKind::kNone},     {"relu", ActivationKind::kRelu},
    {"gelu", ActivationKind::kGelu}, {"gelu_tanh", ActivationKind::kGeluTanh},
    {"silu", ActivationKind::kSilu},
};
constexpr Named<NormKind> kNorms[] = {
    {"", NormKind::kNone}, {"layer", NormKind::kLayerNorm}, {"rms", NormKind::kRmsNorm}};

template <class Kind, size_t kCount>
Status named(const Attributes& attributes, const char* attribute, const Named<Kind> (&list)[kCount], Kind& kind) {
  const std::string text = attributes.text(attribute).value_or("");
  std::string names;
  for (const Named<Kind>& each : list) {
    if (text == each.name) return kind = each.kind, Status();
    if (each.name[0] != '\0') names += sentence(names.empty() ? "" : ", ", each.name);
  }
  return invalid(sentence(attribute, " is \"", text, "\", must be one of ", names));
}

// The rows of [rows..., columns].
Tensor as_matrix(const Tensor& t) {
  const int64_t columns = t.dims[t.ndim - 1];
  int64_t rows = 1;
  for (int i = 0; i + 1 < t.ndim; ++i) rows *= t.dims[i];
  return {t.data, t.dtype, {rows, columns}};
}

Tensor turned(const Tensor& weight, bool transposed) { return transposed ? permuted(weight, {1, 0}) : weight; }

// In huge pages where there is enough for one: a product of [384, 768] by [768, 3072] takes 16.2 ms with them and 16.5 without
// (2026-11-25, Zen 4, one thread).
void* memory_of(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = bytes < kHugePage ? 64 : kHugePage;
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, whole);
#ifdef MADV_HUGEPAGE
  if (memory != nullptr && alignment == kHugePage) (void)madvise(memory, whole, MADV_HUGEPAGE);
#endif
  return memory;
}

}  // namespace

Result<std::shared_ptr<Linear>> Linear::make(const NodeFacts& facts, const Attributes& attributes) {
  auto made = std::make_shared<Linear>();
  Status status = named(attributes, "activation", kActivations, made->desc_.activation);
  if (status.ok()) status = named(attributes, "norm", kNorms, made->desc_.norm);
  if (!status.ok()) return status;
  made->desc_.norm_eps = static_cast<double>(attributes.number("epsilon").value_or(1e-5f));
  made->desc_.bias = facts.gives(kBias);
  made->desc_.residual = facts.gives(kResidual);
  made->transposed_ = attributes.integer("transB").value_or(0) != 0;
  made->gives_sum_ = facts.wants(kSum);
  if (made->gives_sum_ && made->desc_.norm == NormKind::kNone)
    return invalid("its second output, what is normalised, is asked for without a norm");
  return made;
}

Status Linear::hold(const Constants& constants) {
  for (const size_t input : {kBias, kGamma, kBeta}) {
    Tensor& vector = vectors_[input];
    if (Status status = constants.constant(input, vector); !status.ok() || !vector.given()) {
      if (!status.ok()) return status;
      continue;
    }
    const auto bytes = static_cast<size_t>(vector.num_elements()) * dtype_size_bytes(vector.dtype);
    memory_[input].resize(bytes);
    std::memcpy(memory_[input].data(), vector.data, bytes);
    vector.data = memory_[input].data();
  }
  Tensor weight;
  Status status = constants.constant(kWeight, weight);
  if (!status.ok() || !weight.given()) return status;
  if (weight.ndim != 2) return invalid(sentence("W is ", words_of(weight), ", must have 2 dims"));
  weight = turned(weight, transposed_);
  desc_.prepacked = true;
  const auto made = product(1, weight.dims[1], weight.dims[0], weight.dtype, false);
  if (!made.ok()) return made.status();
  const size_t bytes = made->prepacked_bytes();
  prepacked_.reset(memory_of(bytes));
  if (prepacked_ == nullptr) return out_of_memory();
  status = made->prepack(weight, prepacked_.get(), bytes);
  weight_ = weight;
  weight_.data = nullptr;
  return status;
}

Status Linear::read_weight(Call& call, Tensor& weight) const {
  if (prepacked_ != nullptr) return weight = weight_, Status();
  Status status = call.input(kWeight, weight);
  if (status.ok() && weight.ndim != 2) return invalid(sentence("W is ", words_of(weight), ", must have 2 dims"));
  weight = turned(weight, transposed_);
  return status;
}

Status Linear::read_vector(Call& call, size_t input, const char* name, DType dtype, int64_t size,
                           Tensor& vector) const {
  vector = vectors_[input];
  if (!vector.given()) {
    if (Status status = call.input(input, vector); !status.ok() || !vector.given()) return status;
  }
  if (vector.num_elements() != size || vector.dtype != dtype)
    return invalid(sentence(name, " is ", words_of(vector), ", must be ", size, " numbers of ", dtype_name(dtype)));
  vector = Tensor(vector.data, dtype, {size});
  return {};
}

Result<MatrixProduct> Linear::product(int64_t m, int64_t n, int64_t k, DType dtype, bool alone) {
  const auto fits = [&](const MatrixProduct& each) {
    const MatrixProductDesc& d = each.desc();
    return d.m == m && d.n == n && d.k == k && d.dtype == dtype;
  };
  return (alone ? products_alone_ : products_).get(fits, [&] {
    MatrixProductDesc desc = desc_;
    desc.m = m, desc.n = n, desc.k = k;
    desc.dtype = dtype;
    return matrix_product(desc, {.where = {.executor = alone ? &here() : &sizes()}});
  });
}

Status Linear::run(Call& call) {
  Tensor x, weight, residual;
  MatrixProductArgs args;
  Status status = call.input(kX, x);
  if (status.ok()) status = read_weight(call, weight);
  if (!status.ok()) return status;
  if (x.ndim < 2 || x.dims[x.ndim - 1] != weight.dims[0] || x.dtype != weight.dtype || x.dtype > DType::kFloat64)
    return invalid(sentence("X is ", words_of(x), ", W ", words_of(weight), " as [k, n]: X must be floats [..., k]"));
  const int64_t n = weight.dims[1], k = weight.dims[0];
  std::vector<int64_t> dims(x.dims, x.dims + x.ndim);
  dims.back() = n;
  status = read_vector(call, kBias, "B", x.dtype, n, args.bias);
  if (status.ok()) status = read_vector(call, kGamma, "gamma", x.dtype, n, args.gamma);
  if (status.ok()) status = read_vector(call, kBeta, "beta", x.dtype, n, args.beta);
  if (status.ok()) status = call.input(kResidual, residual);
  if (!status.ok()) return status;
  if (residual.given()) {
    if (residual.dtype != x.dtype ||
        !std::equal(dims.begin(), dims.end(), residual.dims, residual.dims + residual.ndim))
      return invalid(sentence("R is ", words_of(residual), ", must be as X but for the last dim, ", n));
    args.residual = as_matrix(residual);
  }
  Tensor y, sum;
  y.dtype = sum.dtype = x.dtype;
  status = call.output(kY, dims, y);
  if (status.ok() && gives_sum_) status = call.output(kSum, dims, sum);
  if (!status.ok()) return status;
  args.a = as_matrix(x);
  args.c = as_matrix(y);
  if (sum.given()) args.sum = as_matrix(sum);
  const int64_t m = args.a.dims[0];
  const bool alone = is_small(static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
  const Result<MatrixProduct> made = product(m, n, k, x.dtype, alone);
  if (!made.ok()) return made.status();
  if (prepacked_ != nullptr) {
    args.prepacked = prepacked_.get();
    args.prepacked_bytes = made->prepacked_bytes();
  } else {
    args.b = weight;
  }
  args.workspace_bytes = made->workspace_bytes();
  if (status = call.scratch(args.workspace_bytes, args.workspace); !status.ok()) return status;
  args.where.executor = alone ? &here() : &call.executor();
  return made->forward(args);
}

}  // namespace polyhead::onnxruntime
