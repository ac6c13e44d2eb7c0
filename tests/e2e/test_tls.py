"""TLS and mutual TLS on the TCP address, with certificates made here by openssl: who is let in, as
whom, what a wrong file says, and how certificates are replaced while the daemon runs."""

import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import time

import grpc
import pytest

from conftest import Daemon, binary, promised
from worker import Refused, pb, rpc

CODE = grpc.StatusCode


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """A root, and the certificates it gives out."""

    def __init__(self, folder, name):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.name = name
        self.certificate = self.folder / f"{name}.pem"
        self.key = self.folder / f"{name}.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", str(self.key), "-out", str(self.certificate), "-days", "2",
                "-subj", f"/CN={name}")

    def issue(self, name, subject, alternative=None):
        """(certificate, key)"""
        key, request, made, extra = (self.folder / f"{self.name}-{name}.{end}"
                                     for end in ("key", "csr", "pem", "ext"))
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", str(key), "-out", str(request), "-subj", f"/CN={subject}")
        extra.write_text(f"subjectAltName={alternative}\n" if alternative else
                         "basicConstraints=CA:FALSE\n")
        openssl("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey",
                str(self.key), "-CAcreateserial", "-out", str(made), "-days", "2",
                "-extfile", str(extra))
        return made, key


CONFIG = """
[server]
tcp_address = 127.0.0.1:0

[tls]
certificate = {folder}/server.pem
key = {folder}/server.key
{clients}

[tiers]
device_bytes = 4 MiB
host_bytes = 8 MiB
huge_pages = no

[durable]
folder = {folder}/durable
keeper = no

[tenant red]
[tenant blue]

[credential token]
token = token-token-token-token
tenants = red
{credentials}

[credential operator]
uids = {uid}
admin = yes
"""

MUTUAL = "client_ca = {folder}/clients.pem\nclient_certificates = {mode}"
BY_CERTIFICATE = """
[credential by-name]
certificate = engine-0
tenants = blue

[credential by-uri]
certificate = spiffe://cluster/engine-1
tenants = blue, red
"""


class Site:
    def __init__(self, folder, mode="no"):
        self.folder = pathlib.Path(folder)
        self.authority = Authority(self.folder / "pki", "servers")
        self.clients = Authority(self.folder / "pki", "clients")
        self.place(*self.authority.issue("one", "node", "DNS:node.test,IP:127.0.0.1"))
        (self.folder / "clients.pem").write_bytes(self.clients.certificate.read_bytes())
        mutual = mode != "no"
        self.config = CONFIG.format(
            folder=folder, uid=os.geteuid(),
            clients=MUTUAL.format(folder=folder, mode=mode) if mutual else "",
            credentials=BY_CERTIFICATE if mutual else "")
        self.daemon = Daemon(folder, self.config)

    def place(self, certificate, key):
        for source, name in ((certificate, "server.pem"), (key, "server.key")):
            target = self.folder / name
            (self.folder / "new").write_bytes(source.read_bytes())
            os.replace(self.folder / "new", target)

    def channel(self, pair=None, root=None, target=None, options=()):
        credentials = grpc.ssl_channel_credentials(
            root_certificates=(root or self.authority.certificate).read_bytes(),
            certificate_chain=pair[0].read_bytes() if pair else None,
            private_key=pair[1].read_bytes() if pair else None)
        channel = grpc.secure_channel(target or f"127.0.0.1:{self.daemon.tcp_port}", credentials,
                                      options=[("grpc.use_local_subchannel_pool", 1), *options])
        self.daemon.channels.append(channel)
        return channel

    def info(self, token=None, timeout=10, **how):
        metadata = [("authorization", f"Bearer {token}")] if token else []
        return rpc.KvkeepStub(self.channel(**how)).GetServerInfo(
            pb.GetServerInfoRequest(), metadata=metadata, timeout=timeout)

    def serial(self):
        """Of the certificate that a new connection is shown."""
        context = ssl.create_default_context(cafile=self.authority.certificate)
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", self.daemon.tcp_port), timeout=5) as plain:
            with context.wrap_socket(plain) as secured:
                return secured.getpeercert()["serialNumber"], secured.version()

    def hangup(self, event):
        """SIGHUP, and the log's word that it was taken."""
        before = self.daemon.log.read_text().count(event)
        self.daemon.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 60
        while self.daemon.log.read_text().count(event) == before:
            assert time.monotonic() < until, self.daemon.log.read_text()
            time.sleep(0.01)


@pytest.fixture
def site(folder):
    sites = []

    def make(mode="no"):
        sites.append(Site(folder, mode))
        return sites[0]

    yield make
    for one in sites:
        one.daemon.stop()


