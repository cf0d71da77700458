# -DPOLYHEAD_SANITIZE=address,undefined: what is watched is the library and the command. What the tests compute themselves,
# the definition above all, is compiled as in a release build: at its speed, and known to ccache.
set(POLYHEAD_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them")
option(POLYHEAD_SANITIZE_TESTS "Under a sanitizer: the tests' own code too" OFF)

set(sanitized -fsanitize=${POLYHEAD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1 -Wno-error)
if(POLYHEAD_SANITIZE)
  add_link_options(-fsanitize=${POLYHEAD_SANITIZE})
endif()
if(POLYHEAD_SANITIZE AND POLYHEAD_SANITIZE_TESTS)
  add_compile_options(${sanitized})
endif()

# polyhead_sanitize(target): after the target's other options, for the last -O counts.
function(polyhead_sanitize target)
  if(POLYHEAD_SANITIZE)
    target_compile_options(${target} PRIVATE ${sanitized})
  endif()
endfunction()
