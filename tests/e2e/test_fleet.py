"""kvkeepctl fleet, and GetFleet behind it: daemons that share a store find each other."""

import json
import os
import pathlib
import subprocess
import time

import grpc
from kvkeep.v1 import kvkeep_pb2 as pb

from conftest import binary, promised
from test_remote import (CONFIG, dear_space, figure, pytestmark, settled, store,  # noqa: F401
                         wait_for)
from worker import BLOCK_TOKENS, Refused, Worker

TENANT = """
[tenant acme]
[credential user]
token = a-token-of-a-tenant
tenants = acme
"""


def fleet_of(worker, count, seconds=20):
    """Until so many are listed: they say it every ten seconds, the first time at once."""
    until = time.monotonic() + promised(seconds)
    while True:
        try:
            answer = worker.call("GetFleet", pb.GetFleetRequest(), stub=worker.admin)
            if len(answer.nodes) == count:
                return answer
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
        assert time.monotonic() < until
        time.sleep(0.05)


def test_nodes_are_listed(start, store, folder):
    key = pathlib.Path(folder) / "fleet.key"
    key.write_text(os.urandom(32).hex() + "\n")
    key.chmod(0o600)
    text = CONFIG.format(port=store.port, folder=folder)
    daemons = [start(text + f"node_name = node {name}\nnode_address = 10.0.0.{name}:7070\n")
               for name in (1, 2, 3)]
    workers = [Worker(daemon) for daemon in daemons]
    answer = fleet_of(workers[0], 3)
    assert not answer.incomplete and answer.nodes_max == 4096
    for index, node in enumerate(answer.nodes):
        assert node.name.decode() == f"node {index + 1}"
        assert node.address.decode() == f"10.0.0.{index + 1}:7070"
        assert node.self == (index == 0) and len(node.id) == 16
        assert node.store_state in (b"good", b"away") and not node.draining  # away: just begun
        assert node.age_s < 60 and node.up_s < 60
        assert [tier.tier for tier in node.tiers] == [1, 2, 3]
        assert node.tiers[1].limit_bytes == 8 << 20
    shown = subprocess.run(
        [os.path.join(os.path.dirname(binary()), "kvkeepctl"), "--connect", daemons[1].target,
         "--json", "fleet"], stdout=subprocess.PIPE, check=True, timeout=30)
    nodes = json.loads(shown.stdout)["nodes"]
    assert [node["name"] for node in nodes] == ["node 1", "node 2", "node 3"]
    assert [node["self"] for node in nodes] == [False, True, False]
    workers[2].leave()
    daemons[2].stop()  # in order: it goes at once
    assert len(fleet_of(workers[0], 2, seconds=5).nodes) == 2
    for worker in workers[:2]:
        worker.leave()


def test_admins_only_and_only_with_a_store(start):
    daemon = start()
    worker = Worker(daemon)
    with Refused(grpc.StatusCode.FAILED_PRECONDITION, field="remote.seeds"):
        worker.call("GetFleet", pb.GetFleetRequest(), stub=worker.admin)
    worker.leave()
    daemon = start("[tiers]\nhost_bytes = 8 MiB\nhuge_pages = no\n" + TENANT)
    worker = Worker(daemon, token="a-token-of-a-tenant")
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        worker.call("GetFleet", pb.GetFleetRequest(), stub=worker.admin)
    worker.leave()


def uses(worker):
    answer = worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin)
    return {stat.name.decode(): stat.value for stat in answer.stats
            if stat.name.startswith(b"kvkeep_block_uses_total")}


def test_uses_are_counted_by_tier(daemon):
    """The device's blocks are used first; a look-up that finds three uses three."""
    worker = Worker(daemon)
    space = worker.open_space()
    values = list(range(3 * BLOCK_TOKENS))
    worker.close(worker.prefill(space, values, seed=1).sequence_id)
    before = uses(worker)
    sequence = worker.open(space, values + [1])
    worker.close(sequence.sequence_id)
    after = uses(worker)
    assert sequence.cached_tokens == len(values)
    assert after['kvkeep_block_uses_total{tier="device"}'] == \
        before['kvkeep_block_uses_total{tier="device"}'] + 3
    assert after['kvkeep_block_uses_total{tier="disk"}'] == 0
    worker.leave()


DELETED = """
[durable]
folder = {folder}/durable-{name}
keeper = no
[tenant own]
[credential operator]
uids = {uid}
tenants = own
admin = yes
"""


def test_a_deleted_tenants_name_brings_nothing_back(start, store, folder):
    """Keys in the store follow from the tenant's name: one that is deleted takes with it what a
    later tenant of that name would find there."""
    key = pathlib.Path(folder) / "fleet.key"
    key.write_text(os.urandom(32).hex() + "\n")
    key.chmod(0o600)
    daemons = [start(CONFIG.format(port=store.port, folder=folder) +
                     DELETED.format(folder=folder, name=name, uid=os.geteuid()))
               for name in "ab"]

    def tenant_on(daemon):
        admin = Worker(daemon)
        admin.call("CreateTenant", pb.CreateTenantRequest(name=b"acme"), stub=admin.admin)
        token = admin.call("CreateCredential", pb.CreateCredentialRequest(
            name=b"acme", tenants=[b"acme"], token=True), stub=admin.admin).token.decode()
        worker = Worker(daemon, token=token)
        worker.space = dear_space(worker)
        return admin, worker

    (admin, worker), (_, other) = tenant_on(daemons[0]), tenant_on(daemons[1])
    values = list(range(100, 140))
    for each in (admin, Worker(daemons[1])):
        wait_for(lambda each=each: figure(each, "kvkeep_remote_spaces") == 1 and
                 figure(each, "kvkeep_remote_spaces_out") == 0)
    worker.close(worker.prefill(worker.space, values, "first").sequence_id)
    wait_for(lambda: figure(admin, "kvkeep_remote_sent_blocks_total") >= 10)
    assert settled(other, values).cached_tokens == 40

    worker.leave()
    admin.call("DeleteTenant", pb.DeleteTenantRequest(name=b"acme"), stub=admin.admin)
    admin.leave()
    admin, worker = tenant_on(daemons[0])  # somebody else of this name
    wait_for(lambda: figure(admin, "kvkeep_remote_spaces") == 1 and
             figure(admin, "kvkeep_remote_spaces_out") == 0)
    answer = settled(worker, values)
    assert answer.cached_tokens == 0 and answer.remote.state == pb.REMOTE_STATE_ABSENT
    assert settled(other, values).cached_tokens == 0  # the name is one tenant in the whole fleet
    for each in (admin, worker, other):
        each.leave()
