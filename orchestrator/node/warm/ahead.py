"""A supervisor that is started ahead: `python <library> ahead FD`, for who is next in the queue.

It has imported all that it needs when the launch gets its turn, and ends with the visit otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from orchestrator.node.job import processes
from orchestrator.node.job.ranks import process_title
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.job.supervisor import Supervisor, run_job
from orchestrator.node.server.visit import LIBRARY, RoomState, Visit
from orchestrator.node.warm import frames
from orchestrator.node.warm.handover import WarmSupervisor
from orchestrator.node.warm.pairs import COMMAND_ROOM_BYTES
from orchestrator.protocol.spec import Spec


class Ahead(RoomState):
    """The supervisor in waiting of one visit, if there is one."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def start(self) -> None:
        """Start it, unless that was done."""
        if self.process is not None:
            return
        self.control, its = socket.socketpair()
        with its:
            words = [LIBRARY, "ahead", str(its.fileno()), " " * COMMAND_ROOM_BYTES]
            self.process = subprocess.Popen(
                [sys.executable, *processes.OPTIONS, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[its.fileno()],
            )

    def take(self, run: RunDir, files: list[int]) -> WarmSupervisor | None:
        """Let it be the supervisor of a job, its errors and these files open."""
        process = None if self.process is None else processes.find(self.process.pid)
        if self.control is None or process is None:
            return None
        reading, writing = os.pipe()
        try:
            frames.send(self.control, {"job": run.job, "node": run.node}, [writing, *files])
        except OSError:
            os.close(reading)
            return None
        finally:
            os.close(writing)
            self.control.close()
            self.control = None
        self.visit.supervisor = self.process
        return WarmSupervisor(process, os.fdopen(reading, "rb", buffering=0))

    def leave(self) -> None:
        if self.control is not None:
            self.control.close()


def main(fd: str) -> None:
    """Wait for a job, and be its supervisor to its end."""
    with socket.socket(fileno=int(fd)) as control, contextlib.suppress(OSError):
        try:
            order, (ready, errors, *held) = frames.receive(control)
        except EOFError:
            return
    os.dup2(errors, 2)
    os.close(errors)
    run = RunDir(order["job"], order["node"])
    names = [run.job, str(run.node)]
    process_title.show_command([sys.executable, *processes.OPTIONS, LIBRARY, "supervise", *names])
    run_job(Supervisor(run, with_open_port(run.read_spec(), held)), ready)


def with_open_port(spec: Spec, held: list[int]) -> Spec:
    """Return a supervisor's spec; the last file that it was sent is the port of its peers."""
    if spec.lease is None or spec.lease.fd is None:
        return spec
    return spec.replace(lease=spec.lease.replace(fd=held[-1]))
