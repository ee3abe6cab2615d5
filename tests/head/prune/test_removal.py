"""Experiments that the rules remove, and those that are never removed."""

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.head.prune.removal import KEPT, PruneEntry, mark_kept, time_in_name
from orchestrator.records.experiment import JobRecord

RECORD = JobRecord("job-1", "experiments/x", "done", ["master_launch"], [], 1000.0)
NOW = time.mktime((2026, 2, 1, 0, 0, 0, 0, 0, -1))


def found(name: str, state: str = "done", **more: Any) -> PruneEntry:
    return PruneEntry(name, record=dataclasses.replace(RECORD, state=state), **more)


THREE = [found(f"m_2026010{day}_000000") for day in (1, 2, 3)]


def chosen(
    experiments: list[PruneEntry], keep: int, older_than: float = 0.0, *, keep_failed: bool = False
) -> list[PruneEntry]:
    copies = [dataclasses.replace(one) for one in experiments]
    copies.sort(key=lambda one: (one.when, one.name), reverse=True)
    mark_kept(copies, NOW, keep, older_than, keep_failed=keep_failed)
    return [one for one in copies if one.action != KEPT]


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
        ([found("m_20260101_000000", "failed"), THREE[2]], {"keep": 1}, "1"),
        ([found("m_20260101_000000", "failed"), THREE[2]], {"keep": 1, "keep_failed": True}, ""),
        ([found("m_20260101_000000", "lost")], {"keep": 0, "keep_failed": True}, ""),
        ([found("m_20260101_000000", "stopped")], {"keep": 0, "keep_failed": True}, "1"),
        ([found("m_20260101_000000", "running")], {"keep": 0}, "1"),  # it was asked: over
        ([found("m_20260101_000000", "running")], {"keep": 0, "keep_failed": True}, ""),
        # The time in the name decides which is newest, not the text before it.
        ([found("z_20250109_000000"), found("a_20260101_000000")], {"keep": 1}, "9"),
        ([found("a_20260101_000000"), found("b_20260101_000000")], {"keep": 1}, "1"),
    ],
)
def test_chosen_follows_rules(
    experiments: list[PruneEntry], rules: dict[str, Any], days: str
) -> None:
    assert "".join(one.name[9] for one in chosen(experiments, **rules)) == days


@given(st.dictionaries(st.integers(1, 28), st.booleans()), st.integers(0, 30), st.booleans())
def test_chosen_keeps_pinned_newest_and_failed(
    days: dict[int, bool], keep: int, keep_failed: bool
) -> None:
    experiments = [
        found(f"m_202601{day:02}_000000", "failed" if day % 2 else "done", pinned=pin)
        for day, pin in days.items()
    ]
    gone = chosen(experiments, keep, keep_failed=keep_failed)
    assert not [one for one in gone if one.pinned]
    newest = sorted((one.name for one in experiments), reverse=True)[:keep]
    assert not {one.name for one in gone} & set(newest)
    assert not keep_failed or not [one for one in gone if one.record.state != "done"]


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("m_20260131_235959", "20260131 235959"),
        ("my run 'x'\n_20260131_235959", "20260131 235959"),
        ("-rf_20260131_235959", "20260131 235959"),
        ("m_20250101_000000_20260131_235959", "20260131 235959"),
        ("m_20261331_235959", None),
        ("m_20260230_000000", None),
        ("m_00000000_000000", None),
        (".m_20260131_235959", None),
        ("m_20260131_235959 ", None),
        ("m_20260131_235959\n", None),
        ("_20260131_235959", None),
        ("m_٢٠٢٦٠١٣١_235959", None),
        ("m", None),
        ("", None),
    ],
)
def test_stamp_reads_time_from_name(name: str, when: str | None) -> None:
    told = time_in_name(name)
    shown = None if told is None else time.strftime("%Y%m%d %H%M%S", time.localtime(told))
    assert shown == when
