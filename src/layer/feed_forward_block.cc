//   pre-norm:   n = norm(x)   u = n W1 + b1   h = g1 activation(u)   y = x + g2 (h W2 + b2)        g: dropout
//   post-norm:  n = x, and z = x + g2 (h W2 + b2), y = norm(z)
// Saved for backward: u, z, and the norm's statistics; n and h are computed once more.
#include <algorithm>
#include <new>
#include <utility>

#include "core/sentence.h"
#include "layer/call.h"
#include "layer/fingerprint.h"
#include "layer/norm.h"
#include "layer/packed.h"
#include "linear/product.h"

namespace polyhead {

struct FeedForwardBlockState {
  FeedForwardBlockDesc desc;
  AttentionDesc no_attention;  // what Operands asks for
  const linear::Kernel* linear = nullptr;
  Executor* executor = nullptr;
  uint64_t fingerprint = 0;
  bool pre = false, post = false;  // a norm
  PackedLayout packed;             // of weight1 and weight2

  size_t saved_inner = 0, saved_rows = 0, saved_mean = 0, saved_rstd = 0, reserve_bytes = 0;
  size_t forward_inner = 0, forward_rows = 0, forward_shared = 0, forward_bytes = 0;
  size_t backward_inner = 0, backward_rows = 0, backward_dropped = 0, backward_shared = 0, backward_bytes = 0;

  int64_t num_rows() const { return desc.batch * desc.seqlen; }
  Tensor rows_at(void* memory, size_t offset, int64_t size) const {
    return Tensor(static_cast<char*>(memory) + offset, desc.dtype, {desc.batch, 1, desc.seqlen, size});
  }
};

namespace {

using linear::Matrix;

Status check_desc(const FeedForwardBlockDesc& d) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"batch", d.batch}, {"seqlen", d.seqlen}, {"size", d.size}, {"inner_size", d.inner_size}};
  for (const auto& size : sizes) {
    if (size.value < 0) return invalid(sentence(size.name, " is ", size.value, ", must not be negative"));
  }
  const auto activation = static_cast<int32_t>(d.activation);
  if (activation < 0 || activation > 4) {
    return invalid(sentence("activation is ", activation, ", must be an ActivationKind: 0 to 4"));
  }
  const struct {
    const char* name;
    double p;
  } dropouts[] = {{"inner_dropout_p", d.inner_dropout_p}, {"output_dropout_p", d.output_dropout_p}};
  for (const auto& dropout : dropouts) {
    if (!(dropout.p >= 0 && dropout.p <= 1))
      return invalid(sentence(dropout.name, " is ", dropout.p, ", must be 0 to 1"));
  }
  if (d.dtype != DType::kFloat32 && d.dtype != DType::kBFloat16 && d.dtype != DType::kFloat16 &&
      d.dtype != DType::kFloat64) {
    return invalid(sentence("dtype is ", dtype_name(d.dtype), ", takes float32, bfloat16, float16 or float64"));
  }
  return check_norm_desc(d.norm);
}

uint64_t fingerprint_of(const FeedForwardBlockDesc& d) {
  Fingerprint print;
  for (const int64_t number : {d.batch, d.seqlen, d.size, d.inner_size, static_cast<int64_t>(d.activation),
                               static_cast<int64_t>(d.norm.kind), static_cast<int64_t>(d.dtype)}) {
    print.add(number);
  }
  for (const bool flag : {d.bias1, d.bias2, d.residual, d.norm.pre, d.norm.gamma, d.norm.beta}) print.add(flag);
  for (const double number : {d.inner_dropout_p, d.output_dropout_p, d.norm.eps}) print.add(number);
  return print.value();
}

size_t product_bytes(const FeedForwardBlockState& s, int64_t m, int64_t n, int64_t k, bool split_k) {
  linear::GemmDesc desc;
  desc.m = m, desc.n = n, desc.k = k, desc.dtype = s.desc.dtype, desc.split_k = split_k;
  return s.linear->gemm_workspace_bytes(desc, s.executor->num_threads());
}

