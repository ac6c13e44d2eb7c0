"""What outlives the daemon, seen from outside: restarts in order and by SIGKILL, identities and
names that must not mix (cases A5 and A7), invalidations that must stay (case E4)."""

import json
import os
import pathlib
import signal
import subprocess
import time

import grpc
import pytest

from conftest import Daemon, binary, promised
from worker import BLOCK_TOKENS, Refused, Worker, block_bytes, group, pb, prompt, space_request

CODE = grpc.StatusCode

TIERS = """
[tiers]
device_bytes = 4 MiB
host_bytes = 8 MiB
huge_pages = no
[durable]
folder = {folder}
disk_bytes = 64 MiB
disk_admit_uses = 1
keeper = {keeper}
keeper_socket = {folder}.keeper
keeper_hold_ms = 5 s
"""


class Lasting:
    """Daemons one after another on one durable folder."""

    def __init__(self, folder, keeper):
        self.folder = pathlib.Path(folder)
        self.durable = self.folder / "durable"
        self.config = TIERS.format(folder=self.durable, keeper=keeper)
        self.count = 0
        self.daemon = None
        self.start()

    def start(self):
        place = self.folder / str(self.count)
        place.mkdir()
        self.count += 1
        self.daemon = Daemon(place, self.config)

    def end(self, kill=False):
        if not kill:
            self.daemon.stop()
            return
        for channel in self.daemon.channels:
            channel.close()
        self.daemon.channels = []
        self.daemon.process.send_signal(signal.SIGKILL)
        self.daemon.process.wait(timeout=10)

    def restart(self, kill=False):
        self.end(kill)
        self.start()


@pytest.fixture(params=["no", "process"])
def lasting(folder, request):
    """Without a keeper only the disk brings blocks back; with one, memory does too."""
    one = Lasting(folder, request.param)
    yield one
    assert one.daemon.process.poll() is None, one.daemon.log.read_text()
    one.end()


def open_space(worker, **changes):
    """A space whose blocks are dear to compute, so that they are worth a read from disk."""
    request = space_request(**changes)
    request.prefill_cost.flops_per_token = 1e12
    return worker.call("OpenSpace", request)


def stats(worker):
    answer = worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin)
    return {stat.name.decode(): stat.value for stat in answer.stats}


def recorded(worker):
    """Blocks whose bytes are on disk and whose records are committed: they survive anything."""
    figures = stats(worker)
    assert figures["kvkeep_catalogue_failing"] == 0
    return figures["kvkeep_catalogue_blocks"]


def is_settled(worker):
    figures = stats(worker)
    return figures["kvkeep_catalogue_queued"] == 0 and figures["kvkeep_disk_leaving_slots"] == 0


def wait_for(condition, what, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.02)


def store(worker, space, values, seed):
    """Write, use once more, and wait until as many more blocks are recorded."""
    wait_for(lambda: is_settled(worker), "removals of what was there before")
    before = recorded(worker)
    sequence = worker.prefill(space, values, seed)
    blocks = (len(values) - sequence.cached_tokens) // BLOCK_TOKENS
    worker.close(sequence.sequence_id)
    worker.close(worker.open(space, values).sequence_id)
    wait_for(lambda: recorded(worker) >= before + blocks, "write-behind")


def check(worker, space, values, seed):
    """All of it is a hit, and every byte is what was written."""
    lease = worker.pin(space, values)
    assert lease.cached_tokens == len(values)
    size = space.groups[0].shard_bytes[0]
    for index, data in enumerate(worker.read(0, len(values) // BLOCK_TOKENS,
                                             lease_id=lease.lease_id)):
        assert data == block_bytes(repr((seed, index)), size)
    worker.call("Release", pb.ReleaseRequest(session_id=worker.id, lease_ids=[lease.lease_id]))


# ---- the folder ----


def run_once(config, folder):
    path = os.path.join(folder, "kvkeep.ini")
    pathlib.Path(path).write_text(config)
    begin = time.monotonic()
    done = subprocess.run([binary(), "--config", path, "--socket",
                           os.path.join(folder, "other.sock")],
                          capture_output=True, text=True, timeout=20)
    assert time.monotonic() - begin < promised(2)
    return done.returncode, done.stderr


