// torch's tensors and operator arguments, through its stable C interface.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "polyhead/status.h"
#include "polyhead/tensor.h"
#include "stable_abi.h"

namespace polyhead::torch_ops {

// Throw, with a printf sentence, what Python sees as ValueError, RuntimeError and MemoryError.
[[noreturn, gnu::format(printf, 1, 2)]] void bad_value(const char* format, ...);
[[noreturn, gnu::format(printf, 1, 2)]] void failure(const char* format, ...);
[[noreturn]] void out_of_memory(const std::string& message);

// Throws what `status` says, if it is not ok.
void check(const Status& status);

// Throws unless an operator gets as many arguments as this library takes: a schema of another version would be read as
// nonsense.
void check_counts(const char* name, uint64_t num_inputs, uint64_t takes);

// Owns one tensor of torch, or none.
class StableTensor {
 public:
  StableTensor() = default;
  explicit StableTensor(AtenTensorHandle handle) : handle_(handle) {}
  StableTensor(StableTensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  StableTensor& operator=(StableTensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~StableTensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  bool given() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// What to call an argument, and the dims that it may have.
struct TensorArgument {
  const char* name;
  int min_dims;
  int max_dims;
  const char* shape;    // "[batch, seqlen_q, num_heads, head_dim]"
  bool stored = false;  // may be of a dtype that scales go with: int8, float8, pairs of int4 (uint8)
  bool on_cpu = false;  // is read at once: lies on the CPU, whatever the others do
};

// A view of `tensor`, which outlives it and lies where the call computes (call_place.h). Of a scalar: one with ndim 0,
// which polyhead takes as not given.
Tensor view_of(const StableTensor& tensor, const TensorArgument& argument);

// A new tensor of `view`'s dtype and dims, contiguous; `view` becomes its view. With heads_first, torch sees it with its
// second and third dimension swapped.
StableTensor new_tensor(Tensor& view, const char* name, bool heads_first = false);

// The same with the strides that torch.empty_like gives for `like`, which has the same dims.
StableTensor new_tensor_like(Tensor& view, const Tensor& like, const char* name);

// [B, H, S, D] as [B, S, H, D], and back.
Tensor heads_and_rows_swapped(Tensor view);

// A result of a list type. Since torch 2.10.
StableIValue list_result(std::vector<StableTensor>&& tensors);

// None in Python for a tensor that is not given.
StableIValue result(StableTensor&& tensor);

// The same where the schema says `Tensor?`.
StableIValue optional_result(StableTensor&& tensor);

// Reads an operator's arguments in order. Takes all ownership that the stack holds, so that nothing leaks whatever is
// thrown later: construct all arguments before looking at any.
class ArgumentReader {
 public:
  explicit ArgumentReader(const StableIValue* stack) : next_(stack) {}

  StableTensor tensor() { return StableTensor(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  StableTensor optional_tensor();
  std::vector<StableTensor> tensors();  // since torch 2.10
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  double real();
  bool flag() { return (*next_++ & 0xff) != 0; }
  std::optional<int64_t> optional_integer();
  std::optional<double> optional_real();
  std::string text();                          // since torch 2.10
  std::optional<std::string> optional_text();  // since torch 2.10

 private:
  std::optional<StableIValue> optional();

  const StableIValue* next_;
};

}  // namespace polyhead::torch_ops