bool lay_out_block(FeedForwardBlockState& s) {
  const FeedForwardBlockDesc& d = s.desc;
  const size_t element = dtype_size_bytes(d.dtype), statistic = d.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t normed = s.pre || s.post ? d.seqlen : 0;
  MemoryMap reserve, forward, backward;
  reserve.take_bytes(sizeof(ReserveHeader));
  s.saved_inner = reserve.take({d.batch, d.seqlen, d.inner_size}, element);
  s.saved_rows = reserve.take({d.batch, s.post ? d.seqlen : 0, d.size}, element);
  s.saved_mean = reserve.take({d.batch, normed}, statistic);
  s.saved_rstd = reserve.take({d.batch, normed}, statistic);
  s.reserve_bytes = reserve.bytes();
  s.forward_inner = forward.take({d.batch, d.seqlen, d.inner_size}, element);
  s.forward_rows = forward.take({d.batch, normed, d.size}, element);
  s.backward_inner = backward.take({d.batch, d.seqlen, d.inner_size}, element);
  s.backward_rows = backward.take({d.batch, normed, d.size}, element);
  s.backward_dropped = backward.take({d.batch, d.output_dropout_p > 0 ? d.seqlen : 0, d.size}, element);
  const MatrixSize weights[] = {{d.size, d.inner_size}, {d.inner_size, d.size}};
  if (!reserve.fits() || !forward.fits() || !backward.fits()) return false;
  if (!lay_out_packed(*s.linear, d.dtype, weights, &s.packed)) return false;
  const int64_t m = s.num_rows(), size = d.size, inner = d.inner_size;
  s.forward_shared =
      forward.take_bytes(std::max(product_bytes(s, m, inner, size, false), product_bytes(s, m, size, inner, false)));
  s.forward_bytes = forward.bytes();
  s.backward_shared = backward.take_bytes(
      std::max({product_bytes(s, m, inner, size, false), product_bytes(s, m, size, inner, false),
                product_bytes(s, size, inner, m, true), product_bytes(s, inner, size, m, true),
                s.linear->sums_workspace_bytes(m, size, d.dtype), s.linear->sums_workspace_bytes(m, inner, d.dtype)}));
  s.backward_bytes = backward.bytes();
  return forward.fits() && backward.fits();
}

// The tensors of a call, checked one after the other.
class FeedForwardOperands {
 public:
  FeedForwardOperands(const FeedForwardBlockState& state, const FeedForwardBlockForwardArgs& args)
      : s_(state), args_(args), operands_(state.no_attention) {}

  Status add_rows(Role role, const char* name, const Tensor& t) {
    const FeedForwardBlockDesc& d = s_.desc;
    return operands_.add(role, name, t, d.dtype,
                         {{"batch", d.batch}, {"beam", 1}, {"seqlen", d.seqlen}, {"size", d.size}});
  }
  Status add_weights(Role role, const FeedForwardWeights& weights) {
    const Status status = add_matrices(role, weights);
    return status.ok() ? add_vectors(role, weights) : status;
  }
  // What forward reads.
  Status add_forward_weights() {
    Status status;
    if (args_.packed_weights == nullptr) {
      status = add_matrices(Role::kInput, args_.weights);
    } else {
      status = add_packed(Role::kInput, args_.packed_weights, args_.packed_weights_bytes);
      if (status.ok()) status = check_packed(s_.packed, args_.packed_weights);
    }
    return status.ok() ? add_vectors(Role::kInput, args_.weights) : status;
  }
  Status add_matrices(Role role, const FeedForwardWeights& weights) {
    const Dim size{"size", s_.desc.size}, inner{"inner_size", s_.desc.inner_size};
    const bool optional = role == Role::kOutput;
    const Status status =
        add_weight(role, optional ? "grad_weights.weight1" : "weights.weight1", weights.weight1, true, {size, inner});
    if (!status.ok()) return status;
    return add_weight(role, optional ? "grad_weights.weight2" : "weights.weight2", weights.weight2, true,
                      {inner, size});
  }
  Status add_packed(Role role, const void* packed, size_t bytes) {
    return polyhead::add_packed(operands_, role, s_.packed, packed, bytes, &packed_);
  }
  Status add_vectors(Role role, const FeedForwardWeights& weights) {
    const FeedForwardBlockDesc& d = s_.desc;
    const bool optional = role == Role::kOutput;
    Status status = add_weight(role, optional ? "grad_weights.bias1" : "weights.bias1", weights.bias1, d.bias1,
                               {{"inner_size", d.inner_size}});
    if (status.ok()) {
      status = add_weight(role, optional ? "grad_weights.bias2" : "weights.bias2", weights.bias2, d.bias2,
                          {{"size", d.size}});
    }
    return status.ok() ? add_norm_weights(operands_, role, d.norm, weights.norm, d.size, d.dtype) : status;
  }
  Status add_reserve() {
    if (args_.reserve_bytes < s_.reserve_bytes) {
      return invalid(sentence("reserve_bytes is ", args_.reserve_bytes, ", needs ", s_.reserve_bytes));
    }
    if (reinterpret_cast<uintptr_t>(args_.reserve) % 64 != 0) return invalid("reserve is not aligned to 64 bytes");
    const auto bytes = static_cast<int64_t>(s_.reserve_bytes);
    reserve_ = Tensor(args_.reserve, DType::kBool, {bytes});
    return operands_.add(Role::kOutput, "reserve", reserve_, DType::kBool, {{"bytes", bytes}});
  }
  Status check_workspace(size_t needed) const {
    return operands_.check_workspace(args_.workspace, args_.workspace_bytes, needed);
  }

