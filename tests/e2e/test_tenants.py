"""The life of tenants and credentials over the Admin service: created, rotated, switched, deleted,
kept over restarts; and what a caller who may not hears."""

import json
import os
import pathlib
import socket
import subprocess
import unicodedata

import grpc
import pytest

from conftest import Daemon, binary
from worker import Refused, Worker, pb, prompt, rpc, space_request, tokens

CODE = grpc.StatusCode
PLENTY = list(range(100, 116))

CONFIG = """
[server]
tcp_address = 127.0.0.1:0
auth_failures = 5
auth_failure_ms = 30 s

[tiers]
device_bytes = 4 MiB
host_bytes = 8 MiB
huge_pages = no

[durable]
folder = {folder}/durable

[tenant filed]
mode = on

[credential filed]
token = filed-filed-filed-filed
tenants = filed

[credential operator]
uids = {uid}
admin = yes
"""


class Site:
    """A daemon with a folder that outlives it."""

    def __init__(self, folder):
        self.folder = folder
        self.config = CONFIG.format(folder=folder, uid=os.geteuid())
        self.daemon = Daemon(folder, self.config)

    def restart(self):
        self.daemon.stop()
        self.daemon = Daemon(self.folder, self.config)

    @property
    def tcp(self):
        return f"127.0.0.1:{self.daemon.tcp_port}"

    def admin(self, name, request, token=None, target=None):
        stub = rpc.AdminStub(self.daemon.channel(target))
        metadata = [("authorization", f"Bearer {token}")] if token else []
        return getattr(stub, name)(request, metadata=metadata, timeout=20)

    def create(self, name, **changes):
        return self.admin("CreateTenant", pb.CreateTenantRequest(name=name, **changes))

    def credential(self, name, tenants, **changes):
        return self.admin("CreateCredential", pb.CreateCredentialRequest(
            name=name, tenants=tenants, token=True, **changes)).token.decode()

    def info(self, token, target=None):
        stub = rpc.KvkeepStub(self.daemon.channel(target or self.tcp))
        metadata = [("authorization", f"Bearer {token}")] if token else []
        return stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=20)

    def stats(self):
        answer = self.admin("GetStats", pb.GetStatsRequest())
        return {row.name.decode(): row.value for row in answer.stats}

    def audit(self):
        path = pathlib.Path(self.folder) / "durable" / "audit.log"
        assert path.stat().st_mode & 0o777 == 0o600
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def site(folder):
    site = Site(folder)
    yield site
    site.daemon.stop()


def fill(worker, values, model=b"tiny"):
    """Seal the prompt and close it: what others of the tenant may find."""
    space = worker.call("OpenSpace", space_request(model=model))
    opened = worker.call("OpenSequence", pb.OpenSequenceRequest(
        session_id=worker.id, space_id=space.space_id, prompt=prompt(values)))
    worker.seal(opened.sequence_id, len(values))
    worker.close(opened.sequence_id)
    return space.space_id


def look(worker, space_id, values):
    return worker.call("Lookup", pb.LookupRequest(
        space_id=space_id, prompt=prompt(values))).cached_tokens


def test_life_of_a_tenant(site):
    made = site.create(b"research", quota=pb.TenantQuota(host_limit_bytes=1 << 20, sequences=7))
    assert made.created and made.tenant_id > 0
    again = site.create(b"research", quota=pb.TenantQuota(host_limit_bytes=1 << 20, sequences=7))
    assert not again.created and again.tenant_id == made.tenant_id
    with Refused(CODE.ALREADY_EXISTS, field="name"):
        site.create(b"research")
    rows = {row.name: row for row in site.admin("ListTenants", pb.ListTenantsRequest()).tenants}
    assert set(rows) == {b"filed", b"research"}
    assert rows[b"filed"].configured and not rows[b"research"].configured
    assert rows[b"research"].quota.sequences == 7
    assert rows[b"research"].quota.host_limit_bytes == 1 << 20
    assert rows[b"research"].mode == pb.MODE_ON

    token = site.credential(b"engine", [b"research"])
    assert token.startswith("kvk_") and len(token) == 68
    worker = Worker(site.daemon, token=token, target=site.tcp)
    space = fill(worker, PLENTY)
    assert look(worker, space, PLENTY) == 16

    site.admin("ChangeTenant", pb.ChangeTenantRequest(
        name=b"research", quota=pb.TenantQuota(sequences=1)))
    opened = worker.call("OpenSequence", pb.OpenSequenceRequest(
        session_id=worker.id, space_id=space, prompt=prompt([1, 2, 3])))
    with Refused(CODE.RESOURCE_EXHAUSTED, pb.CAUSE_TENANT_LIMIT):
        worker.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=worker.id, space_id=space, prompt=prompt([4, 5, 6])))
    worker.close(opened.sequence_id)
    worker.leave()

    gone = site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"research"))
    assert gone.credentials == 1 and gone.spaces == 1
    assert gone.device_blocks + gone.host_blocks == 4
    with Refused(CODE.UNAUTHENTICATED):
        site.info(token)
    with Refused(CODE.NOT_FOUND, field="name"):
        site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"research"))
    occupancy = site.admin("GetOccupancy", pb.GetOccupancyRequest())
    assert all(tier.used_bytes == 0 for tier in occupancy.tiers)

    # The next of the same name is another: nothing of the first is found.
    assert site.create(b"research").tenant_id != made.tenant_id
    worker = Worker(site.daemon, token=site.credential(b"engine", [b"research"]), target=site.tcp)
    space = worker.call("OpenSpace", space_request()).space_id
    assert look(worker, space, PLENTY) == 0
    worker.leave()


