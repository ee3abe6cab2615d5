"""The product's own loopback cluster, with the faults that need no root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.local_cluster.cluster import LoopbackCluster, LoopbackNode, kill_processes
from orchestrator.node.job import processes
from tests.clusters.faults import Faults


class FaultyLoopback(Faults, LoopbackCluster):
    """`with FaultyLoopback(2, directory) as cluster: ...`"""

    def __init__(self, size: int, directory: Path, **options: Any) -> None:
        LoopbackCluster.__init__(self, size, directory, **options)
        self.hung = {}

    def __enter__(self) -> FaultyLoopback:
        self.start()
        return self

    def stop(self) -> None:
        for i in list(self.hung):
            self._end_hung(i)
        LoopbackCluster.stop(self)

    def environment(self, node: LoopbackNode) -> dict[str, str]:
        return {**LoopbackCluster.environment(self, node), "OMP_NUM_THREADS": "1"}

    def popen(self, i: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.environment(self.nodes[i])}
        return subprocess.Popen(argv, text=True, env=environment, **options)

    def home(self, i: int) -> Path:
        return self.nodes[i].home

    def run_home(self, i: int) -> Path:
        return self.nodes[i].state

    def processes(self, i: int, tag: str) -> list[int]:
        ours = f"ORCHESTRATOR_HOME={self.nodes[i].state}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                # It has ended since the listing, or belongs to another user.
                continue
            if ours in environment and tag.encode() in environment:
                found.append(int(entry.name))
        return found

    def kill(self, i: int, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        kill_processes([pid]) if number == signal.SIGKILL else os.kill(pid, number)

    def spawn_sshd(self, i: int) -> None:
        self._spawn(i)
        self._await(i)

    def end_sshd(self, i: int) -> None:
        """End the listener and its sessions, and nothing that a session has detached."""
        if listener := self._listeners.pop(i, None):
            # A stopped listener starts no new session between look and kill.
            os.kill(listener.pid, signal.SIGSTOP)
            kill_processes(
                {
                    listener.pid,
                    *(
                        pid
                        for pid in below(listener.pid)
                        if b"sshd" in processes.file_contents(f"/proc/{pid}/cmdline").split(b" ")[0]
                    ),
                }
            )
            listener.wait()

    def listens_at(self, i: int) -> tuple[str, int]:
        return self.nodes[i].address, self.nodes[i].port


def below(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        with contextlib.suppress(OSError):
            yield from below(int(child))
