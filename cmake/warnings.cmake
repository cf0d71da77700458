# polyhead_warnings(target): what every target of ours compiles with.
function(polyhead_warnings target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wcast-qual -Wempty-body -Wundef
    $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>
    $<$<BOOL:${POLYHEAD_WERROR}>:-Werror>)
endfunction()
