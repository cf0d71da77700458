// The structs of polyhead.h as those of the C++ headers. Each failure names the field.
#pragma once

#include <memory>
#include <vector>

#include "polyhead/attention.h"
#include "polyhead/merge.h"
#include "polyhead/polyhead.h"

// The handle behind every executor that the C interface makes.
struct polyhead_executor {
  std::unique_ptr<polyhead::Executor> executor;
};

namespace polyhead::capi {

// "Null pointer" as a sentence: `what` is the argument's name.
Status need(const void* pointer, const char* what);

polyhead_attention_desc default_desc();
polyhead_plan_options default_options();
polyhead_forward_args default_forward_args();
polyhead_backward_args default_backward_args();

// `from` must not be null, except for options, where null means the defaults.
Status translate(const polyhead_attention_desc* from, AttentionDesc* to);
Status translate(const polyhead_plan_options* from, PlanOptions* to);
Status translate(const polyhead_forward_args* from, const char* name, ForwardArgs* to);
Status translate(const polyhead_backward_args* from, BackwardArgs* to);
Status translate(const polyhead_tensor& from, const char* name, Tensor* to);

// One partial result, or `count` of them. `from` may be null, which is refused.
Status translate(const polyhead_partial* from, const char* name, Partial* to);
Status translate(const polyhead_partial* from, size_t count, const char* name, std::vector<Partial>* to);

// Whether a struct of `size` bytes may come from this header or an earlier version. `name` is the argument's.
Status check_struct_size(size_t size, size_t first_size, size_t size_now, const char* name);

// Sizes of the structs in the first version of the header: a caller's struct may be as small as that.
inline constexpr size_t kFirstDescSize = 248;
inline constexpr size_t kFirstOptionsSize = 32;
inline constexpr size_t kFirstForwardArgsSize = 1608;
inline constexpr size_t kFirstBackwardArgsSize = 864;

}  // namespace polyhead::capi
