"""What was asked for, before anything is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.start.request import target_of


@pytest.mark.parametrize(
    ("typed", "option"),
    [("training.max_steps=5", "--set training.max_steps=5"), ("DEBUG=a b", "--env 'DEBUG=a b'")],
)
def test_a_setting_in_the_place_of_the_program(
    typed: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        target_of(LaunchArguments(program=(typed, "train.py")))
    assert (error.value.what, error.value.fix) == (
        f"{typed} is no program",
        f"did you mean: {option}",
    )
    Path(typed).touch()
    assert target_of(LaunchArguments(program=(typed,))).name == typed
