"""The demo's cluster: for any user, with clear words when it cannot be, and nothing left behind."""

import os
import select
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.local_cluster import cluster as sshd
from orchestrator.local_cluster.cluster import LoopbackCluster
from tests.clusters.require import lacking, require_namespaces, require_sshd

pytestmark = pytest.mark.slow


def run(cluster: LoopbackCluster, i: int, command: str) -> str:
    ssh = ["ssh", "-F", str(cluster.ssh_config), cluster.addresses[i], command]
    return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout


def test_cluster_files_are_private(tmp_path: Path) -> None:
    require_sshd()
    with LoopbackCluster(2, tmp_path / "a cluster", slots=2) as cluster:
        assert cluster.node_list.read_text() == "127.0.0.2 slots=2\n127.0.0.3 slots=2\n"
        assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(cluster.key.stat().st_mode) == 0o600
        states = {run(cluster, i, "echo $ORCHESTRATOR_HOME") for i in (0, 1)}
        assert states == {f"{node.state}\n" for node in cluster.nodes}
        assert run(cluster, 0, "python3 -c 'import sys; print(sys.prefix)'") == f"{sys.prefix}\n"


def test_killed_cluster_is_replaced(tmp_path: Path) -> None:
    require_sshd()
    script = (
        "import sys; from pathlib import Path\n"
        "from orchestrator.local_cluster.cluster import LoopbackCluster\n"
        "cluster = LoopbackCluster(1, Path(sys.argv[1])); cluster.start()\n"
        "print(cluster._listeners[0].pid)"
    )
    left = subprocess.check_output([sys.executable, "-c", script, tmp_path])
    # The cluster's owner did not live to clean up.
    ended = os.pidfd_open(int(left))
    with LoopbackCluster(1, tmp_path) as cluster:
        assert select.select([ended], [], [], 0)[0]
        assert run(cluster, 0, "echo here") == "here\n"
    os.close(ended)


def test_stop_ends_detached_processes(tmp_path: Path) -> None:
    require_sshd()
    cluster = LoopbackCluster(1, tmp_path)
    cluster.start()
    detached = "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"
    ended = os.pidfd_open(int(run(cluster, 0, detached)))
    cluster.stop()
    assert select.select([ended], [], [], 0)[0]
    os.close(ended)
    cluster.stop()


def test_missing_sshd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd, "PROGRAMS", ())
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(CheckFailed, match="apt-get install openssh-server"):
        sshd.sshd_program()


ANYBODY = """
import subprocess, sys
from pathlib import Path
from orchestrator.local_cluster.cluster import LoopbackCluster
with LoopbackCluster(2, Path(sys.argv[1]) / "cluster") as cluster:
    ssh = ["ssh", "-F", str(cluster.ssh_config), "127.0.0.3", "id -un"]
    print(subprocess.run(ssh, capture_output=True, text=True, check=True).stdout, end="")
"""
# A user that exists only in there; it may read all files, since this python may lie in /root.
BECOME = """
mount --bind "$1/passwd" /etc/passwd && chown -R 4711:4711 "$1/home" &&
exec setpriv --reuid 4711 --regid 4711 --clear-groups --inh-caps=+dac_read_search \
    --ambient-caps=+dac_read_search env HOME="$1/home" USER=anybody "$2" -c "$3" "$1/home"
"""


def test_cluster_runs_without_root() -> None:
    require_namespaces()
    if shutil.which("setpriv") is None:
        lacking("setpriv is not installed: apt-get install util-linux")
    place = Path("/tmp") / f"orchestrator-anybody-{os.getpid()}"
    (place / "home").mkdir(parents=True)
    try:
        line = f"anybody:x:4711:4711::{place}/home:/bin/bash\n"
        (place / "passwd").write_text(Path("/etc/passwd").read_text() + line)
        become = ["unshare", "--mount", "bash", "-c", BECOME, "bash", str(place)]
        done = subprocess.run(
            [*become, sys.executable, ANYBODY], capture_output=True, text=True, check=False
        )
        assert done.stdout == "anybody\n", done.stderr
    finally:
        shutil.rmtree(place)
