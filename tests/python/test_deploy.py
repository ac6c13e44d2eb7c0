"""What is deployed beside the daemon names what the daemon has: metrics, fields, alerts."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from conftest import ROOT, binary
from test_http import CONFIG, OTHER, TOKEN, Web

DEPLOY = ROOT / "deploy"
yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def rules():
    return yaml.safe_load((DEPLOY / "prometheus" / "kvkeep-rules.yml").read_text())


def names_in(text):
    return set(re.findall(r"\bkvkeep_[a-z0-9_]+", text))


def test_dashboard_and_alerts_ask_for_metrics_that_there_are(start, rules, tmp_path):
    import kvkeep

    key = tmp_path / "key"
    key.write_text(bytes(range(32)).hex())
    key.chmod(0o600)
    daemon = start(CONFIG % ("metrics", TOKEN, OTHER, os.getuid()) +
                   f"[durable]\nfolder = {tmp_path}/durable\ndisk_bytes = 1 MiB\nkeeper = no\n"
                   f"[remote]\nseeds = 127.0.0.1:1\nkey_file = {key}\n")
    with kvkeep.connect(daemon.target) as client:  # so that the tenant has figures
        group = kvkeep.LayerGroup(layers=1, kv_heads=1, head_size_k=8)
        client.lookup(client.open_space(kvkeep.Identity(model="m"), [group]), [1] * 32)
    text = Web(daemon).ask("GET", "/metrics")[1].decode()
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert 'kvkeep_remote_state{state="away"}' in text
    assert 'kvkeep_disk_state{state="good"} 1' in text
    assert '"kvkeep_device_lost"' in (ROOT / "daemon" / "report_stats.c").read_text()
    there.add("kvkeep_device_lost")  # of a machine with a GPU
    board = json.loads((DEPLOY / "grafana" / "kvkeep.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(queries) > 20
    for query in queries:
        assert names_in(query) <= there, (query, names_in(query) - there)


def test_every_alert_has_a_section_in_the_runbook(rules):
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    for rule in rules["groups"][0]["rules"]:
        assert f"\n## {rule['alert']}\n" in runbook
        assert rule["annotations"]["runbook"].endswith("#" + rule["alert"].lower())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_promtool_takes_the_rules():
    done = subprocess.run(["promtool", "check", "rules", DEPLOY / "prometheus/kvkeep-rules.yml"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_config(path):
    done = subprocess.run([binary(), "--config", path, "--check-config"], capture_output=True,
                          text=True, timeout=10, check=False)
    assert done.returncode == 0, done.stderr


def test_example_configurations_are_right(tmp_path):
    samples = sorted((DEPLOY / "samples").glob("*.conf"))
    assert len(samples) == 3
    for path in (DEPLOY / "kvkeepd.conf", *sorted((DEPLOY / "docker").glob("*.conf")), *samples):
        check_config(path)
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvkeep.yaml").read_text()))
    config = next(item for item in objects if item["kind"] == "ConfigMap")
    path = tmp_path / "kvkeepd.conf"
    path.write_text(config["data"]["kvkeepd.conf"])
    check_config(path)


def test_the_pod_is_not_privileged():
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvkeep.yaml").read_text()))
    for item in objects:
        assert item["apiVersion"] and item["kind"] and item["metadata"]["name"]
    pod = next(item for item in objects if item["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["securityContext"] == {
        "privileged": False, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    # The node's folders are root's when they are made: one container gives them to the pod's user.
    first, = pod["initContainers"]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    user = pod["securityContext"]
    node = {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
    assert node == {mount["name"] for mount in first["volumeMounts"]}
    assert first["command"] == ["chown", f"{user['runAsUser']}:{user['runAsGroup']}",
                                *(mount["mountPath"] for mount in first["volumeMounts"])]
    assert first["image"] == container["image"]
    assert container["image"] in (DEPLOY / "docker" / "Dockerfile").read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"].startswith("/health/")


def test_the_unit_is_one_that_systemd_252_starts():
    """What tests/package/boot.sh shows at length: here, what is written wrongly most easily."""
    lines = (DEPLOY / "kvkeepd.service").read_text().splitlines()
    unit = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    only = dict(unit)
    # In a list of what is allowed, a refusal with the list's own error number is no filter at all.
    calls = [value for name, value in unit if name == "SystemCallFilter"]
    assert calls and not any(":" in value for value in calls)
    assert " seccomp" in calls[0], "the daemon's own filter"
    # systemd says so itself from 254 on.
    assert only["Environment"] == f"FDSTORE={only['FileDescriptorStoreMax']}"
    # Programs of packages that every Debian has.
    started = [value.split()[0] for name, value in unit if name.startswith("Exec")]
    assert started == ["/usr/bin/kvkeepd", "/bin/sh"]


def test_units_have_their_comments_on_lines_of_their_own():
    """What follows a value is part of it, and what is no value is passed over with a warning."""
    manual = (ROOT / "docs" / "gpu.md").read_text()
    drop_in = re.search(r"^    \[Service\]\n(?:    .*\n)+", manual, re.M).group(0)
    for text in ((DEPLOY / "kvkeepd.service").read_text(), drop_in):
        values = [line for line in map(str.strip, text.splitlines()) if not line.startswith("#")]
        assert values and not any("#" in line for line in values)


def test_the_store_is_a_cluster_of_the_right_size():
    """Six nodes are what the job and the compose file make a cluster of, with memory to spare."""
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "fleet.yaml").read_text()))
    for item in objects:
        assert item["apiVersion"] and item["kind"] and item["metadata"]["namespace"] == "kvkeep"
    store = next(item for item in objects if item["kind"] == "StatefulSet")["spec"]
    job = next(item for item in objects if item["kind"] == "Job")["spec"]["template"]["spec"]
    assert store["replicas"] == 6 and "for i in 0 1 2 3 4 5;" in job["containers"][0]["args"][0]
    container = store["template"]["spec"]["containers"][0]
    for one in (container, job["containers"][0]):
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        checked = subprocess.run(["bash", "-n", "-c", one["args"][0]], check=False)
        assert checked.returncode == 0
    room = int(re.search(r"--maxmemory (\d+)gb", container["args"][0]).group(1))
    assert room * 3 == int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 2
    compose = yaml.safe_load((DEPLOY / "docker" / "fleet.yaml").read_text())["services"]
    assert sum(name.startswith("redis-") for name in compose) == 6
    config = (DEPLOY / "docker" / "kvkeepd-fleet.conf").read_text()
    for seed in re.search(r"^seeds = (.*)$", config, re.M).group(1).split(","):
        assert seed.removesuffix(":6379") in compose


def test_compose_names_files_that_there_are():
    made = {"./fleet.key"}  # by who starts it: a key
    for name in ("compose.yaml", "fleet.yaml"):
        compose = yaml.safe_load((DEPLOY / "docker" / name).read_text())
        for service in compose["services"].values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                if source.startswith(".") and source not in made:
                    assert (DEPLOY / "docker" / source).exists(), volume
    assert pathlib.Path(DEPLOY / "docker" / "Dockerfile").exists()


def test_the_reference_is_what_the_proto_says():
    done = subprocess.run([ROOT / "proto" / "reference.py", "--check"], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout
