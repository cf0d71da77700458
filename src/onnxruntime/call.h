// One run of a node: its tensors, memory and threads, all lent by ONNX Runtime.
#pragma once

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "api.h"
#include "polyhead/attention.h"
#include "recent.h"
#include "wiring.h"

namespace polyhead::onnxruntime {

// The arena of ONNX Runtime's CPU allocator, which a node asks for once: for as long as the session lives. Any thread.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Status get(OrtKernelContext* context, abi::Allocator*& allocator);

 private:
  std::atomic<abi::Allocator*> allocator_ = nullptr;
};

class Call {
 public:
  // Of a node that is the operator itself, or of a group of nodes with the operator inside.
  Call(OrtKernelContext* context, Arena& arena, const Wiring* wiring = nullptr)
      : context_(context), arena_(arena), wiring_(wiring), executor_(context) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Input `index` of the operator; a scalar has one dim of 1; not given where it is left out.
  Status input(size_t index, Tensor& tensor);

  // The operator's first inputs where they are the group's own, seen by steps that move no element, and nothing else goes in
  // or comes out but output 0.
  struct Plain {
    static constexpr size_t kMost = 4;
    Tensor inputs[kMost];  // as the group has them
  };
  bool is_plain() const;
  Status read(Plain& plain);

  // Whether anybody reads output `index`.
  bool wants(size_t index) const;

  // Makes output `index`, of tensor's dtype; not given where nobody reads it. A scalar cannot be made.
  Status output(size_t index, std::span<const int64_t> dims, Tensor& tensor);
  Status output(size_t index, std::initializer_list<int64_t> dims, Tensor& tensor) {
    return output(index, std::span(dims.begin(), dims.size()), tensor);
  }

  // Where output `index` lies, made in the dims that output() asked ONNX Runtime for.
  Status output_data(size_t index, std::span<const int64_t> dims, void*& data);
  std::vector<int64_t> dims_asked_for(size_t index, std::span<const int64_t> dims) const;

  // The shapes that a group gives beside what its operator does.
  Status tell_shapes();

  // Memory until the call ends, aligned to 64 bytes: the call's own, or, of more, ONNX Runtime's.
  Status scratch(size_t bytes, void*& memory);
  Status scratch(DType dtype, std::initializer_list<int64_t> dims, Tensor& tensor);

  Executor& executor() { return executor_; }

 private:
  // ONNX Runtime's own threads; how many it lends is its own affair.
  class Threads final : public Executor {
   public:
    explicit Threads(OrtKernelContext* context) : context_(context) {}
    int num_threads() const override { return default_executor().num_threads(); }
    void parallel_for(int count, void (*body)(void* context, int index), void* context) override;

   private:
    OrtKernelContext* context_;
  };

  Status given(size_t index, Tensor& tensor);
  Status make(const Source& source, Tensor& tensor);

  OrtKernelContext* context_;
  Arena& arena_;
  const Wiring* wiring_;
  Threads executor_;
  std::optional<size_t> num_inputs_;
  abi::Allocator* allocator_ = nullptr;
  std::vector<void*> taken_;
  // What a call of a handful of numbers needs, to which the arena would add some hundred ns.
  static constexpr size_t kAlignment = 64, kOwnBytes = size_t{16} << 10;
  size_t own_used_ = 0;
  alignas(kAlignment) std::byte own_[kOwnBytes];
};

// Runs all on the caller's thread.
Executor& here();

// For plans alone: workspaces are made for as many threads as there are CPUs. Each call brings its own executor.
Executor& sizes();

// Whether a call multiplies so few numbers that it is done before another thread would have begun.
bool is_small(double multiplications);

// Copies elements; dtype and dims are the same, strides need not be. The last dim's elements lie side by side in both,
// or it is slow.
void copy(Executor& executor, const Tensor& from, const Tensor& to);

// A call whose inputs have the shapes of an earlier one: that one's, of which pointers alone are others.
struct Ready {
  Call::Plain came;
  std::vector<int64_t> out_dims;  // asked for
  std::shared_ptr<const Plan> plan;
  bool alone = false;  // on the caller's thread
  ForwardArgs args;

  bool fits(const Call::Plain& other) const;
  Status run(Call& call, const Call::Plain& plain) const;
};

// The plans of a node, one for each shape that came. Any thread.
class Plans {
 public:
  // None: a null pointer.
  std::shared_ptr<const Ready> ready_for(const Call::Plain& came) {
    return ready_.find([&](const auto& each) { return each->fits(came); });
  }

  // Of a call that forward() has computed.
  void keep(const Call::Plain& came, const AttentionDesc& desc, const ForwardArgs& args, std::vector<int64_t> out_dims);

  // plan(desc).forward(args) with the call's threads and memory.
  Status forward(Call& call, const AttentionDesc& desc, ForwardArgs& args);
  Status backward(Call& call, const AttentionDesc& desc, BackwardArgs& args);

  // For calls that run on here().
  Result<std::shared_ptr<const Plan>> on_one_thread(const AttentionDesc& desc);

  // 0, 1, 2, ... for the node's runs: what they draw differs.
  uint32_t next_draw() { return draws_.fetch_add(1); }

 private:
  using All = Recent<std::shared_ptr<const Plan>>;
  static Result<std::shared_ptr<const Plan>> get(const AttentionDesc& desc, All& plans, Executor& executor);
  Result<std::shared_ptr<const Plan>> plan_of(const AttentionDesc& desc, bool alone) {
    return alone ? on_one_thread(desc) : get(desc, plans_, sizes());
  }

  All plans_, plans_on_one_thread_;
  Recent<std::shared_ptr<const Ready>> ready_;
  std::atomic<uint32_t> draws_ = 0;
};

// A tensor as ONNX Runtime has it, contiguous; a scalar has one dim of 1.
Status tensor_of(const OrtValue* value, Tensor& tensor);

// Views of a tensor.
Tensor permuted(const Tensor& tensor, std::initializer_list<int> order);
Tensor split_last(const Tensor& tensor, int64_t outer);                   // [..., a * b] -> [..., a, b]
Tensor part(const Tensor& tensor, int dim, int64_t start, int64_t size);  // of one dim
Tensor with_leading_ones(const Tensor& tensor, int ndim);
Tensor without_leading_ones(const Tensor& tensor, int ndim);
std::string words_of(const Tensor& tensor);  // "float32 [2, 3]"

}  // namespace polyhead::onnxruntime
