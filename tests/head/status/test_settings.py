"""The settings that people compare: of a config, and of a program's own command line."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.head.status import settings
from tests.views.report.stories import experiment


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
    assert dict(settings.options(settings.arguments(shlex.split(typed)))) == found


def test_a_config_and_a_command_line_are_one_table(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0)
    record = replace(made.read_record(), command=["master_launch", "train.py", "--seed", "1"])
    assert settings.of(made, record) == {"optimizer.lr": "0.1", "seed": "1"}
    made.write("config.yaml", "a: [")
    assert settings.of(made, record) == {"seed": "1"}


def test_what_differs_is_named_as_far_as_there_is_room() -> None:
    runs = [{"lr": "1", "seed": "1", "same": "0"}, {"lr": "2", "same": "0"}]
    assert settings.differing(runs, 8) == ["lr", "seed"]
    assert settings.differing(runs, 1) == ["lr"]
    assert settings.differing([], 8) == []
