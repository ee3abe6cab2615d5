"""The settings that people compare: of a config, and of a program's own command line."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.head.status.comparison import arguments_of, options_of


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (
            "master_launch --nproc 2 train.py --lr 3e-4 --wd=0.1 --fast",
            {"lr": "3e-4", "wd": "0.1", "fast": "yes"},
        ),
        ("master_launch train.py --momentum -0.5 data/ --x", {"momentum": "-0.5", "x": "yes"}),
        (
            "master_launch -m pkg.train model.size=large +seed=3",
            {"model.size": "large", "seed": "3"},
        ),
        ("master_launch train.py --lr", {"lr": "yes"}),
        ("master_launch train.py a b", {}),
        ("master_launch --set training.max_steps=5", {"training.max_steps": "5"}),
        ("master_launch", {}),
    ],
)
def test_options_of_a_program(typed: str, found: dict[str, str]) -> None:
    assert dict(options_of(arguments_of(shlex.split(typed)))) == found
