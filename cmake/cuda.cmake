# Objects of nvcc. CMake's own language CUDA would link every target that holds one with a runtime of its choice; tests
# link some of them with another.

# polyhead_cuda_object(file.cu variable FLAGS...): compiles it without a runtime; *variable is the object's path.
function(polyhead_cuda_object source variable)
  get_filename_component(source ${source} ABSOLUTE)
  get_filename_component(name ${source} NAME)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -std=c++20 -O3 -expt-relaxed-constexpr -cudart none -I${PROJECT_SOURCE_DIR}/src
      -I${PROJECT_SOURCE_DIR}/include
      -Xcompiler -fPIC,-fvisibility=hidden -MD -MF ${object}.d ${ARGN} -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling ${name} with nvcc" VERBATIM)
  set(${variable} ${object} PARENT_SCOPE)
endfunction()

# What the host does, below src/cuda.
set(POLYHEAD_CUDA_HOST_SOURCES call.cc kernels.cc linear_call.cc linear_decoding.cc linear_kernels.cc machine.cc nvrtc.cc program_kernels.cc
  program_text.cc sums.cc)

# What the device does, likewise: without _sm80.cu.
set(POLYHEAD_CUDA_DEVICE_SOURCES attention_forward attention_backward attention_pair_sums decoding gemm_bfloat16 gemm_float16 gemm_float32 norm
  rows)

# And for GPUs of compute capability 9.0 alone: without _sm90.cu.
set(POLYHEAD_CUDA_SM90_SOURCES attention_forward attention_backward)

# polyhead_cuda_sources(): what kernels of programs are compiled of as text, in cuda_sources.cc of the build's folder
# (src/cuda/sources.h).
function(polyhead_cuda_sources)
  set(names core/philox.h program/integers.h cuda/problem.h)
  foreach(name attention_backward attention_forward attention_forward_wide attention_pair_sums band gradient_rows lane_rows mma numbers pages pairs parts products
      program_words score softmax stored tile)
    list(APPEND names cuda/${name}.cuh)
  endforeach()
  set(files ${names})
  list(TRANSFORM files PREPEND ${PROJECT_SOURCE_DIR}/src/)
  set(embed ${PROJECT_SOURCE_DIR}/cmake/embed_cuda.cmake)
  list(JOIN names "," names)
  add_custom_command(OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/cuda_sources.cc
    COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR}/src -DNAMES=${names}
      -DOUTPUT=${CMAKE_CURRENT_BINARY_DIR}/cuda_sources.cc -P ${embed}
    DEPENDS ${files} ${embed} COMMENT "Embedding the source of the CUDA kernels" VERBATIM)
endfunction()
