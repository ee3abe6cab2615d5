from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.records import history
from orchestrator.records.history import Incident


def incident(number: int, machine: str = "gpu01", kind: str = "lost") -> Incident:
    return Incident(machine, float(number), f"job-{number}", f"run_{number}", kind, "it is gone")


def test_incidents_come_back_in_order_and_once(login: Path) -> None:
    assert history.read() == []
    for number in (2, 1, 2):
        history.note(incident(number))
    history.note(incident(2, kind="signal"))
    history.note(incident(3, "gpu02"))
    assert [(i.machine, i.time, i.kind) for i in history.read()] == [
        ("gpu01", 1.0, "lost"),
        ("gpu01", 2.0, "lost"),
        ("gpu01", 2.0, "signal"),
        ("gpu02", 3.0, "lost"),
    ]
    known = history.by_machine(history.read(), ["gpu03", "gpu01"])
    assert {machine: len(each) for machine, each in known.items()} == {
        "gpu03": 0,
        "gpu01": 3,
        "gpu02": 1,
    }


def test_it_grows_no_further_than_it_may(login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 3)
    for number in range(5):
        history.note(incident(number))
    assert [i.time for i in history.read()] == [2.0, 3.0, 4.0]
    history.note(Incident("gpu01", 9.0, "j", "e", "lost", "x" * 1000 + "\nmore"))
    assert history.read()[-1].what == "x" * history.LONGEST


@pytest.mark.parametrize("text", ['{"incidents": 1}', '{"incidents": [1]}', '{"incidents": [{}]}'])
def test_what_is_no_history_is_said(login: Path, text: str) -> None:
    (login / history.FILE).write_text(text)
    (login / history.FILE).chmod(0o600)
    with pytest.raises(UsageError, match="is not a file of ours"):
        history.read()