def test_a_second_daemon_is_refused(lasting, folder):
    code, text = run_once(lasting.config, folder)
    assert code == 1
    assert "durable.folder: another process uses it" in text
    lasting.restart(kill=True)  # the lock went with the process


@pytest.mark.parametrize("place, reason", [
    ("/proc/none", "cannot be made"),
    ("/dev/null", "is not a folder"),
    ("/nowhere/below", "cannot be made: No such file or directory"),
])
def test_a_folder_that_does_not_do_is_named(folder, place, reason):
    code, text = run_once(f"[durable]\nfolder = {place}\n", folder)
    assert code == 1
    assert "durable.folder" in text and reason in text


def test_a_long_path_is_read(folder):
    deep = folder + "/" + "/".join(["d" * 200] * 15)
    os.makedirs(deep)
    code, text = run_once(f"[durable]\nfolder = {deep}/{'x' * 900}\n", folder)
    assert code != 0 and "durable" in text, text
    code, text = run_once(f"[durable]\nfolder = /{'x' * 4095}\n", folder)
    assert code == 2 and "durable.folder" in text, text


def test_files_are_the_users_alone(lasting):
    worker = Worker(lasting.daemon)
    open_space(worker)
    worker.leave()
    for root, folders, files in os.walk(lasting.durable):
        for name in folders + files:
            mode = os.stat(os.path.join(root, name)).st_mode & 0o7777
            assert mode & 0o077 == 0, f"{root}/{name} {mode:o}"


def test_a_doubtful_catalogue_is_checked_and_a_cut_one_refused(lasting, folder):
    worker = Worker(lasting.daemon)
    space = open_space(worker, model=b"kept")
    lasting.end(kill=True)
    catalogue = lasting.durable / "catalogue"
    assert not (catalogue / "opening").exists(), "what was read at the start is trusted"
    (catalogue / "opening").touch()
    lasting.start()
    assert "catalogue_probed" in lasting.daemon.log.read_text()
    worker = Worker(lasting.daemon)
    assert open_space(worker, model=b"kept").space_id == space.space_id
    lasting.end(kill=True)
    whole = (catalogue / "data.mdb").read_bytes()
    os.truncate(catalogue / "data.mdb", len(whole) // 2)
    code, text = run_once(lasting.config, folder)
    assert code == 1 and "durable.folder: the catalogue is damaged" in text
    (catalogue / "data.mdb").write_bytes(whole)
    lasting.start()


# ---- spaces ----


@pytest.mark.parametrize("kill", [False, True])
def test_a_space_comes_back_under_its_id(lasting, kill):
    worker = Worker(lasting.daemon)
    space = open_space(worker, model=b"kept")
    assert space.created
    worker.call("Invalidate", pb.InvalidateRequest(space_id=space.space_id))
    worker.call("SetSpaceMode", pb.SetSpaceModeRequest(space_id=space.space_id,
                                                       mode=pb.MODE_SHADOW), stub=worker.admin)
    lasting.restart(kill)
    worker = Worker(lasting.daemon)
    again = open_space(worker, model=b"kept")
    assert again.space_id == space.space_id and not again.created
    assert stats(worker)["kvkeep_spaces_restored_total"] == 1
    rows = worker.call("ListSpaces", pb.ListSpacesRequest(), stub=worker.admin).spaces
    assert [row.generation for row in rows] == [2]
    assert [row.mode for row in rows] == [pb.MODE_SHADOW]
    worker.leave()


@pytest.mark.parametrize("kill", [False, True])
def test_blocks_come_back_from_disk(lasting, kill):
    values = list(range(1, 33))
    worker = Worker(lasting.daemon)
    store(worker, open_space(worker), values, "kept")
    lasting.restart(kill)
    worker = Worker(lasting.daemon)
    space = open_space(worker)
    check(worker, space, values, "kept")
    assert worker.lookup(space, values[:-1] + [99]).cached_tokens == 28
    worker.leave()


# ---- case A5 ----


def test_a5_another_identity_gives_no_hit_after_a_restart(lasting):
    values = list(range(1, 17))
    first = pb.Identity(model=b"m", revision=b"1", position_encoding=b"rope factor=1")
    fp16 = group(format_k=pb.FORMAT_FP16, format_v=pb.FORMAT_FP16)
    worker = Worker(lasting.daemon)
    space = open_space(worker, identity=first, groups=[fp16])
    size = space.groups[0].shard_bytes[0]
    sequence = worker.open(space, values).sequence_id
    data = [block_bytes(block, size) for block in range(4)]
    worker.write(sequence, [(0, 0, block, 0, data[block]) for block in range(4)])
    worker.seal(sequence, 16)
    worker.close(sequence)
    worker.close(worker.open(space, values).sequence_id)
    wait_for(lambda: recorded(worker) == 4, "write-behind")

    lasting.restart(kill=True)
    worker = Worker(lasting.daemon)
    others = [
        pb.Identity(model=b"m", revision=b"2", position_encoding=b"rope factor=1"),
        pb.Identity(model=b"m", revision=b"1", position_encoding=b"rope factor=4"),
        pb.Identity(model=b"m", revision=b"1", position_encoding=b"rope factor=1",
                    kv_format=b"fp8 e4m3"),
        pb.Identity(model=b"m", revision=b"1"),
    ]
    for identity in others:
        other = open_space(worker, identity=identity, groups=[fp16])
        assert other.created
        assert worker.lookup(other, values).cached_tokens == 0
    bf16 = group(format_k=pb.FORMAT_BF16, format_v=pb.FORMAT_BF16)
    with Refused(CODE.ALREADY_EXISTS, pb.CAUSE_IDENTITY_MISMATCH):
        open_space(worker, identity=first, groups=[bf16])
    same = open_space(worker, identity=first, groups=[fp16])
    assert not same.created
    assert worker.lookup(same, values).cached_tokens == 16
    lease = worker.pin(same, values)
    assert worker.read(0, 4, lease_id=lease.lease_id) == data
    worker.leave()


# ---- case A7 ----


def test_a7_odd_names_are_apart_after_a_restart(lasting):
    models = [b"o/m/n", b"o/m-SEP-n", b"../x", b"../../etc/passwd", "\u00c5".encode(),
              "\u212b".encode(), "A\u030a".encode(), b"c", b"b@c", b"a" * 4096]
    values = list(range(1, 9))
    worker = Worker(lasting.daemon)
    for index, model in enumerate(models):
        store(worker, open_space(worker, model=model), values, index)
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "identity.model"):
        open_space(worker, model=b"m\0n")
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "identity.model"):
        open_space(worker, model=b"n" * 40960)
    lasting.restart(kill=True)
    worker = Worker(lasting.daemon)
    for index, model in enumerate(models):
        space = open_space(worker, model=model)
        assert not space.created
        check(worker, space, values, index)
    worker.leave()
    names = {name for _, folders, files in os.walk(lasting.folder) for name in folders + files}
    assert not any("passwd" in name or name == "x" for name in names)


