import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.run import Run
from orchestrator.head.schedulers.backend import backend_of
from orchestrator.head.screen.screen import Display, Screen
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord, NodeRecord

Follow = Callable[..., Run]


@pytest.fixture
def follow(tmp_path: Path) -> Follow:
    """Return a function that follows a job of this many nodes, n0, n1, ... with one rank each."""

    def follow(count: int = 0, *, left_behind: bool = False, **fields: Any) -> Run:
        directory = experiments.create_experiment(tmp_path, "run")
        nodes = [
            NodeRecord(i, f"n{i}", f"n{i}", None, None, f"10.0.0.{i}", "py", i, 1)
            for i in range(count)
        ]
        command = ["master_launch"]
        record = JobRecord("run-1", str(directory.path), "running", command, nodes, 1000.0)
        record = replace(record, **fields)
        directory.write_record(record)
        screen = Screen([], io.StringIO(), tty=False, color=False, quiet=True)
        backend = backend_of(record)
        run = Run(directory, record, Display(screen), backend, left_behind=left_behind)
        run.job.followers = [Deaf() for _ in record.nodes]  # type: ignore[misc]
        return run

    return follow


class Deaf:
    """A follower of a node that cannot be asked anything."""

    def end(self, why: str, grace: float, *, failed: bool = False) -> None:
        pass
