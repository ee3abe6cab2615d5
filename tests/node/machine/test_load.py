"""Who uses the processors, found out on this machine with processes that really compute."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.node.machine import load

SPIN = "print(flush=True)\nwhile True: pass"
WAIT = "import signal; print(flush=True); signal.pause()"


@contextmanager
def program(text: str, **variables: str) -> Iterator[int]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_job_that_computes_and_one_that_waits_are_named() -> None:
    begun = time.time()
    spins = {"ORCHESTRATOR_JOB": "spins-1"}
    waits = {"ORCHESTRATOR_JOB": "waits-1"}
    with program(SPIN, **spins) as busy, program(WAIT, **waits) as idle:
        found = load.load(1.0)
    by_job = {user.job: user for user in found.users}
    assert by_job["spins-1"].pid == busy and by_job["waits-1"].pid == idle
    assert by_job["waits-1"].cores < by_job["spins-1"].cores <= found.cores
    assert by_job["waits-1"].memory > 1 << 20
    assert begun - 1.0 < by_job["spins-1"].since < time.time()  # in ticks since the boot
    assert list(found.users) == sorted(found.users, key=lambda user: -user.cores)


def test_what_is_computed_by_processes_that_are_not_seen_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with program(SPIN):
        monkeypatch.setattr(load.processes, "everyone", dict)
        found = load.load(0.5)
    assert not found.users and found.unseen > 0.05 and found.cores == found.unseen


def test_what_is_gone_has_no_owner_and_no_beginning() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert load.owner(process.pid) is None and load.started(process.pid) is None
    own = load.started(os.getpid())
    assert own is not None and own < time.time()
