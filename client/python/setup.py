"""Generates Python from the API's .proto while the package is built; the rest is pyproject.toml.

The .proto lies two folders up in the project's tree, and beside this file in a source archive.
"""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
PROTO = pathlib.Path("kvkeep/v1/kvkeep.proto")


def proto_folder():
    for folder in (HERE / "proto", HERE.parent.parent / "proto"):
        if (folder / PROTO).exists():
            return folder
    raise FileNotFoundError(f"{PROTO} is neither beside setup.py nor in the project's tree")


class BuildWithStubs(build_py):
    """build_py, and the two modules that protoc makes."""

    def run(self):
        super().run()
        from grpc_tools import protoc

        target = pathlib.Path(self.build_lib)
        target.mkdir(parents=True, exist_ok=True)
        if protoc.main(["protoc", f"-I{proto_folder()}", f"--python_out={target}",
                        f"--pyi_out={target}", f"--grpc_python_out={target}", str(PROTO)]) != 0:
            raise RuntimeError("protoc could not compile " + str(PROTO))
        # Older generators do not see that a field may be called self.
        types = target / PROTO.parent / "kvkeep_pb2.pyi"
        lines = types.read_text().splitlines(keepends=True)
        types.write_text("".join(
            line.replace("def __init__(self,", "def __init__(self_,") if ", self: " in line
            else line for line in lines))


class SourceWithProto(sdist):
    """sdist, with the .proto inside."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        target = pathlib.Path(base_dir) / "proto" / PROTO
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(proto_folder() / PROTO, target)


setup(cmdclass={"build_py": BuildWithStubs, "sdist": SourceWithProto})