 private:
  // Gradients are optional.
  Status add_weight(Role role, const char* name, const Tensor& t, bool asked, Dims dims) {
    if (role == Role::kOutput && !t.given()) return {};
    return asked ? operands_.add(role, name, t, s_.desc.dtype, dims) : unasked(name, t);
  }

  const FeedForwardBlockState& s_;
  const FeedForwardBlockForwardArgs& args_;
  Operands operands_;
  Tensor reserve_, packed_;  // memory as operands, which outlive their being added
};

DropoutStreams dropouts_of(const FeedForwardBlockDesc& d, const FeedForwardBlockForwardArgs& args) {
  return {{{"inner_dropout", d.inner_dropout_p, args.inner_dropout_seed, args.inner_dropout_offset},
           {"output_dropout", d.output_dropout_p, args.output_dropout_seed, args.output_dropout_offset}}};
}

linear::MatrixDropout inner_dropout(const FeedForwardBlockState& s, const FeedForwardBlockForwardArgs& args) {
  if (args.reserve == nullptr) return {};
  return {s.desc.inner_dropout_p, args.inner_dropout_seed.value_or(0), args.inner_dropout_offset};
}
linear::MatrixDropout output_dropout(const FeedForwardBlockState& s, const FeedForwardBlockForwardArgs& args) {
  if (args.reserve == nullptr) return {};
  return {s.desc.output_dropout_p, args.output_dropout_seed.value_or(0), args.output_dropout_offset};
}

// A product of the forward pass: x times weight1 or weight2.
linear::GemmArgs product(const FeedForwardBlockState& s, const FeedForwardBlockForwardArgs& args, const Matrix& x,
                         int index, const Matrix& y) {
  linear::GemmArgs gemm;
  gemm.a = x;
  gemm.c = y;
  if (args.packed_weights != nullptr) {
    gemm.packed = packed_matrix(s.packed, index, args.packed_weights).data;
  } else {
    gemm.b = weight_matrix(index == 0 ? args.weights.weight1 : args.weights.weight2);
  }
  gemm.epilogue.bias = weight_matrix(index == 0 ? args.weights.bias1 : args.weights.bias2);
  gemm.workspace = static_cast<char*>(args.workspace) + s.forward_shared;
  return gemm;
}

