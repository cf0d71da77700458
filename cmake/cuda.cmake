# Objects of nvcc. CMake's own language CUDA would link every target that holds one with a runtime of its choice; tests
# link some of them with another.

# polyhead_cuda_object(file.cu variable FLAGS...): compiles it without a runtime; *variable is the object's path.
function(polyhead_cuda_object source variable)
  get_filename_component(source ${source} ABSOLUTE)
  get_filename_component(name ${source} NAME)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -std=c++20 -O3 -expt-relaxed-constexpr -cudart none -I${PROJECT_SOURCE_DIR}/src
      -Xcompiler -fPIC,-fvisibility=hidden -MD -MF ${object}.d ${ARGN} -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling ${name} with nvcc" VERBATIM)
  set(${variable} ${object} PARENT_SCOPE)
endfunction()
