// The weights in one buffer: Wq | Wk | Wv side by side where their inputs have one size (only Wk | Wv where those do), so
// that one product computes them all; then Wo, then the biases, likewise. Matrices start at multiples of 64 bytes.
#include "layer/state.h"

namespace polyhead {
namespace {

constexpr WeightKind kMatrices[] = {WeightKind::kQuery, WeightKind::kKey, WeightKind::kValue};
constexpr WeightKind kBiases[] = {WeightKind::kQueryBias, WeightKind::kKeyBias, WeightKind::kValueBias};

WeightLayout& layout_of(LayerState& s, WeightKind kind) { return s.weight_layouts[static_cast<int>(kind)]; }

// The matrices and the biases of the projections first .. last, which are side by side.
void lay_out_group(LayerState& s, int first, int last, MemoryMap& map, bool biases) {
  const auto element = static_cast<int64_t>(dtype_size_bytes(s.desc.dtype));
  const auto wanted = [&](const Projection& p) { return biases ? p.bias : p.on; };
  int64_t row = 0, column = 0;
  for (int i = first; i <= last; ++i) row += wanted(s.projections[i]) ? s.projections[i].columns() : 0;
  const int64_t rows = biases ? 1 : s.projections[first].size;
  const auto start = static_cast<int64_t>(map.take({rows, row}, static_cast<size_t>(element))) / element;
  for (int i = first; i <= last; ++i) {
    const Projection& p = s.projections[i];
    if (!wanted(p)) continue;
    WeightLayout& layout = layout_of(s, biases ? kBiases[i] : kMatrices[i]);
    layout = {true, start + column, biases ? 1 : 2, {p.size, p.columns()}, {row, 1}};
    if (biases) layout.dims[0] = p.columns(), layout.dims[1] = 0, layout.strides[0] = 1, layout.strides[1] = 0;
    column += p.columns();
  }
}

}  // namespace

void lay_out_weights(LayerState& s, MemoryMap& map) {
  const auto element = static_cast<int64_t>(dtype_size_bytes(s.desc.dtype));
  const bool key_value = s.desc.key_size == s.desc.value_size;
  const bool all = key_value && s.desc.query_size == s.desc.key_size;
  const auto lay_out_groups = [&](bool biases) {
    if (all) return lay_out_group(s, kQuery, kValue, map, biases);
    lay_out_group(s, kQuery, kQuery, map, biases);
    lay_out_group(s, kKey, key_value ? kValue : kKey, map, biases);
    if (!key_value) lay_out_group(s, kValue, kValue, map, biases);
  };
  const auto next = [&](int64_t rows, int64_t columns) {
    return static_cast<int64_t>(map.take({rows, columns}, static_cast<size_t>(element))) / element;
  };
  lay_out_groups(false);
  if (s.out_projected()) {
    layout_of(s, WeightKind::kOut) = {
        true, next(s.heads_size, s.out_size), 2, {s.heads_size, s.out_size}, {s.out_size, 1}};
  }
  lay_out_groups(true);
  if (s.desc.out_bias) layout_of(s, WeightKind::kOutBias) = {true, next(1, s.out_size), 1, {s.out_size, 0}, {1, 0}};
}

LayerWeights tensors_of(const LayerState& s, void* buffer) {
  LayerWeights weights;
  for (int kind = 0; kind < kNumWeightKinds; ++kind) {
    const WeightLayout& layout = s.weight_layouts[kind];
    if (!layout.present) continue;
    Tensor& t = weights[static_cast<WeightKind>(kind)];
    t.dtype = s.desc.dtype;
    t.device = *s.where.device;
    t.ndim = layout.ndim;
    for (int i = 0; i < layout.ndim; ++i) t.dims[i] = layout.dims[i], t.strides[i] = layout.strides[i];
    if (t.num_elements() > 0) {
      t.data = static_cast<char*>(buffer) + layout.offset * static_cast<int64_t>(dtype_size_bytes(t.dtype));
    }
  }
  return weights;
}

}  // namespace polyhead
