# Toolchain of the preset `clang`: the clang at hand, under whichever name the distribution gives it (14 or newer).
set(versions "")
foreach(version RANGE 22 14 -1)
  list(APPEND versions ${version})
endforeach()
list(TRANSFORM versions PREPEND clang- OUTPUT_VARIABLE c_names)
list(TRANSFORM versions PREPEND clang++- OUTPUT_VARIABLE cxx_names)
find_program(CMAKE_C_COMPILER NAMES clang ${c_names} REQUIRED)
find_program(CMAKE_CXX_COMPILER NAMES clang++ ${cxx_names} REQUIRED)
