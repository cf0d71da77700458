// polyhead.h: translates to the C++ interface and back; computes nothing. Each function guards its body, so that no
// exception gets out.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "capi/handles.h"
#include "core/sentence.h"
#include "core/threads.h"
#include "polyhead/dropout.h"
#include "polyhead/kernels.h"
#include "polyhead/merge.h"
#include "polyhead/polyhead.h"
#include "polyhead/program_explanation.h"

using polyhead::AttentionDesc;
using polyhead::Executor;
using polyhead::Explanation;
using polyhead::Partial;
using polyhead::Plan;
using polyhead::PlanOptions;
using polyhead::sentence;
using polyhead::Status;
using polyhead::StatusCode;
using polyhead::Tensor;
using namespace polyhead::capi;

struct polyhead_attention_plan {
  Plan plan;
};

namespace {

class HostExecutor final : public Executor {
 public:
  HostExecutor(int num_threads, polyhead_parallel_for run, void* host)
      : num_threads_(num_threads), run_(run), host_(host) {}
  int num_threads() const override { return num_threads_; }
  void parallel_for(int count, void (*body)(void*, int), void* context) override { run_(host_, count, body, context); }

 private:
  int num_threads_;
  polyhead_parallel_for run_;
  void* host_;
};

Status check_num_threads(int num_threads) {
  if (num_threads >= 1 && num_threads <= polyhead::kMaxThreads) return {};
  return {StatusCode::kInvalidArgument,
          sentence("num_threads is ", num_threads, ", takes 1 to ", polyhead::kMaxThreads)};
}

// What the caller sees of an explanation, and what its strings and arrays live in.
struct OwnedExplanation : polyhead_explanation {
  Explanation source;
  std::vector<polyhead::ProgramValue> values;
  std::vector<const char*> kernel_names, reason_texts, value_texts, value_rates;
};

}  // namespace

extern "C" {

const char* polyhead_version(void) { return polyhead::version(); }

int polyhead_abi_version(void) { return POLYHEAD_ABI_VERSION; }

polyhead_status polyhead_check_abi(int abi_version) {
  return guarded([&]() -> Status {
    if (abi_version == POLYHEAD_ABI_VERSION) return {};
    return {StatusCode::kUnsupported,
            sentence("the program was compiled against ABI version ", abi_version, ", polyhead ", polyhead_version(),
                     " has ABI version ", POLYHEAD_ABI_VERSION)};
  });
}

polyhead_tensor polyhead_tensor_contiguous(const void* data, int32_t dtype, int32_t ndim, const int64_t* dims) {
  polyhead_tensor tensor = {};
  tensor.ndim = -1;
  guarded([&]() -> Status {
    if (ndim < 1 || ndim > POLYHEAD_MAX_DIMS) {
      return {StatusCode::kInvalidArgument, sentence("ndim is ", ndim, ", takes 1 to ", POLYHEAD_MAX_DIMS)};
    }
    if (Status s = need(dims, "dims"); !s.ok()) return s;
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      tensor.dims[i] = dims[i];
      tensor.strides[i] = stride;
      if (__builtin_mul_overflow(stride, std::max<int64_t>(dims[i], 1), &stride)) {
        return {StatusCode::kInvalidArgument, sentence("dims[", i, "] is ", dims[i], ": the size leaves 64 bits")};
      }
    }
    tensor.data = const_cast<void*>(data);
    tensor.dtype = dtype;
    tensor.ndim = ndim;
    return {};
  });
  return tensor;
}

polyhead_status polyhead_executor_create(int num_threads, polyhead_executor** executor) {
  return guarded([&]() -> Status {
    if (Status s = need(executor, "executor"); !s.ok()) return s;
    *executor = nullptr;
    if (Status s = check_num_threads(num_threads); !s.ok()) return s;
    auto handle = std::make_unique<polyhead_executor>();
    handle->executor.reset(polyhead::new_thread_pool(num_threads));
    if (handle->executor == nullptr) throw std::bad_alloc();
    *executor = handle.release();
    return {};
  });
}

polyhead_status polyhead_executor_create_host(int num_threads, polyhead_parallel_for parallel_for, void* host,
                                              polyhead_executor** executor) {
  return guarded([&]() -> Status {
    if (Status s = need(executor, "executor"); !s.ok()) return s;
    *executor = nullptr;
    if (parallel_for == nullptr) return need(nullptr, "parallel_for");
    if (Status s = check_num_threads(num_threads); !s.ok()) return s;
    auto handle = std::make_unique<polyhead_executor>();
    handle->executor = std::make_unique<HostExecutor>(num_threads, parallel_for, host);
    *executor = handle.release();
    return {};
  });
}

