"""The clusters do what they say: each fault has its effect on a plain SSH client, and is undone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from tests.clusters.loopback import FaultyLoopback
from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces, require_sshd
from tests.conftest import Cluster

pytestmark = pytest.mark.cluster

Netns = Callable[..., NetnsCluster]


@pytest.fixture(scope="module", params=["loopback", "netns"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if request.param == "loopback":
        require_sshd()
    else:
        require_namespaces()
    kind = FaultyLoopback if request.param == "loopback" else NetnsCluster
    with kind(2, tmp_path_factory.mktemp("cluster"), slots=3) as running:
        yield running


def says(cluster: Cluster, i: int, command: str) -> str:
    done = cluster.ssh(i, command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def session(cluster: Cluster, i: int) -> subprocess.Popen[bytes]:
    """An open session that echoes what it is sent."""
    pipe = subprocess.PIPE
    opened = subprocess.Popen(cluster.ssh_words(i, "cat"), stdin=pipe, stdout=pipe, stderr=pipe)
    assert echoes(opened, 10.0)
    return opened


def echoes(opened: subprocess.Popen[bytes], seconds: float) -> bool:
    assert opened.stdin is not None and opened.stdout is not None
    opened.stdin.write(b"x")
    opened.stdin.flush()
    ready = select.select([opened.stdout], [], [], seconds)[0]
    return bool(ready) and os.read(opened.stdout.fileno(), 1) == b"x"


def close(opened: subprocess.Popen[bytes]) -> None:
    opened.kill()
    opened.communicate()


def detached(cluster: Cluster, i: int, tag: str) -> int:
    """A process that outlives its session, as the node's side of the product does."""
    return int(says(cluster, i, f"{tag} setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"))


def test_killed_sshd_refuses_and_detached_processes_live_on(cluster: Cluster) -> None:
    pid = detached(cluster, 0, "MARK=survivor")
    opened = session(cluster, 0)
    cluster.kill_sshd(0)
    assert opened.wait(10) == 255
    assert "Connection refused" in cluster.ssh(0, "true").stderr
    assert says(cluster, 1, "echo here") == "here\n"
    assert cluster.processes(0, "MARK=survivor") == [pid]
    assert cluster.processes(1, "MARK=survivor") == []
    cluster.start_sshd(0)
    says(cluster, 0, f"kill -0 {pid}")
    cluster.kill(0, pid, signal.SIGKILL)
    assert cluster.processes(0, "MARK=survivor") == []
    close(opened)


def test_hosts_are_machines_of_their_own(two_nodes: Cluster) -> None:
    if isinstance(two_nodes, FaultyLoopback):
        require_namespaces()
    see = "hostname; ls /sys/class/net; ls /dev/shm; getent hosts host1 | cut -d' ' -f1"
    assert says(two_nodes, 0, see).split() == ["host0", "eth0", "lo", two_nodes.addresses[1]]
    pid = detached(two_nodes, 0, "MARK=one")
    assert str(pid) in says(two_nodes, 0, "ls /proc").split()
    assert "MARK=one" not in says(two_nodes, 1, "cat /proc/[0-9]*/environ | tr '\\0' '\\n'")
    two_nodes.kill(0, pid)
    zombies = says(two_nodes, 0, "grep -l '^State:.Z' /proc/[0-9]*/status || true")
    assert zombies == ""


def test_a_cut_link_loses_packets_and_resets_nothing(netns_cluster: Netns) -> None:
    cluster = netns_cluster(2)
    opened = session(cluster, 0)
    cluster.cut(0)
    assert not echoes(opened, 0.3)
    assert opened.poll() is None
    assert says(cluster, 1, "echo here") == "here\n"
    cluster.restore(0)
    assert opened.stdout is not None
    assert select.select([opened.stdout], [], [], 10)[0]  # the lost packet, sent again
    assert says(cluster, 0, "echo back") == "back\n"
    close(opened)


def test_a_machine_without_power_has_neither_processes_nor_what_was_in_memory(
    netns_cluster: Netns, tmp_path: Path
) -> None:
    """Its private disk stays, unless it goes as well; and packets can vanish one way alone."""
    (disk := tmp_path / "disk").mkdir()
    cluster = netns_cluster(2, tmpfs=[disk])
    kept, gone = disk / "kept", Path("/dev/shm/state")
    says(cluster, 0, f"echo 1 > {kept}; echo 1 > {gone}; (setsid sleep 1000 > /dev/null 2>&1 &)")
    for disk_lost in (False, True):
        cluster.power_off(0, disk_lost=disk_lost)
        assert cluster.exec(0, ["pgrep", "-c", "-v", "-x", "pgrep"]) == "1\n"
        cluster.power_on(0)
        assert says(cluster, 0, "echo back") == "back\n"
        assert not cluster.path(0, gone).exists()
        assert cluster.path(0, kept).exists() is not disk_lost
    cluster.vanish(0, cluster.addresses[1])
    ping = f"timeout 0.3 bash -c '</dev/tcp/{cluster.addresses[1]}/22' && echo open || echo shut"
    assert says(cluster, 0, ping) == "shut\n"
    assert says(cluster, 1, "echo here") == "here\n"
    cluster.arrive(0, cluster.addresses[1])
    assert says(cluster, 0, ping.replace("0.3", "5")) == "open\n"


OWNER = """
import sys
from pathlib import Path
from tests.clusters.{module} import {kind}
cluster = {kind}(2, Path(sys.argv[1]))
cluster.start()
for i in (0, 1):
    command = "MARK=left sleep 600 >/dev/null 2>&1 </dev/null & echo $!"
    print(cluster.exec(i, ["setsid", "sh", "-c", command]))
print(*cluster.addresses, flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_a_killed_owner(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_namespaces()
    directory = tmp_path_factory.mktemp("owner")
    program = OWNER.format(module="netns", kind="NetnsCluster")
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    for _ in range(5):
        owner.stdout.readline()
    left = [os.pidfd_open(pid) for pid in mentioning(f"{directory}/node")]
    assert len(left) >= 2  # an sshd of each host
    owner.kill()
    owner.communicate()
    for descriptor in left:
        assert select.select([descriptor], [], [], 10)[0], "an sshd lives on"
        os.close(descriptor)


def mentioning(text: str) -> list[int]:
    """Pids of processes that have `text` in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if text.encode() in said:
                    found.append(int(entry.name))
    return found


def test_a_missing_need_is_a_failure_where_ci_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CheckFailed("there is no sshd on this machine")

    monkeypatch.setattr("tests.clusters.require.sshd_program", missing)
    monkeypatch.setenv("ORCHESTRATOR_TESTS_NO_SKIP", "1")
    with pytest.raises(pytest.fail.Exception, match="no sshd"):
        require_sshd()
    monkeypatch.delenv("ORCHESTRATOR_TESTS_NO_SKIP")
    with pytest.raises(pytest.skip.Exception, match="no sshd"):
        require_sshd()
