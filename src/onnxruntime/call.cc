#include "call.h"

#include <algorithm>
#include <cstring>

#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

// Where inputs, outputs and workspaces lie.
const OrtMemoryInfo* cpu_memory() {
  static const OrtMemoryInfo* const memory = [] {
    OrtMemoryInfo* made = nullptr;
    const Status status = call(abi::kCreateCpuMemoryInfo, abi::kArenaAllocator, abi::kDefaultMemory, &made);
    return status.ok() ? made : nullptr;
  }();
  return memory;
}

// What it is given runs on the caller's thread.
class Here final : public Executor {
 public:
  explicit Here(int num_threads) : num_threads_(num_threads) {}
  int num_threads() const override { return num_threads_; }
  void parallel_for(int count, void (*body)(void* context, int index), void* context) override {
    for (int i = 0; i < count; ++i) body(context, i);
  }

 private:
  int num_threads_;
};

void make_contiguous(Tensor& tensor) {
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    tensor.strides[i] = stride;
    stride *= std::max<int64_t>(tensor.dims[i], 1);
  }
}

}  // namespace

void Call::Threads::parallel_for(int count, void (*body)(void* context, int index), void* context) {
  if (count == 1) return body(context, 0);
  struct Pieces {
    void (*body)(void* context, int index);
    void* context;
  } pieces{body, context};
  const auto run = [](void* self, size_t index) {
    const auto* all = static_cast<const Pieces*>(self);
    all->body(all->context, static_cast<int>(index));
  };
  const auto size = static_cast<size_t>(count);
  const Status status = call(abi::kKernelContext_ParallelFor, context_, +run, size, size, static_cast<void*>(&pieces));
  if (status.ok()) return;
  for (int i = 0; i < count; ++i) body(context, i);  // it fails before it begins: without a context
}

Arena::~Arena() {
  if (abi::Allocator* allocator = allocator_.load()) abi::kReleaseAllocator(api(), allocator);
}

Status Arena::get(OrtKernelContext* context, abi::Allocator*& allocator) {
  allocator = allocator_.load();
  if (allocator != nullptr) return {};
  abi::Allocator* made = nullptr;
  if (Status status = call(abi::kKernelContext_GetAllocator, context, cpu_memory(), &made); !status.ok()) return status;
  if (allocator_.compare_exchange_strong(allocator, made)) return allocator = made, Status();
  abi::kReleaseAllocator(api(), made);  // another thread was first
  return {};
}

Call::~Call() {
  for (void* memory : taken_) allocator_->free(allocator_, memory);
}

Status tensor_of(const OrtValue* value, Tensor& tensor) {
  OwnedShape shape;
  abi::ElementType type = abi::ElementType::kUnknown;
  size_t ndim = 0;
  const int64_t* dims = nullptr;
  Status status;
  if (api_has(abi::kOldestWithShapesInPlace)) {
    status = call(abi::kGetTensorElementTypeAndShapeDataReference, value, &type, &dims, &ndim);
  } else {
    status = call(abi::kGetTensorTypeAndShape, value, shape.slot());
    if (status.ok()) status = call(abi::kGetTensorElementType, shape.get(), &type);
    if (status.ok()) status = call(abi::kGetDimensionsCount, shape.get(), &ndim);
  }
  if (!status.ok()) return status;
  if (!dtype_of(type, tensor.dtype)) {
    return invalid(sentence("has element type ", static_cast<int32_t>(type), ", which is not taken"));
  }
  if (ndim > static_cast<size_t>(Tensor::kMaxDims)) {
    return invalid(sentence("has ", ndim, " dims, must have at most ", Tensor::kMaxDims));
  }
  if (dims != nullptr) {
    std::copy_n(dims, ndim, tensor.dims);
  } else if (shape.get() != nullptr) {
    status = call(abi::kGetDimensions, shape.get(), tensor.dims, ndim);
  }
  // Never written: the C interface has no function that reads alone before 1.23.
  if (status.ok()) status = call(abi::kGetTensorMutableData, const_cast<OrtValue*>(value), &tensor.data);
  tensor.ndim = static_cast<int32_t>(std::max<size_t>(ndim, 1));
  if (ndim == 0) tensor.dims[0] = 1;
  make_contiguous(tensor);
  return status;
}

