# The stand-in for CUDA's runtime library, the CUDA device on it, and a daemon that has it.
add_library(kvk_cuda_sim_runtime STATIC ${CMAKE_CURRENT_LIST_DIR}/runtime.c
            ${CMAKE_CURRENT_LIST_DIR}/runtime_memory.c)
target_include_directories(kvk_cuda_sim_runtime PUBLIC ${CMAKE_CURRENT_LIST_DIR}/include)
target_link_libraries(kvk_cuda_sim_runtime PUBLIC kvk_flags)

if(NOT EXISTS ${CMAKE_SOURCE_DIR}/gpu/kernels/copy.cu)
    return()
endif()
file(GLOB cuda_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/gpu/device_cuda*.c)
list(REMOVE_ITEM cuda_files ${CMAKE_SOURCE_DIR}/gpu/device_cuda_absent.c)
add_library(kvk_cuda_sim STATIC ${cuda_files})
target_link_libraries(kvk_cuda_sim PUBLIC kvk_gpu kvk_cuda_sim_device kvk_cuda_sim_runtime)

# The numbers are CUDA's own, where there is a toolkit to ask.
if(KVK_CUDA_INCLUDE)
    add_library(kvk_cuda_sim_parity OBJECT ${CMAKE_CURRENT_LIST_DIR}/parity.c)
    target_link_libraries(kvk_cuda_sim_parity PRIVATE kvk_flags)
    target_include_directories(kvk_cuda_sim_parity SYSTEM BEFORE PRIVATE ${KVK_CUDA_INCLUDE})
endif()

foreach(stem runtime_faults device_memory device_copy device_failures device_traps)
    if(EXISTS ${CMAKE_CURRENT_LIST_DIR}/${stem}.c)
        kvk_criterion_test(${CMAKE_CURRENT_LIST_DIR}/${stem}.c LINK kvk_cuda_sim)
        # By the C compiler, which has the sanitizers' flags.
        set_target_properties(test_cuda_sim_${stem} PROPERTIES LINKER_LANGUAGE C)
    endif()
endforeach()

# The engine as it is, with its device tier on a simulated GPU.
kvk_criterion_test(${CMAKE_CURRENT_LIST_DIR}/engine_both.c LINK kvk_engine kvk_cuda_sim)
set_target_properties(test_cuda_sim_engine_both PROPERTIES LINKER_LANGUAGE C)

# kvkeepd as it is, on simulated GPUs.
kvk_program(kvkeepd_sim SOURCES ${CMAKE_SOURCE_DIR}/daemon/main.c
            ${CMAKE_SOURCE_DIR}/daemon/devices.c ${CMAKE_SOURCE_DIR}/daemon/config_machine.c
            LINK kvk_server kvk_cuda_sim)
set_target_properties(kvkeepd_sim PROPERTIES LINKER_LANGUAGE C)

kvk_program(test_cuda_sim_daemon_gpu SOURCES ${CMAKE_CURRENT_LIST_DIR}/daemon_gpu.c
            LINK kvk_client kvk_proto kvk_cuda_sim_runtime kvk_base)
add_dependencies(test_cuda_sim_daemon_gpu kvkeepd_sim)
add_test(NAME cuda_sim/daemon_gpu COMMAND test_cuda_sim_daemon_gpu)
set_tests_properties(cuda_sim/daemon_gpu PROPERTIES TIMEOUT 300 RUN_SERIAL ON LABELS process
    ENVIRONMENT "KVKEEPD=$<TARGET_FILE:kvkeepd_sim>")

# The two-path check of the example worker, its K/V on a simulated GPU.
foreach(options "" "--partial")
    add_test(NAME cuda_sim/two_paths${options} COMMAND ${CMAKE_CURRENT_LIST_DIR}/two_paths.sh
             $<TARGET_FILE:kvkeepd_sim> $<TARGET_FILE:tiny_llama> 8 ${options})
    set_tests_properties(cuda_sim/two_paths${options} PROPERTIES TIMEOUT 300 LABELS process)
endforeach()

include(${CMAKE_CURRENT_LIST_DIR}/../device/programs.cmake)
