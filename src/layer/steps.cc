#include "layer/steps.h"

#include <algorithm>

#include "layer/append_steps.h"
#include "layer/attention_steps.h"
#include "layer/places.h"
#include "linear/product.h"

namespace polyhead {
namespace {

using linear::Matrix;

constexpr EpiloguePlaces kNoEpilogue;

// Tokens [batch, beam, time, ...] as rows, or a weight.
Matrix matrix_of(const Tensor& t) { return t.ndim > 2 ? token_matrix(t) : weight_matrix(t); }

// The product that a step asks for, alone or joined with its neighbours: the same for those who measure it and those who
// run it.
linear::GemmArgs gemm_of(ProductStep::Gives gives, const Product& product) {
  linear::GemmArgs gemm;
  switch (gives) {
    case ProductStep::Gives::kY:
      gemm.a = product.x;
      gemm.b = product.w;
      gemm.prepacked = product.prepacked.data;
      gemm.c = product.y;
      break;
    case ProductStep::Gives::kX:
      gemm.a = product.y;
      gemm.b = product.w.transposed();
      gemm.c = product.x;
      break;
    case ProductStep::Gives::kW:
      gemm.a = product.x.transposed();
      gemm.b = product.y;
      gemm.c = product.w;
      break;
  }
  return gemm;
}

// How many steps from `first` on are products that may be joined with each other.
size_t num_joining(std::span<const Step> steps, size_t first) {
  const ProductStep& product = std::get<ProductStep>(steps[first]);
  size_t end = first + 1;
  while (end < steps.size()) {
    const auto* next = std::get_if<ProductStep>(&steps[end]);
    if (next == nullptr || !next->joins || next->gives != product.gives) break;
    ++end;
  }
  return end - first;
}

// Walks a list and computes.
class Walk {
 public:
  Walk(const Machine& machine, const StepList& list, const Call& call)
      : machine_(machine), call_(call), scratch_(call.workspace + list.scratch) {}

  Status run(std::span<const Step> steps) {
    for (size_t i = 0; i < steps.size();) {
      if (std::holds_alternative<ProductStep>(steps[i])) {
        const size_t count = num_joining(steps, i);
        if (Status status = run_products(steps.subspan(i, count)); !status.ok()) return status;
        i += count;
        continue;
      }
      if (Status status = std::visit([&](const auto& step) { return run(step); }, steps[i]); !status.ok())
        return status;
      ++i;
    }
    return {};
  }

 private:
  Tensor at(const Place& place) const { return tensor_at(call_, place); }
  Matrix matrix(const Place& place) const { return matrix_of(at(place)); }

  // Filled in place: arguments are half a KB and more, and a call of a few tokens would notice copies.
  void set(const Place& place, Matrix* matrix_there) const {
    if (place.somewhere()) *matrix_there = matrix(place);
  }

  void set(const EpiloguePlaces& places, linear::Epilogue* epilogue) const {
    set(places.bias, &epilogue->bias);
    epilogue->activation = places.activation;
    epilogue->gradient = places.gradient;
    set(places.pre_activation, &epilogue->pre_activation);
    if (places.dropout >= 0) {
      const DropoutStream& stream = call_.dropouts[static_cast<size_t>(places.dropout)];
      epilogue->dropout = {stream.p, stream.seed.value_or(0), stream.offset};
    }
    set(places.residual, &epilogue->residual);
  }

  Status pointwise(const Matrix& x, const Matrix& y, const EpiloguePlaces& epilogue, const Matrix& sums,
                   bool accumulate = false) const {
    // Of one there may be any number, where there is none of the other.
    if (x.columns.size() == 0 || (x.rows.size() == 0 && !sums.given())) return {};
    linear::PointwiseArgs args;
    args.x = x;
    args.y = y;
    args.accumulate = accumulate;
    set(epilogue, &args.epilogue);
    args.sums = sums;
    args.accumulate_sums = call_.accumulate;
    args.workspace = scratch_;
    return machine_.linear->pointwise(args, machine_.run);
  }

  // Whether an earlier step gave this matrix; it is noted, if not.
  bool given_before(const Matrix& x) {
    for (int i = 0; i < num_given_; ++i) {
      if (same_matrix(given_[i], x)) return true;
    }
    given_[num_given_++] = x;
    return false;
  }

