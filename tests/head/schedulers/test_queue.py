"""What Slurm's own commands say."""

from __future__ import annotations

import math

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Launch
from orchestrator.head.schedulers import queue
from orchestrator.launchers.sbatch import SbatchOptions, text


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


@pytest.mark.parametrize("time", ["1", "3:00", "0:03:59"])
def test_a_limit_that_leaves_no_time_to_train_is_refused(time: str) -> None:
    """The signal would reach each attempt at its start, and Slurm would start it for ever."""
    launch = Launch(grace=30.0)
    with pytest.raises(UsageError, match=f"--time {time} is too short: 120 s before the limit"):
        text(SbatchOptions(nnodes=2, time=time), launch, ["train"])
    assert f"--time={time}" in text(
        SbatchOptions(nnodes=2, time=time, requeue=False), launch, ["train"]
    )
    assert "--time=4" in text(SbatchOptions(nnodes=2, time="4"), launch, ["train"])
