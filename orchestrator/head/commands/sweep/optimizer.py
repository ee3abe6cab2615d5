"""Let Optuna choose the values of members: it is asked for each, and told how each has ended.

Its study is a journal file in the directory of the sweep; no database is needed. Trial N is member
N.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.common.errors import import_optional
from orchestrator.head.commands.sweep.space import Member, Variable
from orchestrator.head.commands.sweep.sweep import LEAST_WAITING, MemberEnd

FILE = "optuna.log"


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
        )
        self.some, self.trials = some, trials
        self.asked: list[Any] = []

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

    def ended(self, end: MemberEnd) -> None:
        """Tell Optuna how a member has ended."""
        known = end.state == "done" and end.value is not None
        state = self.optuna.trial.TrialState["COMPLETE" if known else "FAIL"]
        self.study.tell(end.member, end.value if known else None, state=state)
