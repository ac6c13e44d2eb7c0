#!/usr/bin/env python3
"""Does tidy.py see what it should? Each rule broken once and kept once, in a small tree."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
import tidy  # pylint: disable=wrong-import-position


def header(path, body=""):
    guard = "KVK_" + path.upper().replace("/", "_").replace(".", "_")
    return f"#ifndef {guard}\n#define {guard}\n\n{body}\n#endif\n"


class Tidy(unittest.TestCase):
    def breaches(self, files):
        """What tidy says about a tree of these files, without clang-format and the compiler."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            report = tidy.Report()
            tidy.check_headers_alone = lambda *arguments: None
            tidy.check_clang_format = lambda *arguments: None
            tidy.check_tree(root, None, report)
            return report.lines

    def assert_tidy(self, files):
        self.assertEqual(self.breaches(files), [])

    def assert_breach(self, files, part):
        lines = self.breaches(files)
        self.assertEqual(len(lines), 1, lines)
        self.assertIn(part, lines[0])

    def test_rooms(self):
        rooms = {"base/a.h": header("base/a.h"), "index/a.h": header("index/a.h"),
                 "gpu/a.h": header("gpu/a.h"), "hosttier/a.h": header("hosttier/a.h"),
                 "daemon/cache.h": header("daemon/cache.h"),
                 "daemon/server.h": header("daemon/server.h"),
                 "client/a.h": header("client/a.h")}
        allowed = {("index/x.c", "base/a.h"), ("gpu/x.c", "base/a.h"), ("gpu/x.c", "gpu/a.h"),
                   ("daemon/x.c", "index/a.h"), ("daemon/x.c", "daemon/cache.h"),
                   ("daemon/rpc_x.c", "daemon/cache.h"), ("daemon/main.c", "daemon/server.h"),
                   ("client/x.c", "base/a.h"), ("tests/unit/x.c", "daemon/server.h")}
        refused = {("base/x.c", "index/a.h"), ("index/x.c", "gpu/a.h"), ("gpu/x.c", "index/a.h"),
                   ("hosttier/x.c", "gpu/a.h"), ("index/x.c", "daemon/cache.h"),
                   ("daemon/x.c", "daemon/server.h"), ("daemon/x.c", "client/a.h"),
                   ("client/x.c", "daemon/cache.h"), ("client/x.c", "index/a.h")}
        for path, target in allowed:
            self.assert_tidy({**rooms, path: f'#include "{target}"\n'})
        for path, target in refused:
            self.assert_breach({**rooms, path: f'#include "{target}"\n'}, f"{path}:1")

    def test_messages_and_calls(self):
        message = '#include "kvkeep/v1/kvkeep.pb-c.h"\n'
        self.assert_tidy({"daemon/rpc_x.c": message, "client/x.c": message,
                          "daemon/server_health.c": message})
        self.assert_breach({"daemon/server_x.c": message}, "protobuf types stay")
        self.assert_breach({"daemon/main.c": "#include <protobuf-c/protobuf-c.h>\n"}, "protobuf")
        call = "#include <grpc/grpc.h>\n"
        self.assert_tidy({"daemon/server_x.c": call, "client/connection.c": call,
                          "tests/unit/x.c": call})
        self.assert_breach({"daemon/rpc.c": call}, "gRPC stays")
        self.assert_breach({"client/client.c": call}, "gRPC stays")
        self.assert_breach({"daemon/cache.c": call}, "gRPC stays")

    def test_paths_from_the_root(self):
        files = {"base/a.h": header("base/a.h"), "base/b.c": '#include "a.h"\n'}
        self.assert_breach(files, "not a path from the root")

    def test_own_header_first(self):
        files = {"base/a.h": header("base/a.h"), "base/b.h": header("base/b.h")}
        self.assert_tidy({**files, "base/a.c": '#include "base/a.h"\n#include "base/b.h"\n'})
        self.assert_breach({**files, "base/a.c": '#include "base/b.h"\n#include "base/a.h"\n'},
                           "own header first")
        self.assert_breach({**files, "base/a.c": "int a;\n"}, "own header first")

    def test_guards(self):
        self.assert_breach({"base/a.h": header("base/b.h")}, "KVK_BASE_A_H")
        self.assert_breach({"base/a.h": "#pragma once\n"}, "KVK_BASE_A_H")
        self.assert_breach({"base/a.h": header("base/a.h") + "int a;\n"}, "must end the file")

    def test_switches(self):
        switch = ("int f(int a)\n{\n    switch (a) {\n    case %s:\n    default:\n"
                  "        return 1;\n    }\n}\n")
        self.assert_breach({"base/a.c": switch % "KVK_OK"}, "base/a.c:5: no default")
        self.assert_tidy({"base/a.c": switch % "3"})
        nested = ("int f(int a)\n{\n    switch (a) {\n    case KVK_OK:\n        switch (a) {\n"
                  "        case 1:\n        default:\n            return 1;\n        }\n    }\n}\n")
        self.assert_tidy({"base/a.c": nested})
        self.assert_tidy({"base/a.c": "/* switch (a) { case KVK_OK: default: } */\n"})

    def test_sizes(self):
        body = "void f(void)\n{\n" + "    g();\n" * 98 + "}\n"
        self.assert_tidy({"base/a.c": body})
        self.assert_breach({"base/a.c": body.replace("{\n", "{\n    g();\n")}, "101 lines")
        self.assert_breach({"base/a.c": "int a;\n" * 901}, "901 lines")
        self.assert_breach({"base/a.c": "/* " + "x" * 98 + " */\n"}, "104 columns")
        self.assert_tidy({"docs/a.md": "x" * 200 + "\n"})

    def test_form(self):
        self.assert_breach({"base/a.c": "int\ta;\n"}, "a tab")
        self.assert_breach({"base/a.c": "int a; \n"}, "blanks at the end")
        self.assert_breach({"base/a.c": "int a;"}, "no end")
        for word in ["FIX" "ME", "TO" "DO", "X" "XX"]:
            self.assert_breach({"base/a.c": f"/* {word}: later */\n"}, word)
        self.assert_tidy({"base/a.c": 'char a[] = "kvkeep-XXXXXX";\n'})


if __name__ == "__main__":
    unittest.main()
