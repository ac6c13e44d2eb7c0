"""The process: start and end, standard services, configuration, signals."""

import os
import signal
import socket
import subprocess
import threading
import time

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from conftest import Daemon, SMALL_TIERS, binary, needs_descriptors, promised
from worker import Refused, Worker, pb, rpc, tokens

CODE = grpc.StatusCode


def run(*arguments, timeout=60):
    began = time.monotonic()
    result = subprocess.run([binary(), *arguments], capture_output=True, text=True,
                            timeout=timeout, check=False)
    return result, time.monotonic() - began


def test_health(daemon):
    stub = health_pb2_grpc.HealthStub(daemon.channel())
    for service in ("", "kvkeep.v1.Kvkeep", "kvkeep.v1.Admin"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert refused.value.code() == CODE.NOT_FOUND


def test_reflection(daemon):
    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel())
    request = reflection_pb2.ServerReflectionRequest

    def ask(**what):
        return next(iter(stub.ServerReflectionInfo(iter([request(**what)]))))

    services = {row.name for row in ask(list_services="").list_services_response.service}
    assert {"kvkeep.v1.Kvkeep", "kvkeep.v1.Admin", "grpc.health.v1.Health"} <= services
    files = ask(file_containing_symbol="kvkeep.v1.Kvkeep").file_descriptor_response
    names = set()
    for data in files.file_descriptor_proto:
        file = FileDescriptorProto()
        file.ParseFromString(data)
        names.add(file.name)
        if file.name == "kvkeep/v1/kvkeep.proto":
            assert [m.name for m in file.service[0].method] == [
                m.name for m in pb.DESCRIPTOR.services_by_name["Kvkeep"].methods]
    assert "kvkeep/v1/kvkeep.proto" in names


def test_unknown_method_is_unimplemented_at_once(daemon):
    channel = daemon.channel()
    began = time.monotonic()
    for path in ("/kvkeep.v1.Kvkeep/Nothing", "/nobody/Nothing"):
        with Refused(CODE.UNIMPLEMENTED):
            channel.unary_unary(path)(b"")
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(path)(iter([b""])))
        assert refused.value.code() == CODE.UNIMPLEMENTED
    assert time.monotonic() - began < promised(2)


def test_deadline_is_kept(start):
    daemon = start(arguments=["--test-hooks"])
    worker = Worker(daemon)
    space = worker.open_space()
    sequence = worker.prefill(space, list(range(64)), "a").sequence_id
    worker.call("TestControl", pb.TestControlRequest(set_copy_delay=True, copy_delay_us=100000),
                stub=worker.admin)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as late:
        worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=sequence),
                    timeout=0.05)
    assert late.value.code() == CODE.DEADLINE_EXCEEDED
    assert time.monotonic() - began < promised(1)
    worker.call("TestControl", pb.TestControlRequest(set_copy_delay=True), stub=worker.admin)
    end = time.monotonic() + 60
    while True:  # whichever way it went, the sequence is whole
        try:
            worker.call("SwapIn", pb.SwapInRequest(session_id=worker.id, sequence_id=sequence))
            break
        except grpc.RpcError as error:
            if error.code() == CODE.FAILED_PRECONDITION:
                break
            assert error.code() == CODE.UNAVAILABLE and time.monotonic() < end
            time.sleep(0.05)
    assert worker.get(sequence).length == 64
    worker.leave()


def test_a_copy_that_fails_is_in_the_log(start):
    """With the device's word, and once a second: the counter counts the others, too."""
    daemon = start(arguments=["--test-hooks"])
    worker = Worker(daemon)
    sequence = worker.prefill(worker.open_space(), list(range(64)), "a").sequence_id
    for _ in range(3):
        worker.call("TestControl", pb.TestControlRequest(fail_next_copy=True), stub=worker.admin)
        with Refused(CODE.INTERNAL):
            worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=sequence))
    lines = [line for line in daemon.log.read_text().splitlines() if line.startswith("copy_failed")]
    assert 1 <= len(lines) <= 3 and "the copy failed, as a test asked for" in lines[0], lines
    rows = worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin).stats
    assert {row.name: row.value for row in rows}[b"kvkeep_copy_failures_total"] == 3
    worker.leave()


