"""Leads a sweep: starts members as long as there is room, and notes how each has ended.

A member is a launch of its own in a background process, which goes on if this one is killed. With
--queue the machines themselves say when there is room: a few members wait there, so that one of
them starts as soon as another ends.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common import interrupt
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    OrchestratorError,
    import_optional,
    nearest,
)
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.background.process import INTERRUPT, Background
from orchestrator.head.commands import launching
from orchestrator.head.commands.sweep.journal import Journal, MemberState
from orchestrator.head.commands.sweep.space import Member, Variable
from orchestrator.head.connect import fleet
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.status.comparison import first_files, read_curves
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics.step_lines import GAP

# Members in the queue beside those that run: they have reached the nodes. As many as run, since
# members that began together end together.
LEAST_WAITING, MOST_WAITING = 2, 8
LOOK_SECONDS = 0.1
ALONE_SECONDS = 10.0  # until a job that no process follows is given up
MOST_VAIN = 3  # members that could not start, before any could
NOT_STARTED, INTERRUPTED = "not started", "interrupted"
TIME_LIMIT = "(--time-limit)"  # in the reason of such an end
STUDY = "optuna.log"  # in the directory of the sweep; trial N is member N


# -- where members come from ------------------------------------------------------------------


class Supply(Protocol):
    """Members: a list, or an optimizer that hears how each has ended."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Member: ...


class Optimizer:
    """A study of Optuna, which chooses the values of members."""

    def __init__(self, place: Path, some: Sequence[Variable], trials: int, best: str) -> None:
        self.optuna = import_optional(
            "optuna", "optuna", "--optuna needs the package optuna, which"
        )
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        journal = self.optuna.storages.journal
        backend = journal.JournalFileBackend(str(place / STUDY))
        self.study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name=place.name,
            direction="minimize" if best == "least" else "maximize",
        )
        known = self.optuna.distributions
        self.space = {
            one.name: known.CategoricalDistribution(one.values)
            if one.values
            else known.FloatDistribution(one.low, one.high, log=one.log)
            for one in some
        }
        self.trials = trials

    def __len__(self) -> int:
        return self.trials

    def __getitem__(self, number: int) -> Member:
        params = self.study.ask(self.space).params
        return Member(number, {name: str(params[name]) for name in self.space})

    def tell(self, end: MemberState) -> None:
        """Tell Optuna how a member has ended."""
        state = self.optuna.trial.TrialState["COMPLETE" if end.is_known else "FAIL"]
        self.study.tell(end.member, end.value if end.is_known else None, state=state)


# -- the sweep --------------------------------------------------------------------------------


@dataclass
class StartedMember:
    """A member that was started: it waits in the queue until it has a place."""

    member: Member
    process: Background  # its head
    place: Path | None = None
    pressed: int = 0  # times that it was sent Ctrl-C

    def state(self, state: str, **found: Any) -> MemberState:
        member = self.member
        return MemberState(member.number, member.words, state, dict(member.values), **found)