Status Call::given(size_t index, Tensor& tensor) {
  tensor = {};
  if (wiring_ == nullptr && !num_inputs_) {  // a group's places are known
    size_t count = 0;
    if (Status status = call(abi::kKernelContext_GetInputCount, context_, &count); !status.ok()) return status;
    num_inputs_ = count;
  }
  if (num_inputs_ && index >= *num_inputs_) return {};
  const OrtValue* value = nullptr;
  if (Status status = call(abi::kKernelContext_GetInput, context_, index, &value); !status.ok()) return status;
  if (value == nullptr) return {};
  const Status status = tensor_of(value, tensor);
  return status.ok() ? status : Status(status.code(), sentence("input ", index, " ", status.message()));
}

Status Call::input(size_t index, Tensor& tensor) {
  if (wiring_ == nullptr) return given(index, tensor);
  tensor = {};
  if (index >= wiring_->inputs.size() || !wiring_->inputs[index]) return {};
  return make(*wiring_->inputs[index], tensor);
}

Status Call::make(const Source& source, Tensor& tensor) {
  if (source.kind == Source::kTensor) {
    if (Status status = given(source.index, tensor); !status.ok()) return status;
  } else {
    int ndim = 1;  // of the result, which is computed in four
    std::vector<Tensor> operands(source.of.size());
    for (size_t i = 0; i < operands.size(); ++i) {
      if (Status status = make(source.of[i], operands[i]); !status.ok()) return status;
    }
    const bool is_bool = source.kind == Source::kNot || source.kind == Source::kAnd;
    const DType wanted = is_bool || source.kind == Source::kChoose ? DType::kBool : wiring_->dtype;
    for (const Tensor& each : operands) {
      if (each.dtype != wanted)
        return invalid(sentence("an operand is ", words_of(each), ", must be ", dtype_name(wanted)));
      ndim = std::max<int>(ndim, each.ndim);
    }
    tensor.dtype = is_bool ? DType::kBool : wiring_->dtype;
    if (!broadcast(operands, tensor)) return invalid("the masks of an attention do not broadcast together");
    const auto bytes = static_cast<size_t>(tensor.num_elements()) * dtype_size_bytes(tensor.dtype);
    if (Status status = scratch(bytes, tensor.data); !status.ok()) return status;
    compute(executor_, source, operands, tensor);
    tensor = without_leading_ones(tensor, ndim);
  }
  if (!follow(source.steps, tensor)) return invalid(sentence("input ", source.index, " is ", words_of(tensor)));
  return {};
}

bool Call::is_plain() const {
  if (wiring_ == nullptr || wiring_->outputs.empty() || wiring_->outputs[0] == nullptr) return false;
  const auto& inputs = wiring_->inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] != nullptr && (i >= Plain::kMost || inputs[i]->kind != Source::kTensor)) return false;
  }
  return std::all_of(wiring_->outputs.begin() + 1, wiring_->outputs.end(), [](const auto& each) { return !each; });
}

Status Call::read(Plain& plain) {
  for (size_t i = 0; i < std::min(Plain::kMost, wiring_->inputs.size()); ++i) {
    if (!wiring_->inputs[i]) continue;
    if (Status status = given(wiring_->inputs[i]->index, plain.inputs[i]); !status.ok()) return status;
  }
  return {};
}

bool Call::wants(size_t index) const {
  if (wiring_ != nullptr) return index < wiring_->outputs.size() && wiring_->outputs[index];
  size_t count = 0;
  return call(abi::kKernelContext_GetOutputCount, context_, &count).ok() && index < count;
}