# ---- case E4: invalidations over all tiers, before and after a restart ----


def invalidations(space):
    return {
        "model": pb.InvalidateRequest(model=b"tiny"),
        "space": pb.InvalidateRequest(space_id=space.space_id),
        "prefix": pb.InvalidateRequest(space_id=space.space_id, prefix=prompt([7, 7, 7, 7])),
        "salt": pb.InvalidateRequest(space_id=space.space_id, by_salt=True, salt=b""),
    }


@pytest.mark.parametrize("what", ["model", "space", "prefix", "salt"])
@pytest.mark.parametrize("kill", [False, True])
def test_e4_what_was_invalidated_stays_so(lasting, what, kill):
    worker = Worker(lasting.daemon)
    space = open_space(worker)
    size = space.groups[0].shard_bytes[0]
    x1, x3, x5 = ([7] * 4 + [1000 * i + k for k in range(12)] for i in (1, 3, 5))
    store(worker, space, x1, "x1")
    store(worker, space, x3, "x3")
    lease = worker.pin(space, x1)  # X5's reader, of blocks that lie on disk too
    running = worker.prefill(space, x5, "x5").sequence_id
    moving = worker.prefill(space, [7] * 4 + list(range(50, 62)), "x2").sequence_id
    worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=moving))

    answer = worker.call("Invalidate", invalidations(space)[what])
    assert answer.spaces == 1
    assert answer.device_blocks + answer.host_blocks >= 8
    assert answer.disk_blocks >= 7
    assert answer.held_blocks >= 7

    def gone(worker, space):
        return [worker.lookup(space, values).cached_tokens for values in (x1, x3, x5)]

    assert gone(worker, space) == [0, 0, 0]
    for index, data in enumerate(worker.read(0, 4, lease_id=lease.lease_id)):
        assert data == block_bytes(repr(("x1", index)), size), "the reader finishes"
    assert worker.get(running).length == 16
    lasting.restart(kill)
    worker = Worker(lasting.daemon)
    again = open_space(worker)
    assert again.space_id == space.space_id
    assert gone(worker, again) == [0, 0, 0]
    store(worker, again, x1, "new")
    check(worker, again, x1, "new")
    lasting.restart(kill)
    worker = Worker(lasting.daemon)
    check(worker, open_space(worker), x1, "new")
    worker.leave()


