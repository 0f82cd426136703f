# How our own code is compiled: optimisation, warnings as errors, sanitizers, ccache.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()
# -O3 buys nothing where the work is done inside libtorch.
set(CMAKE_CXX_FLAGS_RELEASE "-O2")
# libtorch was built with NDEBUG, and its headers lay out classes by it. Assertions of ours are exceptions, not asserts.
add_compile_definitions(NDEBUG)

# One setting for libraries and programs alike (CMake's own would be -fPIC and -fPIE): they share a precompiled header.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>)
# Options are given by the fields that matter, {.clip_norm = 1.0}: the others keep their defaults, as meant.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 and 13 see overflows inside the inlined std::string and std::vector of correct code (GCC bugs 105329, 105651).
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread;-Wno-array-bounds>")
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # Takes every function that is given a temporary and returns a reference for a dangling one.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-dangling-reference>)
  endif()
endif()
option(PLUMB_WERROR "Warnings are errors" ON)
if(PLUMB_WERROR)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

set(PLUMB_SANITIZE "" CACHE STRING "address (with undefined behaviour), thread, or empty")
set_property(CACHE PLUMB_SANITIZE PROPERTY STRINGS "" address thread)
set(PLUMB_SANITIZE_ENVIRONMENT "")
set(supp ${CMAKE_CURRENT_LIST_DIR}/../tests/sanitizers)
get_filename_component(supp ${supp} ABSOLUTE)
if(PLUMB_SANITIZE STREQUAL "address")
  # vptr needs type information that libtorch's hidden classes do not export.
  set(flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined)
  # Containers cross between our instrumented code and libtorch's plain code, so their annotations cannot be trusted;
  # CUDA maps memory where the shadow has its gap.
  set(PLUMB_SANITIZE_ENVIRONMENT
    "ASAN_OPTIONS=detect_container_overflow=0:protect_shadow_gap=0:detect_stack_use_after_return=1:strict_init_order=1:suppressions=${supp}/asan.supp"
    "LSAN_OPTIONS=suppressions=${supp}/lsan.supp:print_suppressions=0"
    "UBSAN_OPTIONS=print_stacktrace=1:suppressions=${supp}/ubsan.supp")
elseif(PLUMB_SANITIZE STREQUAL "thread")
  # libtorch's reference counts use fences, which GCC cannot instrument; what that hides or invents is in tsan.supp.
  set(flags -fsanitize=thread -Wno-tsan)
  set(PLUMB_SANITIZE_ENVIRONMENT
    "TSAN_OPTIONS=suppressions=${supp}/tsan.supp:history_size=4:second_deadlock_stack=1:ignore_noninstrumented_modules=0")
elseif(PLUMB_SANITIZE)
  message(FATAL_ERROR "plumb: PLUMB_SANITIZE is '${PLUMB_SANITIZE}'; expected address, thread or nothing")
endif()
if(PLUMB_SANITIZE)
  # GCC's flow-based warnings misfire on instrumented code.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
  add_compile_options(${flags} -fno-omit-frame-pointer -g1)
  add_link_options(${flags})
  set(CMAKE_CXX_FLAGS_RELEASE "-O1")
endif()

find_program(PLUMB_CCACHE ccache)
if(PLUMB_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${PLUMB_CCACHE})
endif()
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")
  # What ccache needs in order to see through a precompiled header (without it, it steps aside), to digest it once and not for
  # every source (it takes a second), and to know a source again in another checkout, whose paths it takes from the root of the
  # tree on (not yet behind a precompiled header, whose own path CMake writes into it).
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_INODECACHE=yes
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=yes
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CMAKE_CXX_COMPILER_LAUNCHER})
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
endif()
