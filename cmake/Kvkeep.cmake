# What every room, program, test and benchmark of kvkeep is built with.

set(KVK_WARNINGS
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes
    -Wcast-qual -Wwrite-strings -Wvla -Wundef -Wformat=2 -Wswitch-enum)
if(KVK_WERROR)
    list(APPEND KVK_WARNINGS -Werror)
endif()

if(KVK_TSAN)
    # It does not follow fences; those that there are stand between processes.
    list(APPEND KVK_WARNINGS -Wno-tsan)
endif()

add_library(kvk_flags INTERFACE)
target_compile_definitions(kvk_flags INTERFACE _GNU_SOURCE KVK_VERSION="${PROJECT_VERSION}")
target_compile_options(kvk_flags INTERFACE ${KVK_WARNINGS} -fno-strict-aliasing)
target_include_directories(kvk_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_link_libraries(kvk_flags INTERFACE Threads::Threads m)

# kvk_room(NAME [LINK libraries…] [EXCLUDE files…]): the library of one room, from every .c in its
# folder but those excluded.
function(kvk_room name)
    cmake_parse_arguments(ROOM "" "" "LINK;EXCLUDE" ${ARGN})
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.c)
    foreach(file ${ROOM_EXCLUDE})
        list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${file})
    endforeach()
    add_library(kvk_${name} STATIC ${sources})
    target_link_libraries(kvk_${name} PUBLIC kvk_flags ${ROOM_LINK})
endfunction()

# kvk_program(NAME SOURCES files… [LINK libraries…])
function(kvk_program name)
    cmake_parse_arguments(PROGRAM "" "" "SOURCES;LINK" ${ARGN})
    add_executable(${name} ${PROGRAM_SOURCES})
    target_link_libraries(${name} PRIVATE kvk_flags ${PROGRAM_LINK})
endfunction()

# kvk_labelled(TARGET LABEL): so that `ninja tests_LABEL` builds what `ctest -L LABEL` runs.
function(kvk_labelled target label)
    if(NOT TARGET tests_${label})
        add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${target})
endfunction()

# kvk_criterion_test(FILE [LINK libraries…]): one Criterion program per file.
function(kvk_criterion_test file)
    if(KVK_TSAN)
        return() # Criterion 2.4.1 aborts under ThreadSanitizer
    endif()
    cmake_parse_arguments(TEST "" "" "LINK" ${ARGN})
    get_filename_component(stem ${file} NAME_WE)
    get_filename_component(folder ${file} DIRECTORY)
    get_filename_component(folder ${folder} NAME)
    set(target test_${folder}_${stem})
    kvk_program(${target} SOURCES ${file} LINK ${TEST_LINK} criterion)
    add_test(NAME ${folder}/${stem} COMMAND ${target} --short-filename)
    set_tests_properties(${folder}/${stem} PROPERTIES TIMEOUT 300 LABELS ${folder})
    kvk_labelled(${target} ${folder})
endfunction()

# kvk_plain_test(FILE [LINK libraries…] [ARGS arguments…]): a program whose exit code is the
# verdict.
function(kvk_plain_test file)
    cmake_parse_arguments(TEST "" "" "LINK;ARGS" ${ARGN})
    get_filename_component(stem ${file} NAME_WE)
    get_filename_component(folder ${file} DIRECTORY)
    get_filename_component(folder ${folder} NAME)
    set(target test_${folder}_${stem})
    kvk_program(${target} SOURCES ${file} LINK ${TEST_LINK})
    add_test(NAME ${folder}/${stem} COMMAND ${target} ${TEST_ARGS})
    set_tests_properties(${folder}/${stem} PROPERTIES TIMEOUT 600 LABELS ${folder})
endfunction()
