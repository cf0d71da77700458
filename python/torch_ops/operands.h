// What attention_forward and attention_backward share: their operands and options, as the library wants them.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "broadcast.h"
#include "call_place.h"
#include "polyhead/attention.h"
#include "stable_tensor.h"

namespace polyhead::torch_ops {

constexpr int kNumSharedOptions = 24;  // SCHEMA in polyhead/torch/_options.py, whose order this is

// The options' values, unchecked.
struct Options {
  Options() = default;
  explicit Options(ArgumentReader& arguments);

  bool causal = false;
  std::optional<double> scale;
  StableTensor attn_bias;
  StableTensor attn_mask;
  StableTensor alibi_slopes;
  StableTensor dropout_seed;
  double dropout_p = 0;
  int64_t dropout_offset = 0;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t align = 0;
  std::optional<int64_t> query_offset;
  StableTensor query_offsets;
  double softcap = 0;
  StableTensor seqlens_q;
  StableTensor seqlens_k;
  StableTensor cu_seqlens_q;
  StableTensor cu_seqlens_k;
  std::optional<std::string> kernel;  // a name; none: none in particular
  StableTensor dropout_origin;
  StableTensor sink_logits;
  int64_t normalizer = 0;  // of Normalizer
  int64_t sink_keys = 0;
  bool mask_at_end = false;
  StableTensor page_table, key_scales, value_scales;  // of the overload .cached alone
  bool heads_first = false;  // query, key, value, out and their gradients are [B, H, S, D], as torch's own attention's
  bool same_heads = false;   // key and value have as many as query
};

// A program's text and what it captures, as the overloads of that name take them.
struct CapturingProgram {
  static constexpr int kNumArguments = 1 + Program::kMostCaptures;
  explicit CapturingProgram(ArgumentReader& arguments);

  std::string text;
  std::array<StableTensor, Program::kMostCaptures> captures;
};

// One call. The tensors and options that it was made of must outlive it. Throws what bad_value throws.
struct Operands {
  Operands(const StableTensor& query, const StableTensor& key, const StableTensor& value, const Options& options);
  Operands(const Operands&) = delete;  // args points into it
  Operands& operator=(const Operands&) = delete;

  const CallPlace place;  // of the call, which is made as long as this lives
  AttentionDesc desc;
  ForwardArgs args;         // the inputs
  Tensor attn_bias;         // as given: args.attn_bias has 4 dims
  std::string_view kernel;  // "": the best
  bool heads_first = false;

 private:
  void read_operands(const StableTensor& query, const StableTensor& key, const StableTensor& value,
                     const Options& options);
  void read_options(const Options& options);
  void read_dropout(const Options& options);
};

// The same with a program, which must outlive it too.
struct OperandsOfProgram : Operands {
  OperandsOfProgram(const StableTensor& query, const StableTensor& key, const StableTensor& value,
                    const Options& options, const CapturingProgram& program);

  std::array<Tensor, Program::kMostCaptures> captures;  // as given: args.captures has no number without dims

 private:
  std::array<Tensor, Program::kMostCaptures> indexed_captures_;
};

}  // namespace polyhead::torch_ops
