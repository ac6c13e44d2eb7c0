#!/usr/bin/env python3
"""Does nvcc's report of the kernels stay within bounds? No spills, and registers enough for blocks
to share a multiprocessor.

    tests/cuda_sim/registers.py REPORT...

A REPORT is what nvcc -Xptxas=-v printed for one file. Prints a line for each kernel that is past a
bound and exits with 1 if there was any.
"""

import pathlib
import re
import sys

# (kernel's name, mangled, registers at most). A multiprocessor has 65,536; blocks have 128 threads.
BOUNDS = [
    # Few rows, as in decoding: more than the two blocks that shared memory has room for at most.
    (re.compile(r"kvk_attend_matrix.*ELi1ELi\d+ELi\d+EEv"), 192),
    (re.compile(r"kvk_attend_compactILi\d+ELi\d+ELi1E"), 192),
    # Many rows: a block or two.
    (re.compile(r"kvk_attend_(matrix|compact)"), 255),
    (re.compile(r"kvk_attend_plain"), 128),
    (re.compile(r""), 64),
]

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<machine>sm_\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers", re.S)


def check(report):
    """Lines of what is past a bound, and how many kernels there were."""
    lines = []
    count = 0
    for kernel in KERNEL.finditer(report):
        count += 1
        where = f"{kernel['name']} for {kernel['machine']}"
        bound = next(most for name, most in BOUNDS if name.search(kernel["name"]))
        if int(kernel["stores"]) or int(kernel["loads"]):
            lines.append(f"{where} spills {kernel['stores']} bytes")
        if int(kernel["registers"]) > bound:
            lines.append(f"{where} uses {kernel['registers']} registers; at most {bound}")
    return lines, count


def main():
    breaches = []
    total = 0
    for path in sys.argv[1:]:
        lines, count = check(pathlib.Path(path).read_text())
        if count == 0:
            lines.append(f"{path} reports no kernel")
        breaches += lines
        total += count
    for line in breaches:
        print(line)
    print(f"registers: {total} kernels, {len(breaches)} breaches")
    return 1 if breaches or total == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
