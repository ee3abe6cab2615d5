"""The nodes that are told that a job is finally over."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.start import job
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.start import Release
from orchestrator.records.experiment import Attempt, JobRecord, NodeRecord


def node(index: int, name: str, state: str, part: int = -1) -> NodeRecord:
    place = (index, name, name, None, None, "10.0.0.1", "py", index, 1, state)
    return NodeRecord(*place, part=part)


def test_release_reaches_every_node_of_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node that was lost, and is back, would keep the job's state in memory for an hour."""
    attempts = [Attempt(1, 0.0, 1.0, "lost", 4, None, ["a", "b", "c"])]
    nodes = [node(0, "a", "ended"), node(1, "s", "ended"), node(2, "c", "lost", 2)]
    spares = [node(1, "b", "lost", 1), node(3, "t", "standing by", 4), node(2, "u", "ended")]
    record = JobRecord(
        "run-1", str(tmp_path), "done", ["x"], nodes, 0.0, attempts=attempts, spares=spares
    )
    told: dict[str, Release] = {}

    @contextlib.contextmanager
    def for_now(_: object, of: NodeRecord) -> Iterator[SimpleNamespace]:
        def ask(order: Message, seconds: float) -> None:
            assert isinstance(order, Release)
            told[of.name] = order

        if of.name == "c":
            raise NodeError("it does not answer")
        yield SimpleNamespace(ask=ask)

    monkeypatch.setattr(job, "temporary_channel", for_now)
    channels = {
        index: SimpleNamespace(ask=lambda order, _, name=name: told.update({name: order}))
        for index, name in ((0, "a"), (1, "s"))
    }
    job.release_job(record, cast(Any, channels), cast(Any, None))
    assert {name: (order.job, order.part) for name, order in told.items()} == {
        "a": ("run-1", 0),
        "s": ("run-1", 1),
        "b": ("run-1", 1),
        "t": ("run-1", 4),
        "u": ("run-1", 2),
    }
