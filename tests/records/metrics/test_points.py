"""The latest values of a file of metrics, read from its end alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records.metrics.trainers import END_BYTES, Point, read_last_values

STEP = {"time": 1.0, "step": 640, "loss": 0.5, "step_ms": 30.0}
EPOCH = {"time": 2.0, "step": 640, "epoch": 5, "train_loss": 0.25}


def write(path: Path, *lines: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return path


@pytest.mark.parametrize(
    ("lines", "end", "expected"),
    [
        ([], "", {}),
        ([{**STEP, "step": 1}, STEP], "", STEP),
        ([STEP, EPOCH], "", {**STEP, **EPOCH}),
        ([STEP, *[EPOCH] * 3], '{"step": 641, "lo', {**STEP, **EPOCH}),
        # This step is of the epoch before.
        ([EPOCH, {**STEP, "step": 641}], "", {**STEP, "step": 641}),
        ([{**STEP, "loss": 1.0}, {**STEP, "loss": None}], "null\n[1]\n", {**STEP, "loss": None}),
        ([{"acc": 1, "n": 1}, {"loss": 2, "n": 2}], "", {"acc": 1, "loss": 2, "n": 2}),
    ],
)
def test_last_merges_newest_values(
    tmp_path: Path, lines: list[dict[str, Any]], end: str, expected: dict[str, Any]
) -> None:
    assert read_last_values(write(tmp_path / "m", *lines, end=end)).line == expected


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        *((0, 0), (7, 7), (7.0, 7), ((1 << 53) - 1, (1 << 53) - 1)),
        *((step, None) for step in (-3, 7.5, 10**30, 1 << 53, float("nan"), True, "7", None)),
    ],
)
def test_step_is_a_countable_number(step: Any, expected: int | None) -> None:
    assert Point({"step": step}).step == expected


def test_last_reads_end_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"far": 1}, {"x": "y" * END_BYTES}, {"near": 2})
    assert read_last_values(path).line == {"near": 2}
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "none"):
        assert read_last_values(tmp_path / name) == Point()
    assert read_last_values(None) == Point()
