"""The doctor on hosts that are broken in one way each, for real; and on healthy ones."""

import contextlib
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Cluster
from tests.clusters.netns import NetnsCluster
from tests.conftest import require_namespaces
from tests.end_to_end.test_verdicts import SKEWED
from tests.launching import Head
from tests.node.job.trees import hca

# Known without importing it, which takes longer than most of these tests.
TORCH = importlib.metadata.version("torch")
TORCH_PLACE = Path(sysconfig.get_path("purelib"), "torch")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetnsCluster]:
    require_namespaces()
    with NetnsCluster(3, tmp_path_factory.mktemp("doctor"), second_nic=True) as running:
        yield running


@pytest.fixture
def ward(cluster: NetnsCluster, tmp_path: Path) -> Head:
    return Head(cluster, tmp_path)


@contextlib.contextmanager
def broken(cluster: NetnsCluster, host: int, how: str, mend: str) -> Iterator[None]:
    cluster.exec(host, ["sh", "-ec", how])
    try:
        yield
    finally:
        cluster.exec(host, ["sh", "-ec", mend])


def examine(head: Head, *words: str, code: int) -> list[dict[str, Any]]:
    """Its findings; the text form must tell the same, once each, and end alike."""
    shown = head.command("orchestrator", "doctor", "--json", *words).ends(code)
    told = json.loads(shown.text)
    assert told["ok"] == (code == 0)
    findings: list[dict[str, Any]] = told["findings"]
    return findings


def only(findings: list[dict[str, Any]], check: str, level: str, *nodes: str) -> dict[str, Any]:
    assert [(one["check"], one["level"]) for one in findings] == [(check, level)], findings
    assert sorted(findings[0]["nodes"]) == sorted(nodes)
    return findings[0]


def test_healthy_cluster_gives_no_finding(ward: Head) -> None:
    ward.node_list = ward.cluster.write_list(ward.cluster.addresses[:2])
    assert examine(ward, code=0) == []
    text = ward.command("orchestrator", "doctor", "--quick").ends()
    assert "all is well" in text.text and "links" not in text.text
    assert ward.nothing_left()


def test_other_torch_version_on_one_node_is_found(ward: Head, tmp_path: Path) -> None:
    """A second environment has the real torch of another version. A launch also refuses it."""
    python = other_torch(tmp_path / "other", "2.12.1")
    one, two, three = ward.cluster.addresses
    ward.node_list = ward.cluster.write_list([one, f"{two} python={python}", three])
    found = only(examine(ward, "--quick", code=3), "torch", "bad", two)
    ours = TORCH.partition("+")[0]
    assert "2.12.1" in found["what"] and ours in found["what"]
    assert found["fix"].endswith(f"-m pip install torch=={ours}")
    launch = ward.launch(ward.script("x.py", "print('never')")).ends(3)
    assert "nothing was started" in launch.text and found["what"] in launch.text
    assert not ward.experiments and not list((ward.directory / "experiments").glob("[!.]*"))
    ward.run("--check", "none", "--dry-run", "x.py")


def venv(place: Path) -> Path:
    """Make a virtual environment without packages, and return its directory for them."""
    words = [sys.executable, "-m", "venv", "--without-pip", str(place)]
    subprocess.run(words, check=True)
    (site,) = place.glob("lib/python*/site-packages")
    return site


def other_torch(place: Path, version: str) -> Path:
    """A virtual environment whose torch is ours, but for the version it says it is."""
    site, real = venv(place), TORCH_PLACE
    (site / "rest.pth").write_text(f"{real.parent}\n")
    (site / "torch").mkdir()
    for entry in real.iterdir():
        if entry.name != "version.py":
            (site / "torch" / entry.name).symlink_to(entry)
    text = (real / "version.py").read_text()
    text = text.replace(TORCH.partition("+")[0], version)
    (site / "torch" / "version.py").write_text(text)
    return place / "bin" / "python"


# A torch that is imported in no time, for what is not about torch.
STUB = "from torch import version\nclass cuda:\n    is_available = staticmethod(bool)\n"


