#!/usr/bin/env python3
"""docs/api.md from the comments of kvkeep.proto.

    proto/reference.py            write it
    proto/reference.py --check    exit with 1 where it is not what would be written
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto" / "kvkeep" / "v1" / "kvkeep.proto"
TARGET = ROOT / "docs" / "api.md"

DECLARATION = re.compile(r"^\s*(message|enum|service)\s+(\w+)\s*\{")
RPC = re.compile(r"^\s*rpc\s+(\w+)\((stream\s+)?(\w+)\)\s+returns\s+\((stream\s+)?(\w+)\);")
FIELD = re.compile(r"^\s*(repeated\s+)?([\w.]+)\s+(\w+)\s*=\s*(\d+);\s*(?://\s*(.*))?$")
VALUE = re.compile(r"^\s*(\w+)\s*=\s*(\d+);\s*(?://\s*(.*))?$")
COMMENT = re.compile(r"^\s*//\s?(.*)$")
RULE = re.compile(r"^-{10,}\s*(.*)$")


def cell(text):
    return text.replace("|", "\\|")


def link(name, known):
    return f"[{name}](#{name.lower()})" if name in known else name


class Reader:
    """Line by line: comments wait for what they stand before; a field's may go on below it."""

    def __init__(self, text):
        self.lines = text.splitlines()
        self.known = set(re.findall(r"(?m)^\s*(?:message|enum)\s+(\w+)", text))
        self.out = []
        self.waiting = []
        self.rows = None  # of the table being gathered
        self.row_column = 0
        self.nest = []

    def comment(self, line, text):
        rule = RULE.match(text)
        column = len(line) - len(line.lstrip())
        if rule:
            self.section(rule.group(1))
        elif self.rows and column > 8:  # behind a field: it goes on
            self.rows[-1][-1] += " " + text
        else:
            self.waiting.append(text)

    def section(self, title):
        self.waiting = []
        self.out += ["", f"## {title.capitalize()}"]

    def take_comment(self):
        text, self.waiting = self.waiting, []
        return text

    def begin(self, kind, name):
        self.flush()
        self.nest.append(kind)
        title = "Service " + name if kind == "service" else name
        self.out += ["", f"### {title}", ""]
        self.out += self.take_comment()
        self.rows = []

    def flush(self):
        if self.rows:
            width = len(self.rows[0])
            titles = {2: ["value", ""], 3: ["field", "type", ""]}[width]
            self.out += ["", "| " + " | ".join(titles) + " |", "|" + "---|" * width]
            self.out += ["| " + " | ".join(cell(text) for text in row) + " |" for row in self.rows]
        self.rows = None

    def rpc(self, match):
        name, asks, request, answers, response = match.groups()
        asked = ("stream of " if asks else "") + link(request, self.known)
        answer = ("stream of " if answers else "") + link(response, self.known)
        self.out += ["", f"**{name}** ({asked}) → {answer}", ""]
        self.out += self.take_comment()

    def field(self, match):
        repeated, kind, name, number, text = match.groups()
        before = " ".join(self.take_comment())
        kind = link(kind, self.known) + (" …" if repeated else "")
        self.rows.append([f"`{name}` {number}", kind, " ".join(filter(None, [before, text]))])

    def run(self):
        for line in self.lines:
            comment = COMMENT.match(line)
            declaration = DECLARATION.match(line)
            rpc, field, value = RPC.match(line), FIELD.match(line), VALUE.match(line)
            if comment:
                self.comment(line, comment.group(1))
            elif declaration:
                self.begin(*declaration.groups())
                if line.rstrip().endswith("}"):
                    self.nest.pop()
            elif rpc:
                self.rpc(rpc)
            elif field and self.rows is not None and self.nest[-1:] == ["message"]:
                self.field(field)
            elif value and self.rows is not None and self.nest[-1:] == ["enum"]:
                self.rows.append([f"`{value.group(1)}` {value.group(2)}", value.group(3) or ""])
            elif line.strip() == "}":
                self.flush()
                self.nest.pop()
                if self.nest:
                    self.rows = []
            elif line.startswith("syntax"):
                self.preamble()
        return "\n".join(self.out).rstrip() + "\n"

    def preamble(self):
        """The file's own comment, with its indented parts as they are."""
        text = self.take_comment()
        self.out += ["# The API", "",
                     "Made from the comments of `proto/kvkeep/v1/kvkeep.proto` by "
                     "`proto/reference.py`; change them there.", "", "```text", *text, "```"]


def main():
    text = Reader(SOURCE.read_text(encoding="utf-8")).run()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            print("docs/api.md is not what the proto says: run proto/reference.py")
            sys.exit(1)
        return
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
