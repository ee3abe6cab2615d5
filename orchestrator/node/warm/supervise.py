"""The supervisor that a standby executes.

`python <library> forked PID FD supervise JOB PART ATTEMPT`
"""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from orchestrator.node.job import supervisor
from orchestrator.node.job.ranks.agent_start import AgentStart
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.job.supervisor import Supervisor
from orchestrator.node.warm.standby import send_message
from orchestrator.protocol.timing import STANDBY_SECONDS

if TYPE_CHECKING:
    import subprocess


class ForkedSupervisor(Supervisor):
    """A supervisor whose torchrun is already forked and waits for its settings."""

    def __init__(self, run: RunDir, agent: int, control: int) -> None:
        super().__init__(run)
        self.waiting, self.control = agent, socket.socket(fileno=control)

    def spawn_agent(self, start: AgentStart, output: int) -> subprocess.Popen[bytes]:
        # torchrun was killed a moment ago.
        with self.control, contextlib.suppress(BrokenPipeError):
            self.control.settimeout(STANDBY_SECONDS)
            send_message(self.control, {**start}, [output])
        # The caller uses only these attributes of a Popen.
        return cast("subprocess.Popen[bytes]", SimpleNamespace(pid=self.waiting, returncode=None))


def main(agent: str, control: str, *words: str) -> None:
    job, part, attempt = words
    supervisor.main(job, part, attempt, lambda run: ForkedSupervisor(run, int(agent), int(control)))
