# cmake -DFILE=program or shared library -DNM=nm -P symbols.cmake
#
# A library with CUDA kernels loads where there is no CUDA: its runtime is inside, and no symbol of the driver, of NVRTC or of
# the runtime is asked of another library.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${NM} --defined-only ${FILE} OUTPUT_VARIABLE defined COMMAND_ERROR_IS_FATAL ANY)
if(NOT defined MATCHES " cudaLaunchKernel")
  message(FATAL_ERROR "${FILE} has no CUDA runtime inside")
endif()
execute_process(COMMAND ${NM} --dynamic --undefined-only ${FILE} OUTPUT_VARIABLE undefined COMMAND_ERROR_IS_FATAL ANY)
if(NOT undefined MATCHES " dlopen")
  message(FATAL_ERROR "${FILE} does not open the driver at run time")
endif()
string(REGEX MATCHALL " (cu|nvrtc|__cuda)[A-Z_][A-Za-z_]*| cuda[A-Z][A-Za-z]*" asked "${undefined}")
if(asked)
  message(FATAL_ERROR "${FILE} asks others for${asked}")
endif()
