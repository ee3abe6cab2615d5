"""The clusters do what they say: each fault has its effect on a plain SSH client, and is undone."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces, require_sshd

pytestmark = pytest.mark.cluster

Netns = Callable[..., NetnsCluster]


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
