// The operators that run here: what a node of a model says, checked once, and its runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "call.h"
#include "linear.h"
#include "scores.h"

namespace polyhead::onnxruntime {

enum class Operator {
  kAttention,  // of ONNX, versions 23 to 25, and ours, which in a domain of its own is the same and gives logsumexp too
  kAttentionGrad,  // its gradients
  kMultiHead,      // com.microsoft.MultiHeadAttention
  kGroupQuery,     // com.microsoft.GroupQueryAttention
  kLinear,         // a product and what is done to its result, of our domain
};

// Attributes by name, wherever they are kept.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual std::optional<int64_t> integer(const char* name) const = 0;
  virtual std::optional<float> number(const char* name) const = 0;
  virtual std::optional<std::string> text(const char* name) const = 0;
};

// What can be told of a node before it runs.
struct NodeFacts {
  Operator op = Operator::kAttention;
  uint32_t given = 0;   // bit i: input i is there
  uint32_t wanted = 0;  // bit i: output i is there

  bool gives(int input) const { return (given >> input & 1) != 0; }
  bool wants(int output) const { return (wanted >> output & 1) != 0; }
};

class Node {
 public:
  // Why the node cannot run here is the Status's sentence.
  static Result<Node> make(const NodeFacts& facts, const Attributes& attributes);

  // Keeps what it needs of inputs that are known when the session is made.
  Status hold(const Constants& constants) { return linear_ == nullptr ? Status() : linear_->hold(constants); }

  // Any thread.
  Status run(Call& call, Plans& plans) const;

 private:
  Status run_attention(Call& call, Plans& plans) const;
  Status run_attention_grad(Call& call, Plans& plans) const;
  Status run_multi_head(Call& call, Plans& plans) const;
  Status run_group_query(Call& call, Plans& plans) const;
  AttentionDesc desc_of(const Tensor& query, const Tensor& key, const Tensor& value) const;

  Operator op_ = Operator::kAttention;
  std::optional<double> scale_;
  SharedProgram program_;  // of the scores; none: null
  double softcap_ = 0, mask_filter_value_ = 0;
  bool causal_ = false, returns_weights_ = false, rotary_ = false, rotary_interleaved_ = false, sink_of_zero_ = false;
  bool mask_broadcasts_ = false;  // a mask's one column is for all keys
  std::optional<Scores> scores_;
  std::shared_ptr<Linear> linear_;  // of kLinear alone
  double dropout_p_ = 0;
  uint64_t seed_ = 0;
  int64_t window_left_ = -1, window_right_ = -1;
  int64_t num_heads_ = 0, num_heads_kv_ = 0;  // 0: told by dims
};

// Output 0, [batch, sequence, heads * dim], seen as the call's [batch, sequence, heads, dim].
Status make_flat_out(Call& call, const AttentionDesc& desc, Tensor& out);

// A mask [..., keys]: its four dims, for a desc and a call. `what` names it in errors.
Status add_mask(const char* what, const Tensor& mask, AttentionDesc& desc, ForwardArgs& args);

// An input of a logit for each head. `name` tells it in errors.
struct SinkInput {
  size_t index;
  const char* name;
  bool any_dims;         // else one
  bool zero_if_missing;  // else there is none
};
Status add_sinks(Call& call, const SinkInput& input, AttentionDesc& desc, ForwardArgs& args);

}  // namespace polyhead::onnxruntime
