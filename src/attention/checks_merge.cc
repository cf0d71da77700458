#include <cstdio>

#include "attention/checks.h"
#include "contract/operands.h"
#include "core/layout.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

// "merged.out", or "parts[3].logsumexp", without an allocation.
struct Name {
  char text[48];

  Name(const char* owner, const char* field) { std::snprintf(text, sizeof text, "%s.%s", owner, field); }
  Name(const char* owner, size_t index, const char* field) {
    std::snprintf(text, sizeof text, "%s[%zu].%s", owner, index, field);
  }
};

// One tensor or one for each part: what a sentence calls it, and where it is.
struct Group {
  const char* name;
  std::span<const Partial> partials;
  bool many;

  Group(const char* n, const Partial& one) : name(n), partials(&one, 1), many(false) {}
  Group(const char* n, std::span<const Partial> all) : name(n), partials(all), many(true) {}

  Name field(size_t i, const char* text) const { return many ? Name(name, i, text) : Name(name, text); }
};

enum class Optional { kNone, kLogsumexp, kBoth };

// Whether an out may have this dtype beside another of these: sums are float32.
bool mixable(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

// Every tensor of a call has the shape of parts[0].out, or of its logsumexp; float64 all or none.
class Shape {
 public:
  Status take(const Tensor& out) {
    if (!out.given()) return invalid("parts[0].out is missing");
    if (!mixable(out.dtype) && out.dtype != DType::kFloat64) {
      return invalid(
          sentence("parts[0].out is ", dtype_name(out.dtype), ", takes float32, bfloat16, float16 or float64"));
    }
    if (out.ndim != 3 && out.ndim != 4) {
      return invalid(sentence("parts[0].out has ", out.ndim,
                              " dims, expected 4: [batch, seqlen_q, num_heads, head_dim_v], or 3: [total_q, num_heads, "
                              "head_dim_v]"));
    }
    for (int i = 0; i < out.ndim; ++i) {
      if (out.dims[i] < 0) {
        return invalid(sentence("parts[0].out dim ", i, " is ", out.dims[i], ", must not be negative"));
      }
    }
    dtype_ = out.dtype;
    packed_ = out.ndim == 3;
    batch_.size = packed_ ? 1 : out.dims[0];
    rows_ = {packed_ ? "total_q" : "seqlen_q", out.dims[out.ndim - 3]};
    heads_.size = out.dims[out.ndim - 2];
    dim_.size = out.dims[out.ndim - 1];
    return {};
  }

  // Both tensors of each of a group, in their turn.
  Status check(const Group& group, Role role, Optional optional) const {
    for (size_t i = 0; i < group.partials.size(); ++i) {
      const Partial& partial = group.partials[i];
      if (optional != Optional::kBoth || partial.out.given()) {
        if (Status status = check_out(group.field(i, "out"), partial.out, role); !status.ok()) return status;
      }
      if (optional == Optional::kNone || partial.logsumexp.given()) {
        Status status = check_logsumexp(group.field(i, "logsumexp"), partial.logsumexp, role);
        if (!status.ok()) return status;
      }
    }
    return {};
  }

 private:
  Status check_out(const Name& name, const Tensor& t, Role role) const {
    MemoryRange range;
    const DType dtype = mixable(t.dtype) && mixable(dtype_) ? t.dtype : dtype_;
    const OperandShape shape =
        packed_ ? OperandShape(dtype, {rows_, heads_, dim_}) : OperandShape(dtype, {batch_, rows_, heads_, dim_});
    const Status status = check_tensor(name.text, t, shape, Device::kCpu, &range);
    return status.ok() && role != Role::kInput ? check_writable(role, name.text, t) : status;
  }

  Status check_logsumexp(const Name& name, const Tensor& t, Role role) const {
    const DType sums = dtype_ == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    MemoryRange range;
    const OperandShape shape =
        packed_ ? OperandShape(sums, {heads_, rows_}) : OperandShape(sums, {batch_, heads_, rows_});
    const Status status = check_tensor(name.text, t, shape, Device::kCpu, &range);
    return status.ok() && role != Role::kInput ? check_writable(role, name.text, t) : status;
  }

  DType dtype_ = DType::kFloat32;
  bool packed_ = false;
  Dim batch_{"batch", 1}, rows_{"", 0}, heads_{"num_heads", 0}, dim_{"head_dim_v", 0};
};

enum class InPlace { kRefused, kAllowed };

// Whether a tensor that is written shares memory with one of a group; `in_place`: as the very same view it may.
Status check_apart(const Name& name, const Tensor& t, const Group& group, InPlace in_place = InPlace::kRefused) {
  if (!t.given()) return {};
  for (size_t i = 0; i < group.partials.size(); ++i) {
    const Partial& other = group.partials[i];
    for (const Tensor* tensor : {&other.out, &other.logsumexp}) {
      if (!tensor->given() || tensor == &t || !may_share_memory(t, *tensor)) continue;
      if (in_place == InPlace::kAllowed && same_view(t, *tensor)) continue;
      const char* field = tensor == &other.out ? "out" : "logsumexp";
      return invalid(sentence(name.text, " overlaps ", group.field(i, field).text));
    }
  }
  return {};
}

}  // namespace