  // Steps that may be joined: as few products as their matrices allow. `parts` has the bits of its steps.
  Status run_products(std::span<const Step> steps) {
    Products products;
    for (size_t i = 0; i < steps.size(); ++i) {
      const ProductStep& s = std::get<ProductStep>(steps[i]);
      const Tensor x = at(s.x), y = at(s.y), w = at(s.w), bias = at(s.bias);
      const bool gives_w = s.gives == ProductStep::Gives::kW;
      if (gives_w ? !w.given() && !bias.given() : !x.given() || !y.given()) continue;
      Product product = {matrix_of(x), {}, matrix_of(bias), matrix_of(y), 1U << i, {}};
      if (s.prepacked >= 0 && call_.prepacked_weights != nullptr) {
        product.prepacked = prepacked_matrix(*machine_.prepacked, s.prepacked, call_.prepacked_weights);
      } else {
        product.w = matrix_of(w);
      }
      products.add(product);
    }
    const ProductStep& first = std::get<ProductStep>(steps.front());
    for (Product& product : products) {
      Status status =
          first.gives == ProductStep::Gives::kW ? give_weights(steps, product) : run_product(first, product);
      if (!status.ok()) return status;
    }
    return {};
  }

  Status give_weights(std::span<const Step> steps, Product& product) {
    if (product.w.given()) {
      if (Status status = leave_out_padding(steps, product); !status.ok()) return status;
      Status status = run_product(std::get<ProductStep>(steps.front()), product);
      if (!status.ok()) return status;
    }
    return product.bias.given() ? pointwise(product.y, {}, kNoEpilogue, product.bias) : Status();
  }

  Status run_product(const ProductStep& step, const Product& product) {
    linear::GemmArgs gemm = gemm_of(step.gives, product);
    set(step.epilogue, &gemm.epilogue);
    if (step.gives == ProductStep::Gives::kY) gemm.epilogue.bias = product.bias;
    if (step.gives == ProductStep::Gives::kX) gemm.accumulate = given_before(product.x);
    if (step.gives == ProductStep::Gives::kW) gemm.accumulate = call_.accumulate;
    gemm.workspace = scratch_;
    if (gemm.c.rows.size() == 0 || gemm.c.columns.size() == 0) return {};
    return multiply(*machine_.linear, gemm, step.gives == ProductStep::Gives::kW, machine_.run);
  }

  // Makes x a copy without padding, if some of it lies in padding for all of the product's steps.
  Status leave_out_padding(std::span<const Step> steps, Product& product) const {
    ArgumentSet lengths = 0;
    const ProductStep* padded = nullptr;
    for (size_t i = 0; i < steps.size(); ++i) {
      if ((product.parts >> i & 1) == 0) continue;
      const ProductStep& step = std::get<ProductStep>(steps[i]);
      if (step.lengths == 0) return {};
      if (padded == nullptr) padded = &step;
      lengths |= step.lengths;
    }
    if (!product.x.given()) return {};
    const Tensor x = at(padded->x);
    const Tensor copy(at(padded->copy).data, x.dtype, {x.dims[0], x.dims[1], x.dims[2], x.dims[3]});
    product.x = token_matrix(copy);
    return copy_rows(token_matrix(x), lengths, product.x);
  }

  // With both of a sequence's lengths, as query and as key, the longer one counts.
  Status copy_rows(const Matrix& from, ArgumentSet lengths, const Matrix& to) const {
    linear::CopyRowsArgs args;
    args.x = from;
    args.y = to;
    int count = 0;
    for (int i = 0; lengths >> i != 0; ++i) {
      if ((lengths >> i & 1) != 0) args.lengths[count++] = call_.tensors[i];
    }
    return machine_.linear->copy_rows(args, machine_.run);
  }

  Status run(const ProductStep&) { return {}; }  // run_products() has them

  Status run(const PointwiseStep& s) const {
    const Tensor x = at(s.x), y = at(s.y), sums = at(s.sums);
    if (!x.given() || (!y.given() && !sums.given())) return {};
    return pointwise(matrix_of(x), matrix_of(y), s.epilogue, matrix_of(sums));
  }

  Status run(const NormStep& s) const {
    linear::NormForwardArgs args;
    args.norm = norm_of(s.desc.kind);
    args.eps = s.desc.eps;
    args.x = matrix(s.x);
    args.gamma = matrix(s.gamma);
    args.beta = matrix(s.beta);
    args.y = matrix(s.y);
    args.mean = at(s.mean).data;
    args.rstd = at(s.rstd).data;
    return args.y.given() ? machine_.linear->norm_forward(args, machine_.run) : Status();
  }

  Status run(const NormBackwardStep& s) const {
    linear::NormBackwardArgs args;
    args.norm = norm_of(s.desc.kind);
    args.x = matrix(s.x);
    args.gamma = matrix(s.gamma);
    args.mean = at(s.mean).data;
    args.rstd = at(s.rstd).data;
    args.grad_y = matrix(s.grad_y);
    args.residual = matrix(s.residual);
    args.grad_x = matrix(s.grad_x);
    args.grad_gamma = matrix(s.grad_gamma);
    args.grad_beta = matrix(s.grad_beta);
    if (!args.grad_x.given() && !args.grad_gamma.given() && !args.grad_beta.given()) return {};
    args.accumulate_parameters = call_.accumulate;
    args.workspace = scratch_;
    return machine_.linear->norm_backward(args, machine_.run);
  }

