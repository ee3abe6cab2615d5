import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.running import Job


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(path))
    return path


@pytest.fixture
def new_job(home: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(name: str = "", node: int = 0) -> Job:
        # Its own name for every test and worker: the processes of a job are found by it.
        name = name or f"job-{os.getpid()}-{time.monotonic_ns()}"
        jobs.append(Job(home, name, node))
        return jobs[-1]

    yield make
    for job in jobs:
        job.clear()


@pytest.fixture
def job(new_job: Callable[..., Job]) -> Job:
    return new_job()