def test_a_restart_keeps_them(site):
    ids = {name: site.create(name).tenant_id for name in (b"a", b"b")}
    tokens_of = {b"a": site.credential(b"one", [b"a"]), b"b": site.credential(b"two", [b"b", b"a"])}
    site.admin("ChangeTenant", pb.ChangeTenantRequest(
        name=b"b", mode=pb.MODE_SHADOW, set_may_publish=True, may_publish=True,
        quota=pb.TenantQuota(leases=3, idle_ms=60000, refuse_over_quota=True)))
    before = site.admin("ListTenants", pb.ListTenantsRequest())
    listed = site.admin("ListCredentials", pb.ListCredentialsRequest())
    site.restart()
    assert site.admin("ListTenants", pb.ListTenantsRequest()) == before
    assert site.admin("ListCredentials", pb.ListCredentialsRequest()) == listed
    rows = {row.name: row for row in before.tenants}
    assert rows[b"b"].mode == pb.MODE_SHADOW and rows[b"b"].may_publish
    assert rows[b"b"].quota.leases == 3 and rows[b"b"].quota.refuse_over_quota
    assert {name: rows[name].tenant_id for name in ids} == ids
    assert site.info(tokens_of[b"a"]).tenant == b"a"
    assert list(site.info(tokens_of[b"b"]).tenants) == [b"b", b"a"]


def test_a_token_is_shown_once(site):
    site.create(b"a")
    token = site.credential(b"engine", [b"a"])
    rotated = site.admin("RotateToken", pb.RotateTokenRequest(name=b"engine",
                                                             overlap_s=60)).token.decode()
    listed = site.admin("ListCredentials", pb.ListCredentialsRequest())
    row = {row.name: row for row in listed.credentials}[b"engine"]
    assert [token.expires_s > 0 for token in row.tokens] == [True, False]
    site.daemon.stop()
    # Neither it nor what a look at the digest would find lies anywhere.
    for path in pathlib.Path(site.folder).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for secret in (token, rotated):
                assert secret.encode() not in content, path
                assert bytes.fromhex(secret[4:]) not in content, path
    assert token.encode() not in listed.SerializeToString()
    site.daemon = Daemon(site.folder, site.config)


def test_rotation_overlaps_and_revocation_does_not(site):
    site.create(b"a")
    old = site.credential(b"engine", [b"a"])
    new = site.admin("RotateToken", pb.RotateTokenRequest(name=b"engine",
                                                         overlap_s=3600)).token.decode()
    assert site.info(old).tenant == site.info(new).tenant == b"a"
    site.restart()
    assert site.info(old).tenant == site.info(new).tenant == b"a"
    newest = site.admin("RotateToken", pb.RotateTokenRequest(name=b"engine")).token.decode()
    assert site.info(newest).tenant == b"a"
    for ended in (old, new):
        with Refused(CODE.UNAUTHENTICATED):
            site.info(ended)
    assert site.admin("RevokeTokens", pb.RevokeTokensRequest(name=b"engine")).tokens == 1
    assert site.admin("RevokeTokens", pb.RevokeTokensRequest(name=b"engine")).tokens == 0
    with Refused(CODE.UNAUTHENTICATED):
        site.info(newest)
    site.admin("DeleteCredential", pb.DeleteCredentialRequest(name=b"engine"))
    with Refused(CODE.NOT_FOUND, field="name"):
        site.admin("DeleteCredential", pb.DeleteCredentialRequest(name=b"engine"))


