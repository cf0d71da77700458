# Writes OUTPUT, a source of C++ with the text of files NAMES, divided by commas, below ROOT (cuda.cmake).
set(entries "")
string(REPLACE "," ";" NAMES ${NAMES})
foreach(name IN LISTS NAMES)
  file(READ ${ROOT}/${name} text)
  string(APPEND entries "    {\"${name}\", R\"source(${text})source\"},\n")
endforeach()
file(WRITE ${OUTPUT} "#include \"cuda/sources.h\"\n\nnamespace polyhead::cuda {\nnamespace {\n\n"
  "constexpr Source kFiles[] = {\n${entries}};\n\n}  // namespace\n\n"
  "const std::span<const Source> kSources = kFiles;\n\n}  // namespace polyhead::cuda\n")
