# The programs of run.sh: on the GPU, where there is a toolkit; and on the simulated one, as tests
# of themselves.
if(KVK_CUDA_FOUND)
    kvk_program(test_device_check SOURCES ${CMAKE_CURRENT_LIST_DIR}/check.c LINK kvk_cuda)
    kvk_program(bench_device SOURCES ${CMAKE_CURRENT_LIST_DIR}/bench.c
                LINK kvk_bench_report kvk_cuda)
    target_include_directories(test_device_check SYSTEM PRIVATE ${KVK_CUDA_INCLUDE})
    target_include_directories(bench_device SYSTEM PRIVATE ${KVK_CUDA_INCLUDE})
endif()
if(TARGET kvk_cuda_sim)
    kvk_program(test_device_check_sim SOURCES ${CMAKE_CURRENT_LIST_DIR}/check.c LINK kvk_cuda_sim)
    kvk_program(bench_device_sim SOURCES ${CMAKE_CURRENT_LIST_DIR}/bench.c
                LINK kvk_bench_report kvk_cuda_sim)
    set_target_properties(test_device_check_sim bench_device_sim PROPERTIES LINKER_LANGUAGE C)
    add_test(NAME device/check COMMAND test_device_check_sim --rounds 6)
    add_test(NAME device/bench COMMAND bench_device_sim --small)
    set_tests_properties(device/check device/bench PROPERTIES TIMEOUT 300 LABELS device
                         ENVIRONMENT "KVKEEP_CUDA_SIM=late_us=50")
endif()