  Status run(const AppendStep& s) const { return append(s, machine_, call_); }
  Status run(const AttentionStep& s) const { return attend(s, machine_, call_, scratch_); }

  Status run(const AttentionBackwardStep& s) const {
    return attend_backward(s, machine_, call_, scratch_, [&](const Tensor& beam, const Tensor& sums, bool add) {
      return pointwise(token_matrix(beam), token_matrix(sums), kNoEpilogue, {}, add);
    });
  }

  Status run(const UnpadStep& s) const {
    const Tensor x = at(s.x), y = at(s.y);
    if (!y.given() || x.num_elements() == 0) return {};
    return copy_rows(token_matrix(x), s.lengths, token_matrix(y));
  }

  Status run(const SumHeadsStep& s) {
    const Tensor to = at(s.to);
    if (to.num_elements() == 0) return {};
    const Tensor from = at(s.from);
    linear::SumHeadsArgs args;
    args.x = token_matrix(from);
    args.num_heads = from.dims[3];
    args.y = token_matrix(to);
    args.accumulate = given_before(args.y);
    return machine_.linear->sum_heads(args, machine_.run);
  }

  const Machine& machine_;
  const Call& call_;
  char* scratch_;
  Matrix given_[8];  // gradients of inputs so far: at most three of a layer and two of a block
  int num_given_ = 0;
};

// Walks a list, of a call that has all its arguments but their pointers, and asks each step how much memory it needs.
class Measure {
 public:
  Measure(const Machine& machine, const Call& call) : machine_(machine), call_(call) {}

  MemorySize bytes(std::span<const Step> steps) {
    for (size_t i = 0; i < steps.size(); ++i) {
      if (std::holds_alternative<ProductStep>(steps[i])) {
        products(steps.subspan(i, num_joining(steps, i)));
      } else {
        std::visit([&](const auto& step) { add(step); }, steps[i]);
      }
    }
    return bytes_;
  }

 private:
  Tensor at(const Place& place) const { return tensor_at(call_, place); }
  void need(MemorySize bytes) { bytes_ = std::max(bytes_, bytes); }
  void sums(const Matrix& x) { need(machine_.linear->sums_workspace_bytes(x.rows.size(), x.columns.size(), x.dtype)); }

  // The first of these, alone or joined with any number of those behind it.
  void products(std::span<const Step> steps) {
    const ProductStep& first = std::get<ProductStep>(steps.front());
    int64_t columns = 0;
    for (const Step& step : steps) {
      const ProductStep& s = std::get<ProductStep>(step);
      Product joined = {matrix_of(at(first.x)), matrix_of(at(first.w)), {}, matrix_of(at(first.y)), 0, {}};
      columns += matrix_of(at(s.y)).columns.size();
      joined.y.columns = joined.w.columns = linear::axis(columns, 1);
      const bool split_k = first.gives == ProductStep::Gives::kW;
      linear::GemmDesc desc = gemm_desc(gemm_of(first.gives, joined), split_k);
      need(machine_.linear->gemm_workspace_bytes(desc, machine_.run.num_threads));
      if (first.prepacked >= 0) {  // a call decides whether they are, and cuts the product otherwise
        desc.prepacked = true;
        need(machine_.linear->gemm_workspace_bytes(desc, machine_.run.num_threads));
      }
      if (split_k) sums(joined.y);
    }
  }

  void add(const ProductStep&) {}  // products() has them
  void add(const PointwiseStep& s) {
    if (s.sums.somewhere()) sums(matrix_of(at(s.x)));
  }
  void add(const NormStep&) {}
  void add(const NormBackwardStep& s) { sums(matrix_of(at(s.x))); }
  void add(const AppendStep&) {}
  void add(const AttentionStep& s) { need(s.plan->workspace_bytes()); }
  void add(const AttentionBackwardStep& s) { need(s.plan->backward_workspace_bytes()); }
  void add(const UnpadStep&) {}
  void add(const SumHeadsStep&) {}

  const Machine& machine_;
  const Call& call_;
  MemorySize bytes_;
};

}  // namespace

bool finish(const Machine& machine, Memory& workspace, StepList* list, bool one_step) {
  if (!workspace.map.fits()) return false;  // before products of such sizes are asked about
  Call call;
  if (one_step) call.step = 0;
  for (const Expected& e : list->expected) {
    if (e.kind == Expected::Kind::kRefused) continue;
    Tensor& t = call.tensors[e.argument];
    t.ndim = e.shape.ndim;
    t.dtype = e.shape.dtype;
    for (int i = 0; i < t.ndim; ++i) t.dims[i] = e.shape.dims[i].size;
  }
  list->scratch = workspace.map.take_bytes(Measure(machine, call).bytes(list->steps));
  return workspace.map.fits();
}

Status run(const Machine& machine, const StepList& list, const Call& call) {
  return Walk(machine, list, call).run(list.steps);
}

}  // namespace polyhead
