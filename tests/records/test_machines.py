from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.records import machines
from orchestrator.records.machines import Incident


def incident(number: int, machine: str = "gpu01", kind: str = "lost") -> Incident:
    return Incident(machine, float(number), f"job-{number}", f"run_{number}", kind, "it is gone")


def test_incidents_come_back_in_order_and_once(login: Path) -> None:
    assert machines.incidents() == []
    for number in (2, 1, 2):
        machines.note(incident(number))
    machines.note(incident(2, kind="signal"))
    machines.note(incident(3, "gpu02"))
    assert [(i.machine, i.time, i.kind) for i in machines.incidents()] == [
        ("gpu01", 1.0, "lost"),
        ("gpu01", 2.0, "lost"),
        ("gpu01", 2.0, "signal"),
        ("gpu02", 3.0, "lost"),
    ]
    known = machines.by_machine(["gpu03", "gpu01"])
    assert {machine: len(each) for machine, each in known.items()} == {
        "gpu03": 0,
        "gpu01": 3,
        "gpu02": 1,
    }


def test_it_grows_no_further_than_it_may(login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MOST_INCIDENTS", 3)
    for number in range(5):
        machines.note(incident(number))
    assert [i.time for i in machines.incidents()] == [2.0, 3.0, 4.0]
    machines.note(Incident("gpu01", 9.0, "j", "e", "lost", "x" * 1000 + "\nmore"))
    assert machines.incidents()[-1].what == "x" * machines.LONGEST_TEXT_CHARACTERS


@pytest.mark.parametrize("text", ['{"incidents": 1}', '{"incidents": [1]}', '{"incidents": [{}]}'])
def test_what_is_no_history_is_said(login: Path, text: str) -> None:
    (login / machines.HISTORY).write_text(text)
    (login / machines.HISTORY).chmod(0o600)
    with pytest.raises(UsageError, match="is not a file of ours"):
        machines.incidents()
