"""Optuna chooses the values of a sweep."""

from pathlib import Path

import pytest

from orchestrator.head.commands.sweep.journal import MemberState
from orchestrator.head.commands.sweep.space import parse_variables
from orchestrator.head.commands.sweep.sweep import OptunaStudy

SPACE = parse_variables(["x=uniform(-1,1)", "lr=log(1e-5,1e-2)", "seed=0..3", "act=relu,gelu"])


def study(place: Path, trials: int = 20) -> OptunaStudy:
    pytest.importorskip("optuna")
    return OptunaStudy(place, SPACE, trials, "least")


def test_study_makes_trials_and_knows_best_value(tmp_path: Path) -> None:
    first = study(tmp_path)
    members = [first[number] for number in range(3)]
    for one in members:
        assert -1 <= float(one.values["x"]) <= 1 and 1e-5 <= float(one.values["lr"]) <= 1e-2
        assert one.values["seed"] in "0123" and one.values["act"] in ("relu", "gelu")
    assert len({one.words for one in members}) == 3
    first.tell(MemberState(1, "", "done", value=0.5))
    assert first.study.best_value == 0.5 and first.study.best_trial.number == 1


def test_study_tells_optuna_every_end(tmp_path: Path) -> None:
    known = study(tmp_path)
    states = ["done", "failed", "interrupted", "not started", "done"]
    for number, state in enumerate(states):
        known[number]
        known.tell(MemberState(number, "", state, value=0.1 if number == 0 else None))
    told = [trial.state.name for trial in known.study.get_trials()]
    assert told == ["COMPLETE", "FAIL", "FAIL", "FAIL", "FAIL"]