def test_a_revoked_engine_is_refused_in_its_session(site):
    site.create(b"a")
    worker = Worker(site.daemon, token=site.credential(b"engine", [b"a"]), target=site.tcp)
    space = fill(worker, PLENTY)
    site.admin("RevokeTokens", pb.RevokeTokensRequest(name=b"engine"))
    with Refused(CODE.UNAUTHENTICATED):
        look(worker, space, PLENTY)
    worker.channel.close()


def test_admin_rights_are_apart(site):
    """An admin without tenants reads nobody's data; a tenant administers nothing."""
    site.create(b"a")
    token = site.credential(b"engine", [b"a"])
    worker = Worker(site.daemon, token=token, target=site.tcp)
    space = fill(worker, PLENTY)
    operator = site.credential(b"operator-2", [], admin=True)

    with Refused(CODE.PERMISSION_DENIED):
        Worker(site.daemon, token=operator, target=site.tcp)
    stub = rpc.KvkeepStub(site.daemon.channel(site.tcp))
    metadata = [("authorization", f"Bearer {operator}")]
    with Refused(CODE.NOT_FOUND, field="space_id"):
        stub.Lookup(pb.LookupRequest(space_id=space, prompt=prompt(PLENTY)), metadata=metadata)
    with Refused(CODE.PERMISSION_DENIED):
        stub.OpenSpace(space_request(tenant=b"a"), metadata=metadata)
    assert site.admin("ListTenants", pb.ListTenantsRequest(), token=operator).tenants

    calls = [
        ("CreateTenant", pb.CreateTenantRequest(name=b"x")),
        ("ChangeTenant", pb.ChangeTenantRequest(name=b"a", mode=pb.MODE_OFF)),
        ("DeleteTenant", pb.DeleteTenantRequest(name=b"a")),
        ("CreateCredential", pb.CreateCredentialRequest(name=b"x", admin=True, token=True)),
        ("ListCredentials", pb.ListCredentialsRequest()),
        ("RotateToken", pb.RotateTokenRequest(name=b"operator-2")),
        ("RevokeTokens", pb.RevokeTokensRequest(name=b"operator-2")),
        ("DeleteCredential", pb.DeleteCredentialRequest(name=b"operator-2")),
        ("SetSpaceMode", pb.SetSpaceModeRequest(space_id=space, mode=pb.MODE_OFF)),
    ]
    for name, request in calls:
        with Refused(CODE.PERMISSION_DENIED):
            site.admin(name, request, token=token, target=site.tcp)
    # A tenant sees itself alone.
    rows = site.admin("ListTenants", pb.ListTenantsRequest(), token=token, target=site.tcp).tenants
    assert [row.name for row in rows] == [b"a"]
    worker.leave()


def test_the_file_is_changed_in_the_file(site):
    cases = [
        ("ChangeTenant", pb.ChangeTenantRequest(name=b"filed", quota=pb.TenantQuota(leases=1))),
        ("DeleteTenant", pb.DeleteTenantRequest(name=b"filed")),
        ("RotateToken", pb.RotateTokenRequest(name=b"filed")),
        ("RevokeTokens", pb.RevokeTokensRequest(name=b"filed")),
        ("DeleteCredential", pb.DeleteCredentialRequest(name=b"operator")),
    ]
    for name, request in cases:
        with Refused(CODE.FAILED_PRECONDITION, field="name") as refused:
            site.admin(name, request)
        assert "configuration file" in refused.detail.message.decode()
    # But a credential of the catalogue may act for a tenant of the file, and the switch works.
    token = site.credential(b"engine", [b"filed"])
    assert site.info(token).tenant == b"filed"
    site.admin("ChangeTenant", pb.ChangeTenantRequest(name=b"filed", mode=pb.MODE_OFF))
    with Refused(CODE.PERMISSION_DENIED, pb.CAUSE_SWITCHED_OFF):
        Worker(site.daemon, token=token, target=site.tcp)
    site.restart()
    Worker(site.daemon, token=token, target=site.tcp).leave()


def test_without_a_folder_nothing_is_changed(start):
    daemon = start()
    stub = rpc.AdminStub(daemon.channel())
    with Refused(CODE.FAILED_PRECONDITION, field="durable.folder"):
        stub.CreateTenant(pb.CreateTenantRequest(name=b"a"))


