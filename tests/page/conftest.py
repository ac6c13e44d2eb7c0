"""The page in a real Chromium, on a real daemon fed by the Python client.

The daemon is found as in tests/python. Chromium is the system's; without one the tests are skipped,
and say so.
"""

import importlib.util
import pathlib
import secrets
import shutil
import socket
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("python_conftest",
                                               ROOT / "tests" / "python" / "conftest.py")
_house = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_house)
Daemon = _house.Daemon
start = _house.start

BROWSER = shutil.which("chromium")


@pytest.fixture(scope="session")
def browser():
    if BROWSER is None:
        pytest.skip("there is no chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """open_page(url, …): a page, whose script must not fail."""
    pages, errors = [], []

    def open_one(url, **options):
        page = browser.new_page(**options)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        pages.append(page)
        return page

    yield open_one
    for page in pages:
        page.close()
    assert not errors


class Store:
    """A store that daemons share: one server. Called with a node's name: [remote] of its file."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.key = folder / "fleet.key"
        self.key.write_text(secrets.token_hex(32))
        self.key.chmod(0o600)
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--dir", str(folder)], stdout=subprocess.DEVNULL)

    def __call__(self, name):
        return (f"\n[remote]\nseeds = 127.0.0.1:{self.port}\nkey_file = {self.key}\n"
                f"node_name = {name}\n")

    def kill(self):
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def shared_store(tmp_path):
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    store = Store(tmp_path)
    yield store
    store.kill()