void compute_forward(const FeedForwardBlockState& s, const FeedForwardBlockForwardArgs& args) {
  const FeedForwardBlockDesc& d = s.desc;
  char *const reserve = static_cast<char*>(args.reserve), *const workspace = static_cast<char*>(args.workspace);
  const Matrix x = token_matrix(args.x), out = token_matrix(args.out);
  const Matrix rows = token_matrix(reserve != nullptr && s.post ? s.rows_at(reserve, s.saved_rows, d.size)
                                                                : s.rows_at(workspace, s.forward_rows, d.size));
  const Matrix h = token_matrix(s.rows_at(workspace, s.forward_inner, d.inner_size));
  linear::NormForwardArgs norm = norm_forward_args(d.norm, args.weights.norm);
  linear::GemmArgs first = product(s, args, s.pre ? rows : x, 0, h);
  if (reserve != nullptr) {
    begin_reserve(reserve, s.fingerprint, dropouts_of(s.desc, args));
    norm.mean = reserve + s.saved_mean;
    norm.rstd = reserve + s.saved_rstd;
    first.epilogue.pre_activation = token_matrix(s.rows_at(reserve, s.saved_inner, d.inner_size));
  }
  if (s.pre) {
    norm.x = x;
    norm.y = rows;
    s.linear->norm_forward(norm, *s.executor);
  }
  first.epilogue.activation = static_cast<linear::Activation>(d.activation);
  first.epilogue.dropout = inner_dropout(s, args);
  multiply(*s.linear, first, false, *s.executor);
  linear::GemmArgs second = product(s, args, h, 1, s.post ? rows : out);
  second.epilogue.dropout = output_dropout(s, args);
  if (d.residual) second.epilogue.residual = x;
  multiply(*s.linear, second, false, *s.executor);
  if (s.post) {
    norm.x = rows;
    norm.y = out;
    s.linear->norm_forward(norm, *s.executor);
  }
}

class FeedForwardBackward {
 public:
  FeedForwardBackward(const FeedForwardBlockState& state, const FeedForwardBlockBackwardArgs& args)
      : s_(state),
        args_(args),
        forward_(args.forward),
        reserve_(static_cast<char*>(args.forward.reserve)),
        workspace_(static_cast<char*>(args.forward.workspace)),
        rows_(token_matrix(state.rows_at(workspace_, state.backward_rows, state.desc.size))),
        inner_(token_matrix(state.rows_at(workspace_, state.backward_inner, state.desc.inner_size))),
        x_(token_matrix(args.forward.x)),
        grad_x_(token_matrix(args.grad_x)) {}

  void run() const {
    const Matrix grad_out = token_matrix(args_.grad_out);
    if (s_.post) norm(token_matrix(s_.rows_at(reserve_, s_.saved_rows, s_.desc.size)), grad_out, {}, rows_);
    const Matrix dz = s_.post ? rows_ : grad_out;
    const Matrix dY = second_product(dz);
    const Matrix du = inner_gradient(dY);
    first_weights(du);
    const bool normed =
        s_.pre && (grad_x_.given() || args_.grad_weights.norm.gamma.given() || args_.grad_weights.norm.beta.given());
    if (!grad_x_.given() && !normed) return;
    linear::GemmArgs first;
    first.a = du;
    first.b = weight_matrix(forward_.weights.weight1).transposed();
    first.c = s_.pre ? rows_ : grad_x_;
    if (!s_.pre && s_.desc.residual) first.epilogue.residual = dz;
    multiply(first, false);
    if (normed) norm(x_, rows_, s_.desc.residual ? grad_out : Matrix(), grad_x_);
  }

 private:
  void* shared() const { return workspace_ + s_.backward_shared; }

  void multiply(linear::GemmArgs gemm, bool split_k) const {
    gemm.workspace = shared();
    polyhead::multiply(*s_.linear, gemm, split_k, *s_.executor);
  }

  // The gradient of a weight: x^T dy.
  void multiply_tokens(const Matrix& x, const Matrix& dy, const Tensor& grad_weight) const {
    linear::GemmArgs gemm;
    gemm.a = x.transposed();
    gemm.b = dy;
    gemm.c = weight_matrix(grad_weight);
    gemm.accumulate = args_.accumulate;
    multiply(gemm, true);
  }