def test_a7_names_have_one_spelling(site):
    """U+00C5, U+212B and A with a ring are one tenant; what is no name is refused by name."""
    spellings = ["\u00c5", "\u212b", "A\u030a"]
    made = [site.create(spelling.encode()) for spelling in spellings]
    assert [answer.created for answer in made] == [True, False, False]
    assert {answer.name.decode() for answer in made} == {"\u00c5"}
    token = site.credential(b"engine", ["\u212b".encode()])
    worker = Worker(site.daemon, token=token, tenant="A\u030a".encode(), target=site.tcp)
    fill(worker, PLENTY)
    space = worker.call("OpenSpace", space_request(tenant="\u212b".encode())).space_id
    assert look(worker, space, PLENTY) == 16
    worker.leave()
    site.restart()
    for name in (b"", b"\xff", b"a\0b", b"a\nb", b"a,b", "a\u200b".encode(), b"x" * 256,
                 b"x" * 40960, b"\xc0\xaf"):
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "name"):
            site.create(name)
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD):
            site.credential(b"c", [name])
    # A name is a value, never a path.
    for name in (b"../x", b"a/b", b"a@b"):
        assert site.create(name).created
    assert not (pathlib.Path(site.folder) / "x").exists()
    for one, other in [((b"a@b", b"c"), (b"a", b"b@c"))]:
        workers = []
        for index, (tenant, model) in enumerate((one, other)):
            site.create(tenant)
            worker = Worker(site.daemon, token=site.credential(b"e%d" % index, [tenant]),
                            target=site.tcp)
            workers.append((worker, model))
        fill(workers[0][0], PLENTY, workers[0][1])
        worker, model = workers[1]
        space = worker.call("OpenSpace", space_request(model=model)).space_id
        assert look(worker, space, PLENTY) == 0
        for worker, _ in workers:
            worker.leave()


def test_wrong_requests_are_named(site):
    site.create(b"a")
    cases = [
        (pb.CreateCredentialRequest(name=b"c", tenants=[b"a"]), "token"),
        (pb.CreateCredentialRequest(name=b"c", token=True), "tenants"),
        (pb.CreateCredentialRequest(name=b"c", tenants=[b"a", b"a"], token=True), "tenants"),
        (pb.CreateCredentialRequest(name=b"c", tenants=[b"a"], uids=[2**32 - 1]), "uids"),
        (pb.CreateCredentialRequest(name=b"c", tenants=[b"a"], uids=range(17)), "uids"),
        (pb.CreateCredentialRequest(name=b"c", tenants=[b"a"], certificate=b"\xff"), "certificate"),
    ]
    for request, field in cases:
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, field):
            site.admin("CreateCredential", request)
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD):
        site.admin("CreateCredential", pb.CreateCredentialRequest(
            name=b"c", tenants=[b"t%d" % i for i in range(201)], token=True))
    with Refused(CODE.NOT_FOUND, field="tenants"):
        site.credential(b"c", [b"nobody"])
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "quota.sequences"):
        site.create(b"q", quota=pb.TenantQuota(sequences=2**32))
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "mode"):
        site.create(b"q", mode=9)
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "overlap_s"):
        site.admin("RotateToken", pb.RotateTokenRequest(name=b"filed", overlap_s=2**40))
    # An impossible quota leaves no tenant behind, and a change to one changes nothing.
    with Refused(CODE.INVALID_ARGUMENT):
        site.create(b"q", quota=pb.TenantQuota(device_guaranteed_bytes=1 << 40))
    site.admin("ChangeTenant", pb.ChangeTenantRequest(name=b"a", quota=pb.TenantQuota(leases=5)))
    with Refused(CODE.INVALID_ARGUMENT):
        site.admin("ChangeTenant", pb.ChangeTenantRequest(
            name=b"a", quota=pb.TenantQuota(device_guaranteed_bytes=1 << 40)))
    rows = {row.name: row for row in site.admin("ListTenants", pb.ListTenantsRequest()).tenants}
    assert set(rows) == {b"filed", b"a"}
    assert rows[b"a"].quota.leases == 5 and rows[b"a"].quota.device_guaranteed_bytes == 0


def test_an_engine_of_a_hundred_tenants(site):
    """One token for a node full of tenants, also after a restart; another's stay out of reach."""
    names = [b"tenant %d" % i for i in range(100)]
    for name in [*names, b"other"]:
        site.create(name)
    token = site.credential(b"engine", names)
    info = site.info(token)
    assert list(info.tenants) == names
    site.restart()
    assert list(site.info(token).tenants) == names
    worker = Worker(site.daemon, token, tenant=names[99], target=site.tcp)
    worker.open_space(tenant=names[99])
    with Refused(CODE.PERMISSION_DENIED):
        worker.open_space(tenant=b"other")
    worker.leave()
    wanted = [word for name in names for word in ("--tenant", name.decode())]
    done = ctl(site, "credential", "create", "by hand", *wanted)
    assert done.returncode == 0, done.stderr
    assert list(site.info(done.stdout.split()[-1]).tenants) == names
    done = ctl(site, "credential", "create", "more", *wanted, *wanted, "--tenant", "other")
    assert done.returncode == 2 and "first 200" in done.stderr, done.stderr


