// A layer that runs on a framework's own arrays, in place, and one with the same weights imported: the same bits, of the
// output and of the weights' gradients, which go to arrays of the framework's form likewise.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "polyhead/layer.h"
#include "weights_problem.h"

namespace polyhead::testing {
namespace {

struct FreeAligned {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, FreeAligned>;
Memory memory_of(size_t bytes) { return Memory(std::aligned_alloc(64, (bytes / 64 + 1) * 64)); }

Array random_array(std::vector<int64_t> dims, uint64_t seed) {
  Array a(DType::kFloat32, std::move(dims));
  Random random(seed);
  for (int64_t n = 0; n < a.size(); ++n) a.set(n, random.normal());
  return a;
}

// Trains one step: out, and the gradients into `grads`.
Array trained(const Layer& l, const LayerWeights& weights, const LayerWeights& grads) {
  const LayerDesc& d = l.desc();
  const Array query = random_array({d.batch, d.seqlen_q, d.query_size}, 1);
  const Array key = random_array({d.batch, d.seqlen_k, d.key_size}, 2);
  const Array value = random_array({d.batch, d.seqlen_k, d.value_size}, 3);
  Array out(DType::kFloat32, {d.batch, d.seqlen_q, l.out_size()});
  const Array grad_out = random_array(out.dims, 4);
  const Memory workspace = memory_of(std::max(l.workspace_bytes(), l.backward_workspace_bytes()));
  const Memory reserve = memory_of(l.reserve_bytes());
  LayerBackwardArgs args;
  args.forward.query = view(query), args.forward.key = view(key), args.forward.value = view(value);
  args.forward.weights = weights;
  args.forward.out = view(out);
  args.forward.reserve = reserve.get(), args.forward.reserve_bytes = l.reserve_bytes();
  args.forward.workspace = workspace.get(), args.forward.workspace_bytes = l.workspace_bytes();
  EXPECT_EQ(l.forward(args.forward).message(), "");
  args.forward.workspace_bytes = l.backward_workspace_bytes();
  args.grad_out = view(grad_out);
  args.grad_weights = grads;
  EXPECT_EQ(l.backward_data(args).message(), "");
  EXPECT_EQ(l.backward_weights(args).message(), "");
  return out;
}

TEST(WeightsLayer, InPlaceAndImportedAreTheSame) {
  int sources = 0;
  for (const WeightSource& source : weight_sources()) {
    SCOPED_TRACE(source.name);
    LayerDesc d = with_scale(storable(source.name), source);
    d.batch = 2, d.seqlen_q = 5, d.seqlen_k = 6;
    const Result<Layer> l = layer(d);
    ASSERT_EQ(l.status().message(), "");
    Arrays arrays(source.name, d, DType::kFloat32);
    uint64_t seed = 10;
    for (auto& [name, array] : arrays.all) array = random_array(array.dims, ++seed);
    const Arrays grad_arrays(source.name, d, DType::kFloat32, 0xff);
    const Result<LayerWeights> bound = bind_weights(source.name, d, arrays.tensors(), kPrefix);
    const Result<LayerWeights> bound_grads = bind_weights(source.name, d, grad_arrays.tensors(), kPrefix);
    if (!bound.ok()) continue;  // weights_test.cc tells which
    ++sources;

    const Memory buffer = memory_of(l->weights_bytes()), grads = memory_of(l->weights_bytes());
    const LayerWeights weights = l->weights_in(buffer.get());
    ASSERT_EQ(import_weights(source.name, d, arrays.tensors(), weights, kPrefix).message(), "");
    const Array imported_out = trained(*l, weights, l->weights_in(grads.get()));
    const Array bound_out = trained(*l, *bound, *bound_grads);
    EXPECT_EQ(bound_out.bytes, imported_out.bytes);

    Arrays exported(source.name, d, DType::kFloat32);
    ASSERT_EQ(export_weights(source.name, d, l->weights_in(grads.get()), exported.tensors(), kPrefix).message(), "");
    EXPECT_EQ(grad_arrays.all, exported.all);
  }
  EXPECT_GE(sources, 18);
}

}  // namespace
}  // namespace polyhead::testing
