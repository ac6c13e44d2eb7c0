#!/usr/bin/env python3
"""Is the tree tidy? Holds the house's table of what may include what, and the rules of form.

    tests/tidy.py [--root FOLDER] [--generated FOLDER]

--generated is where the build put the code made from proto/; with it, every header is also
compiled alone. Prints one line for each breach, FILE:LINE: what is wrong and what to do, and exits
with 1 if there was any. Needs nothing but Python; clang-format is used where version 14 is there.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

LINE_COLUMNS_MAX = 100
FILE_LINES_MAX = 900
FUNCTION_LINES_MAX = 100

FOLDERS = ["base", "index", "gpu", "hosttier", "daemon", "proto", "client", "bench", "tests",
           "cmake", "deploy", "docs"]
# C++ is the GPU's kernels and what runs them in tests.
CODE = {".c", ".h", ".inc", ".cu", ".cuh", ".cpp", ".hpp"}
# What builds of the Python package and its tests leave behind.
MADE = re.compile(r"/(__pycache__|[^/]*\.egg-info)/|^/client/python/build/")
# Definitions that other projects publish, kept as they are.
FOREIGN = ("proto/google/", "proto/grpc/")
TEXT = CODE | {".proto", ".py", ".sh", ".cmake", ".txt", ".md"}

# What each room may include, itself among it. daemon/ is two floors: the engine, and above it the
# files that know calls and messages.
ABOVE_ENGINE = re.compile(r"daemon/(main|server|rpc|http|publish)[a-z0-9_]*\.[ch]$")
ENGINE = {"base", "index", "gpu", "hosttier", "engine"}
MAY_INCLUDE = {
    "base": {"base"},
    "index": {"base", "index"},
    "gpu": {"base", "gpu"},
    "hosttier": {"base", "hosttier"},
    "engine": ENGINE,
    "server": ENGINE | {"server", "proto"},
    "proto": {"proto"},
    "client": {"base", "client", "proto"},
    "roof": ENGINE | {"server", "proto", "client", "roof"},
}

# Libraries that only some files may see: (what is included, who may, why).
GUARDED = [
    (re.compile(r"(\.pb-c\.h$)|(^protobuf-c/)"),
     re.compile(r"(daemon/(rpc|server_health|server_reflection)[a-z0-9_]*\.[ch]$)"
                r"|((client|proto|tests|bench)/)"),
     "protobuf types stay in daemon/rpc*, the two standard services and client/"),
    (re.compile(r"^grpc/(?!.*\.pb-c\.h$)"),
     re.compile(r"(daemon/server[a-z0-9_]*\.[ch]$)|(client/connection[a-z0-9_]*\.[ch]$)"
                r"|((tests|bench)/)"),
     "gRPC stays in daemon/server* and client/connection*"),
    (re.compile(r"^hiredis/"),
     re.compile(r"(hosttier/remote[a-z0-9_]*\.[ch]$)|((tests|bench)/)"),
     "hiredis stays in hosttier/remote*"),
]

# Words of work left undone; cut in two so that this file does not find itself.
UNDONE = re.compile(r"\b(" + "|".join(["FIX" "ME", "X" "XX", "TO" "DO"]) + r")\b")

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')


class Report:
    def __init__(self):
        self.lines = []

    def add(self, path, line, text):
        self.lines.append(f"{path}:{line}: {text}" if line else f"{path}: {text}")


# ---- Reading -----------------------------------------------------------------------------------


def find_files(root):
    """Paths relative to the root, with '/' between, of everything that has rules."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and (path.suffix in TEXT or path.name == "CMakeLists.txt"):
                name = path.relative_to(root).as_posix()
                if not MADE.search("/" + name) and not name.startswith(FOREIGN):
                    found.append(name)
    return found + [name for name in ["CMakeLists.txt", "README.md"] if (root / name).is_file()]


