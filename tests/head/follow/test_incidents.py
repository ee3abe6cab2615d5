"""Which verdicts count in a machine's history."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.head.follow import incidents
from orchestrator.records import machines
from orchestrator.records.experiment import JobRecord, NodeRecord
from orchestrator.records.outcome import SlowRank, Verdict

NODES = [
    NodeRecord(index, f"bob@{host}", host, "bob", port, "10.0.0.1", "python3", index, 1)
    for index, (host, port) in enumerate([("gpu01", None), ("gpu02", 2222)])
]
RECORD = JobRecord("run-1", "run", "failed", ["master_launch"], NODES, 1000.0)


@pytest.mark.parametrize(
    ("node", "kind", "message", "counted"),
    [
        (1, "lost", "silent for 60 s", True),
        (1, "signal", "killed by signal 9 (SIGKILL)", True),
        (1, "exception", "ValueError: no such key", False),
        (1, "exception", "RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        (1, "exit", "ended with exit code 1", False),
        (1, "gpu_out_of_memory", "CUDA out of memory", False),
        (None, "hang", "no progress for 600 s", False),
    ],
)
def test_what_a_machine_can_be_the_cause_of(
    node: int | None,
    kind: str,
    message: str,
    counted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    verdict = Verdict(node=node, kind=kind, message=message, time=1001.0)
    assert incidents.note("run_1", RECORD, verdict) == ""
    known = [(i.machine, i.kind, i.what) for i in machines.incidents()]
    assert known == ([("gpu02:2222", kind, message)] if counted else [])


def test_a_machine_that_held_a_job_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    found = SlowRank(cause="slow link", rank=1, node=1, step=9, text="sends 9% again")
    for _ in range(2):  # a new head hears it once more
        assert incidents.note_slow("run_1", RECORD, found) == ""
    assert incidents.note_slow("run_1", RECORD, found.replace(node=7)) == ""
    (known,) = machines.incidents()
    assert (known.machine, known.kind, known.what) == ("gpu02:2222", "slow link", "sends 9% again")


def test_a_history_that_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "file"))
    verdict = Verdict(node=0, kind="lost", message="gone", time=1001.0)
    assert incidents.note("run_1", RECORD, verdict).startswith("the history of gpu01 is not kept: ")
