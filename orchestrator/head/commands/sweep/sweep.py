"""Leads a sweep: starts members as long as there is room, and notes how each has ended.

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common import interrupt
from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, OrchestratorError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.background.process import INTERRUPT, Background
from orchestrator.head.commands import launching
from orchestrator.head.commands.sweep import result
from orchestrator.head.commands.sweep.journal import Journal
from orchestrator.head.commands.sweep.space import Member
from orchestrator.records.experiment import Experiment, JobRecord

# Members in the queue beside those that run: they have reached the nodes. As many as run, since
# members that began together end together.
LEAST_WAITING, MOST_WAITING = 2, 8
LOOK_SECONDS = 0.1
ALONE_SECONDS = 10.0  # until a job that no process follows is given up
MOST_VAIN = 3  # members that could not start, before any could
NOT_STARTED, INTERRUPTED = "not started", "interrupted"
TIME_LIMIT = "(--time-limit)"  # in the reason of such an end


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

    def __len__(self) -> int: ...

    def member(self, number: int) -> Member: ...

    def ended(self, end: MemberEnd) -> None: ...


@dataclass(frozen=True)
class ListedMembers:
    """Members that are known from the start."""

    members: Sequence[Member]

    def __len__(self) -> int:
        return len(self.members)

    def member(self, number: int) -> Member:
        return self.members[number]

    def ended(self, end: MemberEnd) -> None: ...


@dataclass
class StartedMember:
    """A member that was started: it waits in the queue until it has a place."""

    member: Member
    process: Background | None  # its head; None while another process follows its job
    place: Path | None = None
    pressed: int = 0  # times that it was sent Ctrl-C
    followed: float = 0.0  # monotonic: when its job was last seen to have a head


@dataclass
class Sweep:
    """A sweep that this process leads."""

    journal: Journal
    supply: Supply
    arguments: Callable[[Member], tuple[LaunchArguments, list[str]]]
    jobs: int | None = None
    metric: str = ""
    show: Callable[[Sweep, MemberEnd], None] = lambda *_: None
    started: dict[int, StartedMember] = field(default_factory=dict)
    ends: dict[int, MemberEnd] = field(default_factory=dict)
    answers: queue.SimpleQueue[tuple[StartedMember, dict[str, Any] | OrchestratorError]] = field(
        default_factory=queue.SimpleQueue
    )
    interrupts: int = 0

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

    def start(self) -> None:
        """Start members as long as there is room for them."""
        while self.left and not self.over and self.has_room:
            member = self.supply.member(self.left.popleft())
            self.journal.add(member=member.number, words=member.words, values=member.values)
            arguments, command = self.arguments(member)
            process = Background(launching.sweep_member, arguments=arguments, command=command)
            one = self.started[member.number] = StartedMember(member, process)
            threading.Thread(target=self.listen, args=(one, process), daemon=True).start()

    def listen(self, one: StartedMember, process: Background) -> None:
        """Pass on what a member's process answers: the place of its job, and its own end."""
        try:
            while True:
                self.answers.put((one, process.answer(lambda _: None)))
        except OrchestratorError as error:
            self.answers.put((one, error))

    def hear(self) -> None:
        """Wait a moment for what a member's process says, and take it."""
        with contextlib.suppress(queue.Empty):
            one, answer = self.answers.get(timeout=LOOK_SECONDS)
            if not isinstance(answer, OrchestratorError):
                one.place = Path(answer["place"])
            elif one.place is None:
                state = INTERRUPTED if self.interrupts else NOT_STARTED
                self.end(one, state, problem=answer.what)
            else:
                one.process, one.followed = None, time.monotonic()
        for one in list(self.started.values()):
            if one.process is None and one.place is not None:
                self.look_at_job(one, Experiment(one.place))

    def look_at_job(self, one: StartedMember, experiment: Experiment) -> None:
        """Take the result of a job that is over, or that no process has followed for a while."""
        record = experiment.read_record()
        if record.over:
            self.end_of_job(one, experiment, record)
        elif experiment.followed:
            one.followed = time.monotonic()
        elif time.monotonic() > one.followed + ALONE_SECONDS:
            problem = f"no process follows it: orchestrator attach {experiment.name}"
            self.end(one, "lost", experiment=experiment.name, problem=problem)

    def end_of_job(self, one: StartedMember, experiment: Experiment, record: JobRecord) -> None:
        message = record.verdict.message if record.verdict else ""
        state = record.state
        if TIME_LIMIT in message:
            state, message = "done", ""  # an end that was wanted
        elif state == "stopped" and self.interrupts:
            state, message = INTERRUPTED, ""
        value, problem = None, ""
        if self.metric:
            value, problem = result.last_value(experiment, record, self.metric)
        self.end(
            one,
            state,
            value=value,
            seconds=round((record.ended or record.started) - record.started, 1),
            experiment=experiment.name,
            problem=message or problem,
        )

    def end(self, one: StartedMember, state: str, **found: Any) -> None:
        member = one.member
        end = MemberEnd(member.number, member.words, state, member.values, **found)
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