def test_an_engine_of_two_tenants(site):
    """Each request is charged to its own tenant, and neither finds the other's."""
    for name in (b"a", b"b", b"c"):
        site.create(name)
    token = site.credential(b"engine", [b"a", b"b"])
    workers = {name: Worker(site.daemon, token=token, tenant=name, target=site.tcp)
               for name in (b"a", b"b")}
    fill(workers[b"a"], PLENTY)
    space = workers[b"b"].call("OpenSpace", space_request(tenant=b"b")).space_id
    assert look(workers[b"b"], space, PLENTY) == 0
    with Refused(CODE.PERMISSION_DENIED, pb.CAUSE_NOT_OWNER, "tenant"):
        workers[b"a"].call("OpenSpace", space_request(tenant=b"c"))

    def used():
        answer = site.admin("GetOccupancy", pb.GetOccupancyRequest())
        sums = {}
        for row in answer.rows:
            sums[row.tenant] = sums.get(row.tenant, 0) + row.device_bytes + row.host_bytes
        return sums

    one = used()
    assert one[b"a"] > 0 and one.get(b"b", 0) == 0
    opened = workers[b"b"].call("OpenSequence", pb.OpenSequenceRequest(
        session_id=workers[b"b"].id, space_id=space, prompt=prompt(PLENTY)))
    assert opened.cached_tokens == 0
    workers[b"b"].seal(opened.sequence_id, 16)
    both = used()
    assert both[b"b"] == one[b"a"] and both[b"a"] == one[b"a"]
    # A session of one tenant cannot use the other's space, whatever the credential.
    with Refused(CODE.PERMISSION_DENIED, pb.CAUSE_NOT_OWNER, "space_id"):
        workers[b"a"].call("OpenSequence", pb.OpenSequenceRequest(
            session_id=workers[b"a"].id, space_id=space, prompt=prompt(PLENTY)))
    # Deleting one leaves the other, and the engine goes on for it.
    workers[b"a"].leave()
    site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"a"))
    assert used() == {b"b": both[b"b"]}
    assert list(site.info(token).tenants) == [b"b"]
    workers[b"b"].leave()


def test_deleting_ends_what_runs(site):
    site.create(b"a")
    worker = Worker(site.daemon, token=site.credential(b"engine", [b"a"]), target=site.tcp)
    space = worker.call("OpenSpace", space_request()).space_id
    worker.call("OpenSequence", pb.OpenSequenceRequest(
        session_id=worker.id, space_id=space, prompt=prompt(PLENTY)))
    answer = site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"a"))
    assert answer.instances == 1 and answer.sequences == 1
    occupancy = site.admin("GetOccupancy", pb.GetOccupancyRequest())
    assert all(tier.used_bytes == 0 for tier in occupancy.tiers)
    with Refused(CODE.UNAUTHENTICATED):
        look(worker, space, PLENTY)
    worker.channel.close()


