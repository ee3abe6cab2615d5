"""What the doctor says at night, and which nodes it cordons and lets back."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.head.doctor.examination import judge
from orchestrator.head.doctor.findings import BAD, WARN, Finding
from orchestrator.head.doctor.last_look import LastLook, Looks
from orchestrator.head.doctor.nightly import Night, night_of
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import Disk
from orchestrator.records.cordons import Cordon
from tests.head.doctor.test_doctor import case

NODES = [Node(f"gpu{n}") for n in range(1, 5)]
FULL = Disk("/job", 1 << 30, 1 << 20, 10**6, 10**6, "/", "ext4", "/dev/sda1", writable=True)


def look(*findings: tuple[str, str]) -> LastLook:
    return LastLook(1.0, [Finding(check, level, (), "before") for check, level in findings])


def night(*changed: dict[str, Any], before: Looks | None = None, **cordoned: str) -> Night:
    known = {name: Cordon(name, 1.0, reason) for name, reason in cordoned.items()}
    return night_of(judge(case(*changed), 0.0), NODES, before or {}, known)


def test_a_quiet_night() -> None:
    assert night() == Night([], [], {}, [])


def test_what_is_new_is_told_once_and_what_is_bad_each_night() -> None:
    changes = ({"disk": FULL}, {"clock_offset": 9.0})
    first = night(*changes)
    assert [(one.check, one.level) for one in first.findings] == [("disk", BAD), ("clock", WARN)]
    before = {"gpu3": look(("disk", BAD)), "gpu4": look(("clock", WARN))}
    again = night(*changes, before=before)
    assert [one.check for one in again.findings] == ["disk"] and again.gone == []
    after = night(before={**before, "gpu1": look(("busy", WARN), ("cordon", WARN))})
    assert after.gone == ["gpu3: disk is BAD no more", "gpu4: clock is warn no more"]


@pytest.mark.parametrize(
    ("reason", "sick", "well"),
    [("", ["gpu4"], []), ("a bad fan", [], []), ("doctor: disk: full", [], [])],
)
def test_what_lacks_something_is_cordoned(reason: str, sick: list[str], well: list[str]) -> None:
    """Whoever has done so before keeps it; another torch is no fault of the machine."""
    found = night({"torch": "2.12.1"}, {"disk": FULL}, **({"gpu4": reason} if reason else {}))
    assert (list(found.sick), list(found.well)) == (sick, well)
    if sick:
        assert found.sick["gpu4"].startswith("disk: / on gpu4: 1 MiB free")


def test_only_what_the_doctor_cordoned_is_let_back() -> None:
    found = night(gpu1="doctor: disk: full", gpu2="a bad fan", gpu9="doctor: of another list")
    assert list(found.well) == ["gpu1"]