def test_socket_is_private_and_gone_at_the_end(start):
    daemon = start()
    for path in (daemon.socket, daemon.socket + ".side"):
        assert os.stat(path).st_mode & 0o777 == 0o600
    daemon.stop()
    assert not os.path.exists(daemon.socket)
    assert not os.path.exists(daemon.socket + ".side")


def test_second_daemon_is_refused(start):
    daemon = start()
    result, seconds = run("--socket", daemon.socket, "--device", "4 MiB", "--host", "4 MiB")
    assert result.returncode == 1 and seconds < promised(2)
    assert str(daemon.process.pid) in result.stderr
    Worker(daemon).leave()
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    again = Daemon(daemon.folder)
    Worker(again).leave()
    again.stop()
    daemon.process = again.process


def test_drain_ends_what_is_under_way_and_tells_sessions(start):
    daemon = start(arguments=["--test-hooks"])
    worker = Worker(daemon)
    space = worker.open_space()
    sequence = worker.prefill(space, list(range(16)), "a").sequence_id
    worker.call("TestControl", pb.TestControlRequest(set_copy_delay=True, copy_delay_us=100000),
                stub=worker.admin)
    answers = []
    swap = threading.Thread(target=lambda: answers.append(worker.call(
        "SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=sequence))))
    swap.start()
    time.sleep(0.1)
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    swap.join(10)
    assert answers and answers[0].sequence.state == pb.SEQUENCE_STATE_SWAPPED_OUT
    notice = worker.events.get(timeout=5)
    assert notice.notice.kind == pb.SessionNotice.KIND_DRAINING
    assert worker.events.get(timeout=5) is None and worker.end is None
    assert daemon.process.wait(timeout=60) == 0
    assert time.monotonic() - began < promised(4)


def test_idle_sessions_do_not_hold_up_the_end(start):
    daemon = start()
    workers = [Worker(daemon) for _ in range(5)]
    for worker in workers:
        worker.open(worker.open_space(), [1, 2, 3])
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(timeout=60) == 0
    assert time.monotonic() - began < promised(2)


def test_hangup_is_survived(start):
    daemon = start()
    daemon.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    Worker(daemon).leave()
    assert "reloaded" in daemon.log.read_text()


def test_systemd_is_told(folder):
    path = os.path.join(folder, "notify")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(path)
    manager.settimeout(5)
    os.environ["NOTIFY_SOCKET"] = path
    try:
        daemon = Daemon(folder)
    finally:
        del os.environ["NOTIFY_SOCKET"]

    def told():
        message = b"STATUS="
        while message.startswith(b"STATUS="):  # for people, now and then
            message = manager.recv(200)
        return message.split(b"\n")[0]

    assert told() == b"READY=1"
    daemon.stop()
    assert told() == b"STOPPING=1"


BAD_CONFIGS = [
    ("[tiers]\ndevice_bytes = -1\n", "device_bytes", 2),
    ("[tiers]\n\ndevice_bytes = 12\n", "device_bytes", 3),
    ("[tiers]\ndevice_bytes = many\n", "device_bytes", 2),
    ("[limits]\nspaces = 0\n", "spaces", 2),
    ("[limits]\ntokens = NaN\n", "tokens", 2),
    ("[server]\nno_such_field = 1\n", "no_such_field", 2),
    ("[nowhere]\na = 1\n", "nowhere", 1),
    ("[tenant a]\n[credential c]\ntoken = short\ntenants = a\n", "token", None),
    ("[server]\ntcp_address = 127.0.0.1:0\n", "tcp_address", None),
    ("[tiers]\ndevice_bytes = 0\nhost_bytes = 0\n", "device_bytes", None),
]


@pytest.mark.parametrize("text,field,line", BAD_CONFIGS)
def test_bad_configuration_is_named_at_once(folder, text, field, line):
    """Case L1: exits within 2 s, naming file, line and field."""
    path = os.path.join(folder, "bad.ini")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    for arguments in (["--config", path], ["--config", path, "--check-config"]):
        result, seconds = run(*arguments, "--socket", os.path.join(folder, "s"))
        assert result.returncode == 2 and seconds < promised(2)
        assert path in result.stderr and field in result.stderr, result.stderr
        if line is not None:
            assert f"{path}:{line}" in result.stderr, result.stderr


def test_tiers_that_the_machine_cannot_have(folder, start):
    """They are refused at once, in words; the configuration alone is right, for another machine."""
    tiers = "[tiers]\ndevice_bytes = 1 TiB\nhost_bytes = 15 TiB\n"
    path = os.path.join(folder, "large.ini")
    with open(path, "w", encoding="utf-8") as file:
        file.write(tiers)
    result, seconds = run("--config", path, "--socket", os.path.join(folder, "s"))
    assert result.returncode == 1 and seconds < promised(2)
    for words in ("tiers.device_bytes with tiers.host_bytes takes 16.0 TiB", "tiers.overcommit"):
        assert words in result.stderr, result.stderr
    result, _ = run("--config", path, "--check-config")
    assert result.returncode == 0, result.stderr
    assert "on this machine: tiers.device_bytes with tiers.host_bytes" in result.stdout
    daemon = start(tiers + "overcommit = yes\n")
    worker = Worker(daemon)
    answer = worker.call("Doctor", pb.DoctorRequest(), stub=worker.admin)
    assert b"memory_short" in [finding.code for finding in answer.findings]
    worker.leave()


def test_what_is_not_on_this_machine_is_told_at_once(folder):
    """All of it, and the configuration is right nevertheless: it may be another machine's."""
    path = os.path.join(folder, "elsewhere.ini")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"[server]\ntcp_address = 127.0.0.1:0\n[tls]\ncertificate = {folder}/none.pem\n"
                   f"key = {path}\n[durable]\nfolder = {folder}/none/deeper\n[remote]\n"
                   f"seeds = 127.0.0.1:6379\nkey_file = {folder}/none.key\n[tenant a]\n"
                   "[credential a]\ntoken = 0123456789abcdef\ntenants = a\n")
    result, _ = run("--config", path, "--check-config")
    assert result.returncode == 0, result.stderr
    told = [line.split(": ")[1] for line in result.stdout.splitlines()[1:]]
    assert told == ["durable.folder", "tls.certificate", "remote.key_file"], result.stdout
    # A key that is there, and that the daemon would not take.
    key = os.path.join(folder, "none.key")
    with open(key, "w", encoding="utf-8") as file:
        file.write(bytes(range(32)).hex())
    os.chmod(key, 0o644)
    result, _ = run("--config", path, "--check-config")
    assert f"remote.key_file: {key} may be read by others" in result.stdout, result.stdout
    os.chmod(key, 0o600)
    result, _ = run("--config", path, "--check-config")
    assert "remote.key_file" not in result.stdout, result.stdout
    result, _ = run("--socket", os.path.join(folder, "s" * (103 - len(folder) - 1)),
                    "--check-config")
    assert result.returncode == 2 and "1 to 102 bytes" in result.stderr


def test_a_demonstration_without_a_daemon(folder):
    """It says so at once, instead of trying for as long as its workers would."""
    begun = time.monotonic()
    done = subprocess.run([os.path.join(os.path.dirname(binary()), "kvkeepctl"), "--connect",
                           f"unix:{folder}/nobody", "demo"], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode != 0 and done.stdout == "" and "nobody" in done.stderr, done
    assert time.monotonic() - begun < promised(5)


def test_command_line(folder):
    result, _ = run("--version")
    assert result.returncode == 0 and result.stdout.startswith("kvkeepd ")
    result, _ = run("--help")
    assert result.returncode == 0 and "--check-config" in result.stdout
    result, _ = run("--print-config")
    assert result.returncode == 0 and "device_bytes" in result.stdout
    path = os.path.join(folder, "default.ini")
    with open(path, "w", encoding="utf-8") as file:
        file.write(result.stdout)
    result, _ = run("--config", path, "--check-config")
    assert result.returncode == 0, result.stderr
    for bad, word in ((["--nothing"], "--help"), (["word"], "word"), (["--device", "5"], "device"),
                      (["--policy", "best"], "policy"), (["--log", "loud"], "log"),
                      (["--config", path + ".no"], path), (["--device", "0", "--host", "0"],
                                                           "device_bytes")):
        result, seconds = run(*bad, timeout=60)
        assert result.returncode == 2 and word in result.stderr and seconds < promised(2), bad


def test_host_only_daemon(start):
    """Case L1: device 0 is a host-only daemon."""
    daemon = start("[tiers]\ndevice_bytes = 0\nhost_bytes = 8 MiB\nhuge_pages = no\n")
    worker = Worker(daemon)
    space = worker.open_space()
    values = list(range(12))
    sequence = worker.prefill(space, values, "h").sequence_id
    found = worker.lookup(space, values)
    assert found.cached_tokens == 12 and found.host_tokens == 12
    assert len(worker.read(0, 3, sequence_id=sequence)) == 3
    worker.leave()


def test_insecure_tcp_says_so(start):
    daemon = start(SMALL_TIERS + "[server]\ntcp_address = 127.0.0.1:0\ninsecure = yes\n")
    worker = Worker(daemon, target=f"127.0.0.1:{daemon.tcp_port}")
    assert worker.welcome.side_socket_path == b"" and worker.welcome.side_token == b""
    space = worker.open_space()
    worker.prefill(space, list(range(4)), "t")
    assert worker.lookup(space, list(range(4))).cached_tokens == 4
    worker.leave()
    assert "insecure_tcp" in daemon.log.read_text()


def test_message_limit(start):
    daemon = start(SMALL_TIERS + "[server]\nmessage_bytes = 64 KiB\n")
    stub = rpc.KvkeepStub(daemon.channel())
    with pytest.raises(grpc.RpcError) as refused:
        stub.Lookup(pb.LookupRequest(space_id=1, prompt=pb.Prompt(tokens=tokens([1]) * 20000)))
    assert refused.value.code() == CODE.RESOURCE_EXHAUSTED
    Worker(daemon).leave()


def test_policy_is_chosen(start):
    daemon = start(arguments=["--policy", "lru", "--host", "4 MiB"])
    info = rpc.KvkeepStub(daemon.channel()).GetServerInfo(pb.GetServerInfoRequest())
    assert info.policy == b"lru" and info.host_bytes == 4 << 20


@needs_descriptors
def test_many_come_and_go(start):
    """Connects, sessions, crashes and reconnects leave no descriptor behind."""
    daemon = start()

    def descriptors():
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    def come_and_go(orderly):
        worker = Worker(daemon)
        worker.open(worker.open_space(), [1, 2, 3, 4, 5])
        if orderly:
            worker.leave()
        else:
            worker.stream.cancel()
        worker.requests.put(None)
        worker.channel.close()
        daemon.channels.remove(worker.channel)

    for _ in range(5):
        come_and_go(True)
    time.sleep(0.3)
    before = descriptors()
    for number in range(40):
        come_and_go(number % 2 == 0)
    end = time.monotonic() + 60
    while descriptors() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert descriptors() <= before
    watcher = Worker(daemon)
    answer = watcher.call("GetOccupancy", pb.GetOccupancyRequest(), stub=watcher.admin)
    assert all(tier.used_bytes == 0 for tier in answer.tiers)
    watcher.leave()
