// polyhead for C: versions, errors, tensors and threads. Part of polyhead.h, which includes it; the rules there hold here.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "polyhead/api.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- Version ----

/// Of this header. Raised when a program compiled against an earlier header would break; structs that grow do not
/// raise it.
#define POLYHEAD_ABI_VERSION 1

typedef enum polyhead_status {
  POLYHEAD_OK = 0,
  POLYHEAD_INVALID_ARGUMENT = 1,  ///< sizes, types, strides or pointers that do not make sense
  POLYHEAD_UNSUPPORTED = 2,       ///< well formed, but no kernel (or not the forced one) can compute it
  POLYHEAD_OUT_OF_MEMORY = 3,     ///< memory ran out
  POLYHEAD_INTERNAL = 4           ///< a defect of the library, or an exception out of a host's callback
} polyhead_status;

/// Version of the library, as "0.1.0".
POLYHEAD_API const char* polyhead_version(void);

/// POLYHEAD_ABI_VERSION of the library.
POLYHEAD_API int polyhead_abi_version(void);

/// POLYHEAD_OK if a program compiled against `abi_version` may use this library; else POLYHEAD_UNSUPPORTED.
/// Call it first, as polyhead_check_abi(POLYHEAD_ABI_VERSION), where the library is loaded at run time.
POLYHEAD_API polyhead_status polyhead_check_abi(int abi_version);

// ---- Errors ----

/// What the latest failed call of this thread said: one sentence that names the argument, what was expected and what
/// came; "" if none has failed. Each thread has its own. Valid until the next polyhead call on this thread; never NULL.
/// Longer than 2047 bytes, it ends in "...".
POLYHEAD_API const char* polyhead_last_error(void);

/// "ok", "invalid argument", "unsupported", "out of memory", "internal"; "unknown" for any other number.
POLYHEAD_API const char* polyhead_status_name(int status);

// ---- Tensors ----

typedef enum polyhead_dtype {
  POLYHEAD_FLOAT32 = 0,
  POLYHEAD_BFLOAT16 = 1,
  POLYHEAD_FLOAT16 = 2,
  POLYHEAD_FLOAT64 = 3,
  POLYHEAD_BOOL = 4,  ///< one byte, 0 or 1
  POLYHEAD_INT32 = 5,
  POLYHEAD_INT64 = 6,
  /* Of keys and values in a cache alone, which scales go with (polyhead_attention_desc.key_dtype): */
  POLYHEAD_INT8 = 7,
  POLYHEAD_FLOAT8_E4M3 = 8,  ///< 4 bits of exponent, 3 of fraction, at most 448, NaN and no inf
  POLYHEAD_FLOAT8_E5M2 = 9,  ///< 5 and 2, at most 57344, NaN and inf
  POLYHEAD_INT4X2 = 10       ///< two of -8 to 7 in a byte, as one element: the first of them in the low four bits
} polyhead_dtype;

typedef enum polyhead_device { POLYHEAD_CPU = 0, POLYHEAD_CUDA = 1 } polyhead_device;

#define POLYHEAD_MAX_DIMS 5

/// A view of an array that the caller owns. All zeros means "not given". Its layout is frozen.
typedef struct polyhead_tensor {
  void* data;                          ///< element [0, 0, ...]; NULL only where some dim is 0. Inputs are only read
  int32_t dtype;                       ///< polyhead_dtype
  int32_t device;                      ///< polyhead_device
  int32_t ndim;                        ///< 1 to 5; 0 = not given
  int32_t reserved;                    ///< 0
  int64_t dims[POLYHEAD_MAX_DIMS];     ///< at least 0
  int64_t strides[POLYHEAD_MAX_DIMS];  ///< in elements; inputs: 0 and negative too; gradients: negative too
} polyhead_tensor;

/// The view of a row-major array of `ndim` (1 to 5) dims on the CPU:
/// `args.query = polyhead_tensor_contiguous(q, POLYHEAD_FLOAT32, 4, (int64_t[]){batch, seqlen, num_heads, head_dim});`
/// With `ndim` out of range or `dims` NULL it sets polyhead_last_error() and returns a view that every call refuses
/// (ndim -1).
POLYHEAD_API polyhead_tensor polyhead_tensor_contiguous(const void* data, int32_t dtype, int32_t ndim,
                                                        const int64_t* dims);

// ---- Executors: where the work runs ----

/// Threads. Made by one of the two create functions; may serve many plans, many calls at once and nested calls.
typedef struct polyhead_executor polyhead_executor;

/// A pool of our own with `num_threads` threads, the caller's included; 1 runs everything on the calling thread.
/// Fork-safe. POLYHEAD_INVALID_ARGUMENT if `num_threads` is not 1 to 1024.
POLYHEAD_API polyhead_status polyhead_executor_create(int num_threads, polyhead_executor** executor);

/// How a host runs `body(context, i)` exactly once for every i in [0, count), in any order and on any threads, and
/// returns when all have ended. `host` is the pointer given at creation. `count` is at most num_threads. Must be
/// callable from several threads at once and from inside `body`.
typedef void (*polyhead_parallel_for)(void* host, int count, void (*body)(void* context, int index), void* context);

/// The host's own threads (those of a framework, so that cores are never oversubscribed). `num_threads`, 1 to 1024, is
/// how many calls of `body` may usefully run at once. `host` may be NULL.
POLYHEAD_API polyhead_status polyhead_executor_create_host(int num_threads, polyhead_parallel_for parallel_for,
                                                           void* host, polyhead_executor** executor);

/// After the plans that use it. NULL is fine.
POLYHEAD_API void polyhead_executor_destroy(polyhead_executor* executor);

/// Threads of `executor`; of the library's own default one (POLYHEAD_THREADS, else the CPUs this process may use) if
/// NULL.
POLYHEAD_API int polyhead_executor_num_threads(const polyhead_executor* executor);

#ifdef __cplusplus
}
#endif
