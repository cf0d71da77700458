// A desc in the words that `polyhead bench` and the tests read: "8x16/4x512/640x64/80 --dtype bf16 --causal".
#pragma once

#include <string>
#include <string_view>

#include "polyhead/attention.h"

namespace polyhead {

template <class T>
struct Word {
  const char* text;
  T value;
};
// What is printed is the first word of a value.
inline constexpr Word<DType> kDTypeWords[] = {{"f32", DType::kFloat32},     {"bf16", DType::kBFloat16},
                                              {"f16", DType::kFloat16},     {"f64", DType::kFloat64},
                                              {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16},
                                              {"float16", DType::kFloat16}, {"float64", DType::kFloat64}};
inline constexpr Word<DType> kCaptureDTypeWords[] = {
    {"f32", DType::kFloat32},     {"bf16", DType::kBFloat16},   {"f16", DType::kFloat16},
    {"f64", DType::kFloat64},     {"i32", DType::kInt32},       {"i64", DType::kInt64},
    {"bool", DType::kBool},       {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16},
    {"float16", DType::kFloat16}, {"float64", DType::kFloat64}, {"int32", DType::kInt32},
    {"int64", DType::kInt64}};
// Of keys and values in a cache.
inline constexpr Word<DType> kStoredDTypeWords[] = {
    {"int8", DType::kInt8}, {"e4m3", DType::kFloat8E4M3}, {"e5m2", DType::kFloat8E5M2}, {"int4", DType::kInt4x2}};
inline constexpr Word<Align> kAlignWords[] = {
    {"unset", Align::kUnset}, {"top_left", Align::kTopLeft}, {"bottom_right", Align::kBottomRight}};
inline constexpr Word<Normalizer> kNormalizerWords[] = {{"softmax", Normalizer::kSoftmax}, {"none", Normalizer::kNone}};
inline constexpr Word<ReturnWeights> kReturnWeightsWords[] = {
    {"none", ReturnWeights::kNone}, {"head", ReturnWeights::kPerHead}, {"mean", ReturnWeights::kMean}};

template <class T, size_t n>
const char* word_of(const Word<T> (&words)[n], T value) {
  for (const auto& [text, meaning] : words) {
    if (meaning == value) return text;
  }
  return "?";
}

// The shortest that reads back as `value`.
std::string number_word(double value);

// "8x16/4x512/640x64/80"
std::string sizes_in_words(const AttentionDesc& desc);

// Each option with a blank before it. A mask may be of a kind (":padding"), packed rows are cut anywhere (=rows) or into
// as many sequences of random lengths.
std::string options_in_words(const AttentionDesc& desc, std::string_view mask_kind = "", bool packed_rows = true);

// " --score 'TEXT'", or --mask of a program without a score: its canonical text.
std::string program_in_words(const Program& program);

// The program of a desc and what its tensors look like: " --score 'score - slope[h]' --captured 'slope: f32[8]'".
std::string program_in_words(const AttentionDesc& desc);

// What stands behind the words of a plan or layer: which kernel computes it, on how many threads.
std::string run_in_words(const char* kernel, const Where& where);

}  // namespace polyhead