def test_firewall_mtu_and_other_code_are_found(
    ward: Head, cluster: NetnsCluster, tmp_path: Path
) -> None:
    """Node 2 may not call the master's port; all else is open. Nodes 0 and 1 send packets that the
    bridge between them drops: calls pass, and data does not. Each node has its own copy of the
    program, and one was edited by mistake."""
    zero, one, two = cluster.addresses
    packages = venv(tmp_path / "light") / "torch"
    packages.mkdir()
    (packages / "__init__.py").write_text(STUB)
    shutil.copy(TORCH_PLACE / "version.py", packages)
    python = tmp_path / "light/bin/python"
    ward.node_list = cluster.write_list(f"{each} python={python}" for each in (zero, one, two))
    place = tmp_path / "own"
    place.mkdir()
    for host in range(3):
        mount = f"mount -t tmpfs own {place}; echo 'x = {host // 2}' >{place}/train.py"
        cluster.exec(host, ["sh", "-ec", mount])
    rule = f"ip saddr {two} tcp dport 29500 drop"
    chain = "nft add chain inet wall i '{ type filter hook input priority 0 ; }'"
    wall = f"nft add table inet wall; {chain}; nft add rule inet wall i {rule}"
    large = "ip link set eth0 mtu 9000 gso_max_segs 1"
    small = "ip link set eth0 mtu 1500 gso_max_segs 65535"
    with (
        broken(cluster, 0, wall, "nft delete table inet wall"),
        broken(cluster, 0, large, small),
        broken(cluster, 1, large, small),
    ):
        findings = examine(ward, "--workdir", str(place), "train.py", code=3)
    bad = {found["check"]: found for found in findings if found["level"] == "bad"}
    assert len(bad) == len([found for found in findings if found["level"] == "bad"]) == 3, findings
    assert sorted(bad["links"]["nodes"]) == sorted([zero, two])
    assert f"{two} does not reach {zero} (port 29500: no answer" in bad["links"]["what"]
    assert sorted(bad["mtu"]["nodes"]) == sorted([zero, one])
    assert "small packets arrive, large ones do not" in bad["mtu"]["what"]
    assert "sha256 of the program" in bad["code"]["what"]


def test_nodes_shows_machines_and_missing_one(ward: Head, cluster: NetnsCluster) -> None:
    three = cluster.addresses
    ward.node_list = cluster.write_list([*three, "10.77.77.99"])
    shown = ward.command("orchestrator", "nodes", "--json", "--connect-timeout", "3").ends(4)
    *found, missing = json.loads(shown.text)["nodes"]
    assert [(one["name"], one["reached"]) for one in found] == [(name, True) for name in three]
    assert {one["torch"].split("+")[0] for one in found} == {TORCH.split("+")[0]}
    for one in found:
        assert one["name"] in [a for net in one["networks"] for a in net["addresses"]]
        assert one["hostname"] and one["cpus"] and one["memory"] and one["disk_free"]
    assert (missing["name"], missing["reached"]) == ("10.77.77.99", False) and missing["problem"]
    known = Cluster(ward.node_list, ssh_config=cluster.ssh_config, connect_timeout=3.0).nodes()
    assert [one.name for one in known if one.reached] == three
    assert ward.nothing_left()


HOLDS = """
import socket, sys
server = socket.create_server(("", 29500))
print("held", flush=True)
sys.stdin.read()
"""


