# The three libraries of the command, which nothing else needs. POLYHEAD_TOOLS=AUTO leaves the command out,
# with one line that says why, where one of them is missing.
option(POLYHEAD_FETCH "Download the command's libraries, of pinned versions, where they are not installed" OFF)
if(NOT POLYHEAD_TOOLS)
  return()
endif()

if(POLYHEAD_FETCH)
  include(FetchContent)
  FetchContent_Declare(CLI11 SYSTEM
    # 2.5 fills the paragraphs of help texts anew, tables among them.
    URL https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.4.2.tar.gz
    URL_HASH SHA256=f2d893a65c3b1324c50d4e682c0cdc021dd0477ae2c048544f39eed6654b699a
    FIND_PACKAGE_ARGS 2.1)
  FetchContent_Declare(fmt SYSTEM
    URL https://github.com/fmtlib/fmt/releases/download/11.0.2/fmt-11.0.2.zip
    URL_HASH SHA256=40fc58bebcf38c759e11a7bd8fdc163507d2423ef5058bba7f26280c5b9c5465
    FIND_PACKAGE_ARGS 8)
  FetchContent_Declare(nlohmann_json SYSTEM
    URL https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    URL_HASH SHA256=d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d
    FIND_PACKAGE_ARGS 3.10)
  FetchContent_MakeAvailable(CLI11 fmt nlohmann_json)
else()
  find_package(CLI11 2.1 QUIET)
  find_package(fmt 8 QUIET)
  find_package(nlohmann_json 3.10 QUIET)
endif()

set(missing)
foreach(target IN ITEMS CLI11::CLI11 fmt::fmt-header-only nlohmann_json::nlohmann_json)
  if(NOT TARGET ${target})
    string(REGEX REPLACE "::.*" "" library ${target})
    list(APPEND missing ${library})
  endif()
endforeach()
# Compiled once by those who packaged it, where there is such a one; inside the command where that goes to other machines.
set(POLYHEAD_FMT fmt::fmt-header-only)
if(TARGET fmt::fmt AND NOT SKBUILD AND NOT POLYHEAD_FETCH)
  set(POLYHEAD_FMT fmt::fmt)
endif()
if(missing)
  list(JOIN missing ", " missing)
  set(why "the polyhead command needs ${missing} (Debian: libcli11-dev, libfmt-dev, nlohmann-json3-dev; or -DPOLYHEAD_FETCH=ON)")
  if(NOT POLYHEAD_TOOLS STREQUAL "AUTO")
    message(FATAL_ERROR "POLYHEAD_TOOLS=${POLYHEAD_TOOLS}: ${why}")
  endif()
  message(STATUS "left out: ${why}")
  set(POLYHEAD_TOOLS OFF)
endif()
