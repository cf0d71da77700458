// The numbers of ONNX's fields (onnx.proto3) that are read or written here; all others are carried along unseen.
#pragma once

#include <cstdint>

namespace polyhead::graph::onnx {

namespace model {
constexpr uint32_t kIrVersion = 1, kGraph = 7, kOpsetImport = 8, kFunctions = 25;
}
namespace opset {
constexpr uint32_t kDomain = 1, kVersion = 2;
}
namespace graph {
constexpr uint32_t kNode = 1, kName = 2, kInitializer = 5, kInput = 11, kOutput = 12, kValueInfo = 13;
constexpr uint32_t kSparseInitializer = 15;
}  // namespace graph
namespace sparse_tensor {
constexpr uint32_t kValues = 1, kIndices = 2;
}
namespace node {
constexpr uint32_t kInput = 1, kOutput = 2, kName = 3, kOpType = 4, kAttribute = 5, kDomain = 7;
}
namespace attribute {
constexpr uint32_t kName = 1, kFloat = 2, kInt = 3, kString = 4, kTensor = 5, kGraph = 6, kFloats = 7, kInts = 8;
constexpr uint32_t kTensors = 10, kGraphs = 11, kType = 20, kSparseTensor = 22, kSparseTensors = 23;
constexpr uint64_t kIsFloat = 1, kIsInt = 2, kIsString = 3, kIsInts = 7;  // values of kType
}  // namespace attribute
namespace tensor {
constexpr uint32_t kDims = 1, kDataType = 2, kFloatData = 4, kInt32Data = 5, kStringData = 6, kInt64Data = 7, kName = 8;
constexpr uint32_t kRawData = 9, kDoubleData = 10, kUint64Data = 11, kExternalData = 13, kDataLocation = 14;
constexpr uint64_t kElsewhere = 1;  // the value of kDataLocation
}  // namespace tensor
namespace entry {
constexpr uint32_t kKey = 1, kValue = 2;
}
namespace value_info {
constexpr uint32_t kName = 1, kType = 2;
}
namespace type {
constexpr uint32_t kTensor = 1;                       // of a TypeProto
constexpr uint32_t kElementType = 1, kShape = 2;      // of its tensor
constexpr uint32_t kDim = 1;                          // of a shape
constexpr uint32_t kDimValue = 1, kDimParameter = 2;  // of a dim
}  // namespace type

}  // namespace polyhead::graph::onnx
