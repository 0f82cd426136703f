# The imported target plumb::torch: libtorch as the Python found at configure time ships it.
# -DPython_EXECUTABLE=… or -DPLUMB_TORCH_DIR=…/site-packages/torch choose another one.
if(NOT PLUMB_TORCH_DIR)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import torch, os; print(os.path.dirname(torch.__file__))"
    OUTPUT_VARIABLE PLUMB_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_VARIABLE why)
  if(failed)
    message(FATAL_ERROR "plumb: ${Python_EXECUTABLE} cannot import torch; run `make setup`, or pass -DPython_EXECUTABLE of a Python that has torch 2.11 to 2.13\n${why}")
  endif()
endif()

add_library(plumb::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(plumb::torch SYSTEM INTERFACE
  ${PLUMB_TORCH_DIR}/include ${PLUMB_TORCH_DIR}/include/torch/csrc/api/include)
target_link_directories(plumb::torch INTERFACE ${PLUMB_TORCH_DIR}/lib)
target_link_libraries(plumb::torch INTERFACE torch_cpu c10)
target_link_options(plumb::torch INTERFACE -Wl,-rpath,${PLUMB_TORCH_DIR}/lib)
target_compile_definitions(plumb::torch INTERFACE USE_C10D_GLOO)
