"""The real kvkeepd for these tests, as tests/python has it; one for a file's tests, in a folder."""

import importlib.util
import os
import pathlib
import sys
import tempfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
SPEC = importlib.util.spec_from_file_location("kvkeep_daemon", HERE.parent / "python/conftest.py")
daemons = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(daemons)

if not os.path.exists(daemons.binary()):
    pytest.skip(f"no kvkeepd at {daemons.binary()}: build it, or name it as KVKEEPD",
                allow_module_level=True)
pytest.importorskip("torch", reason="torch is not installed: tests/transformers/run.sh installs it")
pytest.importorskip("transformers", minversion="5.0",
                    reason="Transformers is not installed: tests/transformers/run.sh installs it")

TIERS = "[tiers]\ndevice_bytes = {device}\nhost_bytes = {host}\nhuge_pages = no\n"


@pytest.fixture(scope="module")
def shared():
    """A daemon for all tests of the file: models keep their caches apart by themselves."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        daemon = daemons.Daemon(folder, TIERS.format(device="0", host="64 MiB"))
        yield daemon
        daemon.stop()


@pytest.fixture
def start():
    """start(config): a daemon of a test's own; config may name {folder}."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        running = []

        def start_one(config=TIERS.format(device="1 MiB", host="16 MiB")):
            running.append(daemons.Daemon(folder, config.replace("{folder}", folder)))
            return running[-1]

        yield start_one
        for daemon in running:
            daemon.stop()
