"""The arguments of `orchestrator sweep`, before any file is read."""

import pytest

from orchestrator.cli.options import own_arguments
from orchestrator.cli.sweep import sweep_command

TWO = ["--grid", "a=1", "--grid", "b=2"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--grid", "a=1", "b=2", "--", "x.py"], [*TWO, "--", "x.py"]),
        (["--metric", "loss", "--grid", "a=1", "b=2", "x.py"], ["--metric", "loss", *TWO, "x.py"]),
        (["--warm", "--grid", "a=1", "b=2", "x.py"], ["--warm=30m", *TWO, "x.py"]),
        (["--warm", "5m", "--grid", "a=1", "b=2", "x.py"], ["--warm=5m", *TWO, "x.py"]),
        (["--optuna", "3", "a=1", "b=2", "x.py"], ["--optuna", "3", *TWO, "x.py"]),
        (["--detach", "--grid", "a=1", "--jobs", "2"], ["--detach", *TWO[:2], "--jobs", "2"]),
    ],
)
def test_grid_takes_all_following_variables(typed: list[str], meant: list[str]) -> None:
    assert own_arguments(sweep_command, typed) == meant
