"""Which experiments go by the rules, and which never."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.head.prune.choice import Rules, choose
from orchestrator.head.prune.scan import ScannedExperiment
from orchestrator.records.experiment import JobRecord

RECORD = JobRecord("job-1", "experiments/x", "done", ["master_launch"], [], 1000.0, {})
NOW = time.mktime((2026, 2, 1, 0, 0, 0, 0, 0, -1))


def found(name: str, state: str = "done", **more: Any) -> ScannedExperiment:
    return ScannedExperiment(name, dataclasses.replace(RECORD, state=state), **more)


THREE = [found(f"m_2026010{day}_000000") for day in (1, 2, 3)]


def going(experiments: list[ScannedExperiment], *rules: Any, **more: Any) -> str:
    """The days of those that go."""
    chosen = choose(experiments, NOW, Rules(*rules, **more))
    return "".join(one.name[9] for one, why in chosen if why is None)


@pytest.mark.parametrize(
    ("experiments", "rules", "days"),
    [
        ([], {"keep": 0}, ""),
        (THREE, {"keep": 0}, "321"),
        (THREE, {"keep": 1}, "21"),
        (THREE[::-1], {"keep": 2}, "1"),
        (THREE, {"keep": 3}, ""),
        (THREE, {"keep": 99}, ""),
        # Both have to be true: not among the newest, and old.
        (THREE, {"keep": 0, "older_than": 30 * 86400.0}, "21"),
        (THREE, {"keep": 2, "older_than": 30 * 86400.0}, "1"),
        (THREE, {"keep": 0, "older_than": 31 * 86400.0}, "1"),
        (THREE, {"keep": 0, "older_than": 31 * 86400.0 + 1}, ""),
        # What stays for a reason of its own counts among the newest all the same.
        ([THREE[0], dataclasses.replace(THREE[2], pinned=True)], {"keep": 1}, "1"),
        ([dataclasses.replace(THREE[0], pinned=True), THREE[1], THREE[2]], {"keep": 1}, "2"),
        ([dataclasses.replace(THREE[0], busy="it runs"), THREE[2]], {"keep": 0}, "3"),
        ([found("m_20260101_000000", "failed"), THREE[2]], {"keep": 1}, "1"),
        ([found("m_20260101_000000", "failed"), THREE[2]], {"keep": 1, "keep_failed": True}, ""),
        ([found("m_20260101_000000", "lost")], {"keep": 0, "keep_failed": True}, ""),
        ([found("m_20260101_000000", "stopped")], {"keep": 0, "keep_failed": True}, "1"),
        ([found("m_20260101_000000", "running")], {"keep": 0}, "1"),  # it was asked: over
        ([found("m_20260101_000000", "running")], {"keep": 0, "keep_failed": True}, ""),
        ([ScannedExperiment("m_20260101_000000", foreign="no job.json")], {"keep": 0}, ""),
        # The newest by the time in the name, whatever stands before it.
        ([found("z_20250109_000000"), found("a_20260101_000000")], {"keep": 1}, "9"),
        ([found("a_20260101_000000"), found("b_20260101_000000")], {"keep": 1}, "1"),
    ],
)
def test_which_go(experiments: list[ScannedExperiment], rules: dict[str, Any], days: str) -> None:
    assert going(experiments, **rules) == days


@given(
    st.lists(st.tuples(st.integers(1, 28), st.booleans(), st.sampled_from(["", "it runs"])),
             unique_by=lambda one: one[0]),
    st.integers(0, 30), st.booleans(),
)  # fmt: skip
def test_what_never_goes(days: list[tuple[int, bool, str]], keep: int, keep_failed: bool) -> None:
    experiments = [
        found(f"m_202601{day:02}_000000", "failed" if day % 2 else "done", pinned=pin, busy=busy)
        for day, pin, busy in days
    ]
    chosen = choose(experiments, NOW, Rules(keep, 0.0, keep_failed))
    assert {one.name for one, _ in chosen} == {one.name for one in experiments}
    gone = [one for one, why in chosen if why is None]
    assert not [one for one in gone if one.pinned or one.busy]
    newest = sorted((one.name for one in experiments), reverse=True)[:keep]
    assert not {one.name for one in gone} & set(newest)
    assert not keep_failed or not [one for one in gone if one.record and one.record.state != "done"]
