// How a source's arrays are put together: the table's rows, the words for their shapes, and what is read out of both.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/sentence.h"
#include "polyhead/weights.h"

namespace polyhead::stored {

// The numbers that shapes are made of.
enum class Size : int {
  kQuery,
  kKey,
  kValue,
  kOut,
  kHeads,
  kKvHeads,
  kHeadDim,
  kHeadDimV,
};
inline constexpr int kNumSizes = 8;

class Sizes {
 public:
  int64_t& operator[](Size size) { return values_[static_cast<size_t>(size)]; }
  int64_t operator[](Size size) const { return values_[static_cast<size_t>(size)]; }

 private:
  std::array<int64_t, kNumSizes> values_ = {};  // 0: not known
};

const char* size_name(Size size);  // "num_heads * ..." is made of these

// An array of a source. `axes` describes its shape as seen by the weights (parts) in it, outermost dim first: each dim is
// one letter, or several in brackets, the last of which runs fastest:
//   e  the side without heads: size of the input; of the output for the out projection
//   h  heads     d  head_dim     c p  head_dim as [2, head_dim / 2]
//   n  the number of parts, one after the other     1  one
//   [hd]  the parts side by side, each as long as its own h * d;  (hd)  h * d, the same for all parts
struct Row {
  const char* array;
  std::span<const WeightKind> parts;
  const char* axes;
};

struct SourceTable {
  WeightSource source;
  bool num_heads_kv;  // whether it can differ from num_heads
  bool head_dim_v;    // whether it can differ from head_dim
  bool optional;      // whether projections can be off, one by one
  std::span<const Row> rows;
};

// Null, with a sentence that lists the sources, if there is none of that name.
const SourceTable* find_source(std::string_view name, Status* status);
std::span<const WeightSource> public_sources();

// "query weight", "out bias".
const char* weight_name(WeightKind kind);
constexpr bool is_bias(WeightKind kind) { return kind >= WeightKind::kQueryBias; }
constexpr WeightKind bias_of(WeightKind weight) { return static_cast<WeightKind>(static_cast<int>(weight) + 4); }

// The size that letter e, h or d stands for in a weight or its bias.
Size size_of(WeightKind kind, char letter);

// A row's axes, one by one.
struct Axis {
  std::string_view letters;
  bool side_by_side = false;
};
struct Axes {
  explicit Axes(const char* axes);
  int count = 0;
  Axis axis[Tensor::kMaxDims];
};

// The product of an axis's letters for one part; false if it is beyond an int64.
[[nodiscard]] bool axis_product(const Row& row, const Axis& axis, size_t part, const Sizes& sizes, int64_t* product);

// "[num_heads * head_dim, query_size]"
std::string shape_text(const Row& row);
// "[8, 4]"
std::string shape_text(const Tensor& tensor);
std::string shape_text(const WeightView& view);

// The sizes of a desc, as letters see them: a projection that is off has its input's size.
Sizes sizes_of(const LayerDesc& desc);
bool has_weight(const LayerDesc& desc, WeightKind kind);

// The array `prefix` + row.array: given, of a floating-point type, on the CPU, its pointer and strides sound.
Result<Tensor> find_array(const SourceTable& table, const Row& row, std::span<const NamedTensor> arrays,
                          std::string_view prefix);
bool has_array(const char* name, std::span<const NamedTensor> arrays, std::string_view prefix);

// `name`: for sentences.
Status check_array(std::string_view name, const Tensor& tensor);

Result<std::vector<WeightView>> views_of(const SourceTable& table, const LayerDesc& desc);

// Copies element by element, in the order of the indices. The dims of one of the two are those of the other, some of them
// split in several. Checked floating-point tensors that do not overlap. Same dtype: same bits.
void copy_weight(const Tensor& from, const Tensor& to);

}  // namespace polyhead::stored
