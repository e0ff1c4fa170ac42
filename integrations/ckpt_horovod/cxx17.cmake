# For CMAKE_TOOLCHAIN_FILE: what asks for C++14, as Horovod 0.28.1 does, is compiled as C++17, which torch needs.
# The first line has this file read again at the end of each project(), since project() sets the other two.
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION -std=c++17)
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION -std=gnu++17)
