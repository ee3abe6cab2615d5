"""What `orchestrator logs` brings home of a job that is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.commands import logs
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord, NodeRecord
from tests.head.follow.streams.test_last_lines import NODES, Streaming, here, pieces, there


def test_a_node_that_answers_again_has_what_it_had_not_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a job without restarts, which ended when the node was lost."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    place = experiments.create(tmp_path / "experiments", "run")
    node = replace(NODES[1], state="lost")
    job = JobRecord("run-1", str(place.path), "lost", ["x"], [NODES[0], node], 0.0, ended=1.0)
    here(place, node, b"one\n", b"0 1\n")
    log = there("run-1", 1)
    log.feed("1", b"one\n")
    log.feed("1", b"two\n")
    away = {"b"}

    @contextlib.contextmanager
    def for_now(_: object, of: NodeRecord) -> Iterator[Streaming]:
        if of.name in away:
            raise NodeError("it does not answer")
        channel = Streaming()
        channel.connection = SimpleNamespace(close=lambda: None)
        yield channel

    monkeypatch.setattr(logs, "for_now", for_now)
    for _ in range(3):
        fetcher = logs.LogFetcher(place, job, cast("Any", None), cast("Any", None))
        fetcher.bring_lost()
        fetcher.end()
        came = len(pieces(place, node)[0][1])
        assert came == (4 if away else 8)
        away.clear()
    assert pieces(place, node) == [("1", b"one\ntwo\n")]
    assert capsys.readouterr().out.count("the last 4 B of b's log, which b alone had, are") == 1
