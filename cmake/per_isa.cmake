# polyhead_per_isa(target source...): compiles the sources once per instruction set and adds the objects to `target`.
#
# Each copy sees POLYHEAD_ISA=<name> and must keep all that it defines in namespace POLYHEAD_ISA, except its one exported
# table: an inline function of the standard library compiled here could become the copy that a CPU without these
# instructions runs (docs/decisions/0002-one-object-per-isa.md; tests/rules checks it with nm).
#
# POLYHEAD_WITHOUT_<name> lists the sources that a set does not need, because its kernels leave what they compute to another
# set's functions.
#
# The flags of each set of src/cpu/isa/list.h. A set that only one of the two names does not compile, or does not link.
set(POLYHEAD_ISA_generic "")
set(POLYHEAD_ISAS generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set(POLYHEAD_ISA_avx2 -mavx2 -mfma -mf16c)
  set(POLYHEAD_ISA_avx512 -march=x86-64-v4 -mprefer-vector-width=512)
  set(POLYHEAD_ISA_avx512bf16 -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mavx512vbmi -mprefer-vector-width=512)
  set(POLYHEAD_ISA_amx ${POLYHEAD_ISA_avx512bf16} -mamx-tile -mamx-bf16)
  set(POLYHEAD_ISAS amx avx512bf16 avx512 avx2 generic)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(POLYHEAD_ISA_neon "")
  set(POLYHEAD_ISAS neon generic)
endif()

function(polyhead_per_isa target)
  foreach(isa IN LISTS POLYHEAD_ISAS)
    set(objects ${target}_${isa})
    set(sources ${ARGN})
    list(REMOVE_ITEM sources ${POLYHEAD_WITHOUT_${isa}})
    add_library(${objects} OBJECT ${sources})
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    target_compile_definitions(${objects} PRIVATE POLYHEAD_ISA=${isa} POLYHEAD_ISA_WORDS="cpu/isa/simd_${isa}.h")
    polyhead_warnings(${objects})
    target_compile_options(${objects} PRIVATE
      ${POLYHEAD_ISA_${isa}} $<$<CONFIG:Release,RelWithDebInfo>:-O3>
      -fno-math-errno -fno-exceptions -fno-rtti)
    # Few machines run amx; --full watches its sources as its twin's (tests/CMakeLists.txt). Of avx512 and avx512bf16, whose
    # other words are the same, ./dev test watches the second alone (tests/kernels_to_test.h).
    if(NOT isa STREQUAL amx AND (POLYHEAD_SANITIZE_TESTS OR NOT isa STREQUAL avx512))
      polyhead_sanitize(${objects})
    endif()
    set_target_properties(${objects} PROPERTIES
      CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON INTERPROCEDURAL_OPTIMIZATION OFF)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()
