"""The page in a real Chromium, on a real daemon fed by the Python client.

The daemon is found as in tests/python. Chromium is the system's; without one the tests are skipped,
and say so.
"""

import importlib.util
import pathlib
import shutil

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
