# Writes OUT, a header with the commit of SOURCE, COMPILER and BUILD_TYPE, and touches it only if they changed.
cmake_minimum_required(VERSION 3.25)
set(commit "unknown")
find_program(git git)
if(git AND EXISTS ${SOURCE}/.git)
  execute_process(COMMAND ${git} -C ${SOURCE} describe --always --dirty --abbrev=10 --exclude=*
    OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(commit "${described}")
  endif()
endif()
if(NOT BUILD_TYPE)
  set(BUILD_TYPE "none")
endif()
file(CONFIGURE OUTPUT ${OUT} @ONLY CONTENT "// Made by tools/build_facts.cmake.
#pragma once
constexpr char kCommit[] = \"@commit@\";
constexpr char kCompiler[] = \"@COMPILER@\";
constexpr char kBuildType[] = \"@BUILD_TYPE@\";
")
