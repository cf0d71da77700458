# cmake -DBUILD=build-folder -DPREFIX=folder [-DCONFIG=...] -P install.cmake: installs, then moves the tree to PREFIX.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${PREFIX} ${PREFIX}.first)
set(config)
if(CONFIG)
  set(config --config ${CONFIG})
endif()
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX}.first ${config}
  COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${PREFIX}.first ${PREFIX})
