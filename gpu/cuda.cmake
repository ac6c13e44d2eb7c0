# kvk_cuda: the CUDA device, where there is a CUDA toolkit; else what says that there is none.
#
# KVKEEP_CUDA: AUTO takes a toolkit that is found, ON needs one, OFF does without. The runtime is
# linked statically: it looks for the driver when it is first called, so the daemon starts anywhere.
# Builds for sanitizers go without: the tests run the same files on the simulator there.
set(KVKEEP_CUDA AUTO CACHE STRING "The CUDA device: AUTO, ON or OFF")
set(KVKEEP_CUDA_ARCHITECTURES "80;90" CACHE STRING "Compute capabilities to build kernels for")
file(GLOB cuda_kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/kernels/*.cu)

set(KVK_CUDA_FOUND NO CACHE INTERNAL "")
if(KVKEEP_CUDA STREQUAL "ON" OR
   (KVKEEP_CUDA STREQUAL "AUTO" AND NOT "${CMAKE_C_FLAGS}" MATCHES "-fsanitize"))
    find_program(KVK_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(KVK_NVCC)
        execute_process(COMMAND ${KVK_NVCC} --dryrun -c nothing.cu ERROR_VARIABLE dryrun
                        OUTPUT_QUIET)
        string(REGEX MATCH "TOP=([^\n]+)" ignored "${dryrun}")
        get_filename_component(cuda_root "${CMAKE_MATCH_1}" REALPATH)
        find_path(KVK_CUDA_INCLUDE cuda_runtime_api.h NO_DEFAULT_PATH
                  HINTS ${cuda_root}/include ${cuda_root}/targets/x86_64-linux/include)
        find_library(KVK_CUDART cudart_static NO_DEFAULT_PATH
                     HINTS ${cuda_root}/lib64 ${cuda_root}/lib
                     ${cuda_root}/targets/x86_64-linux/lib)
    endif()
    if(KVK_NVCC AND KVK_CUDA_INCLUDE AND KVK_CUDART AND
       EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/kernels/copy.cu)
        set(KVK_CUDA_FOUND YES CACHE INTERNAL "")
    elseif(KVKEEP_CUDA STREQUAL "ON")
        message(FATAL_ERROR "KVKEEP_CUDA is ON: no nvcc with its headers and cudart_static")
    endif()
endif()

if(KVK_CUDA_FOUND)
    set(nvcc_flags -std=c++17 -O3 -lineinfo -Xcompiler=-fPIC,-Wall,-Wextra -Xptxas=-v)
    foreach(architecture ${KVKEEP_CUDA_ARCHITECTURES})
        list(APPEND nvcc_flags
             -gencode=arch=compute_${architecture},code=sm_${architecture})
    endforeach()
    # And as an intermediate form for what comes later.
    list(GET KVKEEP_CUDA_ARCHITECTURES -1 architecture)
    list(APPEND nvcc_flags -gencode=arch=compute_${architecture},code=compute_${architecture})
    set(kernel_objects)
    foreach(file ${cuda_kernels})
        get_filename_component(stem ${file} NAME_WE)
        set(object ${CMAKE_CURRENT_BINARY_DIR}/kernels/${stem}.o)
        add_custom_command(
            OUTPUT ${object}
            COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/kernels
            COMMAND sh -c "\"$@\" >$0 2>&1 || { cat $0; exit 1; }" ${object}.log
                    ${KVK_NVCC} ${nvcc_flags} -I${CMAKE_SOURCE_DIR} -MD -MF ${object}.d
                    -c ${file} -o ${object}
            DEPENDS ${file}
            DEPFILE ${object}.d
            COMMENT "nvcc ${stem}.cu"
            VERBATIM)
        list(APPEND kernel_objects ${object})
    endforeach()
    list(TRANSFORM cuda_files PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ OUTPUT_VARIABLE sources)
    list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/device_cuda_absent.c)
    add_library(kvk_cuda STATIC ${sources} ${kernel_objects})
    set_source_files_properties(${kernel_objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    target_include_directories(kvk_cuda SYSTEM PRIVATE ${KVK_CUDA_INCLUDE})
    target_link_libraries(kvk_cuda PUBLIC kvk_gpu ${KVK_CUDART} dl rt stdc++)
else()
    add_library(kvk_cuda STATIC device_cuda_absent.c)
    target_link_libraries(kvk_cuda PUBLIC kvk_gpu)
endif()
