# The installed package: headers, libplumb, the program, and what find_package(plumb) reads.
include(CMakePackageConfigHelpers)
set(plumb_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/plumb)
install(DIRECTORY include/plumb DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS plumb_lib EXPORT plumbTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT plumbTargets NAMESPACE plumb:: DESTINATION ${plumb_cmake_dir})
configure_package_config_file(cmake/plumbConfig.cmake.in ${CMAKE_BINARY_DIR}/plumbConfig.cmake
  INSTALL_DESTINATION ${plumb_cmake_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/plumbConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/plumbConfig.cmake ${CMAKE_BINARY_DIR}/plumbConfigVersion.cmake cmake/PlumbTorch.cmake
  DESTINATION ${plumb_cmake_dir})
