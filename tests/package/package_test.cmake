# The package test's script: install, move, build the consumer, run it; also the errors of a wrong torch.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nended with ${failed}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BINARY_DIR} --prefix ${WORK}/first)
# Moved, so that nothing depends on where it was installed.
file(RENAME ${WORK}/first ${WORK}/moved)
foreach(file include/plumb/plumb.h lib/libplumb.so lib/cmake/plumb/plumbConfig.cmake
        lib/cmake/plumb/plumbConfigVersion.cmake lib/cmake/plumb/plumbTargets.cmake)
  if(NOT EXISTS ${WORK}/moved/${file})
    message(FATAL_ERROR "the installed package has no ${file}")
  endif()
endforeach()

file(COPY ${CONSUMER}/ DESTINATION ${WORK}/consumer)
run(${CMAKE_COMMAND} -S ${WORK}/consumer -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${WORK}/moved -DPLUMB_TORCH_DIR=${TORCH_DIR})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
if(NOT output MATCHES "consumer: 2 ranks agree")
  message(FATAL_ERROR "the consumer ran, but printed:\n${output}")
endif()

if(PROGRAM)
  run(${WORK}/moved/bin/plumb --help)
endif()

# A torch that is too old is named, with what to do.
file(WRITE ${WORK}/old/include/torch/headeronly/version.h
  "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 4\n#define TORCH_VERSION_PATCH 1\n")
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${WORK}/consumer -B ${WORK}/build-old -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
          -DCMAKE_PREFIX_PATH=${WORK}/moved -DPLUMB_TORCH_DIR=${WORK}/old
  RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE error)
string(REGEX REPLACE "[ \n]+" " " error "${error}")
if(NOT failed OR NOT error MATCHES "found torch 2.4.1 in .* expected 2.11 to 2.13")
  message(FATAL_ERROR "a torch 2.4.1 must be refused with a clear message; got (${failed}):\n${error}")
endif()
message(STATUS "package: installed, moved, used")