def test_modes(site):
    """Off: every call is refused. Shadow: calls work as with an empty cache, and share nothing."""
    site.create(b"a")
    token = site.credential(b"engine", [b"a"])
    worker = Worker(site.daemon, token=token, target=site.tcp)
    space = fill(worker, PLENTY)
    other = list(range(500, 516))

    def check_off(turn, back):
        turn(pb.MODE_OFF)
        refusals = [
            ("Lookup", pb.LookupRequest(space_id=space, prompt=prompt(PLENTY))),
            ("OpenSequence", pb.OpenSequenceRequest(session_id=worker.id, space_id=space,
                                                    prompt=prompt(PLENTY))),
            ("Pin", pb.PinRequest(session_id=worker.id, space_id=space, prompt=prompt(PLENTY),
                                  ttl_ms=1000)),
        ]
        for name, request in refusals:
            with Refused(CODE.PERMISSION_DENIED, pb.CAUSE_SWITCHED_OFF):
                worker.call(name, request)
        back(pb.MODE_ON)
        assert look(worker, space, PLENTY) == 16

    def check_shadow(turn, back):
        turn(pb.MODE_SHADOW)
        before = site.stats()["kvkeep_lookup_total"]
        assert look(worker, space, PLENTY) == 0
        assert site.stats()["kvkeep_lookup_total"] == before + 1
        opened = worker.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=worker.id, space_id=space, prompt=prompt(other)))
        assert opened.cached_tokens == 0
        worker.seal(opened.sequence_id, 16)
        back(pb.MODE_ON)
        assert look(worker, space, other) == 0  # sealed in shadow: found by nobody, ever
        worker.close(opened.sequence_id)
        assert look(worker, space, other) == 0
        assert look(worker, space, PLENTY) == 16

    def tenant(mode):
        site.admin("ChangeTenant", pb.ChangeTenantRequest(name=b"a", mode=mode))

    def one_space(mode):
        site.admin("SetSpaceMode", pb.SetSpaceModeRequest(space_id=space, mode=mode))

    words = {pb.MODE_OFF: "off", pb.MODE_SHADOW: "shadow", pb.MODE_ON: "on"}

    def by_ctl(mode):
        told = ctl(site, "space", "mode", str(space), words[mode])
        assert told.returncode == 0 and told.stdout == f"space {space}: {words[mode]}\n", told
        listed = json.loads(ctl(site, "--json", "spaces").stdout)
        assert [row["mode"] for row in listed if row["space_id"] == space] == [words[mode]]
        assert str(space) in [row["id"] for row in listed]
        assert str(space) in ctl(site, "spaces").stdout.split()  # where `space mode` sends one

    for turn in (tenant, one_space, by_ctl):
        check_off(turn, turn)
        check_shadow(turn, turn)
    with Refused(CODE.NOT_FOUND, field="space_id"):
        site.admin("SetSpaceMode", pb.SetSpaceModeRequest(space_id=space + 1, mode=pb.MODE_OFF))
    with Refused(CODE.INVALID_ARGUMENT, field="mode"):
        site.admin("SetSpaceMode", pb.SetSpaceModeRequest(space_id=space))
    gone = ctl(site, "space", "mode", str(space + 1), "off")
    assert gone.returncode == 1 and "space_id" in gone.stderr, gone.stderr
    for wrong in (["mode", str(space), "of"], ["mode", "x", "off"], ["mode", str(space)], []):
        assert ctl(site, "space", *wrong).returncode == 2
    worker.leave()


def test_failed_attempts_are_limited(site):
    """After five failures an address is refused with a time; who holds a token of kvkeep's own
    making is let in all the same, a guessable one is not, and the unix socket is another source."""
    site.create(b"a")
    token = site.credential(b"engine", [b"a"])
    filed = "filed-filed-filed-filed"
    assert site.info(filed).tenant == b"filed"
    before = site.stats()
    for _ in range(5):
        with Refused(CODE.UNAUTHENTICATED):
            site.info("not-a-token-of-anybody")
    with Refused(CODE.RESOURCE_EXHAUSTED, pb.CAUSE_LIMIT, "server.auth_failures") as refused:
        site.info("not-a-token-of-anybody")
    assert 0 < refused.detail.retry_after_ms <= 30001
    assert refused.detail.limit == 5
    with Refused(CODE.RESOURCE_EXHAUSTED, pb.CAUSE_LIMIT, "server.auth_failures"):
        site.info(filed)
    assert site.info(token).tenant == b"a"
    assert site.info(None, site.daemon.target).admin
    assert site.info(filed, site.daemon.target).tenant == b"filed"
    after = site.stats()
    assert after["kvkeep_auth_failures_total"] == before["kvkeep_auth_failures_total"] + 6
    assert after["kvkeep_auth_limited_total"] == before["kvkeep_auth_limited_total"] + 2
    assert (after["kvkeep_callers_identified_total"] >
            before["kvkeep_callers_identified_total"])


def test_audit(site):
    site.create(b"a", quota=pb.TenantQuota(leases=9))
    token = site.credential(b"engine", [b"a"])
    with Refused(CODE.PERMISSION_DENIED):
        site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"a"), token=token,
                   target=site.tcp)
    site.admin("DeleteCredential", pb.DeleteCredentialRequest(name=b"engine"))
    site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"a"))
    stats = site.stats()
    assert stats["kvkeep_audit_entries_total"] == 5
    assert stats["kvkeep_audit_failures_total"] == 0
    assert stats["kvkeep_tenants"] == 1 and stats["kvkeep_credentials"] == 2
    assert stats["kvkeep_tenant_changes_total"] >= 4
    site.restart()
    entries = site.audit()
    assert [(entry["who"], entry["call"], entry["object"], entry["result"])
            for entry in entries] == [
        ("operator", "CreateTenant", "a", "OK"),
        ("operator", "CreateCredential", "engine", "OK"),
        ("engine", "DeleteTenant", "", "PERMISSION"),
        ("operator", "DeleteCredential", "engine", "OK"),
        ("operator", "DeleteTenant", "a", "OK"),
    ]
    assert entries[0]["peer"].startswith(f"unix:uid={os.geteuid()},pid=")
    assert entries[2]["peer"].startswith("ipv4:127.0.0.1:")
    assert "leases=9" in entries[0]["details"]
    assert token not in json.dumps(entries)
    assert token not in site.daemon.log.read_text()


