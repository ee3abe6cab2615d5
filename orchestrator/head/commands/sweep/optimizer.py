"""Lets Optuna choose the values of members: it is asked for each, and told how each has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.common.errors import import_optional
from orchestrator.head.commands.sweep.space import Member, Variable
from orchestrator.head.commands.sweep.sweep import MemberEnd

FILE = "optuna.log"  # the study, in the directory of the sweep; trial N is member N


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
        self.space = {one.name: self.distribution_of(one) for one in some}
        self.trials = trials

    def __len__(self) -> int:
        return self.trials

    def member(self, number: int) -> Member:
        params = self.study.ask(self.space).params
        return Member(number, {name: str(params[name]) for name in self.space})

    def distribution_of(self, one: Variable) -> Any:
        if one.values:
            return self.optuna.distributions.CategoricalDistribution(one.values)
        return self.optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)

    def ended(self, end: MemberEnd) -> None:
        """Tell Optuna how a member has ended."""
        known = end.state == "done" and end.value is not None
        state = self.optuna.trial.TrialState["COMPLETE" if known else "FAIL"]
        self.study.tell(end.member, end.value if known else None, state=state)
