// Models in ONNX Runtime, whose library is loaded when a model has to run: nothing of it is needed to build.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "buffer.h"
#include "onnxruntime/abi.h"
#include "polyhead/graph.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::tools {

// A tensor of any number of dims, row-major.
struct OnnxTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> dims;
  Buffer data;

  int64_t num_elements() const;
};

// An error if the machine has not so much memory.
Result<OnnxTensor> new_onnx_tensor(DType dtype, std::vector<int64_t> dims);

// Once in a process. "": the library that the system's loader finds.
Status load_onnxruntime(const std::string& library);

struct OnnxInput {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<graph::Dim> dims;
};

class OnnxSession {
 public:
  // Tensors in other files are named relative to `folder`.
  static Result<OnnxSession> open(const std::string& model, const std::string& folder);

  OnnxSession(OnnxSession&& other) noexcept;
  ~OnnxSession();

  const std::vector<OnnxInput>& inputs() const { return inputs_; }
  const std::vector<std::string>& outputs() const { return outputs_; }

  // `given` in the order of the inputs; the results in that of the outputs.
  Result<std::vector<OnnxTensor>> run(const std::vector<OnnxTensor>& given) const;

 private:
  OnnxSession() = default;
  Status read_signature();

  OrtSession* session_ = nullptr;
  std::vector<OnnxInput> inputs_;
  std::vector<std::string> outputs_;
};

}  // namespace polyhead::tools
