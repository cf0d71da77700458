# GoogleTest for another CPU than this machine's, from the sources that Debian's libgtest-dev brings.
find_path(GTEST_SOURCES src/gtest-all.cc PATHS /usr/src/googletest/googletest REQUIRED)
add_library(gtest_main STATIC ${GTEST_SOURCES}/src/gtest-all.cc ${GTEST_SOURCES}/src/gtest_main.cc)
target_include_directories(gtest_main SYSTEM PUBLIC ${GTEST_SOURCES}/include PRIVATE ${GTEST_SOURCES})
add_library(GTest::gtest_main ALIAS gtest_main)
find_package(Threads REQUIRED)
target_link_libraries(gtest_main PUBLIC Threads::Threads)
set(GTest_FOUND TRUE)
