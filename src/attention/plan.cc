#include <cmath>
#include <new>

#include "attention/checks.h"
#include "contract/kernel.h"

namespace polyhead {
namespace {

Status out_of_memory() { return {StatusCode::kOutOfMemory, "out of memory"}; }

// Writes `bits`, one element, to every place of a view that has some.
template <class Bits>
void fill(const Tensor& t, Bits bits) {
  int64_t index[Tensor::kMaxDims] = {};
  int64_t at = 0;
  int dim = 0;
  do {
    static_cast<Bits*>(t.data)[at] = bits;
    for (dim = t.ndim - 1; dim >= 0; --dim) {
      if (++index[dim] < t.dims[dim]) {
        at += t.strides[dim];
        break;
      }
      at -= (t.dims[dim] - 1) * t.strides[dim];
      index[dim] = 0;
    }
  } while (dim >= 0);
}

void fill_number(const Tensor& t, double number) {
  if (t.num_elements() == 0) return;
  switch (t.dtype) {
    case DType::kFloat64: fill(t, number); break;
    case DType::kFloat32: fill(t, static_cast<float>(number)); break;
    default: fill(t, uint16_t{0}); break;  // bfloat16 and float16 outputs are filled with zeros only
  }
}

// The answer where no query sees a key, because some size is 0.
void forward_of_nothing(const ForwardArgs& args) {
  fill_number(args.out, 0);
  fill_number(args.logsumexp, -INFINITY);
  fill_number(args.weights, 0);
  fill_number(args.column_sums, 0);
}

// No pair, so every gradient is 0.
void backward_of_nothing(const BackwardArgs& args) {
  if (args.accumulate) return;
  for (const Tensor* gradient :
       {&args.grad_query, &args.grad_key, &args.grad_value, &args.grad_attn_bias, &args.grad_alibi_slopes}) {
    fill_number(*gradient, 0);
  }
}

}  // namespace

const char* Plan::kernel_name() const { return kernel_->name; }

Status Plan::forward(const ForwardArgs& args) const try {
  if (Status status = check_forward_args(desc_, args, workspace_bytes_); !status.ok()) return status;
  if (nothing_visible(desc_)) {
    forward_of_nothing(args);
  } else {
    kernel_->forward(desc_, args, *executor_);
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status Plan::backward(const BackwardArgs& args) const try {
  if (Status status = check_backward_args(desc_, args, backward_workspace_bytes_); !status.ok()) return status;
  if (nothing_visible(desc_)) {
    backward_of_nothing(args);
  } else {
    kernel_->backward(desc_, args, *executor_);
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<Plan> plan(const AttentionDesc& desc, const PlanOptions& options) try {
  if (Status status = check_desc(desc); !status.ok()) return status;
  const Result<const Kernel*> kernel = choose_kernel(desc, options.kernel);
  if (!kernel.ok()) return kernel.status();
  Plan made;
  made.desc_ = desc;
  made.kernel_ = *kernel;
  made.executor_ = options.executor != nullptr ? options.executor : &default_executor();
  if (nothing_visible(desc)) return made;
  made.workspace_bytes_ = (*kernel)->workspace_bytes(desc, made.executor_->num_threads());
  made.backward_workspace_bytes_ = (*kernel)->backward_workspace_bytes(desc, made.executor_->num_threads());
  return made;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
