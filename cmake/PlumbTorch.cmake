# The imported target plumb::torch: libtorch as the Python found at configure time ships it (2.11 to 2.13, CPU or CUDA).
#
# Chosen by, in this order: -DPLUMB_TORCH_DIR=…/site-packages/torch, -DPython_EXECUTABLE=…, the project's own .venv, the
# Python that CMake finds. The installed package includes this file too, so it speaks to both readers.
#
# Sets PLUMB_TORCH_DIR, PLUMB_TORCH_VERSION (major.minor.patch), PLUMB_TORCH_HAS_CUDA (the wheel has CUDA),
# PLUMB_TORCH_CUDA_INCLUDE and PLUMB_TORCH_NCCL_INCLUDE (where the headers are; empty when there are none).
set(PLUMB_TORCH_OLDEST 2.11)
set(PLUMB_TORCH_NEWEST 2.13)

# find_spec instead of import: it needs no working driver, and it takes milliseconds.
if(NOT PLUMB_TORCH_DIR)
  if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  endif()
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE PLUMB_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    # pip builds in an environment of its own, which hides the packages that are installed; the torch to build with is there.
    if(NOT PLUMB_TORCH_DIR AND SKBUILD)
      execute_process(
        COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH --unset=PYTHONNOUSERSITE "${Python_EXECUTABLE}" -c
                "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE PLUMB_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
  if(NOT PLUMB_TORCH_DIR AND PLUMB_TORCH_DIR_FALLBACK AND EXISTS "${PLUMB_TORCH_DIR_FALLBACK}")
    set(PLUMB_TORCH_DIR "${PLUMB_TORCH_DIR_FALLBACK}")
  endif()
  if(NOT PLUMB_TORCH_DIR)
    message(FATAL_ERROR
      "plumb: no torch in the Python '${Python_EXECUTABLE}'. Run `make setup`, or pass -DPython_EXECUTABLE=… of a Python "
      "that has torch ${PLUMB_TORCH_OLDEST} to ${PLUMB_TORCH_NEWEST}, or -DPLUMB_TORCH_DIR=… (the folder of the torch package).")
  endif()
endif()

set(plumb_torch_version_header "${PLUMB_TORCH_DIR}/include/torch/headeronly/version.h")
if(NOT EXISTS "${plumb_torch_version_header}")
  message(FATAL_ERROR
    "plumb: no torch headers in '${PLUMB_TORCH_DIR}' (or torch older than ${PLUMB_TORCH_OLDEST}); expected the folder of a "
    "torch package ${PLUMB_TORCH_OLDEST} to ${PLUMB_TORCH_NEWEST} with include/ and lib/. Run `make setup`, or pass "
    "-DPython_EXECUTABLE=… or -DPLUMB_TORCH_DIR=… of another one.")
endif()
file(STRINGS "${plumb_torch_version_header}" plumb_torch_lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
string(REGEX MATCHALL "[0-9]+" PLUMB_TORCH_VERSION "${plumb_torch_lines}")
list(JOIN PLUMB_TORCH_VERSION "." PLUMB_TORCH_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" PLUMB_TORCH_MINOR "${PLUMB_TORCH_VERSION}")
if(PLUMB_TORCH_MINOR VERSION_LESS PLUMB_TORCH_OLDEST OR PLUMB_TORCH_MINOR VERSION_GREATER PLUMB_TORCH_NEWEST)
  message(FATAL_ERROR
    "plumb: found torch ${PLUMB_TORCH_VERSION} in '${PLUMB_TORCH_DIR}', expected ${PLUMB_TORCH_OLDEST} to "
    "${PLUMB_TORCH_NEWEST}. Run `make setup`, or pass -DPython_EXECUTABLE=… of a Python that has one of those.")
endif()

set(PLUMB_TORCH_HAS_CUDA OFF)
set(PLUMB_TORCH_CUDA_INCLUDE "")
set(PLUMB_TORCH_NCCL_INCLUDE "")
if(EXISTS "${PLUMB_TORCH_DIR}/lib/libtorch_cuda.so")
  set(PLUMB_TORCH_HAS_CUDA ON)
  # The wheels of the CUDA runtime and of NCCL lie beside torch and carry their headers; a toolkit may be installed too.
  get_filename_component(plumb_site_packages "${PLUMB_TORCH_DIR}" DIRECTORY)
  file(GLOB plumb_nvidia_includes "${plumb_site_packages}/nvidia/*/include")
  find_package(CUDAToolkit QUIET)
  find_path(plumb_cuda_include cuda_runtime_api.h
    HINTS ${CUDAToolkit_INCLUDE_DIRS} ${plumb_nvidia_includes} NO_CACHE)
  find_path(plumb_nccl_include nccl.h HINTS ${plumb_nvidia_includes} NO_CACHE)
  if(plumb_cuda_include)
    set(PLUMB_TORCH_CUDA_INCLUDE "${plumb_cuda_include}")
  endif()
  if(plumb_nccl_include)
    set(PLUMB_TORCH_NCCL_INCLUDE "${plumb_nccl_include}")
  endif()
endif()

if(NOT TARGET plumb::torch)
  set(plumb_torch_libraries c10 torch_cpu)
  if(PLUMB_TORCH_HAS_CUDA)
    list(APPEND plumb_torch_libraries c10_cuda torch_cuda)
  endif()
  add_library(plumb::torch INTERFACE IMPORTED GLOBAL)
  # libtorch_cuda registers itself when it is loaded; a linker that drops libraries nobody names would lose it.
  set(plumb_keep_all -Wl,--push-state,--no-as-needed)
  foreach(library ${plumb_torch_libraries})
    add_library(plumb::${library} SHARED IMPORTED GLOBAL)
    set_target_properties(plumb::${library} PROPERTIES
      IMPORTED_LOCATION "${PLUMB_TORCH_DIR}/lib/lib${library}.so" IMPORTED_NO_SONAME OFF)
    list(APPEND plumb_keep_all plumb::${library})
  endforeach()
  list(APPEND plumb_keep_all -Wl,--pop-state)
  # libtorch uses the shared libstdc++. A compiler that finds no shared one takes the static one without a word, and then a
  # process has two, which end in crashes where one's objects meet the other's: name the shared one ourselves.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.so
      OUTPUT_VARIABLE plumb_libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT EXISTS "${plumb_libstdcxx}")
      find_library(plumb_shared_libstdcxx NAMES libstdc++.so.6 NO_CACHE)
      if(plumb_shared_libstdcxx)
        list(APPEND plumb_keep_all "${plumb_shared_libstdcxx}")
      else()
        message(WARNING "plumb: '${CMAKE_CXX_COMPILER}' has no shared libstdc++, which libtorch uses; set CXX to another one")
      endif()
    endif()
  endif()
  target_link_libraries(plumb::torch INTERFACE ${plumb_keep_all})
  target_include_directories(plumb::torch SYSTEM INTERFACE
    "${PLUMB_TORCH_DIR}/include" "${PLUMB_TORCH_DIR}/include/torch/csrc/api/include")
endif()