Status Call::output(size_t index, std::span<const int64_t> dims, Tensor& tensor) {
  const DType dtype = tensor.dtype;
  tensor = {};
  if (!wants(index)) return {};
  const Target* target = wiring_ == nullptr ? nullptr : wiring_->outputs[index].get();
  const bool is_seen = target != nullptr && !target->steps.empty();
  const std::vector<int64_t> asked = is_seen ? dims_asked_for(index, dims) : std::vector<int64_t>();
  const std::span<const int64_t> all = is_seen ? std::span<const int64_t>(asked) : dims;
  void* data = nullptr;
  Status status = output_data(index, all, data);
  if (!status.ok() || data == nullptr) return status;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(all.size());
  std::copy(all.begin(), all.end(), tensor.dims);
  make_contiguous(tensor);
  if (is_seen) tensor = seen_before(target->steps, {dims.begin(), dims.end()}, tensor);
  return status;
}

std::vector<int64_t> Call::dims_asked_for(size_t index, std::span<const int64_t> dims) const {
  std::vector<int64_t> asked(dims.begin(), dims.end());
  return wiring_ == nullptr ? asked : dims_behind(wiring_->outputs[index]->steps, std::move(asked));
}

Status Call::output_data(size_t index, std::span<const int64_t> dims, void*& data) {
  OrtValue* value = nullptr;
  const size_t at = wiring_ == nullptr ? index : wiring_->outputs[index]->index;
  const Status status = call(abi::kKernelContext_GetOutput, context_, at, dims.data(), dims.size(), &value);
  return status.ok() && value != nullptr ? call(abi::kGetTensorMutableData, value, &data) : status;
}

Status Call::tell_shapes() {
  for (const ToldShape& shape : wiring_->shapes) {
    const auto count = static_cast<int64_t>(shape.sizes.size());
    OrtValue* value = nullptr;
    void* data = nullptr;
    Status status = call(abi::kKernelContext_GetOutput, context_, shape.index, &count, size_t{1}, &value);
    if (status.ok()) status = call(abi::kGetTensorMutableData, value, &data);
    for (size_t i = 0; i < shape.sizes.size() && status.ok(); ++i) {
      int64_t size = shape.sizes[i].number;
      for (const ToldShape::Part& part : shape.sizes[i].parts) {
        Tensor tensor;
        if (status.ok()) status = given(part.index, tensor);
        if (status.ok()) size += tensor.dims[part.dim];
      }
      static_cast<int64_t*>(data)[i] = size;
    }
    if (!status.ok()) return status;
  }
  return {};
}

Status Call::scratch(size_t bytes, void*& memory) {
  memory = nullptr;
  if (bytes == 0) return {};
  const size_t rounded = bytes <= kOwnBytes ? (bytes + kAlignment - 1) / kAlignment * kAlignment : bytes;
  if (rounded <= kOwnBytes - own_used_) {
    memory = own_ + own_used_;
    own_used_ += rounded;
    return {};
  }
  if (allocator_ == nullptr) {
    if (Status status = arena_.get(context_, allocator_); !status.ok()) return status;
  }
  taken_.reserve(taken_.size() + 1);
  void* raw = allocator_->alloc(allocator_, bytes + kAlignment);
  if (raw == nullptr) return out_of_memory();
  taken_.push_back(raw);
  const auto address = reinterpret_cast<uintptr_t>(raw);
  memory = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  return {};
}

Status Call::scratch(DType dtype, std::initializer_list<int64_t> dims, Tensor& tensor) {
  tensor = Tensor(nullptr, dtype, dims);
  return scratch(static_cast<size_t>(tensor.num_elements()) * dtype_size_bytes(dtype), tensor.data);
}

namespace {

struct Copy {
  Tensor from, to;  // 4 dims
  int pieces;

