"""What a node measured before it was lost comes home once it answers again: its session answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.head.transfer.fetch import gaps
from orchestrator.node.server.visit import Visit

JOB = "job_20260101_000000-abcdef"
NAME = "rank_00_metrics.jsonl"


def lines(steps: Iterable[int], of: str) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.5, "of": of}) + "\n" for step in steps)


def channel_to_it() -> Any:
    visit = Visit()
    return SimpleNamespace(ask=lambda request, _: visit.answer(request))


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "node"))
    there = tmp_path / "node/runs" / JOB / "0/experiment/outputs"
    there.mkdir(parents=True)
    return there


def test_missing_steps_come_from_the_node_that_has_them(tmp_path: Path, there: Path) -> None:
    (there / NAME).write_text(lines(range(1, 9), "lost") + '{"step": 9, "lo')
    (there / "rank_01_metrics.jsonl").write_text(lines(range(1, 9), "lost"))
    here = tmp_path / "here"
    here.mkdir()
    begin = '{"a": "line without a step"}\n' + lines(range(1, 4), "home")
    end = lines(range(6, 12), "spare")
    (here / NAME).write_text(begin + end)
    whole = lines(range(2, 30, 2), "home")
    (here / "rank_01_metrics.jsonl").write_text(whole)
    channel = channel_to_it()
    wanted = gaps.lacking(here)
    assert wanted == {NAME}
    gaps.fill(channel, (JOB, 0), here, wanted)
    assert (here / NAME).read_text() == begin + lines((4, 5), "lost") + end
    assert (here / "rank_01_metrics.jsonl").read_text() == whole
    assert gaps.lacking(here) == set()


def test_before_the_ranks_go_on_its_last_steps_come_too(
    tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long file only the end is fetched: the lines of the steps that are here are known."""
    here = tmp_path / "here"
    here.mkdir()
    (here / NAME).write_text(begin := lines(range(1, 9), "home"))
    (there / NAME).write_text(lines(range(1, 12), "lost") + '{"step": 12, "lo')
    (there / "rank_01_metrics.jsonl").write_text(lines(range(1, 9), "never here"))
    monkeypatch.setattr(gaps, "LATEST_BYTES", 6 * len(lines([1], "lost")))
    gaps.extend(channel_to_it(), (JOB, 0), here)
    assert (here / NAME).read_text() == begin + lines((9, 10, 11), "lost")
    assert [path.name for path in here.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("steps", "lacks"),
    [((), 0), ((5,), 0), ((1, 2, 3), 0), ((4, 5, 6), 1), ((10, 20, 40), 1), ((1, 1, 2, 2, 3), 0)],
)
def test_what_a_gap_is(steps: tuple[int, ...], lacks: int, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(lines(steps, "home"))
    assert len(gaps.lacking(tmp_path)) == lacks
