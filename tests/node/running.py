"""A job on this machine, without a head: a real supervisor on a real run directory."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.node.job import job_processes, processes
from orchestrator.node.job.run_directory import PartDir, RunDir, connect_supervisor
from orchestrator.protocol.message import decode_value, encode_value
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.version import OWN

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("job") / "torchrun.py"
# The node's Python: NODE_PYTHON=/path/to/python3.9 pytest tests/node
PYTHON = os.environ.get("NODE_PYTHON", sys.executable)
# A test fails if any expected event takes longer.
PATIENCE = 30.0
SUPERVISE = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from orchestrator.node.job import supervisor;"
    " supervisor.main(*sys.argv[-3:])"
)

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str = "it", patience: float = PATIENCE) -> T:
    """Return the condition's value as soon as it is true."""
    deadline = time.monotonic() + patience
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {patience} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    process = processes.find_process(pid)
    return process is not None and process.state not in "ZX"


def streams(log: bytes, ranks: bytes) -> dict[str, bytes]:
    """Each stream's bytes, from the two files alone. Bytes that no record speaks of fail."""
    records = [line.split() for line in ranks.splitlines()]
    if not records:
        assert not log
        return {}
    starts = [int(offset) for offset, *_ in records]
    assert starts == sorted(starts)
    assert starts[0] == 0
    found: dict[str, bytes] = {}
    for (start, stream, *_), end in zip(records, [*starts[1:], len(log)], strict=True):
        found[stream.decode()] = found.get(stream.decode(), b"") + log[int(start) : end]
    return found


def spec_of(data: dict[str, Any]) -> Spec:
    return decode_value(Spec, json.loads(json.dumps(data)))


def bare_spec(**fields: Any) -> Spec:
    """A spec in which nothing matters but these fields."""
    text = {"job": "job", "experiment": "e", "start": "plain", "workdir": "/"}
    numbers = {"node": 0, "nnodes": 1, "nproc": 1, "first_rank": 0}
    rest = {"agent": [], "env": {}, "unset": [], "version": encode_value(OWN)}
    rest["target"] = {"kind": "script", "name": "x"}
    return decode_value(Spec, {**text, **numbers, **rest, **fields})


def run_dir(job: str = "job", part: int = 0, **fields: Any) -> RunDir:
    """Return a run directory that exists and has a spec with these fields."""
    run = RunDir(job, part)
    run.create()
    for each in (PartDir(job, part), run):
        each.write_spec(bare_spec(**fields))
    return run


class Job:
    """One job on one node. `home` is where ORCHESTRATOR_HOME points to."""

    def __init__(self, home: Path, name: str = "job", node: int = 0) -> None:
        self.run = RunDir(name, node)
        self.home = home
        self.process: subprocess.Popen[bytes] | None = None

    def spec(
        self,
        target: dict[str, Any],
        *,
        start: str = "plain",
        nproc: int = 1,
        first: int = 0,
        workdir: Path | str = "/",
        agent: list[str] | None = None,
        env: dict[str, str] | None = None,
        unset: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        fork = ["--fork"] if start == "fork" else []
        stand_in = [PYTHON, "-u", str(STAND_IN), *fork, f"--nproc={nproc}", f"--first={first}"]
        tags = {"ORCHESTRATOR_JOB": self.run.job, "NODE_RANK": str(self.run.part)}
        return {
            "job": self.run.job,
            "node": self.run.part,
            "part": self.run.part,
            "attempt": self.run.attempt,
            "version": encode_value(OWN),
            "nproc": nproc,
            "nnodes": 1,
            "first_rank": first,
            "start": start,
            "agent": stand_in if agent is None else agent,
            "env": {"ORCHESTRATOR_EXPERIMENT": "/nowhere", **(env or {}), **tags},
            "experiment": "/nowhere",
            "unset": list(unset),
            "workdir": str(workdir),
            "target": target,
        }

    def start(
        self, spec: dict[str, Any], files: tuple[int, ...] = (), group: Path | None = None
    ) -> "Job":
        self.run.create()
        self.run.write_spec(spec_of(spec))
        self.process = subprocess.Popen(
            [PYTHON, "-IS", "-c", SUPERVISE, "supervise", *self.run.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=files,
            preexec_fn=group and (lambda: group.write_text(str(os.getpid()))),  # noqa: PLW1509
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == b"ready\n", said
        return self

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the job was not started"
        return self.process

    def wait(self, patience: float = PATIENCE) -> dict[str, Any]:
        self.supervisor.wait(patience)
        return self.events[-1]

    def end(self, why: str, grace: float) -> socket.socket:
        supervisor = connect_supervisor(self.run)
        supervisor.sendall(json.dumps({"why": why, "grace": grace}).encode() + b"\n")
        return supervisor

    @property
    def events(self) -> list[dict[str, Any]]:
        try:
            lines = Path(self.run.events).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def ended(self) -> dict[int, int]:
        return {event["rank"]: event["code"] for event in self.of_kind("rank_ended")}

    @property
    def output(self) -> dict[str, str]:
        log, ranks = Path(self.run.log).read_bytes(), Path(self.run.ranks).read_bytes()
        return {name: data.decode() for name, data in streams(log, ranks).items()}

    def said(self, words: str, stream: str = "0") -> bool:
        there = words in self.output.get(stream, "")
        over = self.process is not None and self.process.poll() is not None
        assert there or not over, f"it ended without {words!r}: {self.output}"
        return there

    def living(self) -> list[int]:
        return [process.pid for process in job_processes.processes_of_job(self.run)]

    def clear(self) -> None:
        """Remove the leftovers of a failed test."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        for process in job_processes.processes_of_job(self.run):
            processes.send_signal(process, signal.SIGKILL)


def script(directory: Path, text: str, name: str = "program.py") -> dict[str, Any]:
    """A target: the program, written down. Arguments are to be added."""
    (directory / name).write_text(text)
    return {"kind": "script", "name": str(directory / name), "args": []}


def spare_others(monkeypatch: pytest.MonkeyPatch, ours: set[str]) -> None:
    """Hide the jobs that really run here."""
    tagged = job_processes.tagged_jobs
    monkeypatch.setattr(
        job_processes, "tagged_jobs", lambda: {job for job in tagged() if job.job in ours}
    )
