// Tensors of polyhead.h as those of C++, and what every struct has in common. Each failure names the argument.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "polyhead/executor.h"
#include "polyhead/merge.h"
#include "polyhead/polyhead.h"
#include "polyhead/status.h"

// The handle behind every executor that the C interface makes.
struct polyhead_executor {
  std::unique_ptr<polyhead::Executor> executor;
};

namespace polyhead::capi {

// "Null pointer" as a sentence: `what` is the argument's name.
Status need(const void* pointer, const char* what);

// A sentence calls it `prefix` and `name` together.
Status translate(const polyhead_tensor& from, std::string_view prefix, std::string_view name, Tensor* to);
polyhead_tensor translate_back(const Tensor& from);

// One partial result, or `count` of them. `from` may be null, which is refused.
Status translate(const polyhead_partial* from, const char* name, Partial* to);
Status translate(const polyhead_partial* from, size_t count, const char* name, std::vector<Partial>* to);

// Whether a struct of `size` bytes may come from this header or an earlier version. `name` is the argument's.
Status check_struct_size(size_t size, size_t first_size, size_t size_now, const char* name);

}  // namespace polyhead::capi
