"""Every state of the page: empty, busy, refused, full, asked for a token, the daemon gone."""

import re

import pytest

import kvkeep

GROUP = kvkeep.LayerGroup(layers=2, kv_heads=2, head_size_k=8, format_k=kvkeep.Format.FP32)
TOKEN = "token-of-an-operator"

CONFIG = """
[tiers]
device_bytes = 1 MiB
host_bytes = 2 MiB
huge_pages = no
[http]
address = 127.0.0.1:0
open = {open}
[tenant chat]
host_limit_bytes = 1 MiB
[tenant <b>agents</b>]
[credential engine]
uids = 0, {uid}
tenants = chat, <b>agents</b>
[credential operator]
token = {token}
tenants = chat
admin = yes
"""


def config(open_to):
    import os

    uid = os.getuid()
    text = CONFIG.format(open=open_to, uid=uid, token=TOKEN)
    return text.replace("0, 0", "0") if uid == 0 else text.replace("0, ", "")


def address(daemon):
    port = re.search(r"http_port=(\d+)", daemon.log.read_text()).group(1)
    return f"http://127.0.0.1:{port}/"


def wait_text(page, selector, word, timeout=8000):
    page.wait_for_function("([selector, word]) => document.querySelector(selector)?.textContent"
                           ".includes(word)", arg=[selector, word], timeout=timeout)


def fill(session, client, tenant="chat", count=4):
    """Sequences whose blocks are sealed, still open; the space."""
    space = client.open_space(kvkeep.Identity(model="tiny"), [GROUP], block_tokens=4, tenant=tenant)
    sequences = []
    for number in range(count):
        tokens = list(range(1000 * number, 1000 * number + 40))
        client.lookup(space, tokens)
        sequence = session.open_sequence(space, tokens)
        sequence.seal(all_ranks=True)
        sequences.append(sequence)
    return space, sequences


def test_empty(start, open_page):
    page = open_page(address(start(config("all"))))
    wait_text(page, "#state", "live")
    assert "chat" in page.text_content("#tenants")
    assert "none is open" in page.text_content("#sequences")
    assert "drawn as soon as" in page.text_content("#rate")
    assert "nothing was refused" in page.text_content("#why")
    assert page.locator("#tiers .bar").count() == 2
    assert page.is_hidden("#login")


def test_busy(start, open_page):
    daemon = start(config("all"))
    with kvkeep.connect(daemon.target) as client, client.session(name="engine 7") as session:
        space, sequences = fill(session, client)
        lease = session.pin(space, list(range(40)))
        page = open_page(address(daemon))
        wait_text(page, "#sequences", str(sequences[0].id))
        wait_text(page, "#leases", "engine 7")
        assert str(lease.id) in page.text_content("#leases")
        wait_text(page, "#tenants", "chat")
        assert "1.0 MiB" in page.text_content("#tenants")  # the limit
        assert page.locator("#tiers .fill-active").first.get_attribute("width") != "0"
        # A new look-up between two rounds draws the line of the hit rate.
        for _ in range(3):
            client.lookup(space, list(range(40)))
            page.wait_for_timeout(2300)
        assert page.locator("#rate polyline.rate").count() == 1
        page.fill("#sequence-search", str(sequences[1].id))
        assert page.locator("#sequences tbody tr").count() == 1
        page.fill("#sequence-search", "nothing like it")
        assert "none matches" in page.text_content("#sequences")
        lease.release()


def test_a_refusal_is_explained(start, open_page):
    daemon = start(config("all"))
    with kvkeep.connect(daemon.target, retry=kvkeep.Retry(attempts=1)) as client, \
            client.session() as session:
        space, _ = fill(session, client)
        with pytest.raises(kvkeep.KvkeepError):
            session.open_sequence(space, list(range(7000, 7000 + 4 * 4000)))
        page = open_page(address(daemon))
        wait_text(page, "#why", "OpenSequence")
        assert page.text_content("#advice") != ""


def test_a_name_is_text_and_never_markup(start, open_page):
    daemon = start(config("all"))
    with kvkeep.connect(daemon.target) as client:
        with client.session(tenant="<b>agents</b>") as session:
            fill(session, client, tenant="<b>agents</b>", count=1)
            page = open_page(address(daemon))
            wait_text(page, "#tenants", "<b>agents</b>")
            assert page.locator("#tenants b, #sequences b").count() == 0


def test_a_token_is_asked_for(start, open_page):
    page = open_page(address(start(config("metrics"))))
    page.wait_for_selector("#login:not([hidden])")
    assert page.is_hidden("#main")
    assert page.evaluate("document.activeElement.id") == "token"  # usable from the keyboard
    page.keyboard.type("not the right token at all")
    page.keyboard.press("Enter")
    page.wait_for_selector("#login-error:not(:empty)")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    wait_text(page, "#state", "live")
    assert page.is_hidden("#login")


def test_the_daemon_goes_away_and_comes_back(start, open_page):
    daemon = start(config("all").replace("127.0.0.1:0", "127.0.0.1:29481"))
    page = open_page(address(daemon))
    wait_text(page, "#state", "live")
    daemon.kill()
    wait_text(page, "#state", "does not answer")
    daemon.start()
    wait_text(page, "#state", "live", timeout=15000)


@pytest.mark.parametrize("width", [360, 820, 1400])
def test_nothing_is_wider_than_the_screen(start, open_page, width):
    daemon = start(config("all"))
    with kvkeep.connect(daemon.target) as client, client.session() as session:
        fill(session, client)
        page = open_page(address(daemon), viewport={"width": width, "height": 800})
        wait_text(page, "#tenants", "chat")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_and_light(start, open_page):
    url = address(start(config("all")))
    grounds = set()
    for scheme in ("dark", "light"):
        page = open_page(url, color_scheme=scheme)
        wait_text(page, "#state", "live")
        grounds.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(grounds) == 2


def test_fleet(start, open_page, shared_store):
    """Two nodes of one store; a node that shares none shows nothing of it."""
    one, two = (start(config("all") + shared_store(name)) for name in ("left", "right"))
    with kvkeep.connect(one.target) as client, client.session(name="e") as session:
        fill(session, client)
    page = open_page(address(two), viewport={"width": 1200, "height": 900})
    wait_text(page, "#fleet", "right (this one)", 20000)
    wait_text(page, "#fleet", "left", 40000)
    assert "store: good" in page.text_content("#store")
    assert page.locator("#fleet tbody tr").count() == 2
    assert page.locator("#fleet .meter").count() == 4  # two tiers each
    shared_store.kill()
    wait_text(page, "#store", "away", 40000)
    wait_text(page, "#state", "live")
    alone = open_page(address(start(config("all"))))
    wait_text(alone, "#state", "live")
    assert alone.is_hidden("#fleet-section")
