"""Containers that only a launch was told of are looked into by what is about whole nodes."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.launch import Launch, Where
from orchestrator.head.nodes.node_list import parse_nodes
from orchestrator.head.status import status
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NODES = parse_nodes("a\nb wrap='docker exec -i listed'\nuser@c:22", "list")
IN_JOB = "docker exec -i job"


def part(host: str, wrap: str | None, user: str | None = None, port: int | None = None) -> Any:
    return NodeRecord(0, host, host, user, port, host, "/inside/python", 0, 1, wrap=wrap)


def launched(root: Path, parts: list[Any], *, signed: bool = True, **changes: Any) -> None:
    path = root / f"run_{time.strftime('%Y%m%d')}_{len(list(root.iterdir())):06}"
    path.mkdir(mode=0o700)
    record = JobRecord("job-1", "x", "running", ["master_launch"], parts, 1000.0)
    experiment = Experiment(path)
    write = experiment.write_signed if signed else experiment.write_record
    write(replace(record, **changes))


def found(root: Path) -> list[tuple[str, str | None, str | None]]:
    nodes = status.containers_of(NODES, Where(experiments=root), status.is_open)
    return [(node.place, node.python, node.wrap) for node in nodes]


def test_containers_of_lists_running_jobs_on_listed_nodes(tmp_path: Path) -> None:
    root = tmp_path / "experiments"
    root.mkdir()
    other = part("c", IN_JOB)  # the same machine by another login is another node of a list
    launched(root, [part("a", IN_JOB), part("b", "docker exec -i listed"), other])
    launched(root, [part("a", IN_JOB), part("c", IN_JOB, "user", 22), part("a", None)])
    launched(root, [part("a", "docker exec -i over")], state="done")
    launched(root, [part("a", "docker exec -i forged")], signed=False)
    assert found(root) == [
        (f"a ({IN_JOB})", "/inside/python", IN_JOB),
        (f"user@c:22 ({IN_JOB})", "/inside/python", IN_JOB),
    ]


@pytest.mark.parametrize(
    ("changes", "warm"),
    [
        ({}, False),
        ({"launch": Launch(warm="10m")}, True),
        ({"launch": Launch(warm="10m"), "state": "done", "ended": 500.0}, True),
        ({"launch": Launch(warm="10m"), "state": "done", "ended": 399.0}, False),
    ],
)
def test_may_be_warm_follows_age_and_settings(
    changes: dict[str, Any], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status.time, "time", lambda: 1000.0)
    record = JobRecord("job-1", "x", "running", ["master_launch"], [], 100.0)
    assert status.may_be_warm(replace(record, **changes)) == warm
