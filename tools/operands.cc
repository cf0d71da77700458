#include "operands.h"

#include <algorithm>

#include "contract/sequences.h"
#include "new_tensors.h"

namespace polyhead::tools {
namespace {

// Layouts that mean something else, or nothing, for such operands: fine to test with, but not what a user asks to time.
Status check_layout(const Problem& problem) {
  const AttentionDesc& desc = problem.desc;
  if (problem.layout == Layout::kQkv && desc.seqlen_q != desc.seqlen_k) {
    return invalid("--layout qkv with seqlen_q " + std::to_string(desc.seqlen_q) + " and seqlen_k " +
                   std::to_string(desc.seqlen_k) +
                   ": both must be equal, as one row holds a token's query, key and value");
  }
  if (problem.layout == Layout::kSbhd && desc.packed) {
    return invalid(
        "--layout sbhd with --packed: packed operands are [rows, heads, dim]; use bshd, bhsd, qkv or strided");
  }
  return {};
}

}  // namespace

Status check_memory(const Problem& problem) {
  const auto physical = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const double bytes = input_bytes(problem);
  return bytes > physical ? too_large(bytes) : Status();
}

Result<Operands> Operands::create(const Problem& problem, const ForwardArgs& given) {
  if (Status s = check_memory(problem); !s.ok()) return s;
  if (Status s = check_layout(problem); !s.ok()) return s;
  Operands operands;
  operands.desc_ = given.query.given() ? problem.desc : problem_desc(problem);
  operands.in_.forward = random_inputs(problem, given);
  RunOptions options = run_options(problem);
  options.guard = Guard::kNone;
  operands.placed_ = std::make_unique<PlacedInputs>(options);
  ForwardArgs& args = operands.forward_;
  args = operands.placed_->add(operands.desc_, operands.in_.forward);
  for (const InputName& input : kInputs) {
    if ((given.*input.tensor).given()) args.*input.tensor = given.*input.tensor;
  }
  operands.captures_.assign(args.captures.begin(), args.captures.end());
  for (size_t n = 0; n < given.captures.size(); ++n) {
    if (given.captures[n].given()) operands.captures_[n] = given.captures[n];
  }
  args.captures = operands.captures_;
  operands.outputs_ = std::make_unique<PlacedOutputs>(operands.desc_, options, *operands.placed_);
  operands.outputs_->give_to(args);
  return operands;
}

Result<BackwardArgs> Operands::backward(const Problem& problem, const BackwardArgs& given) {
  const auto needs = needed_gradients(problem);
  if (!needs.ok()) return needs.status();
  Problem asked = problem;
  asked.logsumexp = problem.logsumexp && !given.grad_out.given();
  draw_incoming(asked, desc_, in_);
  RunOptions options = run_options(problem);
  options.guard = Guard::kNone;
  BackwardArgs args;
  args.forward = forward_;
  args.forward.attn_weights = args.forward.column_sums = {};
  args.grad_out = given.grad_out.given() ? given.grad_out : placed_->add("grad_out", in_.grad_out);
  args.grad_logsumexp =
      given.grad_logsumexp.given() ? given.grad_logsumexp : placed_->add("grad_logsumexp", in_.grad_logsumexp);
  args.accumulate = problem.accumulate;
  gradients_ = std::make_unique<PlacedGradients>(desc_, args.forward, in_, *needs, options, *placed_);
  gradients_->give_to(args);
  return args;
}

Result<Buffer> give_workspace(size_t size_bytes, ForwardArgs& args) {
  Buffer buffer = new_buffer(size_bytes);
  if (buffer == nullptr) return too_large(static_cast<double>(size_bytes));
  args.workspace = buffer.get();
  args.workspace_bytes = size_bytes;
  return buffer;
}

double visible_pairs(const AttentionDesc& desc, const ForwardArgs& args) {
  double pairs = 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const Sequence s = sequence(desc, args, b);
    for (int64_t i = 0; i < s.len_q; ++i) {
      const KeyRange range = key_range(desc, args, s, i);
      pairs += static_cast<double>(std::max<int64_t>(range.end - range.begin, 0));
    }
  }
  return pairs * static_cast<double>(desc.num_heads);
}

double backward_flops(const AttentionDesc& desc, GradientSet needs, double visible_pairs) {
  constexpr GradientSet kQuery = 1, kKey = 2, kValue = 4;
  const auto dim = static_cast<double>(desc.head_dim), dim_v = static_cast<double>(desc.head_dim_v);
  double products = dim;                          // S
  if ((needs & ~kValue) != 0) products += dim_v;  // dP
  if ((needs & kQuery) != 0) products += dim;     // dQ
  if ((needs & kKey) != 0) products += dim;       // dK
  if ((needs & kValue) != 0) products += dim_v;   // dV
  return 2 * visible_pairs * products;
}

double traffic_bytes(const ForwardArgs& args) {
  double total = 0;
  for (const Tensor& t : args.captures) {
    total += static_cast<double>(t.num_elements()) * static_cast<double>(dtype_size_bytes(t.dtype));
  }
  for (const Tensor* t : {&args.query, &args.key, &args.value, &args.attn_mask, &args.attn_bias, &args.alibi_slopes,
                          &args.out, &args.logsumexp, &args.attn_weights, &args.column_sums}) {
    total += static_cast<double>(t->num_elements()) * static_cast<double>(dtype_size_bytes(t->dtype));
  }
  return total;
}

double traffic_bytes(const BackwardArgs& args) {
  double total = traffic_bytes(args.forward);
  const auto add = [&](const Tensor& t) {
    total += static_cast<double>(t.num_elements()) * static_cast<double>(dtype_size_bytes(t.dtype));
  };
  add(args.grad_out);
  add(args.grad_logsumexp);
  for (const GradientName& gradient : kGradients) add(args.*gradient.tensor);
  for (const Tensor& t : args.grad_captures) add(t);
  return total;
}

}  // namespace polyhead::tools
