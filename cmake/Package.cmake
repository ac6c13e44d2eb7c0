# What is installed, and the Debian package: cmake --build … --target package (tests/package/run.sh
# builds it, installs it and tries it).
include(GNUInstallDirs)

# ---- libkvkeep, for workers in C

# One shared library of what client/kvkeep.h offers; all else stays inside.
add_library(kvkeep SHARED $<TARGET_OBJECTS:kvk_client>)
target_link_libraries(kvkeep PRIVATE kvk_client)
set_target_properties(kvkeep PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION 0
    LINK_DEPENDS ${CMAKE_SOURCE_DIR}/deploy/package/libkvkeep.map)
target_link_options(kvkeep PRIVATE
    -Wl,--version-script=${CMAKE_SOURCE_DIR}/deploy/package/libkvkeep.map -Wl,--no-undefined)
install(TARGETS kvkeep LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES client/kvkeep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvkeep/client)
install(FILES base/geometry.h base/format.h base/status.h base/slab_table.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvkeep/base)
# From where the file lies, for a package may be made for another prefix than this build's.
file(RELATIVE_PATH prefix_from_pc ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(deploy/package/libkvkeep.pc.in libkvkeep.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/libkvkeep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# ---- programs, and what goes with them

install(TARGETS kvkeepd kvkeepctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

# Pages of the manual are what the programs say of themselves.
set(manual_pages kvkeepd.8.gz kvkeepctl.1.gz kvkeepd.conf.5.gz)
list(TRANSFORM manual_pages PREPEND ${CMAKE_BINARY_DIR}/man/)
add_custom_command(
    OUTPUT ${manual_pages}
    COMMAND ${CMAKE_SOURCE_DIR}/deploy/package/manual.sh $<TARGET_FILE:kvkeepd>
            $<TARGET_FILE:kvkeepctl> ${CMAKE_BINARY_DIR}/man
    DEPENDS kvkeepd kvkeepctl ${CMAKE_SOURCE_DIR}/deploy/package/manual.sh)
add_custom_target(manual ALL DEPENDS ${manual_pages})
install(FILES ${CMAKE_BINARY_DIR}/man/kvkeepctl.1.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${CMAKE_BINARY_DIR}/man/kvkeepd.conf.5.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man5)
install(FILES ${CMAKE_BINARY_DIR}/man/kvkeepd.8.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man8)

install(FILES deploy/package/kvkeepctl.bash
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kvkeepctl)
install(FILES deploy/kvkeepd.service DESTINATION lib/systemd/system)
install(FILES deploy/package/kvkeep.sysusers DESTINATION lib/sysusers.d RENAME kvkeep.conf)
install(FILES deploy/samples/cpu-only.conf DESTINATION /etc/kvkeep RENAME kvkeepd.conf)
install(DIRECTORY deploy/samples deploy/prometheus deploy/grafana
        DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples)
install(FILES proto/kvkeep/v1/kvkeep.proto
        DESTINATION ${CMAKE_INSTALL_DATADIR}/kvkeep/proto/kvkeep/v1)
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR})

# ---- the package

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvkeep)
set(CPACK_PACKAGE_VENDOR "kvkeep")
set(CPACK_PACKAGE_CONTACT "the kvkeep developers <kvkeep@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "KV cache of large language models outside the workers")
set(CPACK_PACKAGE_DESCRIPTION
"kvkeepd keeps the KV cache of inference workers in tiers of memory and
disk, shares prefixes within each tenant, brings preempted sequences
back, and survives restarts.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_SET_DESTDIR OFF)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DEPENDS "adduser")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
    ${CMAKE_SOURCE_DIR}/deploy/package/conffiles
    ${CMAKE_SOURCE_DIR}/deploy/package/postinst
    ${CMAKE_SOURCE_DIR}/deploy/package/prerm
    ${CMAKE_SOURCE_DIR}/deploy/package/postrm
    ${CMAKE_SOURCE_DIR}/deploy/package/triggers)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
