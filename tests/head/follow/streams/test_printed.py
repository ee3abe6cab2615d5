"""Metrics made of what ranks print."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.follow.streams import printed
from orchestrator.head.follow.streams.printed import Printed
from orchestrator.head.screen.log_reader import LogFile
from orchestrator.records.metrics import trainers


def append(log: LogFile, stream: str, text: str, at: float = 0.0) -> None:
    with log.ranks.open("a") as records, log.text.open("a") as lines:
        records.write(f"{log.size()} {stream} {at:.2f}\n")
        lines.write(text)


def lines(experiment: Path, rank: int) -> list[dict[str, Any]]:
    path = trainers.newest_metrics_files(experiment / "outputs")[rank]
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("time", "left_s")} for line in told]


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    return LogFile(0, "10.0.0.1", tmp_path / "log", tmp_path / "ranks")


def test_printed_writes_file_per_reporting_rank(log: LogFile, tmp_path: Path) -> None:
    append(log, "0", "step 1 loss 9\n")
    # An earlier attempt printed what is before.
    reading = Printed(log, tmp_path, range(2), begin=log.size())
    append(log, "0", "step 2 loss 0.5\nste")
    append(log, "1", "  5%|# | 4/8 [00:00<00:01]\r")
    append(log, "-", "step 7 loss 7\n")
    reading.check(0.0, last=True)
    append(log, "0", "p 3 loss nan\n")
    append(log, "1", "\n{'loss': 0.25}\n{'loss': 0.25}\n")
    reading.check(0.0, last=True)
    assert lines(tmp_path, 0) == [
        {"rank": 0, "step": 2, "loss": 0.5},
        {"rank": 0, "step": 3, "loss": None, "lost_steps": 1},
    ]
    assert lines(tmp_path, 1) == [{"rank": 1, "step": 4, "steps": 8, "loss": 0.25}]
    assert list(trainers.newest_metrics_files(tmp_path / "outputs")) == [0, 1]


def test_printed_reads_log_only_after_growth(
    log: LogFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(printed.time, "monotonic", lambda: now)
    reading = Printed(log, tmp_path, range(2))
    reading.check(0.0)
    assert reading.due == math.inf
    now += printed.LOOK_SECONDS
    for step in (1, 2):
        append(log, "0", f"step {step} loss 1\n")
        reading.grew()
        reading.check(0.0)
        if step == 2:
            assert len(lines(tmp_path, 0)) == 1, "too early"
            assert reading.due == now + printed.LOOK_SECONDS
            now = reading.due
            reading.check(0.0)
        assert len(lines(tmp_path, 0)) == step
        assert reading.due == math.inf


def test_printed_yields_to_metrics_of_program(log: LogFile, tmp_path: Path) -> None:
    reading = Printed(log, tmp_path, range(2))
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    (outputs / trainers.file_name(0)).touch()
    append(log, "0", "step 2 loss 0.5\n")
    reading.check(0.0, last=True)
    assert not trainers.printed_metrics_directory(outputs).exists()
    assert trainers.newest_metrics_files(outputs)[0].parent == outputs


def test_printed_reads_all_but_the_far_beginning_of_a_long_log(
    log: LogFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printed, "FURTHEST_BEHIND_BYTES", 3 * printed.MOST_BYTES)
    rest = "x" * 2 * printed.MOST_BYTES + "\nstep 2 loss 2\n"
    append(log, "0", f"step 0 loss 1\n{'x' * printed.MOST_BYTES}\nstep 1 loss 1\n{rest}")
    Printed(log, tmp_path, range(2)).check(0.0, last=True)
    assert [line["step"] for line in lines(tmp_path, 0)] == [1, 2]


def test_printed_metrics_are_a_function_of_the_log(log: LogFile, tmp_path: Path) -> None:
    """A head that takes over, or that follows one that was killed, loses and repeats no point."""
    whole = tmp_path / "whole"
    whole.mkdir()
    output = [
        f"epoch {step // 4 + 1} batch {step % 4}/4 loss {'nan' if step == 5 else 1 / (step + 1)}\n"
        for step in range(12)
    ]
    saved, killed = Printed(log, tmp_path, range(2)), Printed(log, tmp_path, range(2))
    for step, line in enumerate(output):
        append(log, "0", line[:9], at=1e9 + step)
        append(log, "1", f"step {step} val loss 2\n", at=1e9 + step)
        if step in (3, 7):
            saved.check(0.0, last=True)
            saved.save(log.size(), saved.tellers)
            killed = Printed(log, tmp_path, range(2))
        append(log, "0", line[9:], at=1e9 + step + 0.5)
        if step in (5, 9):
            # It writes rows, and no state.
            killed.check(0.0, last=True)
            saved = Printed(log, tmp_path, range(2))
    Printed(log, tmp_path, range(2)).check(0.0, last=True)
    Printed(log, whole, range(2)).check(0.0, last=True)
    for rank in (0, 1):
        [one, other] = (
            trainers.newest_metrics_files(at / "outputs")[rank] for at in (tmp_path, whole)
        )
        assert one.read_text() == other.read_text()
    rows = [json.loads(line) for line in other.read_text().splitlines()]
    assert [row["time"] for row in rows] == [1e9 + step for step in range(12)]


def test_printed_adds_evaluation_loss_of_written_step(log: LogFile, tmp_path: Path) -> None:
    reading = Printed(log, tmp_path, range(2))
    append(log, "0", "iter 2: loss 3.4\nstep 2: val loss 3.5\niter 2: loss 3.4\n")
    reading.check(0.0, last=True)
    assert lines(tmp_path, 0) == [
        {"rank": 0, "step": 2, "loss": 3.4},
        {"rank": 0, "step": 2, "val_loss": 3.5},
    ]


def test_printed_accepts_ranks_of_own_node_alone(tmp_path: Path) -> None:
    log = LogFile(1, "10.0.0.2", tmp_path / "log", tmp_path / "ranks")
    reading = Printed(log, tmp_path, range(2, 4))
    for stream in ("0", "2", "02", "999999999"):
        append(log, stream, "step 2 loss nan\n")
    reading.check(0.0, last=True)
    assert list(trainers.newest_metrics_files(tmp_path / "outputs")) == [2]