TOKEN = "token-token-token-token"


def unreachable(site, **how):
    with pytest.raises(grpc.RpcError) as failure:
        site.info(token=TOKEN, timeout=5, **how)
    assert failure.value.code() in (CODE.UNAVAILABLE, CODE.DEADLINE_EXCEEDED), failure.value


def test_tokens_over_tls(site):
    here = site()
    assert here.info(token=TOKEN).tenant == b"red"
    with Refused(CODE.UNAUTHENTICATED):
        here.info(token="nobodys-nobodys-nobodys")
    with Refused(CODE.UNAUTHENTICATED):
        here.info()
    assert here.serial()[1] in ("TLSv1.2", "TLSv1.3")
    # The name in the certificate counts.
    assert here.info(token=TOKEN, options=[
        ("grpc.ssl_target_name_override", "node.test")]).tenant == b"red"
    unreachable(here, options=[("grpc.ssl_target_name_override", "other.test")])
    # So does the root.
    unreachable(here, root=here.clients.certificate)
    # Nobody speaks in clear.
    plain = rpc.KvkeepStub(here.daemon.channel(f"127.0.0.1:{here.daemon.tcp_port}"))
    with pytest.raises(grpc.RpcError):
        plain.GetServerInfo(pb.GetServerInfoRequest(), timeout=3,
                            metadata=[("authorization", f"Bearer {TOKEN}")])


def test_a_session_over_tls(site):
    """Streams work as over any socket; mapping memory is for local processes."""
    from worker import Worker

    here = site()

    class Secured:
        def channel(self, target=None):
            return here.channel()

    worker = Worker(Secured(), token=TOKEN)
    space = worker.open_space()
    sequence = worker.prefill(space, list(range(10, 26)), "tls")
    assert worker.lookup(space, list(range(10, 26))).cached_tokens == 16
    assert len(worker.read(0, 4, sequence_id=sequence.sequence_id)) == 4
    worker.leave()


def test_certificates_name_credentials(site):
    here = site("request")
    engine = here.clients.issue("engine", "engine-0")
    by_uri = here.clients.issue("uri", "whatever", "URI:spiffe://cluster/engine-1,DNS:other")
    stranger = here.clients.issue("stranger", "engine-9")
    assert here.info(pair=engine).tenant == b"blue"
    assert list(here.info(pair=by_uri).tenants) == [b"blue", b"red"]
    with Refused(CODE.UNAUTHENTICATED):
        here.info(pair=stranger)
    # A token that is sent decides alone; without a certificate it is all there is.
    assert here.info(pair=engine, token=TOKEN).tenant == b"red"
    assert here.info(token=TOKEN).tenant == b"red"
    with Refused(CODE.UNAUTHENTICATED):
        here.info(pair=engine, token="nobodys-nobodys-nobodys")
    with Refused(CODE.UNAUTHENTICATED):
        here.info()
    # One that another root gave out is no certificate at all.
    forged = Authority(here.folder / "pki", "forged").issue("engine", "engine-0")
    unreachable(here, pair=forged)
    # A credential of the catalogue by its certificate.
    stub = rpc.AdminStub(here.daemon.channel())
    stub.CreateCredential(pb.CreateCredentialRequest(name=b"nine", tenants=[b"red"],
                                                     certificate=b"engine-9"))
    assert here.info(pair=stranger).tenant == b"red"
    with Refused(CODE.ALREADY_EXISTS, field="certificate"):
        stub.CreateCredential(pb.CreateCredentialRequest(name=b"ten", tenants=[b"red"],
                                                         certificate=b"engine-0"))


def test_certificates_are_required(site):
    here = site("require")
    unreachable(here)
    engine = here.clients.issue("engine", "engine-0")
    assert here.info(pair=engine).tenant == b"blue"
    assert here.info(pair=engine, token=TOKEN).tenant == b"red"


def test_failed_attempts_count_by_address(site):
    here = site()
    for _ in range(20):
        with Refused(CODE.UNAUTHENTICATED):
            here.info(token="nobodys-nobodys-nobodys")
    with Refused(CODE.RESOURCE_EXHAUSTED, pb.CAUSE_LIMIT, "server.auth_failures"):
        here.info(token="nobodys-nobodys-nobodys")
    stub = rpc.AdminStub(here.daemon.channel())
    token = stub.CreateCredential(pb.CreateCredentialRequest(
        name=b"made", tenants=[b"red"], token=True)).token.decode()
    assert here.info(token=token).tenant == b"red"


