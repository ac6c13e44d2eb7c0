"""Three machines with a Redis Cluster between them and a daemon on each, for tests.

With --machines a machine is a network namespace on a bridge, so that its cable can be pulled; else
all are 127.0.0.1 with ports of their own.
"""

import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import grpc
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNT = 3


def generate_stubs(folder):
    result = protoc.main(["protoc", f"-I{ROOT}/proto", f"--python_out={folder}",
                          f"--grpc_python_out={folder}", "kvkeep/v1/kvkeep.proto"])
    assert result == 0, "the proto does not compile"
    sys.path.insert(0, str(folder))
    sys.path.insert(0, str(ROOT / "tests/e2e"))


def run(*command, check=True, **more):
    return subprocess.run(command, check=check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, **more)


class Redis:
    """One node, spoken to in RESP."""

    def __init__(self, host, port):
        self.host, self.port = host, port
        self.file = None

    def __call__(self, *words):
        try:
            if self.file is None:
                sock = socket.create_connection((self.host, self.port), timeout=5)
                self.file = sock.makefile("rwb")
                sock.close()
            parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
            self.file.write(b"*%d\r\n" % len(parts) +
                            b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            self.file.flush()
            return self.read()
        except OSError:
            self.file = None
            raise

    def read(self):
        line = self.file.readline()
        if not line:
            self.file = None
            raise ConnectionError("the node is gone")
        kind, rest = line[:1], line[1:-2]
        if kind in b"+-":
            return rest.decode()
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return self.file.read(int(rest) + 2)[:-2] if int(rest) >= 0 else None
        return [self.read() for _ in range(int(rest))]


class Machine:
    def __init__(self, house, index):
        self.house, self.index = house, index
        self.name = f"kvm{index + 1}"
        self.host = f"10.77.0.{index + 11}" if house.machines else "127.0.0.1"
        self.inside = ["ip", "netns", "exec", self.name] if house.machines else []
        self.redis_ports = [house.port + 2 * index, house.port + 2 * index + 1]
        self.redis = {}
        self.daemon = None
        if house.machines:
            cable = f"cable{index + 1}"
            run("ip", "netns", "add", self.name)
            run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns",
                self.name)
            run("ip", "link", "set", cable, "master", "bridge", "up")
            run(*self.inside, "ip", "addr", "add", f"{self.host}/24", "dev", "eth0")
            run(*self.inside, "ip", "link", "set", "eth0", "up")
            run(*self.inside, "ip", "link", "set", "lo", "up")

    def cable(self, state):
        run("ip", "link", "set", f"cable{self.index + 1}", state)

    def redis_start(self, port):
        folder = self.house.folder / f"redis-{port}"
        folder.mkdir(exist_ok=True)
        with open(folder / "log", "ab") as log:
            self.redis[port] = subprocess.Popen(
                [*self.inside, "redis-server", "--port", str(port), "--bind", self.host,
                 "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
                 "--cluster-node-timeout", "1500", "--cluster-port", str(port + 500),
                 "--appendonly", "no", "--save", "", "--dir", str(folder), "--protected-mode",
                 "no", "--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0",
                 "--cluster-announce-ip", self.host],
                stdout=log, stderr=log)

    def daemon_start(self, config):
        self.daemon = Daemon(self, config, f"daemon-{self.index + 1}")
        return self.daemon


class Daemon:
    def __init__(self, machine, config, name):
        self.machine = machine
        self.folder = machine.house.folder / name
        self.folder.mkdir(exist_ok=True)
        self.socket = str(self.folder / "k.sock")
        self.target = "unix:" + self.socket
        path = self.folder / "kvkeep.ini"
        path.write_text(config)
        path.chmod(0o600)
        self.log = self.folder / "log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*machine.inside, str(machine.house.bin / "kvkeepd"), "--config", str(path),
                 "--socket", self.socket], stderr=log)
        until = time.monotonic() + 30
        while not any(line.startswith("ready ") for line in self.log.read_text().splitlines()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def channel(self, target=None):
        return grpc.insecure_channel(target or self.target, options=[
            ("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)])

    def ctl(self, *words, check=True):
        return run(str(self.machine.house.bin / "kvkeepctl"), "--connect", self.target, *words,
                   check=check)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


class House:
    def __init__(self, binaries, machines, keep=False, prefix="kvf-"):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix))
        self.bin, self.machines, self.keep = pathlib.Path(binaries).resolve(), machines, keep
        self.port = 7000 if machines else 20000 + os.getpid() % 5000 * 2
        self.key = self.folder / "fleet.key"
        self.key.write_text(secrets.token_hex(32) + "\n")
        self.key.chmod(0o600)
        if machines:
            run("ip", "link", "add", "bridge", "type", "bridge")
            run("ip", "addr", "add", "10.77.0.1/24", "dev", "bridge")
            run("ip", "link", "set", "bridge", "up")
        self.all = [Machine(self, index) for index in range(COUNT)]

    def seeds(self):
        return ",".join(f"{m.host}:{m.redis_ports[0]}" for m in self.all)

    def cluster_start(self):
        """Masters on the first ports, replicas on the second, none with its master."""
        for machine in self.all:
            for port in machine.redis_ports:
                machine.redis_start(port)
        nodes = [(m.host, m.redis_ports[k]) for k in range(2) for m in self.all]
        for host, port in nodes:
            self.await_(lambda h=host, p=port: Redis(h, p)("ping") == "PONG", "a node answers")
        run("redis-cli", "--cluster", "create", *[f"{h}:{p}" for h, p in nodes],
            "--cluster-replicas", "1", "--cluster-yes")
        self.await_(lambda: self.cluster_good(), "the cluster is there")

    def nodes(self):
        """(host, port, is a master, slots) as the first node that answers knows them."""
        for machine in self.all:
            for port in machine.redis_ports:
                try:
                    table = Redis(machine.host, port)("cluster", "nodes")
                except OSError:
                    continue
                if not isinstance(table, bytes):  # an error: it has just begun, and is loading
                    continue
                rows = []
                for line in table.decode().splitlines():
                    words = line.split()
                    host, _, rest = words[1].rpartition(":")
                    if "fail" in words[2].replace("fail?", "").split(","):
                        continue
                    rows.append((host, int(rest.split("@")[0]), "master" in words[2],
                                 len(words) > 8, words[0]))
                return rows
        return []

    def masters(self):
        return [(host, port) for host, port, master, slots, _ in self.nodes() if master and slots]

    def cluster_good(self):
        try:
            answers = [Redis(m.host, p)("cluster", "info") for m in self.all for p in m.redis_ports
                       if m.redis[p].poll() is None]
            return all(isinstance(answer, bytes) and b"cluster_state:ok" in answer
                       for answer in answers)
        except OSError:
            return False

    def redis_all(self, *words):
        for machine in self.all:
            for port in machine.redis_ports:
                if machine.redis[port].poll() is None:
                    Redis(machine.host, port)(*words)

    @staticmethod
    def await_(condition, what, seconds=60):
        until = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except (OSError, grpc.RpcError):
                pass
            assert time.monotonic() < until, f"never: {what}"
            time.sleep(0.05)

    def end(self):
        for machine in self.all:
            if machine.daemon is not None:
                machine.daemon.stop()
            for process in machine.redis.values():
                process.send_signal(signal.SIGKILL)
                process.wait()
        if self.keep:
            print(f"kept: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
