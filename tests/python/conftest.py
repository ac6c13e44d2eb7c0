"""The installed package `kvkeep` against the real kvkeepd: a daemon for each test.

The daemon is $KVKEEPD, or kvkeepd in $KVKEEP_BIN, or build/dev/bin/kvkeepd.
"""

import os
import pathlib
import subprocess
import tempfile

import pytest

import kvkeep

ROOT = pathlib.Path(__file__).resolve().parents[2]

SMALL_TIERS = """
[tiers]
device_bytes = 4 MiB
host_bytes = 8 MiB
huge_pages = no
"""


def binary():
    folder = os.environ.get("KVKEEP_BIN", str(ROOT / "build/dev/bin"))
    return os.environ.get("KVKEEPD", os.path.join(folder, "kvkeepd"))


class Daemon:
    """One kvkeepd. `config` is its file's text; the socket lies in the folder."""

    def __init__(self, folder, config=SMALL_TIERS):
        self.folder = pathlib.Path(folder)
        self.target = f"unix:{self.folder}/kvkeep.sock"
        self.log = self.folder / "kvkeepd.log"
        (self.folder / "kvkeepd.conf").write_text(config)
        self.process = None
        self.start()

    def start(self):
        command = [binary(), "--config", str(self.folder / "kvkeepd.conf"), "--socket",
                   str(self.folder / "kvkeep.sock")]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        with open(self.log, encoding="utf-8") as log:
            while not log.readline().startswith("ready "):
                assert self.process.poll() is None, self.log.read_text()

    def kill(self):
        self.process.kill()
        self.process.wait(30)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(30) == 0, self.log.read_text()


@pytest.fixture
def start():
    """start(config): a daemon that is stopped after the test."""
    daemons = []
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        def start_one(config=SMALL_TIERS):
            place = os.path.join(folder, str(len(daemons)))
            os.mkdir(place)
            daemons.append(Daemon(place, config))
            return daemons[-1]

        yield start_one
        for daemon in daemons:
            daemon.stop()


@pytest.fixture
def daemon(start):
    return start()


@pytest.fixture
def client(daemon):
    with kvkeep.connect(daemon.target) as connection:
        yield connection