void polyhead_executor_destroy(polyhead_executor* executor) { delete executor; }

int polyhead_executor_num_threads(const polyhead_executor* executor) {
  int num_threads = 1;
  guarded([&]() -> Status {
    num_threads = (executor != nullptr ? *executor->executor : polyhead::default_executor()).num_threads();
    return {};
  });
  return num_threads;
}

polyhead_status polyhead_attention_desc_init(polyhead_attention_desc* desc, size_t struct_size) {
  return guarded([&] { return init(desc, struct_size, "desc"); });
}

polyhead_status polyhead_plan_options_init(polyhead_plan_options* options, size_t struct_size) {
  return guarded([&] { return init(options, struct_size, "options"); });
}

polyhead_status polyhead_forward_args_init(polyhead_forward_args* args, size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_backward_args_init(polyhead_backward_args* args, size_t struct_size) {
  return guarded([&] { return init(args, struct_size, "args"); });
}

polyhead_status polyhead_attention_plan_create(const polyhead_attention_desc* desc,
                                               const polyhead_plan_options* options, polyhead_attention_plan** plan) {
  return create(desc, options, "plan", plan, polyhead::plan);
}

void polyhead_attention_plan_destroy(polyhead_attention_plan* plan) { delete plan; }

size_t polyhead_attention_plan_workspace_bytes(const polyhead_attention_plan* plan) {
  return ask(plan, "plan", size_t{0}, [](const auto& p) { return p.plan.workspace_bytes(); });
}

size_t polyhead_attention_plan_backward_workspace_bytes(const polyhead_attention_plan* plan) {
  return ask(plan, "plan", size_t{0}, [](const auto& p) { return p.plan.backward_workspace_bytes(); });
}

const char* polyhead_attention_plan_kernel_name(const polyhead_attention_plan* plan) {
  return ask(plan, "plan", "", [](const auto& p) { return p.plan.kernel_name(); });
}

polyhead_status polyhead_attention_forward(const polyhead_attention_plan* plan, const polyhead_forward_args* args) {
  return call(plan, "plan", args, [](const auto& p, const auto& tensors) { return p.plan.forward(tensors); });
}

polyhead_status polyhead_attention_backward(const polyhead_attention_plan* plan, const polyhead_backward_args* args) {
  return call(plan, "plan", args, [](const auto& p, const auto& tensors) { return p.plan.backward(tensors); });
}

polyhead_status polyhead_merge(const polyhead_partial* parts, size_t num_parts, const polyhead_partial* merged,
                               polyhead_executor* executor) {
  return guarded([&]() -> Status {
    std::vector<Partial> all;
    Partial one;
    if (Status s = translate(parts, num_parts, "parts", &all); !s.ok()) return s;
    if (Status s = translate(merged, "merged", &one); !s.ok()) return s;
    return polyhead::merge(all, one, executor != nullptr ? executor->executor.get() : nullptr);
  });
}

polyhead_status polyhead_merge_backward(const polyhead_partial* parts, size_t num_parts, const polyhead_partial* merged,
                                        const polyhead_partial* grad_merged, const polyhead_partial* grad_parts,
                                        polyhead_executor* executor) {
  return guarded([&]() -> Status {
    std::vector<Partial> all, grad_all;
    Partial one, grad_one;
    if (Status s = translate(parts, num_parts, "parts", &all); !s.ok()) return s;
    if (Status s = translate(merged, "merged", &one); !s.ok()) return s;
    if (Status s = translate(grad_merged, "grad_merged", &grad_one); !s.ok()) return s;
    if (Status s = translate(grad_parts, num_parts, "grad_parts", &grad_all); !s.ok()) return s;
    Executor* const threads = executor != nullptr ? executor->executor.get() : nullptr;
    return polyhead::merge_backward(all, one, grad_one, grad_all, threads);
  });
}

polyhead_status polyhead_attention_explain(const polyhead_attention_desc* desc, const polyhead_plan_options* options,
                                           polyhead_explanation** explanation) {
  return guarded([&]() -> Status {
    if (Status s = need(explanation, "explanation"); !s.ok()) return s;
    *explanation = nullptr;
    if (Status s = need(desc, "desc"); !s.ok()) return s;
    auto owned = std::make_unique<OwnedExplanation>();
    Explanation& source = owned->source;
    AttentionDesc checked;
    PlanOptions chosen;
    source.status = translate(desc, {"desc"}, &checked);
    if (source.status.ok()) source.status = translate(options, &chosen);
    if (source.status.ok()) source = polyhead::explain(checked, chosen);
    for (const polyhead::KernelReason& reason : source.reasons) {
      owned->kernel_names.push_back(reason.kernel);
      owned->reason_texts.push_back(reason.reason.c_str());
    }
    owned->struct_size = sizeof(polyhead_explanation);
    owned->status = static_cast<int32_t>(source.status.code());
    owned->reserved = 0;
    owned->message = source.status.message().c_str();
    owned->kernel = source.kernel.c_str();
    owned->num_kernels = source.reasons.size();
    owned->kernels = owned->kernel_names.data();
    owned->reasons = owned->reason_texts.data();
    owned->workspace_bytes = source.workspace_bytes;
    owned->flops = source.flops;
    owned->backward_workspace_bytes = source.backward_workspace_bytes;
    owned->backward_flops = source.backward_flops;
    owned->measured = source.measured.c_str();
    if (source.status.code() != StatusCode::kInvalidArgument && checked.program != nullptr) {
      owned->values = polyhead::explain_program(*checked.program);
    }
    for (const polyhead::ProgramValue& value : owned->values) {
      owned->value_texts.push_back(value.expression.c_str());
      owned->value_rates.push_back(value.depends_on.c_str());
    }
    owned->num_program_values = owned->values.size();
    owned->program_values = owned->value_texts.data();
    owned->depends_on = owned->value_rates.data();
    *explanation = owned.release();
    return {};
  });
}

polyhead_status polyhead_attention_count_mask_blocks(const polyhead_attention_desc* desc,
                                                     const polyhead_forward_args* args, polyhead_mask_blocks* blocks) {
  return guarded([&]() -> Status {
    if (Status s = need(blocks, "blocks"); !s.ok()) return s;
    if (Status s = need(desc, "desc"); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    AttentionDesc checked;
    Table<polyhead_forward_args>::Cpp tensors;
    if (Status s = translate(desc, {"desc"}, &checked); !s.ok()) return s;
    if (Status s = translate(args, {"args", "args"}, &tensors); !s.ok()) return s;
    const auto counted = polyhead::count_mask_blocks(checked, tensors);
    if (!counted.ok()) return counted.status();
    *blocks = {counted->none, counted->some, counted->all};
    return {};
  });
}

void polyhead_explanation_destroy(polyhead_explanation* explanation) {
  delete static_cast<OwnedExplanation*>(explanation);
}

const char* const* polyhead_kernels(void) {
  struct Names {
    std::vector<std::string> names;
    std::vector<const char*> pointers;
  };
  static const char* const none[] = {nullptr};
  const char* const* list = none;
  guarded([&]() -> Status {
    // Never destroyed: promised to live as long as the library.
    static const Names& all = *[] {
      auto made = std::make_unique<Names>();
      made->names = polyhead::kernels();
      if (made->names.empty()) throw std::bad_alloc();  // the reference is always usable
      for (const std::string& name : made->names) made->pointers.push_back(name.c_str());
      made->pointers.push_back(nullptr);
      return made.release();
    }();
    list = all.pointers.data();
    return {};
  });
  return list;
}

const char* polyhead_cpu_features(void) {
  const char* text = "";
  guarded([&]() -> Status {
    std::string now = polyhead::cpu_features();
    if (now.empty()) return {};  // none, or no memory: not worth keeping
    static const std::string& kept = *new std::string(std::move(now));
    text = kept.c_str();
    return {};
  });
  return text;
}

polyhead_status polyhead_dropout_mask(double dropout_p, uint64_t seed, uint32_t offset, const polyhead_tensor* kept) {
  return polyhead_shard_dropout_mask(dropout_p, seed, offset, nullptr, kept);
}

polyhead_status polyhead_shard_dropout_mask(double dropout_p, uint64_t seed, uint32_t offset,
                                            const polyhead_dropout_origin* dropout_origin,
                                            const polyhead_tensor* kept) {
  return guarded([&]() -> Status {
    if (Status s = need(kept, "kept"); !s.ok()) return s;
    Tensor tensor;
    if (Status s = translate(*kept, "", "kept", &tensor); !s.ok()) return s;
    polyhead::DropoutOrigin origin;
    if (dropout_origin != nullptr) {
      if (Status s = translate(dropout_origin, kDropoutOrigin, &origin); !s.ok()) return s;
    }
    return polyhead::dropout_mask(dropout_p, seed, offset, tensor, origin);
  });
}

}  // extern "C"
