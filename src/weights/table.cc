// The sources, each with the arrays that it stores an attention layer in. Read off the frameworks' own modules; the
// names are those of a module's parameters, so that what stands before them in a checkpoint is the prefix.
#include <algorithm>
#include <iterator>

#include "core/sentence.h"
#include "weights/weights.h"

namespace polyhead::stored {
namespace {

using enum WeightKind;

constexpr WeightKind kQ[] = {kQuery}, kK[] = {kKey}, kV[] = {kValue}, kO[] = {kOut};
constexpr WeightKind kQb[] = {kQueryBias}, kKb[] = {kKeyBias}, kVb[] = {kValueBias}, kOb[] = {kOutBias};
constexpr WeightKind kQkv[] = {kQuery, kKey, kValue}, kQkvb[] = {kQueryBias, kKeyBias, kValueBias};
constexpr WeightKind kKv[] = {kKey, kValue}, kKvb[] = {kKeyBias, kValueBias};

// y = x W, two-dimensional: what Layer::weights_in() has, as arrays of their own.
constexpr Row kPolyhead[] = {{"query_weight", kQ, "e(hd)"}, {"query_bias", kQb, "(hd)"},   {"key_weight", kK, "e(hd)"},
                             {"key_bias", kKb, "(hd)"},     {"value_weight", kV, "e(hd)"}, {"value_bias", kVb, "(hd)"},
                             {"out_weight", kO, "(hd)e"},   {"out_bias", kOb, "e"}};

// torch/nn/modules/activation.py: rows of in_proj_weight are q, k, v.
constexpr Row kTorch[] = {{"in_proj_weight", kQkv, "[hd]e"},
                          {"in_proj_bias", kQkvb, "[hd]"},
                          {"out_proj.weight", kO, "e(hd)"},
                          {"out_proj.bias", kOb, "e"}};
// With kdim or vdim: matrices of their own, but one bias.
constexpr Row kTorchKdimVdim[] = {{"q_proj_weight", kQ, "(hd)e"},   {"k_proj_weight", kK, "(hd)e"},
                                  {"v_proj_weight", kV, "(hd)e"},   {"in_proj_bias", kQkvb, "[hd]"},
                                  {"out_proj.weight", kO, "e(hd)"}, {"out_proj.bias", kOb, "e"}};
constexpr const char* kTorchExtras[] = {"bias_k", "bias_v"};

// keras/src/layers/attention/multi_head_attention.py: EinsumDense kernels.
constexpr Row kKeras[] = {{"query/kernel", kQ, "ehd"},
                          {"query/bias", kQb, "hd"},
                          {"key/kernel", kK, "ehd"},
                          {"key/bias", kKb, "hd"},
                          {"value/kernel", kV, "ehd"},
                          {"value/bias", kVb, "hd"},
                          {"attention_output/kernel", kO, "hde"},
                          {"attention_output/bias", kOb, "e"}};
// flax/linen/attention.py
constexpr Row kFlax[] = {{"query/kernel", kQ, "ehd"}, {"query/bias", kQb, "hd"},   {"key/kernel", kK, "ehd"},
                         {"key/bias", kKb, "hd"},     {"value/kernel", kV, "ehd"}, {"value/bias", kVb, "hd"},
                         {"out/kernel", kO, "hde"},   {"out/bias", kOb, "e"}};

// google-research/bert, variables below .../layer_N/attention/
constexpr Row kBertTf[] = {{"self/query/kernel", kQ, "e(hd)"},   {"self/query/bias", kQb, "(hd)"},
                           {"self/key/kernel", kK, "e(hd)"},     {"self/key/bias", kKb, "(hd)"},
                           {"self/value/kernel", kV, "e(hd)"},   {"self/value/bias", kVb, "(hd)"},
                           {"output/dense/kernel", kO, "(hd)e"}, {"output/dense/bias", kOb, "e"}};
// transformers: BertAttention
constexpr Row kBert[] = {{"self.query.weight", kQ, "(hd)e"},   {"self.query.bias", kQb, "(hd)"},
                         {"self.key.weight", kK, "(hd)e"},     {"self.key.bias", kKb, "(hd)"},
                         {"self.value.weight", kV, "(hd)e"},   {"self.value.bias", kVb, "(hd)"},
                         {"output.dense.weight", kO, "e(hd)"}, {"output.dense.bias", kOb, "e"}};
// transformers: GPT2Attention. Conv1D keeps [in, out].
constexpr Row kGpt2[] = {{"c_attn.weight", kQkv, "e[hd]"},
                         {"c_attn.bias", kQkvb, "[hd]"},
                         {"c_proj.weight", kO, "(hd)e"},
                         {"c_proj.bias", kOb, "e"}};
// transformers: LlamaAttention and its like. RoPE pairs column i with column i + head_dim / 2.
constexpr Row kLlama[] = {{"q_proj.weight", kQ, "(hd)e"}, {"q_proj.bias", kQb, "(hd)"},
                          {"k_proj.weight", kK, "(hd)e"}, {"k_proj.bias", kKb, "(hd)"},
                          {"v_proj.weight", kV, "(hd)e"}, {"v_proj.bias", kVb, "(hd)"},
                          {"o_proj.weight", kO, "e(hd)"}, {"o_proj.bias", kOb, "e"}};
constexpr const char* kNormExtras[] = {"q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"};
// meta-llama/llama: RoPE pairs neighbours, columns 2 i and 2 i + 1 of q and k.
constexpr Row kLlamaMeta[] = {
    {"wq.weight", kQ, "(hpc)e"}, {"wk.weight", kK, "(hpc)e"}, {"wv.weight", kV, "(hd)e"}, {"wo.weight", kO, "e(hd)"}};
// transformers: T5Attention
constexpr Row kT5[] = {
    {"q.weight", kQ, "(hd)e"}, {"k.weight", kK, "(hd)e"}, {"v.weight", kV, "(hd)e"}, {"o.weight", kO, "e(hd)"}};
constexpr const char* kT5Extras[] = {"relative_attention_bias.weight"};
// transformers: GPTNeoXAttention, BloomAttention. q, k, v of a head, then those of the next.
constexpr Row kGptNeox[] = {{"query_key_value.weight", kQkv, "(hnd)e"},
                            {"query_key_value.bias", kQkvb, "(hnd)"},
                            {"dense.weight", kO, "e(hd)"},
                            {"dense.bias", kOb, "e"}};
// timm/layers/attention.py
constexpr Row kTimm[] = {
    {"qkv.weight", kQkv, "[hd]e"}, {"qkv.bias", kQkvb, "[hd]"}, {"proj.weight", kO, "e(hd)"}, {"proj.bias", kOb, "e"}};
// flash_attn/modules/mha.py
constexpr Row kFlash[] = {{"Wqkv.weight", kQkv, "[hd]e"},
                          {"Wqkv.bias", kQkvb, "[hd]"},
                          {"out_proj.weight", kO, "e(hd)"},
                          {"out_proj.bias", kOb, "e"}};
constexpr Row kFlashCross[] = {{"Wq.weight", kQ, "(hd)e"},       {"Wq.bias", kQb, "(hd)"},
                               {"Wkv.weight", kKv, "[hd]e"},     {"Wkv.bias", kKvb, "[hd]"},
                               {"out_proj.weight", kO, "e(hd)"}, {"out_proj.bias", kOb, "e"}};

// paddle.incubate.nn.functional.fused_multi_head_attention: qkv_weight is [.., out, in], linear_weight [in, out].
constexpr Row kPaddleFused[] = {{"qkv_weight", kQkv, "nhde"},
                                {"qkv_bias", kQkvb, "nhd"},
                                {"linear_weight", kO, "(hd)e"},
                                {"linear_bias", kOb, "e"}};
constexpr Row kPaddleFusedWb[] = {{"qkv_weight", kQkv, "e[hd]"},
                                  {"qkv_bias", kQkvb, "[hd]"},
                                  {"linear_weight", kO, "(hd)e"},
                                  {"linear_bias", kOb, "e"}};
// paddle.nn.MultiHeadAttention: Linear keeps [in, out]. Flux's Dense keeps (out, in) column by column, which is the same
// memory: a file or array that turns the dims round has [in, out] too.
constexpr Row kInOut[] = {{"q_proj.weight", kQ, "e(hd)"},   {"q_proj.bias", kQb, "(hd)"},
                          {"k_proj.weight", kK, "e(hd)"},   {"k_proj.bias", kKb, "(hd)"},
                          {"v_proj.weight", kV, "e(hd)"},   {"v_proj.bias", kVb, "(hd)"},
                          {"out_proj.weight", kO, "(hd)e"}, {"out_proj.bias", kOb, "e"}};
constexpr Row kOutIn[] = {{"q_proj.weight", kQ, "(hd)e"},   {"q_proj.bias", kQb, "(hd)"},
                          {"k_proj.weight", kK, "(hd)e"},   {"k_proj.bias", kKb, "(hd)"},
                          {"v_proj.weight", kV, "(hd)e"},   {"v_proj.bias", kVb, "(hd)"},
                          {"out_proj.weight", kO, "e(hd)"}, {"out_proj.bias", kOb, "e"}};

// com.microsoft Attention: the inputs `weights` and `bias`; the product behind it is no part of the node.
constexpr Row kOnnx[] = {{"weights", kQkv, "e[hd]"}, {"bias", kQkvb, "[hd]"}};

// cudnnGetMultiHeadAttnWeights reports three dims and strides for each kind. The caller makes the tensors with these
// strides; nothing is assumed of the memory.
constexpr Row kCudnn[] = {{"Q_WEIGHTS", kQ, "hde"}, {"Q_BIASES", kQb, "hd1"}, {"K_WEIGHTS", kK, "hde"},
                          {"K_BIASES", kKb, "hd1"}, {"V_WEIGHTS", kV, "hde"}, {"V_BIASES", kVb, "hd1"},
                          {"O_WEIGHTS", kO, "hed"}, {"O_BIASES", kOb, "1e1"}};

constexpr SourceScale kInverseRoot = SourceScale::kInverseRoot, kOne = SourceScale::kOne;
constexpr SourceScale kOwn = SourceScale::kOwn, kAsked = SourceScale::kAsked;

// name, module, scale, norm epsilon, extras | num_heads_kv, head_dim_v free | projections optional | rows
constexpr SourceTable kTables[] = {
    {{"polyhead", "this library's own form", kOwn}, true, true, true, kPolyhead},
    {{"torch", "torch.nn.MultiheadAttention", kInverseRoot, 1e-5, kTorchExtras}, true, false, false, kTorch},
    {{"torch_kdim_vdim", "torch.nn.MultiheadAttention with kdim or vdim", kInverseRoot, 1e-5, kTorchExtras},
     true,
     false,
     false,
     kTorchKdimVdim},
    {{"keras", "Keras MultiHeadAttention, GroupQueryAttention", kInverseRoot, 1e-3}, true, true, false, kKeras},
    {{"flax", "Flax linen MultiHeadDotProductAttention", kInverseRoot, 1e-6}, false, false, false, kFlax},
    {{"bert_tf", "Google BERT, TensorFlow checkpoint", kInverseRoot, 1e-12}, false, false, false, kBertTf},
    {{"bert", "Hugging Face BertAttention", kInverseRoot, 1e-12}, false, false, false, kBert},
    {{"gpt2", "Hugging Face GPT2Attention", kInverseRoot, 1e-5}, false, false, false, kGpt2},
    {{"llama", "Hugging Face LlamaAttention, Mistral, Qwen", kInverseRoot, 0, kNormExtras}, true, false, false, kLlama},
    {{"llama_meta", "Meta Llama Attention", kInverseRoot, 0}, true, false, false, kLlamaMeta},
    {{"t5", "Hugging Face T5Attention", kOne, 1e-6, kT5Extras}, false, false, false, kT5},
    {{"gpt_neox", "Hugging Face GPTNeoXAttention", kInverseRoot, 1e-5}, false, false, false, kGptNeox},
    {{"bloom", "Hugging Face BloomAttention", kInverseRoot, 1e-5}, false, false, false, kGptNeox},
    {{"timm", "timm Attention (ViT)", kInverseRoot, 1e-6, kNormExtras}, false, false, false, kTimm},
    {{"flash_attention", "flash_attn MHA", kInverseRoot, 0}, true, false, false, kFlash},
    {{"flash_attention_cross", "flash_attn MHA with cross_attn", kInverseRoot, 0}, true, false, false, kFlashCross},
    {{"paddle_fused", "Paddle fused_attention", kInverseRoot, 1e-5}, false, false, false, kPaddleFused},
    {{"paddle_fused_wb", "Paddle fused_attention with transpose_qkv_wb", kInverseRoot, 1e-5},
     false,
     false,
     false,
     kPaddleFusedWb},
    {{"paddle", "paddle.nn.MultiHeadAttention", kInverseRoot, 1e-5}, false, false, false, kInOut},
    {{"flux", "Flux MultiHeadAttention, memory as Julia has it: [in, out]", kInverseRoot, 1e-5},
     false,
     true,
     false,
     kInOut},
    {{"flux_out_in", "Flux MultiHeadAttention, dims as Julia has them: [out, in]", kInverseRoot, 1e-5},
     false,
     true,
     false,
     kOutIn},
    {{"onnx_attention", "ONNX Runtime com.microsoft Attention", kInverseRoot, 0}, false, true, false, kOnnx},
    {{"cudnn", "cuDNN multi-head attention, by the reported dims and strides", kAsked, 0}, false, true, true, kCudnn},
};
constexpr size_t kNumSources = std::size(kTables);

constexpr std::array<WeightSource, kNumSources> kSources = [] {
  std::array<WeightSource, kNumSources> sources;
  for (size_t i = 0; i < kNumSources; ++i) sources[i] = kTables[i].source;
  return sources;
}();

}  // namespace

const SourceTable* find_source(std::string_view name, Status* status) {
  const auto* found =
      std::find_if(std::begin(kTables), std::end(kTables), [&](const SourceTable& t) { return name == t.source.name; });
  if (found != std::end(kTables)) return found;
  std::string known;
  for (const WeightSource& source : kSources) known += sentence(known.empty() ? "" : ", ", source.name);
  *status = invalid(sentence("source is \"", name, "\", must be one of ", known));
  return nullptr;
}

std::span<const WeightSource> public_sources() { return kSources; }

}  // namespace polyhead::stored