  void norm(const Matrix& x, const Matrix& grad_y, const Matrix& residual, const Matrix& grad_x) const {
    linear::NormBackwardArgs norm = norm_backward_args(s_.desc.norm, forward_.weights.norm);
    norm.x = x;
    norm.mean = reserve_ + s_.saved_mean;
    norm.rstd = reserve_ + s_.saved_rstd;
    norm.grad_y = grad_y;
    norm.residual = residual;
    norm.grad_x = grad_x;
    norm.grad_gamma = weight_matrix(args_.grad_weights.norm.gamma);
    norm.grad_beta = weight_matrix(args_.grad_weights.norm.beta);
    norm.accumulate_parameters = args_.accumulate;
    norm.workspace = shared();
    s_.linear->norm_backward(norm, *s_.executor);
  }

  // y = epilogue(x) and the sums over its rows, each if given.
  void sum_rows(const Matrix& x, const Matrix& y, const linear::Epilogue& epilogue, const Matrix& sums) const {
    if (!y.given() && !sums.given()) return;
    linear::PointwiseArgs pointwise;
    pointwise.x = x;
    pointwise.y = y;
    pointwise.epilogue = epilogue;
    pointwise.sums = sums;
    pointwise.accumulate_sums = args_.accumulate;
    pointwise.workspace = shared();
    s_.linear->pointwise(pointwise, *s_.executor);
  }

  // dY = g2 dz, db2 = sum of dY, dW2 = h^T dY.
  Matrix second_product(const Matrix& dz) const {
    Matrix dY = dz;
    linear::Epilogue epilogue;
    if (s_.desc.output_dropout_p > 0) {
      dY = token_matrix(s_.rows_at(workspace_, s_.backward_dropped, s_.desc.size));
      epilogue.gradient = true;
      epilogue.dropout = output_dropout(s_, forward_);
    }
    sum_rows(dz, s_.desc.output_dropout_p > 0 ? dY : Matrix(), epilogue, weight_matrix(args_.grad_weights.bias2));
    if (!args_.grad_weights.weight2.given()) return dY;
    linear::Epilogue again;
    again.activation = static_cast<linear::Activation>(s_.desc.activation);
    again.dropout = inner_dropout(s_, forward_);
    linear::PointwiseArgs pointwise;
    pointwise.x = token_matrix(s_.rows_at(reserve_, s_.saved_inner, s_.desc.inner_size));
    pointwise.y = inner_;
    pointwise.epilogue = again;
    s_.linear->pointwise(pointwise, *s_.executor);
    multiply_tokens(inner_, dY, args_.grad_weights.weight2);
    return dY;
  }

  // du = activation'(u) g1 (dY W2^T)
  Matrix inner_gradient(const Matrix& dY) const {
    linear::GemmArgs call;
    call.a = dY;
    call.b = weight_matrix(forward_.weights.weight2).transposed();
    call.c = inner_;
    call.epilogue.gradient = true;
    call.epilogue.activation = static_cast<linear::Activation>(s_.desc.activation);
    call.epilogue.dropout = inner_dropout(s_, forward_);
    call.epilogue.pre_activation = token_matrix(s_.rows_at(reserve_, s_.saved_inner, s_.desc.inner_size));
    multiply(call, false);
    return inner_;
  }

  // db1 = sum of du, dW1 = n^T du.
  void first_weights(const Matrix& du) const {
    sum_rows(du, {}, {}, weight_matrix(args_.grad_weights.bias1));
    if (!args_.grad_weights.weight1.given()) return;
    if (s_.pre) {
      linear::NormForwardArgs again = norm_forward_args(s_.desc.norm, forward_.weights.norm);
      again.x = x_;
      again.y = rows_;
      s_.linear->norm_forward(again, *s_.executor);
    }
    multiply_tokens(s_.pre ? rows_ : x_, du, args_.grad_weights.weight1);
  }

  const FeedForwardBlockState& s_;
  const FeedForwardBlockBackwardArgs& args_;
  const FeedForwardBlockForwardArgs& forward_;
  char* reserve_;
  char* workspace_;
  Matrix rows_;   // n, then its gradient; or that of z
  Matrix inner_;  // h, then du
  Matrix x_, grad_x_;
};

}  // namespace