def blank_out(code):
    """The same text with comments, strings and characters replaced by blanks, lines kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), code)


def room_of(path):
    first = path.split("/")[0]
    if first == "daemon":
        return "server" if ABOVE_ENGINE.match(path) else "engine"
    return "roof" if first in ("tests", "bench") else first


def includes_of(text):
    for number, line in enumerate(text.split("\n"), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1) == '"', match.group(2)


# ---- Rules -------------------------------------------------------------------------------------


def check_includes(root, path, text, report):
    room = room_of(path)
    if room not in MAY_INCLUDE:
        return
    for number, quoted, target in includes_of(text):
        for included, allowed, reason in GUARDED:
            if included.search(target) and not allowed.match(path):
                report.add(path, number, f"includes {target}: {reason}")
        if not quoted:
            continue
        if target.endswith(".pb-c.h"):
            other = "proto"
        elif (root / target).is_file():
            other = room_of(target)
        else:
            report.add(path, number, f'includes "{target}", which is not a path from the root')
            continue
        if other not in MAY_INCLUDE[room]:
            allowed = ", ".join(sorted(MAY_INCLUDE[room]))
            report.add(path, number,
                       f"{room} may not include {target} of {other}; it may include {allowed}")


def check_own_header(root, path, text, report):
    header = path[:-2] + ".h"
    if not path.endswith(".c") or not (root / header).is_file():
        return
    first = next(includes_of(text), None)
    if first is None or first[2] != header:
        number = first[0] if first else 1
        report.add(path, number, f'must include its own header first: #include "{header}"')


def check_guard(path, text, report):
    if not path.endswith(".h"):
        return
    guard = "KVK_" + re.sub(r"[^A-Z0-9]", "_", path.upper())
    opening = re.search(r"^#ifndef (\w+)\n#define (\w+)$", text, re.M)
    if not opening or opening.group(1) != guard or opening.group(2) != guard:
        report.add(path, 1, f"needs the include guard {guard}")
    elif not text.rstrip().endswith("#endif"):
        report.add(path, 1, "the include guard must end the file: #endif")


def close_of(code, start, opening, closing):
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for at in range(start, len(code)):
        if code[at] == opening:
            depth += 1
        elif code[at] == closing:
            depth -= 1
            if depth == 0:
                return at
    return len(code)


def check_switches(path, code, report):
    """No default in a switch over one of our enums, so that the compiler names what is missing."""
    bodies = []
    for match in re.finditer(r"\bswitch\s*\(", code):
        head_end = close_of(code, match.end() - 1, "(", ")")
        start = code.find("{", head_end)
        if start >= 0:
            bodies.append((start, close_of(code, start, "{", "}")))
    for start, end in bodies:
        body = code[start:end]
        for inner_start, inner_end in bodies:
            if start < inner_start < end:
                body = (body[:inner_start - start] + " " * (inner_end - inner_start)
                        + body[inner_end - start:])
        default = re.search(r"\bdefault\s*:", body)
        if default and re.search(r"\bcase\s+KVK_[A-Z0-9_]+\s*:", body):
            number = code.count("\n", 0, start + default.start()) + 1
            report.add(path, number, "no default in a switch over an enum: list every value")


def check_functions(path, code, report):
    """A function's body begins and ends in the first column, and nothing else does both."""
    begin = 0
    before = ""
    for number, line in enumerate(code.split("\n"), 1):
        if line.startswith("{") and not before.startswith("namespace"):
            begin = number
        elif line.startswith("}") and begin:
            count = number - begin + 1
            if count > FUNCTION_LINES_MAX:
                report.add(path, begin, f"a function of {count} lines; at most "
                           f"{FUNCTION_LINES_MAX}, better 70")
            begin = 0
        before = line


def check_form(path, text, report):
    lines = text.split("\n")
    is_prose = path.endswith((".md", ".proto"))  # the API's manual is its .proto
    is_table = False  # laid out by hand: as wide as it must be
    if text and not text.endswith("\n"):
        report.add(path, len(lines), "the last line has no end")
    for number, line in enumerate(lines, 1):
        if "\t" in line:
            report.add(path, number, "a tab; indent with blanks")
        if "\r" in line:
            report.add(path, number, "a carriage return; lines end with a newline alone")
        if line != line.rstrip() and not path.endswith(".md"):
            report.add(path, number, "blanks at the end of the line")
        if "clang-format o" in line:
            is_table = "clang-format off" in line
        if len(line) > LINE_COLUMNS_MAX and not is_prose and not is_table:
            report.add(path, number, f"{len(line)} columns; at most {LINE_COLUMNS_MAX}")
        word = UNDONE.search(line)
        if word:
            report.add(path, number, f"{word.group()}: finish it, or file it where work is filed")
    if len(lines) - 1 > FILE_LINES_MAX and not is_prose:
        report.add(path, 0, f"{len(lines) - 1} lines; at most {FILE_LINES_MAX}, better 500")


