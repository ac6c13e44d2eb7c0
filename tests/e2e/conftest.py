"""The real kvkeepd under stock grpcio: every test gets a daemon of its own in a folder of its own.

The daemon is $KVKEEPD, or kvkeepd in $KVKEEP_BIN, or build/dev/bin/kvkeepd. The stubs are generated
from proto/ when the tests start, as a worker's author would do it.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import grpc
import pytest
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]


# The daemon cannot be traced, so what /proc tells of its descriptors is root's.
sees_descriptors = os.geteuid() == 0
needs_descriptors = pytest.mark.skipif(not sees_descriptors, reason="looks at the daemon's "
                                       "descriptors in /proc, which are root's")


def generate_stubs():
    folder = tempfile.mkdtemp(prefix="kvkeep-stubs-")
    result = protoc.main(["protoc", f"-I{ROOT}/proto", f"--python_out={folder}",
                          f"--grpc_python_out={folder}", "kvkeep/v1/kvkeep.proto"])
    assert result == 0, "the proto does not compile"
    sys.path.insert(0, folder)
    return folder


STUBS = generate_stubs()
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def promised(seconds):
    """How long what is promised within a time may take. A busy machine fails no test: it is asked
    for as promised only with KVKEEP_TEST_CALM, and must come, later, elsewhere too."""
    return seconds if os.environ.get("KVKEEP_TEST_CALM") else 30 * seconds


def binary():
    if "KVKEEPD" in os.environ:
        return os.environ["KVKEEPD"]
    folder = os.environ.get("KVKEEP_BIN", str(ROOT / "build/dev/bin"))
    return os.path.join(folder, "kvkeepd")


SMALL_TIERS = """
[tiers]
device_bytes = 4 MiB
host_bytes = 8 MiB
huge_pages = no
"""


class Daemon:
    """One kvkeepd process. `config` is the file's text; the socket lies in the folder."""

    def __init__(self, folder, config=SMALL_TIERS, arguments=()):
        self.folder = pathlib.Path(folder)
        self.socket = str(self.folder / "kvkeep.sock")
        self.target = "unix:" + self.socket
        self.log = self.folder / "kvkeepd.log"
        path = self.folder / "kvkeep.ini"
        path.write_text(config)
        self.command = [binary(), "--config", str(path), "--socket", self.socket, *arguments]
        self.tcp_port = None
        self.channels = []
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stderr=log)
        self.wait_until_ready()

    def wait_until_ready(self):
        with open(self.log, encoding="utf-8") as log:
            text = ""
            while True:
                line = log.readline()
                text += line
                if line.startswith("ready "):
                    words = dict(word.split("=", 1) for word in line.split()[1:])
                    assert words["socket"] == self.socket
                    self.tcp_port = int(words.get("tcp_port", 0))
                    return
                if self.process.poll() is not None:
                    raise AssertionError("kvkeepd ended: " + text + log.read())

    def channel(self, target=None, options=()):
        channel = grpc.insecure_channel(
            target or self.target,
            options=[("grpc.use_local_subchannel_pool", 1),
                     ("grpc.max_receive_message_length", 64 << 20), *options])
        self.channels.append(channel)
        return channel

    def stop(self):
        """SIGTERM, and whatever a sanitizer has to say."""
        for channel in self.channels:
            channel.close()
        self.channels = []
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(timeout=30)
        text = self.log.read_text()
        assert code == 0, text
        return text


@pytest.fixture
def folder():
    # A path of its own, for a unix socket's may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="kvk-") as path:
        yield path


@pytest.fixture
def start(folder):
    """Start a daemon with this configuration and these arguments; stopped after the test."""
    daemons = []

    def start_one(config=SMALL_TIERS, arguments=()):
        place = os.path.join(folder, str(len(daemons)))
        os.mkdir(place)
        daemon = Daemon(place, config, arguments)
        daemons.append(daemon)
        return daemon

    yield start_one
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def daemon(start):
    return start()