Status check_merge(std::span<const Partial> parts, const Partial& merged) {
  if (parts.empty()) return invalid("parts is empty, takes one or more");
  Shape shape;
  Status status = shape.take(parts[0].out);
  if (status.ok()) status = shape.check({"parts", parts}, Role::kInput, Optional::kNone);
  if (status.ok()) status = shape.check({"merged", merged}, Role::kOutput, Optional::kLogsumexp);
  if (!status.ok()) return status;
  const Name out("merged", "out"), logsumexp("merged", "logsumexp");
  status = check_apart(logsumexp, merged.logsumexp, {"merged", merged});
  if (status.ok()) status = check_apart(out, merged.out, {"parts", parts}, InPlace::kAllowed);
  if (status.ok()) status = check_apart(logsumexp, merged.logsumexp, {"parts", parts}, InPlace::kAllowed);
  return status;
}

Status check_merge_backward(std::span<const Partial> parts, const Partial& merged, const Partial& grad_merged,
                            std::span<const Partial> grad_parts) {
  if (parts.empty()) return invalid("parts is empty, takes one or more");
  if (grad_parts.size() != parts.size()) {
    return invalid(
        sentence("grad_parts has ", grad_parts.size(), " elements, expected as many as parts: ", parts.size()));
  }
  Shape shape;
  Status status = shape.take(parts[0].out);
  if (status.ok()) status = shape.check({"parts", parts}, Role::kInput, Optional::kNone);
  if (status.ok()) status = shape.check({"merged", merged}, Role::kInput, Optional::kNone);
  if (status.ok()) status = shape.check({"grad_merged", grad_merged}, Role::kInput, Optional::kLogsumexp);
  if (status.ok()) status = shape.check({"grad_parts", grad_parts}, Role::kGradient, Optional::kBoth);
  if (!status.ok()) return status;
  bool asked = false;
  for (size_t i = 0; i < grad_parts.size(); ++i) {
    for (const Tensor* t : {&grad_parts[i].out, &grad_parts[i].logsumexp}) {
      asked = asked || t->given();
      const Name name("grad_parts", i, t == &grad_parts[i].out ? "out" : "logsumexp");
      for (const Group& others : {Group("parts", parts), Group("merged", merged), Group("grad_merged", grad_merged),
                                  Group("grad_parts", grad_parts.first(i + 1))}) {
        if (status = check_apart(name, *t, others); !status.ok()) return status;
      }
    }
  }
  return asked ? status : invalid("no gradient is asked for: give the out or logsumexp of one of grad_parts");
}

}  // namespace polyhead
