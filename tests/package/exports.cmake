# cmake -DLIBRARY=libpolyhead.so -DNM=nm -DHEADERS=folder -P exports.cmake
#
# The shared library must export what exports.txt lists, no more and no less, and every function of the C headers. An
# addition is listed on purpose; a removal or a changed signature breaks programs that are already linked.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${NM} --dynamic --defined-only --demangle ${LIBRARY} OUTPUT_VARIABLE output
  COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE ";" "," output "${output}")
string(REGEX MATCHALL "[^\n]+" lines "${output}")
set(exported)
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^[0-9a-f]+ [A-Za-z] " "" name "${line}")
  # Which of these appear depends on the compiler; the classes themselves are listed by their functions.
  if(NOT name MATCHES "^(vtable|typeinfo|typeinfo name) for polyhead::[A-Za-z]+$" AND
     NOT name MATCHES "^polyhead::Executor::")
    list(APPEND exported "${name}")
  endif()
endforeach()
list(SORT exported)

file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/exports.txt listed)
list(SORT listed)
set(surplus ${exported})
list(REMOVE_ITEM surplus ${listed})
set(missing ${listed})
list(REMOVE_ITEM missing ${exported})
file(READ ${HEADERS}/polyhead.h header)
foreach(part IN ITEMS core cache layer block)
  file(READ ${HEADERS}/polyhead_${part}.h part_header)
  string(APPEND header "${part_header}")
endforeach()
string(REGEX MATCHALL "POLYHEAD_API [a-z_ *]*(polyhead_[a-z_]+)\\(" declared "${header}")
list(TRANSFORM declared REPLACE ".*[ *](polyhead_[a-z_]+)\\($" "\\1")
list(LENGTH declared num_declared)
foreach(name IN LISTS declared)
  if(NOT name IN_LIST exported)
    list(APPEND missing "${name} (declared in a C header)")
  endif()
endforeach()
list(JOIN surplus "\n  " surplus_lines)
list(JOIN missing "\n  " missing_lines)
if(surplus OR missing OR num_declared LESS 20)
  message(FATAL_ERROR "${LIBRARY}\nexports, but must not:\n  ${surplus_lines}\nmust export, but does not:\n  "
    "${missing_lines}\nfunctions found in the C headers: ${num_declared}")
endif()
list(LENGTH exported num_exported)
message(STATUS "${num_exported} symbols exported as listed, ${num_declared} of them declared in C headers")
