"""For how long the GPUs of a job have done nothing, as everybody on the machine may read it."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from orchestrator.node.machine.gpus import use
from orchestrator.node.machine.gpus.use import HeldGpus

PLACES = ["0000:01:00", "0000:02:00", "0000:03:00"]


@pytest.fixture
def entry(tmp_path: Path) -> str:
    path = tmp_path / "0123456789abcdef.json"
    path.write_text(json.dumps({"keys": ["gpu-0000:01:00.0", "gpu-0000:03:00.0"]}))
    return str(path)


def test_idle_is_when_all_that_a_job_holds_does_nothing(entry: str) -> None:
    held = HeldGpus(entry)
    held.busy -= 100.0
    assert held.note(PLACES, [0.0, 0.9, 0.0]) == pytest.approx(100.0, abs=5)
    note = use.read(entry)
    assert note is not None and note[0] == os.getuid() and 95 < note[1] < 105
    assert stat.S_IMODE(Path(use.place_of(entry)).stat().st_mode) == 0o644
    assert held.note(PLACES, [0.0, 0.0, 0.01]) == 0.0


@pytest.mark.parametrize("seen", [[None, 0.0, 0.0], [0.0, 0.0], []])
def test_what_does_not_tell_is_not_idle(entry: str, seen: list[float | None]) -> None:
    assert HeldGpus(entry).note(PLACES, seen) is None and use.read(entry) is None


def test_a_part_of_a_gpu_and_no_entry_at_all(entry: str, tmp_path: Path) -> None:
    assert HeldGpus("").note(PLACES, [0.0] * 3) is None
    Path(entry).write_text(json.dumps({"keys": ["mig-MIG-1", "gpu-0000:01:00.0"]}))
    assert HeldGpus(entry).note(PLACES, [0.0] * 3) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"seen": 1}', '{"seen": "x", "busy": 0}', '{"seen": 5, "busy": 2}', "NOW"]
)
def test_a_note_that_is_old_or_none(entry: str, text: str) -> None:
    now = time.time()
    text = json.dumps({"seen": now, "busy": now + 9}) if text == "NOW" else text
    Path(use.place_of(entry)).write_text(text)
    assert use.read(entry) is None