@pytest.mark.parametrize("what", ["model", "space", "prefix", "salt"])
def test_e4_blocks_that_are_on_disk_alone(lasting, what):
    """After a restart nothing is in memory (or, with a keeper, all of it is, as it was)."""
    x1, x3 = ([7] * 4 + [1000 * i + k for k in range(12)] for i in (1, 3))
    worker = Worker(lasting.daemon)
    space = open_space(worker)
    store(worker, space, x1, "x1")
    store(worker, space, x3, "x3")
    lasting.restart(kill=True)
    worker = Worker(lasting.daemon)
    space = open_space(worker)
    answer = worker.call("Invalidate", invalidations(space)[what])
    assert answer.disk_blocks == 7 and answer.held_blocks == 0
    assert worker.lookup(space, x1).cached_tokens == 0
    assert worker.pin(space, x3).lease_id == 0
    lasting.restart(kill=True)
    worker = Worker(lasting.daemon)
    space = open_space(worker)
    assert worker.lookup(space, x1).cached_tokens == 0
    assert worker.pin(space, x3).lease_id == 0
    wait_for(lambda: is_settled(worker) and recorded(worker) == 0, "nothing left behind")
    worker.leave()


def test_e4_in_mid_write(lasting):
    """Invalidated while blocks are being written behind, over and over; none comes back."""
    worker = Worker(lasting.daemon)
    space = open_space(worker)
    for turn in range(8):
        chains = [[7] * 4 + [10000 * turn + 100 * i + k for k in range(16)] for i in range(6)]
        for values in chains:
            worker.close(worker.prefill(space, values, turn).sequence_id)
            worker.close(worker.open(space, values).sequence_id)
        request = invalidations(space)["prefix" if turn % 2 else "space"]
        worker.call("Invalidate", request)
        lasting.restart(kill=True)
        worker = Worker(lasting.daemon)
        space = open_space(worker)
        for values in chains:
            assert worker.lookup(space, values).cached_tokens == 0
    worker.leave()


# ---- kvkeepctl ----


def ctl(lasting, *arguments):
    program = os.path.join(os.path.dirname(binary()), "kvkeepctl")
    return subprocess.run([program, "--connect", lasting.daemon.target, *arguments],
                          capture_output=True, text=True, timeout=30)


def test_ctl_invalidate(lasting):
    worker = Worker(lasting.daemon)
    space = open_space(worker, identity=pb.Identity(model=b"m", mask_rule=b"causal"))
    values = list(range(1, 17))
    worker.close(worker.prefill(space, values, "x").sequence_id)
    done = ctl(lasting, "--json", "invalidate", "--mask-rule", "other")
    assert json.loads(done.stdout)["spaces"] == 0
    done = ctl(lasting, "--json", "invalidate", "--space", str(space.space_id), "--prefix",
               "1,2,3,4,5,6,7,8")
    assert json.loads(done.stdout)["device_blocks"] == 3
    assert worker.lookup(space, values).cached_tokens == 4
    done = ctl(lasting, "invalidate", "--model", "m", "--mask-rule", "causal")
    assert done.returncode == 0 and "1 spaces" in done.stdout
    assert worker.lookup(space, values).cached_tokens == 0
    for wrong in ([], ["--prefix", "1,2"], ["--space", "x"], ["--space", "1", "--all"],
                  ["--space", "1", "--prefix", "1,,2"], ["word"]):
        assert ctl(lasting, "invalidate", *wrong).returncode == 2, wrong
    assert ctl(lasting, "invalidate", "--all").returncode == 0
    worker.leave()