# ---- Rules that take other programs ------------------------------------------------------------


def pkg_config_flags(packages):
    if shutil.which("pkg-config") is None:
        return []
    flags = []
    for package in packages:
        answer = subprocess.run(["pkg-config", "--cflags", package], capture_output=True,
                                text=True, check=False)
        flags += answer.stdout.split()
    return flags


def compile_alone(root, path, command):
    answer = subprocess.run(command + [path], cwd=root, capture_output=True, text=True,
                            check=False)
    return path, answer.returncode, answer.stderr


def check_headers_alone(root, headers, generated, report):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or generated is None:
        print("tidy: headers are not compiled alone: no compiler, or no --generated", flush=True)
        return
    command = [compiler, "-std=c17", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Wextra",
               "-Wno-unused-function", "-Wno-unused-const-variable", "-Werror", "-x", "c",
               f"-I{root}", "-isystem", str(generated),
               "-isystem", str(root / "tests/cuda_sim/include")]  # CUDA's own is not everywhere
    command += pkg_config_flags(["grpc", "libprotobuf-c", "jansson"])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, code, text in pool.map(lambda h: compile_alone(root, h, command), headers):
            if code != 0:
                first = next((line for line in text.split("\n") if "error" in line), text)
                report.add(path, 0, f"does not compile alone: {first.strip()}")


def find_clang_format():
    for name in ["clang-format-14", "clang-format"]:
        program = shutil.which(name)
        if program:
            answer = subprocess.run([program, "--version"], capture_output=True, text=True,
                                    check=False)
            if re.search(r"version 14\.", answer.stdout):
                return program
    return None


def check_clang_format(root, paths, report):
    program = find_clang_format()
    if program is None:
        print("tidy: formatting is not checked: no clang-format 14", flush=True)
        return
    answer = subprocess.run([program, "--dry-run", "--Werror", "--ferror-limit=1"] + paths,
                            cwd=root, capture_output=True, text=True, check=False)
    for path, line in re.findall(r"^(\S+?):(\d+):\d+: error: code should be", answer.stderr, re.M):
        report.add(path, int(line), f"not formatted: clang-format -i {path}")
    if answer.returncode != 0 and "code should be" not in answer.stderr:
        report.add("clang-format", 0, answer.stderr.strip())


# ---- All of it ---------------------------------------------------------------------------------


def check_tree(root, generated, report):
    paths = find_files(root)
    code_paths = [path for path in paths if pathlib.PurePosixPath(path).suffix in CODE]
    for path in paths:
        try:
            text = (root / path).read_bytes().decode()
        except UnicodeDecodeError:
            report.add(path, 0, "not UTF-8")
            continue
        check_form(path, text, report)
        if path in code_paths:
            code = blank_out(text)
            check_includes(root, path, text, report)
            check_own_header(root, path, text, report)
            check_guard(path, text, report)
            check_switches(path, code, report)
            check_functions(path, code, report)
    headers = [path for path in code_paths if path.endswith(".h")]
    check_headers_alone(root, headers, generated, report)
    check_clang_format(root, [path for path in code_paths if not path.endswith(".inc")], report)
    return len(paths)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--generated", type=pathlib.Path)
    options = parser.parse_args()
    report = Report()
    generated = options.generated.resolve() if options.generated else None
    count = check_tree(options.root.resolve(), generated, report)
    for line in report.lines:
        print(line)
    print(f"tidy: {count} files, {len(report.lines)} breaches")
    return 1 if report.lines else 0


if __name__ == "__main__":
    sys.exit(main())