const FeedForwardBlockDesc& FeedForwardBlock::desc() const { return state_->desc; }
size_t FeedForwardBlock::packed_weights_bytes() const { return state_->packed.bytes; }
size_t FeedForwardBlock::workspace_bytes() const { return state_->forward_bytes; }
size_t FeedForwardBlock::backward_workspace_bytes() const { return state_->backward_bytes; }
const char* FeedForwardBlock::kernel_name() const { return state_->linear->name; }
size_t FeedForwardBlock::reserve_bytes() const { return state_->reserve_bytes; }

Result<FeedForwardBlock> feed_forward_block(const FeedForwardBlockDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  auto state = std::make_shared<FeedForwardBlockState>();
  state->desc = desc;
  Result<const linear::Kernel*> kernel = linear::choose_kernel(desc.dtype, options.kernel);
  if (!kernel.ok()) return kernel.status();
  state->linear = *kernel;
  state->executor = options.executor != nullptr ? options.executor : &default_executor();
  state->pre = desc.norm.kind != NormKind::kNone && desc.norm.pre;
  state->post = desc.norm.kind != NormKind::kNone && !desc.norm.pre;
  state->fingerprint = fingerprint_of(desc);
  if (!lay_out_block(*state)) {
    return Status(StatusCode::kInvalidArgument, "the block is too large: its memory passes the address space");
  }
  FeedForwardBlock made;
  made.state_ = std::move(state);
  return made;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kOutOfMemory, "out of memory");
}

Status FeedForwardBlock::pack_weights(const FeedForwardWeights& weights, void* packed, size_t bytes) const try {
  const FeedForwardBlockForwardArgs none;
  FeedForwardOperands operands(*state_, none);
  Status status = operands.add_matrices(Role::kInput, weights);
  if (status.ok()) status = operands.add_packed(Role::kOutput, packed, bytes);
  if (!status.ok()) return status;
  const Matrix matrices[] = {weight_matrix(weights.weight1), weight_matrix(weights.weight2)};
  write_packed(*state_->linear, state_->packed, matrices, packed, *state_->executor);
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

Status FeedForwardBlock::forward(const FeedForwardBlockForwardArgs& given) const try {
  FeedForwardBlockForwardArgs args = given;
  args.x = with_beam(args.x, 4);
  args.out = with_beam(args.out, 4);
  FeedForwardOperands operands(*state_, args);
  Status status = operands.add_rows(Role::kInput, "x", args.x);
  if (status.ok()) status = operands.add_forward_weights();
  if (status.ok()) status = operands.add_rows(Role::kOutput, "out", args.out);
  if (status.ok() && args.reserve != nullptr) status = operands.add_reserve();
  if (status.ok()) status = operands.check_workspace(state_->forward_bytes);
  if (status.ok() && args.reserve != nullptr) status = check_dropouts(dropouts_of(state_->desc, args));
  if (status.ok()) compute_forward(*state_, args);
  return status;
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

Status FeedForwardBlock::backward(const FeedForwardBlockBackwardArgs& given) const try {
  FeedForwardBlockBackwardArgs args = given;
  for (Tensor* t : {&args.forward.x, &args.grad_out, &args.grad_x}) *t = with_beam(*t, 4);
  if (args.forward.reserve == nullptr) return invalid("reserve is null: backward needs what forward wrote there");
  FeedForwardOperands operands(*state_, args.forward);
  Status status = operands.add_rows(Role::kInput, "x", args.forward.x);
  if (status.ok()) status = operands.add_weights(Role::kInput, args.forward.weights);
  if (status.ok()) status = operands.add_rows(Role::kInput, "grad_out", args.grad_out);
  if (status.ok()) status = operands.add_reserve();
  if (status.ok() && args.grad_x.given()) status = operands.add_rows(Role::kOutput, "grad_x", args.grad_x);
  if (status.ok()) status = operands.add_weights(Role::kOutput, args.grad_weights);
  if (status.ok()) status = operands.check_workspace(state_->backward_bytes);
  if (!status.ok()) return status;
  status = check_reserve(args.forward.reserve, state_->fingerprint, ReserveHeader::kForwardDone,
                         dropouts_of(state_->desc, args.forward), "block");
  if (!status.ok()) return status;
  FeedForwardBackward(*state_, args).run();
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

}  // namespace polyhead