def test_defects_of_each_node_are_found(ward: Head, cluster: NetnsCluster, tmp_path: Path) -> None:
    """Low memlock on node 1 says nothing where nothing pins memory; with GPUs, it would be fatal.

    Node 0 has a program at the master's port, node 1 small packets, node 2 full shared memory and
    a clock of its own.
    """
    wrapper, python = tmp_path / "python", tmp_path / "skewed.py"
    python.write_text(SKEWED.format(shift=-90, wrapper=str(wrapper)))
    words = shlex.join([sys.executable, str(python)])
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
    one, two, three = cluster.addresses
    ward.node_list = cluster.write_list([one, two, f"{three} python={wrapper}"])
    rc = cluster.home(1) / ".bashrc"
    full = "mount -t tmpfs -o size=64m none /dev/shm; head -c 60M /dev/zero >/dev/shm/full"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = cluster.popen(0, [sys.executable, "-c", HOLDS], **pipes)
    assert holder.stdout and holder.stdout.readline()
    try:
        rc.write_text("ulimit -l 64\n")
        with (
            broken(cluster, 1, "ip link set eth0 mtu 1400", "ip link set eth0 mtu 1500"),
            broken(cluster, 2, full, "umount /dev/shm"),
        ):
            findings = examine(ward, "--quick", code=0)
            named = examine(ward, "--quick", "--master-port", "29500", code=3)
        found = {finding["check"]: finding for finding in findings}
        assert {check: (each["level"], each["nodes"]) for check, each in found.items()} == {
            "port": ("warn", [one]),
            "mtu": ("warn", [two]),
            "shm": ("warn", [three]),
            "clock": ("warn", [three]),
        }
        assert len(findings) == 4 and "29501 would be used" in found["port"]["what"]
        assert "1400" in found["mtu"]["what"] and "mtu 1500" in found["mtu"]["fix"]
        assert "/dev/shm is full" in found["shm"]["what"]
        behind = re.search(r"is ([0-9.]+) s behind this machine's", found["clock"]["what"])
        # The clock is read over a connection.
        assert behind and 85 < float(behind[1]) < 95, found
        only([each for each in named if each["level"] == "bad"], "port", "bad", one)

        for i in range(3):
            own = tmp_path / f"class{i}"
            subprocess.run(["cp", "-a", "/sys/class", str(own)], check=False, capture_output=True)
            hca(own, "mlx5_0", top="infiniband")
            cluster.exec(i, ["mount", "--bind", str(own), "/sys/class"])
        # This machine's own limit may also be low enough for a finding.
        pins = [each for each in examine(ward, "--quick", code=0) if "64 KiB" in each["what"]]
        only(pins, "limits", "warn", two)
    finally:
        rc.unlink()
        holder.communicate()
        for i in range(3):
            cluster.exec(i, ["sh", "-c", "umount /sys/class || true"])


def test_unreachable_master_is_found(ward: Head, cluster: NetnsCluster) -> None:
    """The head reaches node 2 by an address of its own, which leads to none of the others."""
    alone = "ip address add 10.79.0.9/32 dev lo"
    route = "ip route replace unreachable " + cluster.addresses[0]
    with broken(
        cluster, 2, f"{alone}; {route}", f"ip route del unreachable {cluster.addresses[0]}"
    ):
        findings = examine(ward, "--quick", code=3)
    only(findings, "net", "bad", cluster.addresses[0], cluster.addresses[2])


def test_unreachable_hosts_are_reported(ward: Head, cluster: NetnsCluster) -> None:
    _, two, three = cluster.addresses
    cluster.kill_sshd(1)
    cluster.change_host_key(2)
    try:
        findings = examine(ward, "--quick", code=3)
        kinds = {tuple(f["nodes"]): (f["check"], f["level"]) for f in findings}
        assert kinds == {(two,): ("reach", "bad"), (three,): ("reach", "bad")}
        text = ward.command("orchestrator", "doctor", "--quick").ends(3)
        assert "refuses connections" in text.text and "host key" in text.text
    finally:
        cluster.start_sshd(1)
        cluster.restore_host_key(2)


def test_one_machine_under_two_names_is_found(ward: Head, cluster: NetnsCluster) -> None:
    one, two, _ = cluster.addresses
    other = two.rpartition(".")[0] + ".77"
    known = cluster.known_hosts.read_text()
    (line,) = (line for line in known.splitlines() if line.startswith(one))
    with broken(
        cluster, 0, f"ip address add {other}/24 dev eth0", f"ip address del {other}/24 dev eth0"
    ):
        cluster.known_hosts.write_text(known + line.replace(one, other) + "\n")
        ward.node_list = cluster.write_list([one, other])
        findings = [f for f in examine(ward, "--quick", code=3) if f["check"] == "names"]
        cluster.known_hosts.write_text(known)
    assert "are the same machine" in only(findings, "names", "bad", one, other)["what"]
