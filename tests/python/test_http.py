"""HTTP: metrics that promtool accepts, health, and who may ask what."""

import http.client
import json
import os
import re
import shutil
import subprocess
import time

import pytest

import kvkeep

TOKEN = "token-of-an-operator"
OTHER = "token-of-an-engine-no-admin"
CONFIG = """
[tiers]
device_bytes = 1 MiB
host_bytes = 2 MiB
huge_pages = no
[http]
address = 127.0.0.1:0
open = %s
[tenant chat]
[credential operator]
token = %s
tenants = chat
admin = yes
[credential engine]
token = %s
tenants = chat
uids = %d
"""


class Web:
    def __init__(self, daemon):
        self.port = int(re.search(r"http_port=(\d+)", daemon.log.read_text()).group(1))

    def ask(self, method, path, body=None, token=None, host=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {"Authorization": "Bearer " + token} if token else {}
        if host:
            headers["Host"] = host
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


@pytest.fixture
def web(start):
    def start_one(open_to="metrics"):
        return Web(start(CONFIG % (open_to, TOKEN, OTHER, os.getuid())))
    return start_one


def test_health(web):
    site = web()
    assert site.ask("GET", "/health/live")[:2] == (200, b"alive\n")
    assert site.ask("GET", "/health/ready")[:2] == (200, b"ready\n")
    assert site.ask("GET", "/nowhere")[0] == 404
    assert site.ask("DELETE", "/")[0] == 405


def test_metrics_are_as_prometheus_wants_them(start):
    daemon = start(CONFIG % ("metrics", TOKEN, OTHER, os.getuid()))
    site = Web(daemon)
    with kvkeep.connect(daemon.target) as client:
        group = kvkeep.LayerGroup(layers=1, kv_heads=1, head_size_k=8)
        space = client.open_space(kvkeep.Identity(model="m"), [group])
        for _ in range(3):
            client.lookup(space, [1] * 32)
    # How long a call took is known a moment after its caller has the answer.
    timed = 'kvkeep_call_seconds_count{method="Lookup"} 3'
    lines = []
    deadline = time.monotonic() + 30
    while timed not in lines and time.monotonic() < deadline:
        code, text, headers = site.ask("GET", "/metrics")
        assert code == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = text.decode().splitlines()
        assert "kvkeep_lookup_total 3" in lines
    assert timed in lines
    assert any(line.startswith("kvkeep_connections_live ") for line in lines)
    assert not [line for line in lines if "quantile" in line]
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "samples of one name lie together"
    assert all(line.split(None, 3)[3] for line in lines if line.startswith("# HELP"))
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True,
                              check=False)
        assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr.decode()


def test_what_needs_a_token(web):
    site = web()
    for body in (b"", b"{}"):
        assert site.ask("POST", "/api/GetOccupancy", body)[0] == 401
        assert site.ask("POST", "/api/GetOccupancy", body, token="not-a-token-of-anybody")[0] == 401
        assert site.ask("POST", "/api/GetOccupancy", body, token=OTHER)[0] == 403
        code, text, _ = site.ask("POST", "/api/GetOccupancy", body, token=TOKEN)
        assert code == 200
        tiers = json.loads(text)["tiers"]
        assert [tier["limit_bytes"] for tier in tiers][:2] == [1 << 20, 2 << 20]
    closed = web("none")
    assert closed.ask("GET", "/metrics")[0] == 401
    assert closed.ask("GET", "/metrics", token=TOKEN)[0] == 200
    assert closed.ask("GET", "/health/ready")[0] == 401
    assert closed.ask("GET", "/health/live")[0] == 200


def test_only_what_reads(web):
    site = web()
    for method in ("Invalidate", "CreateTenant", "DeleteTenant", "CreateCredential", "TestControl",
                   "OpenSpace", "Nothing", "", "../GetOccupancy"):
        assert site.ask("POST", "/api/" + method, b"{}", token=TOKEN)[0] == 404, method


def test_bad_requests(web):
    site = web()
    for body, word in ((b"[", "JSON"), (b"[]", "JSON"), (b'{"nosuch": 1}', "nosuch"),
                       (b'{"tenant": 7}', "tenant"), (b'{"tenant": "a\\u0000b"}', "JSON")):
        code, text, _ = site.ask("POST", "/api/GetOccupancy", body, token=TOKEN)
        assert code == 400 and word in text.decode(), (body, text)
    assert site.ask("POST", "/api/ListSequences", b'{"limit": -1}', token=TOKEN)[0] == 400
    for number, word in ((b"9223372036854775808", "JSON"), (b"18446744073709551616", "JSON"),
                         (b'"18446744073709551616"', "limit"), (b'"99999999999999999999"', "limit"),
                         (b'"1x"', "limit"), (b'""', "limit"), (b'" 1"', "limit"),
                         (b'"-1"', "limit"), (b"1.5", "limit"), (b"1e3", "limit")):
        code, text, _ = site.ask("POST", "/api/ListSequences", b'{"limit": %s}' % number,
                                 token=TOKEN)
        assert code == 400 and word in text.decode(), (number, text)
    for number in (b"9223372036854775807", b'"9223372036854775807"', b'"18446744073709551615"'):
        assert site.ask("POST", "/api/ListSequences", b'{"limit": %s}' % number,
                        token=TOKEN)[0] == 200, number
    assert site.ask("POST", "/api/GetOccupancy", b" " * 70000, token=TOKEN)[0] == 413
    assert site.ask("GET", "/health/live")[0] == 200


def test_open_to_all_is_for_this_machine_alone(web):
    site = web("all")
    assert site.ask("POST", "/api/GetOccupancy", b"{}")[0] == 200
    assert site.ask("POST", "/api/GetOccupancy", b"{}", host="evil.example:80")[0] == 403


def test_the_page_keeps_strangers_out(web):
    headers = web().ask("GET", "/")[2]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_bad_address_is_named_at_the_start(start, tmp_path):
    from conftest import binary

    for address, open_to, word in (("127.0.0.1", "metrics", "http.address"),
                                   ("127.0.0.1:x", "metrics", "http.address"),
                                   ("0.0.0.0:0", "all", "http.open")):
        path = tmp_path / "c.conf"
        path.write_text(f"[http]\naddress = {address}\nopen = {open_to}\n")
        done = subprocess.run([binary(), "--config", path, "--check-config"], capture_output=True,
                              timeout=5, check=False)
        assert done.returncode != 0 and word in done.stderr.decode(), done.stderr
