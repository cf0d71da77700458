// polyhead.Linear: sum = activation(X W + bias) + residual, Y = norm(sum).
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "call.h"
#include "polyhead/matrix_product.h"
#include "recent.h"

namespace polyhead::onnxruntime {

class Attributes;
struct NodeFacts;

// Inputs that are known when the session is made.
class Constants {
 public:
  virtual ~Constants() = default;
  // Not given: it is none, or is left out.
  virtual Status constant(size_t input, Tensor& tensor) const = 0;
};

class Linear {
 public:
  static constexpr size_t kX = 0, kWeight = 1, kBias = 2, kResidual = 3, kGamma = 4, kBeta = 5;  // inputs
  static constexpr size_t kY = 0, kSum = 1;                                                      // outputs

  static Result<std::shared_ptr<Linear>> make(const NodeFacts& facts, const Attributes& attributes);

  // Keeps what is constant in memory of its own, the weight as products read it: nothing of that is read from a call then.
  Status hold(const Constants& constants);

  // Any thread.
  Status run(Call& call);

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  Status read_weight(Call& call, Tensor& weight) const;
  Status read_vector(Call& call, size_t input, const char* name, DType dtype, int64_t size, Tensor& vector) const;
  Result<MatrixProduct> product(int64_t m, int64_t n, int64_t k, DType dtype, bool alone);

  MatrixProductDesc desc_;  // but for sizes and dtype
  bool transposed_ = false, gives_sum_ = false;
  Tensor weight_;  // [k, n], without data: prepacked_ has that
  std::unique_ptr<void, Free> prepacked_;
  Tensor vectors_[kBeta + 1];  // by input
  std::vector<char> memory_[kBeta + 1];
  Recent<MatrixProduct> products_, products_alone_;
};

}  // namespace polyhead::onnxruntime
