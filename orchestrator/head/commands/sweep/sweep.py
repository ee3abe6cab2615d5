"""Lead a sweep: start members as long as there is room, and note how each has ended.

A member is a launch of its own in a background process, which goes on if this one is killed. With
--queue the machines themselves say when there is room: a few members wait there, so that one of
them starts as soon as another ends.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common import interrupt
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    OrchestratorError,
)
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.background.process import INTERRUPT, Background
from orchestrator.head.commands import follow, launching
from orchestrator.head.commands.sweep import trial
from orchestrator.head.commands.sweep.journal import Journal
from orchestrator.head.commands.sweep.space import Member
from orchestrator.records.experiment import Experiment, JobRecord

# Members in the queue beside those that run: they have reached the nodes. As many as run, since
# members that began together end together.
LEAST_WAITING, MOST_WAITING = 2, 8
LOOK_SECONDS = 0.1
# Between two looks at what members measure, or PAUSES times as long as a look takes.
MEASURE_SECONDS, PAUSES = 1.0, 4
MOST_VAIN = 3  # members that could not start, before any could
MOST_HEADS = 3  # for one job
NOT_STARTED, INTERRUPTED = "not started", "interrupted"


@dataclass(frozen=True)
class MemberEnd:
    """How a member has ended."""

    member: int
    words: str
    state: str
    values: Mapping[str, str] = field(default_factory=dict)
    value: float | None = None  # of the metric
    seconds: float = 0.0
    experiment: str = ""
    problem: str = ""


class Supply(Protocol):
    """Where members come from: a list, or an optimizer that hears how each has ended."""

    @property
    def most_waiting(self) -> int:
        """Return how many members may be chosen before they can start."""
        ...

    def __len__(self) -> int: ...

    def member(self, number: int) -> Member: ...

    def ended(self, end: MemberEnd) -> None: ...


@dataclass(frozen=True)
class ListedMembers:
    """Members that are known from the start."""

    members: Sequence[Member]
    most_waiting: int = MOST_WAITING

    def __len__(self) -> int:
        return len(self.members)

    def member(self, number: int) -> Member:
        return self.members[number]

    def ended(self, end: MemberEnd) -> None: ...


@dataclass
class StartedMember:
    """A member that was started: it waits in the queue until it has a place."""

    member: Member
    process: Background | None = None  # its head; None while another process follows its job
    began: float = field(default_factory=time.time)
    place: Path | None = None
    pressed: int = 0  # times that it was sent Ctrl-C
    heads: int = 1
    step: int | None = None  # of the newest value that it has measured
    value: float | None = None


@dataclass
class Sweep:
    """A sweep that this process leads."""

    journal: Journal
    supply: Supply
    arguments: Callable[[Member], tuple[LaunchArguments, list[str]]]
    restarts: int = 0
    jobs: int | None = None
    metric: str = ""
    measures: bool = True  # while members run, for a table that is shown
    show: Callable[[Sweep, MemberEnd | None], None] = lambda *_: None
    started: dict[int, StartedMember] = field(default_factory=dict)
    ends: dict[int, MemberEnd] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    answers: queue.SimpleQueue[tuple[StartedMember, dict[str, Any] | OrchestratorError]] = field(
        default_factory=queue.SimpleQueue
    )
    interrupts: int = 0
    vain: int = 0
    measures_at: float = 0.0

    def __post_init__(self) -> None:
        self.left = deque(range(len(self.supply)))

    def run(self) -> int:
        """Lead it to its end, or until it is stopped."""
        before = {number: signal.signal(number, self.interrupted) for number in interrupt.SIGNALS}
        try:
            while self.started or (self.left and not self.over):
                self.start()
                self.hear()
                self.press()
                self.measure()
                self.show(self, None)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.exit_code

    def interrupted(self, *_: object) -> None:
        self.interrupts += 1

    @property
    def over(self) -> bool:
        """Return True if no further member is started."""
        return bool(self.interrupts) or self.vain >= MOST_VAIN

    @property
    def exit_code(self) -> int:
        if self.interrupts:
            return EXIT_STOPPED
        done = all(end.state == "done" for end in self.ends.values())
        return EXIT_DONE if done and not self.left else EXIT_FAILED

    # -- starting ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start members as long as there is room for them."""
        while self.left and not self.over and self.has_room:
            member = self.supply.member(self.left.popleft())
            one = self.started[member.number] = StartedMember(member)
            self.journal.add(member=member.number, words=member.words, values=member.values)
            arguments, command = self.arguments(member)
            self.lead(one, Background(launching.sweep_member, arguments=arguments, command=command))

    def lead(self, one: StartedMember, process: Background) -> None:
        """Take what a member's process answers from now on."""
        one.process, one.pressed = process, 0

        def listen() -> None:
            try:
                while True:
                    self.answers.put((one, process.answer(lambda _: None)))
            except OrchestratorError as error:
                self.answers.put((one, error))

        threading.Thread(target=listen, daemon=True).start()

    @property
    def has_room(self) -> bool:
        if self.jobs is not None:
            return len(self.started) < self.jobs
        waiting = sum(one.place is None for one in self.started.values())
        running = len(self.started) - waiting
        return waiting < min(max(LEAST_WAITING, running), self.supply.most_waiting)

    # -- what becomes of them ----------------------------------------------------------------

    def hear(self) -> None:
        """Wait a moment for what a member's process says, and take it."""
        with contextlib.suppress(queue.Empty):
            one, answer = self.answers.get(timeout=LOOK_SECONDS)
            if isinstance(answer, OrchestratorError):
                self.process_ended(one, answer)
            elif "place" in answer:
                one.place = Path(answer["place"])
        for one in list(self.started.values()):
            if one.process is None and one.place is not None:
                self.look_at_job(one, Experiment(one.place))

    def process_ended(self, one: StartedMember, error: OrchestratorError) -> None:
        """Take the end of a member's process; `error` is why, if it has no job."""
        one.process, number = None, one.member.number
        if one.place is not None:
            return
        self.tries[number] += 1
        unreachable = error.exit_code == EXIT_NODE and self.tries[number] <= self.restarts
        if self.interrupts or (unreachable and not self.over):
            del self.started[number]
            self.left.appendleft(number)
            return
        self.vain += not any(end.experiment for end in self.ends.values())
        self.end(one, NOT_STARTED, error.what)

    def look_at_job(self, one: StartedMember, experiment: Experiment) -> None:
        """Take the result of a job that is over; give one that nothing follows a head again."""
        record = experiment.read_record()
        if record.over:
            self.end_of_job(one, experiment, record)
        elif not experiment.followed:
            one.heads += 1
            if one.heads > MOST_HEADS:
                self.end(one, "lost", "its head ends as soon as it starts", experiment.name)
                return
            where = self.arguments(one.member)[0].where
            take_up = Background(follow.take_up, where=where, experiment=str(experiment.path))
            self.lead(one, take_up)

    def end_of_job(self, one: StartedMember, experiment: Experiment, record: JobRecord) -> None:
        found = trial.result(experiment, record, self.metric)
        state = record.state
        if found["time_limit"]:
            state = "done"  # A time limit is an end that was wanted.
        elif state == "stopped" and self.interrupts:
            state = INTERRUPTED
        as_wanted = state in ("done", INTERRUPTED)
        problem = record.verdict.message if record.verdict and not as_wanted else ""
        measured = {"value": found["value"]} if self.metric else {}
        problem = problem or (found["problem"] if self.metric else "")
        self.end(one, state, problem, experiment.name, seconds=found["seconds"], **measured)

    def end(
        self, one: StartedMember, state: str, problem: str, experiment: str = "", **found: Any
    ) -> None:
        member = one.member
        end = MemberEnd(
            member.number,
            member.words,
            state,
            member.values,
            experiment=experiment,
            problem=problem,
            **found,
        )
        self.journal.add(**vars(end))
        self.ends[member.number] = end
        del self.started[member.number]
        self.supply.ended(end)
        self.show(self, end)

    def press(self) -> None:
        """Pass each Ctrl-C on to the members: a head stops its job, proved."""
        if not self.interrupts and self.journal.stop_is_asked:
            self.interrupts = 1
        for one in self.started.values():
            if one.process is not None and one.pressed < self.interrupts:
                one.process.press(INTERRUPT)
                one.pressed += 1

    def measure(self) -> None:
        """Read what the members have measured so far."""
        began = time.monotonic()
        if not (self.metric and self.measures and began > self.measures_at):
            return
        for one in self.started.values():
            if one.place is not None:
                experiment = Experiment(one.place)
                record = experiment.read_record()
                steps, readings = trial.readings(experiment, record, self.metric, [])
                if readings:
                    step, one.value = readings[-1]
                    one.step = None if steps is None else step  # else it is only counted
        now = time.monotonic()
        self.measures_at = now + max(MEASURE_SECONDS, PAUSES * (now - began))
