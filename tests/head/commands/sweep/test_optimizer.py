"""Optuna chooses the values of a sweep; a study goes on after its head was killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.head.commands.sweep.optimizer import Optimizer
from orchestrator.head.commands.sweep.space import variables
from orchestrator.head.commands.sweep.sweep import End
from orchestrator.head.commands.sweep.trial import Readings

SPACE = variables(["x=uniform(-1,1)", "lr=log(1e-5,1e-2)", "seed=0..3", "act=relu,gelu"])


def study(place: Path, trials: int = 20) -> Optimizer:
    pytest.importorskip("optuna")
    return Optimizer(place, SPACE, trials, "least")


def measured(*values: float) -> Readings:
    return list(enumerate(values, 1))


def test_members_are_trials_and_are_the_same_after_a_crash(tmp_path: Path) -> None:
    first = study(tmp_path)
    members = [first.member(number) for number in range(3)]
    for one in members:
        assert -1 <= float(one.values["x"]) <= 1 and 1e-5 <= float(one.values["lr"]) <= 1e-2
        assert one.values["seed"] in "0123" and one.values["act"] in ("relu", "gelu")
    assert len({one.words for one in members}) == 3
    end = End(1, "", "done", value=0.5)
    first.ended(end)
    again = study(tmp_path)
    assert [again.member(number) for number in range(3)] == members
    again.ended(end)  # it was told of it before
    assert again.study.best_value == 0.5 and again.study.best_trial.number == 1


def test_what_optuna_is_told_of_each_end(tmp_path: Path) -> None:
    known = study(tmp_path)
    states = ["done", "failed", "interrupted", "not started", "pruned", "done"]
    for number, state in enumerate(states):
        known.member(number)
        known.ended(End(number, "", state, value=0.1 if number == 0 else None))
    told = [trial.state.name for trial in known.study.get_trials()]
    assert told == ["COMPLETE", "FAIL", "RUNNING", "FAIL", "PRUNED", "FAIL"]


def test_a_member_that_measures_worse_than_others_is_hopeless(tmp_path: Path) -> None:
    known = study(tmp_path)
    for number in range(6):
        known.member(number)
        assert not known.is_hopeless(number, measured(1.0, 0.5, 0.1))
        known.ended(replace(End(number, "", "done"), value=0.1))
    known.member(6)
    known.member(7)
    bad = measured(9.0, 9.0)
    assert known.is_hopeless(6, bad)
    assert not known.is_hopeless(7, measured(0.1, 0.01))
