"""What Slurm's own commands say."""

from __future__ import annotations

import math

import pytest

from orchestrator.head.schedulers import queue


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("0:30:00", 1800),
        ("01:00:05", 3605),
        ("2-3", 51 * 3600),
        ("2-3:15", 51 * 3600 + 900),
        ("1-00:00:01", 86401),
        ("infinite", math.inf),
        ("UNLIMITED", math.inf),
        ("Partition_Limit", math.inf),
    ],
)
def test_times(time: str, seconds: float) -> None:
    assert queue.seconds(time) == seconds