def ctl(site, *arguments, env=None):
    program = os.path.join(os.path.dirname(binary()), "kvkeepctl")
    return subprocess.run([program, "--connect", site.daemon.target, *arguments], timeout=30,
                          capture_output=True, text=True, env={**os.environ, **(env or {})})


def test_kvkeepctl_audit(site):
    site.create(b"a")
    site.create(b"b")
    token = site.credential(b"engine", [b"a"])
    with Refused(CODE.PERMISSION_DENIED):
        site.admin("DeleteTenant", pb.DeleteTenantRequest(name=b"a"), token=token,
                   target=site.tcp)
    folder = str(pathlib.Path(site.folder) / "durable")

    def calls(*arguments):
        shown = ctl(site, "--json", "audit", "--folder", folder, *arguments)
        assert shown.returncode == 0, shown.stderr
        return [(entry["call"], entry["object"]) for entry in json.loads(shown.stdout)]

    created = [("CreateTenant", "a"), ("CreateTenant", "b")]
    engine = ("CreateCredential", "engine")
    assert calls() == [*created, engine, ("DeleteTenant", "")]
    assert calls("--tenant", "a") == [created[0], engine]
    assert calls("--action", "CreateTenant") == created
    assert calls("--who", "engine") == calls("--failed") == [("DeleteTenant", "")]
    assert len(calls("--since", "1h")) == 4 and calls("--since", "2999-01-01") == []
    # The older file comes first, and a broken line hides nothing.
    older = {"time": "2020-02-02T02:02:02.000Z", "who": "x\u001b[2J", "call": "Drain", "object": "",
             "details": "", "result": "OK", "reason": "", "peer": "unix:uid=0"}
    (pathlib.Path(folder) / "audit.log.1").write_text(json.dumps(older) + "\n{torn\n")
    assert calls()[0] == ("Drain", "") and len(calls()) == 5
    assert len(calls("--since", "2020-02-03T00:00:00")) == 4
    text = ctl(site, "audit", "--folder", folder)
    assert "CreateTenant" in text.stdout and "\x1b" not in text.stdout
    assert "1 lines are no entries" in text.stderr
    assert ctl(site, "audit", "--folder", folder, "--since", "soon").returncode == 2
    assert ctl(site, "audit").returncode == 2
    assert ctl(site, "audit", "--folder", folder + "/none").returncode == 1