def test_reload(site):
    here = site()
    first, _ = here.serial()
    open_channel = rpc.KvkeepStub(here.channel())
    metadata = [("authorization", f"Bearer {TOKEN}")]
    open_channel.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=10)
    here.place(*here.authority.issue("two", "node", "DNS:node.test,IP:127.0.0.1"))
    assert here.serial()[0] == first
    here.hangup("reloaded")
    second, _ = here.serial()
    assert second != first
    assert here.info(token=TOKEN).tenant == b"red"
    open_channel.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=10)
    # What is wrong is told, and what was there stays.
    (here.folder / "server.pem").write_text("nothing\n")
    here.hangup("reload_failed")
    assert "tls.certificate" in here.daemon.log.read_text()
    assert here.serial()[0] == second
    assert here.info(token=TOKEN).tenant == b"red"


def start_fails(folder, config):
    path = pathlib.Path(folder) / "kvkeep.ini"
    path.write_text(config)
    begun = time.monotonic()
    result = subprocess.run([binary(), "--config", str(path), "--socket",
                             str(pathlib.Path(folder) / "kvkeep.sock")],
                            capture_output=True, text=True, timeout=10)
    assert time.monotonic() - begun < promised(2)
    assert result.returncode != 0
    return result.stderr


def test_wrong_files_stop_the_start(folder):
    pki = Authority(folder + "/pki", "servers")
    certificate, key = pki.issue("one", "node")
    _, other_key = pki.issue("two", "node")
    locked = pathlib.Path(folder) / "locked.key"
    openssl("pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked))
    empty = pathlib.Path(folder) / "empty"
    empty.touch()
    garbage = pathlib.Path(folder) / "garbage"
    garbage.write_text("no certificate\n")

    def config(certificate, key, more=""):
        return (f"[server]\ntcp_address = 127.0.0.1:0\n[tls]\ncertificate = {certificate}\n"
                f"key = {key}\n{more}[tiers]\ndevice_bytes = 1 MiB\nhost_bytes = 1 MiB\n"
                "huge_pages = no\n[tenant a]\n[credential c]\ntoken = 0123456789abcdef\n"
                "tenants = a\n")

    mutual = "client_certificates = require\nclient_ca = "
    cases = [
        (config("/nonexistent", key), "tls.certificate", "No such file"),
        (config(certificate, "/nonexistent"), "tls.key", "No such file"),
        (config(folder, key), "tls.certificate", "is no file"),
        (config(empty, key), "tls.certificate", "empty"),
        (config(garbage, key), "tls.certificate", "no PEM certificate"),
        (config(certificate, garbage), "tls.key", "no PEM key"),
        (config(certificate, locked), "tls.key", "pass phrase"),
        (config(certificate, other_key), "tls.key", "not the key of tls.certificate"),
        (config(certificate, key, mutual + "/nonexistent\n"), "tls.client_ca", "No such file"),
        (config(certificate, key, mutual + f"{garbage}\n"), "tls.client_ca", "no PEM certificate"),
        (config(certificate, key, "client_certificates = maybe\n"), "tls.client_certificates",
         "no, request or require"),
        (config("", ""), None, None),
    ]
    for text, field, reason in cases[:-1]:
        said = start_fails(folder, text)
        assert field in said and reason in said, said
    # A key that others may read is no mistake of the file's; a token in clear is one of ours.
    said = start_fails(folder, cases[-1][0].replace("127.0.0.1:0", "0.0.0.0:0"))
    assert "server.tcp_address" in said and "tokens_in_clear" in said


def test_kvkeepctl_over_tls(site):
    here = site("request")
    engine = here.clients.issue("engine", "engine-0")
    program = os.path.join(os.path.dirname(binary()), "kvkeepctl")
    target = f"127.0.0.1:{here.daemon.tcp_port}"

    def run(*arguments, env=None):
        return subprocess.run([program, "--connect", target, "--json", *arguments], timeout=30,
                              capture_output=True, text=True, env={**os.environ, **(env or {})})

    root = str(here.authority.certificate)
    answer = run("--ca", root, "--token", TOKEN, "status")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["tenant"] == "red"
    answer = run("--ca", root, "--cert", str(engine[0]), "--key", str(engine[1]), "status")
    assert json.loads(answer.stdout)["tenant"] == "blue"
    answer = run("status", env={"KVKEEP_CA": root, "KVKEEP_TOKEN": TOKEN,
                                "KVKEEP_SERVER_NAME": "node.test"})
    assert json.loads(answer.stdout)["tenant"] == "red"
    assert run("--ca", root, "--server-name", "other.test", "--token", TOKEN,
               "status").returncode != 0
    answer = run("--ca", "/nonexistent", "--token", TOKEN, "status")
    assert answer.returncode == 1 and "ca" in answer.stderr and "/nonexistent" in answer.stderr
    assert run("--token", TOKEN, "status").returncode != 0
