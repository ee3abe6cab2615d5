"""Drives the installed commands as a user does: a process, its output as it comes, its end."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.records.experiment import Experiment
from tests.clusters.faults import Faults

BIN = Path(sys.executable).parent
# A test fails if any expected event takes longer.
PATIENCE = 150.0


class Command:
    """A running command, in a session of its own."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
        os.close(writing)
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=[reading], daemon=True).start()

    def _read(self, reading: int) -> None:
        with open(reading, errors="replace") as output:
            for line in output:
                self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def wait_for(self, pattern: str, patience: float = PATIENCE) -> re.Match[str]:
        """The first line, from now on, in which the pattern is found."""
        deadline = time.monotonic() + patience
        while True:
            try:
                line = self._new.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{pattern!r} did not come:\n{self.text}") from None
            if line is None:
                self._new.put(None)
                raise AssertionError(f"it ended without {pattern!r}:\n{self.text}")
            self.lines.append(line)
            found = re.search(pattern, line)
            if found:
                return found

    def wait_for_all(self, *patterns: str) -> None:
        """Wait for a line for each pattern, in any order."""
        missing = list(patterns)
        while missing:
            line = self.wait_for("|".join(missing)).string
            missing = [pattern for pattern in missing if not re.search(pattern, line)]

    def finish(self, patience: float = PATIENCE) -> int:
        """Its exit code; `lines` then holds all of its output."""
        deadline = time.monotonic() + patience
        while True:
            try:
                line = self._new.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                self.process.kill()
                raise AssertionError(f"it did not end:\n{self.text}") from None
            if line is None:
                return self.process.wait(timeout=10)
            self.lines.append(line)

    def ends(self, code: int = 0) -> "Command":
        found = self.finish()
        assert found == code, self.text
        return self

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def interrupt_when(there: Callable[[], object]) -> None:
    """Ctrl-C as soon as the condition is true; the test is in the middle of something then."""

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE
        while not there() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def missing_lines(page: Path, text: str) -> list[str]:
    """The lines of a page's ```text that an output lacks.

    `...` stands for anything, and a number with a point for any other.
    """
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    shapes = {
        line: re.sub(r"\d+\\\.\d+", r"[\\d.]+", re.escape(line)) for line in shown.split("\n")
    }
    return [line for line in shapes if not re.search(shapes[line].replace(r"\.\.\.", ".*"), text)]


class Head:
    """The head node: a directory in which the commands are typed, and the cluster they reach."""

    def __init__(self, cluster: Faults, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.node_list = cluster.node_list

    @property
    def reach(self) -> list[str]:
        """The options with which a command reaches the cluster."""
        return ["--nodes", str(self.node_list), "--ssh-config", str(self.cluster.ssh_config)]

    def command(self, name: str, *words: str, **env: str) -> Command:
        first = [str(BIN / name)]
        if name == "orchestrator":
            first.append(words[0])
            words = words[1:]
        # Tests must not use the developer's cache.
        env.setdefault("XDG_CACHE_HOME", str(self.directory.parent / ".cache"))
        return Command([*first, *self.reach, *words], self.directory, env)

    def launch(self, *words: str, **env: str) -> Command:
        return self.command("master_launch", *words, **env)

    def run(self, *words: str, **env: str) -> Command:
        return self.launch(*words, **env).ends()

    def script(self, name: str, text: str) -> str:
        (self.directory / name).write_text(text)
        return name

    @property
    def experiments(self) -> list[Path]:
        found = (self.directory / "experiments").glob("*/job.json")
        return sorted(path.parent for path in found)

    @property
    def experiment(self) -> Path:
        return self.experiments[-1]

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.experiment / "job.json").read_text())
        return found

    def log(self, node: int) -> bytes:
        (path,) = (self.experiment / "logs").glob(f"node_{node}_*.txt")
        return path.read_bytes()

    def node_file(self, node: int, name: str, attempt: int | str = 1) -> Path:
        """A file of the job's run directory on a node, as seen from here."""
        home = self.cluster.run_home(node)
        return home / "runs" / str(self.record["job"]) / str(node) / str(attempt) / name

    def end_background(self) -> None:
        """End the heads that were left behind; their jobs go on."""
        for experiment in map(Experiment, self.experiments):
            deadline = time.monotonic() + PATIENCE
            while experiment.followed and time.monotonic() < deadline:
                holder = json.loads((experiment.path / ".head").read_text() or "{}")
                if holder.get("background"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(holder["pid"], signal.SIGKILL)
                elif holder:
                    # A user in a terminal holds it.
                    break
                time.sleep(0.02)

    def left(self, node: int) -> list[int]:
        return self.cluster.processes(node, "ORCHESTRATOR_JOB=")

    def nothing_left(self, patience: float = 20.0) -> bool:
        """A supervisor may need a moment to leave after its last word, on a busy machine longer."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not any(self.left(node) for node in range(len(self.cluster.addresses))):
                return True
            # Each look reads the environment of every process of a host.
            time.sleep(0.1)
        return False