def test_kvkeepctl(site):
    made = ctl(site, "tenant", "create", "research", "--host", "1 GiB", "--device-share", "1MiB",
               "--sequences", "5", "--over-quota", "refuse", "--idle", "60")
    assert made.returncode == 0, made.stderr
    listed = json.loads(ctl(site, "--json", "tenant", "list").stdout)
    row = {row["name"]: row for row in listed}["research"]
    assert row["quota"]["host_limit_bytes"] == 1 << 30
    assert row["quota"]["device_guaranteed_bytes"] == 1 << 20
    assert row["quota"]["over_quota"] == "refuse" and row["quota"]["idle_ms"] == 60000
    assert ctl(site, "tenant", "change", "research", "--leases", "4").returncode == 0
    listed = json.loads(ctl(site, "--json", "tenant", "list").stdout)
    row = {row["name"]: row for row in listed}["research"]
    assert row["quota"]["leases"] == 4 and row["quota"]["sequences"] == 5
    assert "research" in ctl(site, "tenant", "list").stdout

    token = ctl(site, "credential", "create", "engine", "--tenant", "research").stdout.strip()
    assert site.info(token).tenant == b"research"
    worker = Worker(site.daemon, token=token, target=site.tcp)
    space = worker.call("OpenSpace", space_request()).space_id
    told = ctl(site, "tenant", "change", "research", "--host", "1 B")
    assert told.returncode == 0 and "research changed" in told.stdout
    assert "warning: host_limit_bytes is 1, less than" in told.stderr
    assert f"space {space}" in told.stderr
    answer = json.loads(ctl(site, "--json", "tenant", "change", "research", "--leases", "4").stdout)
    assert len(answer["warnings"]) == 1 and answer["changed"] == "research"
    told = ctl(site, "tenant", "change", "research", "--host", "1 GiB")
    assert told.returncode == 0 and told.stderr == ""
    worker.leave()
    answer = ctl(site, "credential", "rotate", "engine", "--overlap", "60")
    assert "once" in answer.stderr and site.info(answer.stdout.strip()).tenant == b"research"
    assert site.info(token).tenant == b"research"
    shown = ctl(site, "credential", "list")
    assert "engine" in shown.stdout and token not in shown.stdout
    assert len(json.loads(ctl(site, "--json", "credential", "list").stdout)) == 3
    assert "2 tokens" in ctl(site, "credential", "revoke", "engine").stdout
    assert ctl(site, "credential", "delete", "engine").returncode == 0
    assert ctl(site, "credential", "delete", "engine").returncode == 1
    assert ctl(site, "tenant", "change", "research", "--mode", "off").returncode == 0
    assert "research deleted" in ctl(site, "tenant", "delete", "research").stdout
    for wrong in (["tenant"], ["tenant", "create"], ["tenant", "create", "x", "--host", "many"],
                  ["tenant", "change", "x", "--mode", "dim"], ["credential", "rotate"],
                  ["credential", "create", "x", "--uid", "me"]):
        answer = ctl(site, *wrong)
        assert answer.returncode == 2 and "usage" in answer.stderr, wrong
    for wrong, told in ((["--host", "64"], '--host: "64" is not a size'),
                        (["--host-share", "64G"], '--host-share: "64G" is not a size'),
                        (["--idle", "5m"], '--idle: "5m" is not a number of seconds'),
                        (["--mode", "dim"], '--mode: "dim" is not on, shadow or off'),
                        (["--rate", "many"], "--rate"), (["--hosts", "1GiB"], "--hosts"),
                        (["--host", "1GiB", "more"], "one name")):
        answer = ctl(site, "tenant", "create", "x", *wrong)
        assert answer.returncode == 2 and told in answer.stderr, (wrong, answer.stderr)
    assert ctl(site, "tenant", "create", "--host=1GiB").returncode == 2
    assert "x" not in [row["name"] for row in json.loads(
        ctl(site, "--json", "tenant", "list").stdout)]


def test_kvkeepctl_changes_no_tenant_that_it_has_not_found(site):
    """The daemon would know the decomposed name as well, and what was not named would be lost."""
    name = unicodedata.normalize("NFC", "\u00dcber")
    assert ctl(site, "tenant", "create", name, "--sequences", "7").returncode == 0
    answer = ctl(site, "tenant", "change", unicodedata.normalize("NFD", name), "--leases", "3")
    assert answer.returncode == 1 and "tenant list" in answer.stderr
    assert ctl(site, "tenant", "change", name, "--leases", "3").returncode == 0
    row = next(row for row in json.loads(ctl(site, "--json", "tenant", "list").stdout)
               if row["name"] == name)
    assert row["quota"]["sequences"] == 7 and row["quota"]["leases"] == 3


def test_kvkeepctl_says_what_is_wrong_with_a_line(site):
    """A sentence that is one, before the usage, for commands that take next to nothing, too."""
    for line, told in ((["stats", "now"], "kvkeepctl stats: wants options only\n"),
                       (["leases", "--limit", "abc"], '--limit: "abc" is not a whole number'),
                       (["audit"], "kvkeepctl audit: --folder is needed"),
                       (["invalidate"], "kvkeepctl invalidate: name what is meant"),
                       (["publish", "--space", "1", "--tokens", "x"], "publish: --tokens wants"),
                       (["plan", "--budget", "40"], '--budget: "40" is none that it takes'),
                       (["--nothing", "status"], "kvkeepctl: no option --nothing"),
                       (["nothing"], "kvkeepctl: no command nothing")):
        answer = ctl(site, *line)
        assert answer.returncode == 2 and told in answer.stderr, (line, answer.stderr)
    assert ctl(site, "--version").stdout.startswith("kvkeepctl ")


def test_kvkeepctl_says_what_to_do_where_it_reaches_nobody(tmp_path):
    def ask(target):
        program = pathlib.Path(binary()).with_name("kvkeepctl")
        return subprocess.run([program, "--connect", target, "status"], capture_output=True,
                              text=True, timeout=30, check=False)

    answer = ask(f"unix:{tmp_path}/none.sock")
    assert answer.returncode == 3 and "KVKEEP_TARGET" in answer.stderr
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/left.sock")
    answer = ask(f"unix:{tmp_path}/left.sock")
    assert answer.returncode == 3 and "has ended" in answer.stderr
    answer = ask("localhost")
    assert answer.returncode == 1 and "HOST:PORT" in answer.stderr
