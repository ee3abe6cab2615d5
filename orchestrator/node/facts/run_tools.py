"""Runs external tools: all at once, each with its own time limit, killed with its children.

Their output goes to files, not pipes: a child that outlives its tool could hold a pipe open.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

MOST = 4 << 20  # of output
DIES = 1.0  # seconds to go after SIGKILL; what does not is stuck in a driver
CLEAN = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}


class Command(NamedTuple):
    argv: Sequence[str]
    seconds: float
    env: Mapping[str, str] = {}


class Output(NamedTuple):
    """The output of a tool; `problem` is empty if it ended by itself with exit code 0."""

    out: str
    problem: str


class Running:
    def __init__(self, command: Command) -> None:
        self.name = os.path.basename(command.argv[0])
        self.seconds = command.seconds
        self.deadline = time.monotonic() + command.seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.problem = ""
        if shutil.which(command.argv[0]) is None:
            self.problem = f"{self.name} is not installed"
            return
        self.out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=self.out,
                stderr=self.err,
                env={**os.environ, **CLEAN, **command.env},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self.problem = f"{self.name} cannot be run: {error.strerror}"

    def finish(self) -> Output:
        if self.process is None:
            return Output("", self.problem)
        try:
            code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Output("", self._late())
        finally:
            out, err = self._content(self.out), self._content(self.err)
        if code == 0:
            return Output(out, "")
        lines = (err.strip() or out.strip()).splitlines()
        last = f": {' '.join(lines[:3])[:300]}" if lines else ""
        return Output(out, f"{self.name} ended with exit code {code}{last}")

    def _late(self) -> str:
        assert self.process is not None
        self._kill()
        try:
            self.process.wait(DIES)
        except subprocess.TimeoutExpired:
            return f"{self.name} hangs in the kernel: not even SIGKILL ends it"
        return f"{self.name} did not end within {self.seconds:g} s"

    def _kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @staticmethod
    def _content(file: IO[bytes]) -> str:
        with file:
            file.seek(0)
            return file.read(MOST).decode("utf-8", "replace")


def together(commands: Mapping[str, Command]) -> dict[str, Output]:
    """Run them side by side: it takes as long as the slowest."""
    running: dict[str, Any] = {name: Running(command) for name, command in commands.items()}
    return {name: tool.finish() for name, tool in running.items()}
