# find_package(pleach): the targets pleach::pleach (shared library) and pleach::static.
get_filename_component(_pleach_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
file(GLOB _pleach_folders "${_pleach_prefix}/lib" "${_pleach_prefix}/lib64" "${_pleach_prefix}/lib/*-linux-*")

find_path(pleach_INCLUDE_DIR pleach.h PATHS "${_pleach_prefix}/include" NO_DEFAULT_PATH)
find_library(pleach_LIBRARY libpleach.so PATHS ${_pleach_folders} NO_DEFAULT_PATH)
find_library(pleach_STATIC_LIBRARY libpleach.a PATHS ${_pleach_folders} NO_DEFAULT_PATH)

include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(pleach REQUIRED_VARS pleach_LIBRARY pleach_INCLUDE_DIR)

if(pleach_FOUND AND NOT TARGET pleach::pleach)
    add_library(pleach::pleach SHARED IMPORTED)
    set_target_properties(pleach::pleach PROPERTIES
        IMPORTED_LOCATION "${pleach_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${pleach_INCLUDE_DIR}")
    if(pleach_STATIC_LIBRARY)
        add_library(pleach::static STATIC IMPORTED)
        set_target_properties(pleach::static PROPERTIES
            IMPORTED_LOCATION "${pleach_STATIC_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${pleach_INCLUDE_DIR}"
            INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m")
    endif()
endif()
mark_as_advanced(pleach_INCLUDE_DIR pleach_LIBRARY pleach_STATIC_LIBRARY)
