#!/usr/bin/env python3
"""Do the packages that are listed bring all that the build reads, on a machine that has nothing?

A machine on which one develops has more than what deploy/packages.sh names, so that a package which
is missing there is missed by nobody. Here apt is asked what the listed ones bring on an empty
system, and each header, tool, library and imported .proto that the build read must belong to one of
those, or to what every Debian has. In the same way deploy/docker/Dockerfile: it builds with the
same list, and its second stage has the shared libraries that the daemon and kvkeepctl are linked
with, and no more.

    tests/package/closure.py BUILD_FOLDER

Exit codes: 0 all there, 1 not, 77 it cannot be said here, in words.
"""

import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LISTS = pathlib.Path("/var/lib/dpkg/info")
# Compilers bring these, and whoever has others builds with others.
COMPILERS = ("/usr/lib/gcc/", "/usr/lib/llvm")


def skip(why):
    print(f"skipped: {why}", file=sys.stderr)
    sys.exit(77)


def output(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def closure(packages):
    """What apt would install with these where nothing is installed."""
    nothing = ["-o", "Dir::State::status=/dev/null", "-o", "Dir::State::extended_states=/dev/null"]
    done = subprocess.run(["apt-get", "-s", *nothing, "--no-install-recommends", "install",
                           *packages], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        skip(f"apt-get knows no answer: {done.stderr.strip()}")
    return set(re.findall(r"^Inst (\S+)", done.stdout, re.MULTILINE))


@functools.cache
def always():
    """What every Debian has: what is essential or required, and what that needs."""
    lines = output("dpkg-query", "-W", "-f", "${Package} ${Essential} ${Priority}\n").splitlines()
    words = [line.split() for line in lines]
    return closure([name for name, essential, priority in words
                    if essential == "yes" or priority == "required"])


def forms(name):
    """How dpkg may know a file: /lib and the like were not always within /usr."""
    if name.startswith("/usr/"):
        return {name, name[len("/usr"):]}
    return {name, "/usr" + name}


def owners(paths):
    """path: the packages that it belongs to, or that what it leads to belongs to, for each."""
    wanted = {}
    for path in paths:
        for form in forms(path) | forms(str(pathlib.Path(path).resolve())):
            wanted[form] = set()
    for listing in LISTS.glob("*.list"):
        package = listing.name[:-len(".list")].split(":")[0]
        for line in listing.read_text(errors="replace").splitlines():
            if line in wanted:
                wanted[line].add(package)

    def of(name):
        return set().union(*(wanted[form] for form in forms(name)))

    return {path: of(path) or of(str(pathlib.Path(path).resolve())) for path in paths}


def headers_read(build):
    """(by what is built, by the tests): the files outside that compilers said they read."""
    built, tests = set(), set()
    target = ""
    for line in output("ninja", "-C", str(build), "-t", "deps").splitlines():
        if not line.startswith(" "):
            target = line.split(":")[0]
            continue
        (tests if target.startswith("tests/") else built).add(line.strip())
    return built, tests


def cache_files(build):
    """(for what is built, for the tests): the files that CMake found."""
    built, tests = set(), set()
    for line in (build / "CMakeCache.txt").read_text().splitlines():
        match = re.match(r"([A-Za-z_0-9.+-]+):[A-Z]+=(/[^;]+)$", line)
        if not match or not pathlib.Path(match[2]).is_file():
            continue
        if "Python3" in match[1] and not match[2].startswith("/usr/bin/"):
            continue  # whoever has another takes that one
        of_tests = re.search(r"CRITERION|Python3|CMAKE_CXX", match[1])
        (tests if of_tests else built).add(match[2])
    return built, tests


def protos_read(build):
    """The files outside that ours import."""
    cache = (build / "CMakeCache.txt").read_text()
    folder = pathlib.Path(re.search(r"^PROTOBUF_INCLUDE:PATH=(.*)$", cache, re.MULTILINE)[1])
    imports = set()
    for file in (ROOT / "proto").rglob("*.proto"):
        imports |= set(re.findall(r'^import "([^"]+)"', file.read_text(), re.MULTILINE))
    # descriptor.proto is what protoc-c asks for by itself.
    imports.add("google/protobuf/descriptor.proto")
    return {str(folder / name) for name in imports if (folder / name).is_file()}


def ours(path, build, toolkit):
    return path.startswith((str(ROOT) + "/", str(build) + "/", *COMPILERS, *toolkit)) or \
        not path.startswith("/")


def toolkit_folders(build):
    """Where a CUDA toolkit lies, which no list of Debian brings."""
    cache = (build / "CMakeCache.txt").read_text()
    found = re.findall(r"^KVK_(?:NVCC|CUDA_INCLUDE|CUDART):\w+=(/.*)/[^/]+/[^/]+$", cache,
                       re.MULTILINE)
    return tuple(sorted({folder + "/" for folder in found if folder != "/usr"}))


def check_read(paths, packages, build, what):
    """Say what of these no package of the list brings; the number of those."""
    there = closure(packages) | always()
    toolkit = toolkit_folders(build)
    paths = sorted(path for path in paths if not ours(path, build, toolkit))
    if not paths:
        skip(f"{build} has not been built")
    missed = {path: names for path, names in owners(paths).items() if not names & there}
    for path, names in missed.items():
        print(f"{what}: {path} is of {' or '.join(sorted(names)) or 'no package'}, which is not "
              f"listed")
    print(f"{what}: {len(paths)} files, {len(missed)} of packages that are not listed")
    return len(missed)


def check_image(build):
    """The Dockerfile's second stage: its libraries are those that the programs are linked with."""
    stage = (ROOT / "deploy/docker/Dockerfile").read_text().rsplit("\nFROM ", 1)[1]
    install = re.search(r"--no-install-recommends \\\n(.*?)\\\n\s+&&", stage, re.DOTALL)[1]
    listed = set(install.replace("\\\n", " ").split())
    needed = set()
    for program in ("kvkeepd", "kvkeepctl"):
        text = output("readelf", "-d", str(build / "bin" / program))
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    where = dict(re.findall(r"^\t(\S+) => (\S+)", output("ldd", str(build / "bin/kvkeepd")) +
                            output("ldd", str(build / "bin/kvkeepctl")), re.MULTILINE))
    linked = {}
    for path, names in owners([where[name] for name in needed if name in where]).items():
        linked |= {name: path for name in names}
    missed = set(linked) - listed - always()
    idle = listed - set(linked)
    for name in sorted(missed):
        print(f"image: {linked[name]} is of {name}, which is not listed")
    for name in sorted(idle):
        print(f"image: {name} is listed, and nothing is linked with it")
    print(f"image: libraries of {len(linked)} packages, {len(missed)} of them not listed")
    return len(missed) + len(idle)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tests/package/closure.py BUILD_FOLDER")
    build = pathlib.Path(sys.argv[1]).resolve()
    release = pathlib.Path("/etc/os-release")
    if not release.is_file() or 'VERSION_CODENAME=bookworm' not in release.read_text():
        skip("this is not Debian 12")
    if not list(pathlib.Path("/var/lib/apt/lists").glob("*_Packages*")):
        skip("apt has no lists (apt-get update)")
    if not (build / "build.ninja").is_file():
        skip(f"{build} is not built by ninja")

    packages = {test: output(str(ROOT / "deploy/packages.sh"), "--print", *test).split()
                for test in ((), ("--test",))}
    built, tests = headers_read(build)
    built_found, tests_found = cache_files(build)
    wrong = check_read(built | built_found | protos_read(build), packages[()], build, "build")
    if tests:
        wrong += check_read(tests | tests_found, packages[("--test",)], build, "tests")
    wrong += check_image(build)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
