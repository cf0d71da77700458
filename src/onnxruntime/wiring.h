// Between the tensors of a group of nodes and those of the operator that stands for them: views, and masks that are
// made.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "polyhead/executor.h"
#include "polyhead/tensor.h"

namespace polyhead::onnxruntime {

// Another view of the same elements.
struct ViewStep {
  enum Kind {
    kTranspose,   // dim i is dim order[i] of what came
    kOnesAhead,   // `count` dims of 1 in front
    kLeadTwo,     // [..., q, k] -> [a, b, q, k]; `order` has a and b, one of which may be -1
    kMergeFirst,  // [a, b, ...] -> [a * b, ...]; of outputs alone
  } kind = kTranspose;
  std::vector<int> order = {};
  int64_t count = 0;
};

// What an input of the operator is made of.
struct Source {
  enum Kind {
    kTensor,  // an input of the group
    kNot,
    kAnd,
    kAdd,
    kTimes,  // by numbers[0]
    kProduct,
    kQuotient,
    kChoose,  // numbers[0] where the first is true, else numbers[1]
  } kind = kTensor;
  std::string name = {};  // of a tensor
  size_t index = 0;       // its place among the group's inputs
  double numbers[2] = {};
  std::vector<Source> of = {};
  std::vector<ViewStep> steps = {};  // behind all that
};

struct Target {
  std::string name;
  size_t index = 0;
  std::vector<ViewStep> steps;  // from the operator's output to the group's
};

// A shape of what is no more, which others read: an output of the group.
struct ToldShape {
  struct Part {
    std::string of = {};  // an input of the group
    size_t index = 0;
    size_t dim = 0;
  };
  struct Size {
    int64_t number = 0;
    std::vector<Part> parts = {};  // what is added to it
  };
  std::string name;
  size_t index = 0;
  std::vector<Size> sizes;
};

// By the operator's inputs and outputs; null: left out.
struct Wiring {
  std::vector<std::unique_ptr<Source>> inputs;
  std::vector<std::unique_ptr<Target>> outputs;
  std::vector<ToldShape> shapes;
  DType dtype = DType::kFloat32;  // of masks that are made and are not bool
};

// `tensor` as the steps say. False: it does not have the dims for that.
bool follow(const std::vector<ViewStep>& steps, Tensor& tensor);

// The dims behind the steps; and a contiguous tensor of those dims, seen as what came before them.
std::vector<int64_t> dims_behind(const std::vector<ViewStep>& steps, std::vector<int64_t> dims);
Tensor seen_before(const std::vector<ViewStep>& steps, const std::vector<int64_t>& dims, Tensor tensor);

// The dims to which all of them broadcast; nothing if they do not, or have more than four. Tensors get these dims, with
// strides of 0 where they repeat.
bool broadcast(std::vector<Tensor>& tensors, Tensor& like);

// One of the operations, for elements of `out`, contiguous with 4 dims, from operands of the same dims.
void compute(Executor& executor, const Source& source, const std::vector<Tensor>& operands, const Tensor& out);

}  // namespace polyhead::onnxruntime
