# What `cmake --install` puts in place: library, headers, find_package(polyhead) and pkg-config files.
include(CMakePackageConfigHelpers)

install(TARGETS polyhead EXPORT polyhead-targets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/polyhead DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development FILES_MATCHING PATTERN "*.h")

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/polyhead)
install(EXPORT polyhead-targets NAMESPACE polyhead:: DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/polyhead-config.cmake.in
  ${PROJECT_BINARY_DIR}/polyhead-config.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 each minor version may break the interface; the soname says the same.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/polyhead-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/polyhead-config.cmake ${PROJECT_BINARY_DIR}/polyhead-config-version.cmake
  DESTINATION ${package_dir} COMPONENT development)

# The installed tree may be moved: the .pc file finds its prefix from where it stands.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pkgconfig_to_prefix /prefix/${pkgconfig_dir} /prefix)
set(pkgconfig_libs "-lpolyhead")
get_target_property(library_type polyhead TYPE)
if(library_type STREQUAL STATIC_LIBRARY)
  string(APPEND pkgconfig_libs " -lstdc++ -lm -pthread")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/polyhead.pc.in ${PROJECT_BINARY_DIR}/polyhead.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/polyhead.pc DESTINATION ${pkgconfig_dir} COMPONENT development)