  void run(int piece) const {
    const size_t bytes = dtype_size_bytes(from.dtype);
    const int64_t rows = from.dims[0] * from.dims[1] * from.dims[2], width = from.dims[3];
    const bool side_by_side = from.strides[3] == 1 && to.strides[3] == 1;
    for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) {
      const int64_t at[3] = {row / from.dims[2] / from.dims[1], row / from.dims[2] % from.dims[1], row % from.dims[2]};
      const char* source = static_cast<const char*>(from.data);
      char* target = static_cast<char*>(to.data);
      for (int i = 0; i < 3; ++i) {
        source += at[i] * from.strides[i] * static_cast<int64_t>(bytes);
        target += at[i] * to.strides[i] * static_cast<int64_t>(bytes);
      }
      if (side_by_side) {
        std::memcpy(target, source, static_cast<size_t>(width) * bytes);
        continue;
      }
      for (int64_t i = 0; i < width; ++i) {
        std::memcpy(target + i * to.strides[3] * static_cast<int64_t>(bytes),
                    source + i * from.strides[3] * static_cast<int64_t>(bytes), bytes);
      }
    }
  }
};

}  // namespace

void copy(Executor& executor, const Tensor& from, const Tensor& to) {
  constexpr size_t kWorthAThread = size_t{1} << 16;  // bytes
  const auto bytes = static_cast<size_t>(from.num_elements()) * dtype_size_bytes(from.dtype);
  if (bytes == 0) return;
  const auto worth = static_cast<int>(std::min<size_t>(bytes / kWorthAThread + 1, 1024));
  Copy job{with_leading_ones(from, 4), with_leading_ones(to, 4), std::min(worth, executor.num_threads())};
  if (job.from.strides[2] == job.from.dims[3] && job.to.strides[2] == job.to.dims[3]) {  // rows in one run
    for (Tensor* each : {&job.from, &job.to}) {
      each->dims[3] *= each->dims[2];
      each->dims[2] = 1;
    }
  }
  executor.parallel_for(
      job.pieces, [](void* self, int i) { static_cast<const Copy*>(self)->run(i); }, &job);
}

Executor& here() {
  static Here executor(1);
  return executor;
}

Executor& sizes() {
  static Here executor(default_executor().num_threads());
  return executor;
}

bool is_small(double multiplications) {
  constexpr double kWorthAThread = 1 << 18;  // some 5 us of one thread: as long as another one takes to begin
  return multiplications < kWorthAThread;
}

Result<std::shared_ptr<const Plan>> Plans::get(const AttentionDesc& desc, All& plans, Executor& executor) {
  return plans.get([&](const std::shared_ptr<const Plan>& each) { return each->desc() == desc; },
                   [&]() -> Result<std::shared_ptr<const Plan>> {
                     Result<Plan> made = plan(desc, {.where = {.executor = &executor}});
                     if (!made.ok()) return made.status();
                     return std::make_shared<const Plan>(std::move(*made));
                   });
}

Result<std::shared_ptr<const Plan>> Plans::on_one_thread(const AttentionDesc& desc) {
  return get(desc, plans_on_one_thread_, here());
}

namespace {

bool runs_alone(const AttentionDesc& desc) {
  const auto product = [](auto... sizes) { return (static_cast<double>(sizes) * ...); };
  return is_small(product(desc.batch, desc.num_heads, desc.seqlen_q, desc.seqlen_k, desc.head_dim + desc.head_dim_v));
}

Status run(Call& call, const Plan& plan, bool alone, ForwardArgs& args) {
  args.workspace_bytes = plan.workspace_bytes();
  if (Status status = call.scratch(args.workspace_bytes, args.workspace); !status.ok()) return status;
  args.where.executor = alone ? &here() : &call.executor();
  return plan.forward(args);
}

}  // namespace

Status Plans::forward(Call& call, const AttentionDesc& desc, ForwardArgs& args) {
  const bool alone = runs_alone(desc);
  const Result<std::shared_ptr<const Plan>> plan = plan_of(desc, alone);
  return plan.ok() ? run(call, **plan, alone, args) : plan.status();
}

