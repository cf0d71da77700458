// The part of torch's stable C interface that we use, declared anew: so no torch is needed to build, and one library
// serves every torch from 2.9 on. stable_abi_check.cc holds these against torch's own headers, where there are some.
#pragma once

#include <cstddef>
#include <cstdint>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;

using AOTITorchError = int32_t;  // 0 = success

// One argument or result of an operator. A Tensor is an AtenTensorHandle, owned by who reads it; int, float and bool
// are their bytes; an optional is null or a pointer to its value's StableIValue, freed by who reads it.
using StableIValue = uint64_t;

// Of StableIValues. An argument of a list type is one, owned by who reads it, as its elements are once they are taken.
struct StableListOpaque;
using StableListHandle = StableListOpaque*;

// An argument of a string type is one, owned by who reads it.
struct StringOpaque;
using StringHandle = StringOpaque*;

struct StreamOpaque;
using StreamHandle = StreamOpaque*;

extern "C" {
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_float8_e5m2();

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* device_type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* device_index);
AOTITorchError aoti_torch_get_current_stream(int32_t device_index, StreamHandle* stream);
AOTITorchError aoti_torch_delete_stream(StreamHandle stream);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle tensor, bool* is_defined);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* tensor);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);

AOTITorchError aoti_torch_library_init_def(const char* name_space, const char* file, uint32_t line,
                                           TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError aoti_torch_library_init_impl(const char* name_space, const char* dispatch_key, const char* file,
                                            uint32_t line, TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_impl(TorchLibraryHandle library, const char* name,
                                       void (*kernel)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs));

// Null in a torch that is older than the version named.
[[gnu::weak]] AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                                void (*body)(int64_t begin, int64_t end, void* context),
                                                void* context);                                 // 2.10
[[gnu::weak]] AOTITorchError torch_get_num_threads(uint32_t* num_threads);                      // 2.10
[[gnu::weak]] AOTITorchError torch_stream_native_handle(StreamHandle stream, void** handle);    // 2.13
[[gnu::weak]] AOTITorchError torch_new_stable_ivalue(StableIValue** value);                     // 2.13; before: new
[[gnu::weak]] AOTITorchError torch_delete_stable_ivalue(StableIValue* value);                   // 2.13; before: delete
[[gnu::weak]] AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* list);  // 2.10
[[gnu::weak]] AOTITorchError torch_list_size(StableListHandle list, size_t* size);              // 2.10
[[gnu::weak]] AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* element);  // 2.10
[[gnu::weak]] AOTITorchError torch_list_push_back(StableListHandle list, StableIValue element);                // 2.10
[[gnu::weak]] AOTITorchError torch_delete_list(StableListHandle list);                                         // 2.10
[[gnu::weak]] AOTITorchError torch_string_length(StringHandle string, size_t* length);                         // 2.10
[[gnu::weak]] AOTITorchError torch_string_c_str(StringHandle string, const char** data);                       // 2.10
[[gnu::weak]] AOTITorchError torch_delete_string(StringHandle string);                                         // 2.10
}