@dataclass
class Sweep:
    """A sweep that this process leads."""

    journal: Journal
    supply: Supply
    arguments: Callable[[Member], tuple[LaunchArguments, list[str]]]
    jobs: int | None = None
    metric: str = ""
    show: Callable[[Sweep, MemberState], None] = lambda *_: None
    started: dict[int, StartedMember] = field(default_factory=dict)
    ends: dict[int, MemberState] = field(default_factory=dict)
    heard: queue.SimpleQueue[MemberState] = field(default_factory=queue.SimpleQueue)
    interrupts: int = 0

    def __post_init__(self) -> None:
        self.left = deque(range(len(self.supply)))

    def run(self) -> int:
        """Lead it to its end, or until it is stopped."""
        before = {number: signal.signal(number, self.interrupted) for number in interrupt.SIGNALS}
        try:
            while self.started or (self.left and not self.over):
                while self.left and not self.over and self.has_room:
                    self.start(self.supply[self.left.popleft()])
                with contextlib.suppress(queue.Empty):
                    self.end(self.heard.get(timeout=LOOK_SECONDS))
                self.press()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.interrupts:
            return EXIT_STOPPED
        done = all(end.state == "done" for end in self.ends.values())
        return EXIT_DONE if done and not self.left else EXIT_FAILED

    def interrupted(self, *_: object) -> None:
        self.interrupts += 1

    @property
    def over(self) -> bool:
        """Return True if no further member is started."""
        vain = [end.state == NOT_STARTED for end in self.ends.values()]
        return bool(self.interrupts) or (all(vain) and len(vain) >= MOST_VAIN)

    @property
    def has_room(self) -> bool:
        if self.jobs is not None:
            return len(self.started) < self.jobs
        waiting = sum(one.place is None for one in self.started.values())
        running = len(self.started) - waiting
        return waiting < min(max(LEAST_WAITING, running), MOST_WAITING)

    def start(self, member: Member) -> None:
        arguments, command = self.arguments(member)
        process = Background(launching.sweep_member, arguments=arguments, command=command)
        one = self.started[member.number] = StartedMember(member, process)
        self.journal.add(one.state("not over"))
        fleet.start(lambda: self.heard.put(self.end_of(one)))

    def end_of(self, one: StartedMember) -> MemberState:
        """Wait until a member has ended, in a thread of its own, and return how."""
        try:
            one.place = Path(one.process.answer(lambda _: None)["place"])
        except OrchestratorError as error:
            state = INTERRUPTED if self.interrupts else NOT_STARTED
            return one.state(state, problem=error.what)
        with contextlib.suppress(OrchestratorError):  # what its head says at its own end
            one.process.answer(lambda _: None)
        experiment, followed = Experiment(one.place), time.monotonic()
        try:
            while not (record := experiment.read_record()).over:
                if experiment.followed:  # by an attach
                    followed = time.monotonic()
                elif time.monotonic() > followed + ALONE_SECONDS:
                    problem = f"no process follows it: orchestrator attach {experiment.name}"
                    return one.state("lost", experiment=experiment.name, problem=problem)
                time.sleep(LOOK_SECONDS)
        except OrchestratorError as error:
            return one.state("lost", experiment=experiment.name, problem=error.what)
        return self.end_of_job(one, experiment, record)

    def end_of_job(
        self, one: StartedMember, experiment: Experiment, record: JobRecord
    ) -> MemberState:
        state, problem = record.state, record.verdict.message if record.verdict else ""
        if TIME_LIMIT in problem:
            state, problem = "done", ""  # an end that was wanted
        elif state == "stopped" and self.interrupts:
            state, problem = INTERRUPTED, ""
        value, unknown = None, ""
        if self.metric:
            value, unknown = last_value(experiment, record, self.metric)
        return one.state(
            state,
            value=value,
            seconds=round((record.ended or record.started) - record.started, 1),
            experiment=experiment.name,
            problem=problem or unknown,
        )

    def end(self, end: MemberState) -> None:
        self.journal.add(end)
        self.ends[end.member] = end
        del self.started[end.member]
        if isinstance(self.supply, Optimizer):
            self.supply.tell(end)
        self.show(self, end)

    def press(self) -> None:
        """Pass each Ctrl-C on to the members: a head stops its job, proved."""
        if not self.interrupts and self.journal.stop_is_asked:
            self.interrupts = 1
        for one in self.started.values():
            if one.pressed < self.interrupts:
                one.process.press(INTERRUPT)
                one.pressed += 1


# -- the metric: a Trainer's, or one that a program prints ------------------------------------

NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
LONGEST_LINE = 1 << 16


def last_value(experiment: Experiment, record: JobRecord, metric: str) -> tuple[float | None, str]:
    """Return the last value of a metric, or None and the reason."""
    names, values = list[str](), list[float]()
    trainers = read_curves(first_files(experiment.path / "outputs"))
    for _, curves in sorted(trainers.items(), reverse=True):
        names += curves
        if not values and metric in curves:
            values = list(curves[metric].means)
    if not values:
        logs = log_files(experiment, record.nodes)
        values = [value for log in logs for value in printed(log.text, metric)]
    if not values:
        return None, f"nothing measured or printed {metric}{nearest(metric, names)}"
    if not math.isfinite(values[-1]):
        return None, f"the last {metric} is {values[-1]}"
    return values[-1], ""


def printed(log: Path, metric: str) -> Iterator[float]:
    """Yield the values that lines of a log give a metric: val_bpb: 0.98, val_bpb=0.98."""
    name = re.escape(metric)
    wanted = re.compile(rf"(?<![\w./-]){name}[\"']?{GAP}[:=]?{GAP}{NUMBER}(?![\w.])", re.I)
    with contextlib.suppress(FileNotFoundError), log.open(errors="replace") as lines:
        for line in lines:
            for match in wanted.finditer(line[:LONGEST_LINE]):
                yield float(match[1])