void Plans::keep(const Call::Plain& came, const AttentionDesc& desc, const ForwardArgs& args,
                 std::vector<int64_t> out_dims) {
  const Tensor& mask = args.attn_mask.given() ? args.attn_mask : args.attn_bias;
  const Tensor* seen[] = {&args.query, &args.key, &args.value, &mask};
  for (size_t i = 0; i < Call::Plain::kMost; ++i) {
    if (seen[i]->data != came.inputs[i].data) return;
  }
  const bool alone = runs_alone(desc);
  const Result<std::shared_ptr<const Plan>> plan = plan_of(desc, alone);
  if (!plan.ok()) return;
  using Made = std::shared_ptr<const Ready>;
  (void)ready_.get(
      [&](const Made& each) { return each->fits(came); },
      [&] {
        return Result<Made>(std::make_shared<const Ready>(Ready{came, std::move(out_dims), *plan, alone, args}));
      });
}

bool Ready::fits(const Call::Plain& other) const {
  for (size_t i = 0; i < Call::Plain::kMost; ++i) {
    const Tensor &a = came.inputs[i], &b = other.inputs[i];
    if (a.ndim != b.ndim || a.dtype != b.dtype || !std::equal(a.dims, a.dims + a.ndim, b.dims)) return false;
  }
  return true;
}

Status Ready::run(Call& call, const Call::Plain& plain) const {
  ForwardArgs now = args;
  now.query.data = plain.inputs[0].data;
  now.key.data = plain.inputs[1].data;
  now.value.data = plain.inputs[2].data;
  (now.attn_mask.given() ? now.attn_mask : now.attn_bias).data = plain.inputs[3].data;
  const Status status = call.output_data(0, out_dims, now.out.data);
  return status.ok() ? onnxruntime::run(call, *plan, alone, now) : status;
}

Status Plans::backward(Call& call, const AttentionDesc& desc, BackwardArgs& args) {
  const Result<std::shared_ptr<const Plan>> plan = get(desc, plans_, sizes());
  if (!plan.ok()) return plan.status();
  args.forward.workspace_bytes = (*plan)->backward_workspace_bytes();
  if (Status status = call.scratch(args.forward.workspace_bytes, args.forward.workspace); !status.ok()) return status;
  args.forward.where.executor = &call.executor();
  return (*plan)->backward(args);
}

Tensor permuted(const Tensor& tensor, std::initializer_list<int> order) {
  Tensor out = tensor;
  int i = 0;
  for (int from : order) {
    out.dims[i] = tensor.dims[from];
    out.strides[i++] = tensor.strides[from];
  }
  return out;
}

Tensor split_last(const Tensor& tensor, int64_t outer) {
  Tensor out = tensor;
  const int last = out.ndim++ - 1;
  out.dims[last] = outer;
  out.dims[last + 1] = tensor.dims[last] / outer;
  out.strides[last + 1] = tensor.strides[last];
  out.strides[last] = tensor.strides[last] * out.dims[last + 1];
  return out;
}

Tensor part(const Tensor& tensor, int dim, int64_t start, int64_t size) {
  Tensor out = tensor;
  out.dims[dim] = size;
  if (out.data != nullptr) {
    out.data = static_cast<char*>(out.data) +
               start * tensor.strides[dim] * static_cast<int64_t>(dtype_size_bytes(tensor.dtype));
  }
  return out;
}

Tensor with_leading_ones(const Tensor& tensor, int ndim) {
  Tensor out = tensor;
  out.ndim = ndim;
  for (int i = 0; i < ndim; ++i) {
    const int from = i - (ndim - tensor.ndim);
    out.dims[i] = from < 0 ? 1 : tensor.dims[from];
    out.strides[i] = from < 0 ? 0 : tensor.strides[from];
  }
  return out;
}

Tensor without_leading_ones(const Tensor& tensor, int ndim) {
  Tensor out = tensor;
  out.ndim = ndim;
  for (int i = 0; i < ndim; ++i) {
    out.dims[i] = tensor.dims[i + tensor.ndim - ndim];
    out.strides[i] = tensor.strides[i + tensor.ndim - ndim];
  }
  return out;
}

std::string words_of(const Tensor& tensor) {
  std::string words = sentence(dtype_name(tensor.dtype), " [");
  for (int i = 0; i < tensor.ndim; ++i) words += sentence(i == 0 ? "" : ", ", tensor.dims[i]);
  return words + "]";
}

}  // namespace polyhead::onnxruntime
