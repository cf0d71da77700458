# fmt for another CPU than this machine's: of its headers alone.
add_library(fmt::fmt-header-only INTERFACE IMPORTED)
target_compile_definitions(fmt::fmt-header-only INTERFACE FMT_HEADER_ONLY)
set(fmt_FOUND TRUE)
