"""Let Optuna choose the values of members: it is asked for each, and told how each has ended.

Its study is a journal file in the directory of the sweep; no database is needed. Trial N is member
N, so a sweep that goes on finds the values of a member there which was not given out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.common.errors import import_optional
from orchestrator.head.commands.sweep.space import Member, Variable
from orchestrator.head.commands.sweep.sweep import LEAST_WAITING, End
from orchestrator.head.commands.sweep.trial import Readings

FILE = "optuna.log"
TOLD = {"done": "COMPLETE", "pruned": "PRUNED"}


class Optimizer:
    """A study of Optuna as the supply of a sweep."""

    def __init__(self, place: Path, some: list[Variable], trials: int, best: str) -> None:
        self.optuna = import_optional(
            "optuna", "optuna", "--optuna needs the package optuna, which"
        )
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        journal = self.optuna.storages.journal
        storage = self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(place / FILE)))
        self.study = self.optuna.create_study(
            storage=storage,
            study_name=place.name,
            direction="minimize" if best == "least" else "maximize",
            load_if_exists=True,
        )
        self.some, self.trials = some, trials
        known = self.study.get_trials(deepcopy=False)
        self.asked = [self.optuna.trial.Trial(self.study, one._trial_id) for one in known]
        self.reported: dict[int, int] = {}  # member -> how many of its values Optuna has

    @property
    def most_waiting(self) -> int:
        """Choose late: each end tells it more."""
        return LEAST_WAITING

    def __len__(self) -> int:
        return self.trials

    def member(self, number: int) -> Member:
        while len(self.asked) <= number:
            self.asked.append(self.study.ask({one.name: self.range_of(one) for one in self.some}))
        params = self.asked[number].params
        values = {one.name: str(params[one.name]) for one in self.some}
        return Member(number, values)

    def range_of(self, one: Variable) -> Any:
        kinds = self.optuna.distributions
        if one.whole:
            return kinds.IntDistribution(int(one.values[0]), int(one.values[-1]))
        if one.values:
            return kinds.CategoricalDistribution(one.values)
        return kinds.FloatDistribution(one.low, one.high, log=one.log)

    def ended(self, end: End) -> None:
        """Tell Optuna what came of a member; one that is to begin again is still open."""
        if not end.final:
            return
        lacking = end.state == "done" and end.value is None
        name = "FAIL" if lacking else TOLD.get(end.state, "FAIL")
        value = end.value if name == "COMPLETE" else None
        state = self.optuna.trial.TrialState[name]
        self.study.tell(end.member, value, state=state, skip_if_finished=True)

    def is_hopeless(self, number: int, readings: Readings) -> bool:
        """Report what a member has measured since; tell whether Optuna would prune it."""
        new = readings[self.reported.get(number, 0) :]
        self.reported[number] = len(readings)
        for step, value in new:
            self.asked[number].report(value, step)
        return bool(new) and bool(self.asked[number].should_prune())
