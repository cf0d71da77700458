// A checkpoint in a .safetensors file: written, read and imported, as a C++ program does it with the command's readers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "polyhead/weights.h"
#include "tools/array.h"
#include "tools/safetensors.h"
#include "weights_problem.h"

namespace polyhead::testing {
namespace {

class WeightsFile : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ =
      (std::filesystem::temp_directory_path() / ("polyhead_weights_" + std::to_string(getpid()) + ".safetensors"))
          .string();
};

TEST_F(WeightsFile, ThereAndBack) {
  const LayerDesc d = storable("gpt_neox");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Weights weights(d, dtype, 1);
    const Arrays arrays("gpt_neox", d, dtype);
    ASSERT_EQ(export_weights("gpt_neox", d, weights.views(), arrays.tensors(), kPrefix).message(), "");
    tools::NamedTensors named;
    for (const auto& [name, array] : arrays.all) named.emplace_back(name, view(array));
    ASSERT_EQ(tools::write_safetensors(path_, named, /*overwrite=*/true).message(), "");

    const auto file = tools::SafetensorsFile::open(path_);
    ASSERT_EQ(file.status().message(), "");
    std::vector<tools::Array> memory;
    std::vector<NamedTensor> read;
    for (const tools::SafetensorsEntry& entry : file->entries()) {
      auto array = file->read(entry.name);
      ASSERT_EQ(array.status().message(), "");
      read.push_back({entry.name, array->tensor});
      memory.push_back(std::move(*array));
    }
    LayerDesc known;
    known.num_heads = d.num_heads, known.num_heads_kv = 0;
    const Result<LayerDesc> found = layer_desc_of("gpt_neox", read, known, kPrefix);
    ASSERT_EQ(found.status().message(), "");
    const Weights back(*found, dtype, 2);
    ASSERT_EQ(import_weights("gpt_neox", *found, read, back.views(), kPrefix).message(), "");
    EXPECT_EQ(back.arrays, weights.arrays);
  }
}

}  // namespace
}  // namespace polyhead::testing
