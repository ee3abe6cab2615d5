"""Lead a sweep: give members out as long as there is room, and see what becomes of each.

A member is a launch of its own, in a process of its own (slot.py), which goes on without this one.
With --queue the machines themselves say when there is room: a few members wait there, so that one
of them starts as soon as another ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common import interrupt
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    UsageError,
)
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.background.process import Background
from orchestrator.head.commands.sweep import slot as slots
from orchestrator.head.commands.sweep import trial
from orchestrator.head.commands.sweep.journal import Journal
from orchestrator.head.commands.sweep.slot import Slot
from orchestrator.head.commands.sweep.space import Member
from orchestrator.head.screen.output import complain_once
from orchestrator.records.experiment import RECORD, Experiment, JobRecord

# Members in the queue beside those that run: they have reached the nodes. As many as run, since
# members that began together end together.
LEAST_WAITING, MOST_WAITING = 2, 8
LOOK_SECONDS = 0.1
MEASURE_SECONDS, PAUSES = 1.0, 4  # between two looks at what members measure, or as long as one
MOST_TRIES = 3  # of a process that ends without a word; of first members that cannot start
MOST_HEADS, REST_SECONDS = 10, 0.5  # heads of a job that end at once: a disk may be full
NOT_STARTED = "not started"
FINAL = ("done", "failed", "lost", "stopped", "pruned", NOT_STARTED)
INTERRUPTED = "interrupted"  # with the whole sweep: it begins again with that


class Supply(Protocol):
    """Where members come from: a list, or an optimizer that hears how each has ended."""

    @property
    def most_waiting(self) -> int:
        """Return how many members may be chosen before they can start."""
        ...

    def __len__(self) -> int: ...

    def member(self, number: int) -> Member: ...

    def ended(self, end: End) -> None: ...

    def is_hopeless(self, number: int, readings: trial.Readings) -> bool:
        """Tell whether what a member has measured so far shows that it is not worth its time."""
        ...


@dataclass(frozen=True)
class Listed:
    """Members that were known from the start."""

    members: Sequence[Member]
    most_waiting: int = MOST_WAITING

    def __len__(self) -> int:
        return len(self.members)

    def member(self, number: int) -> Member:
        return self.members[number]

    def ended(self, end: End) -> None: ...

    def is_hopeless(self, number: int, readings: trial.Readings) -> bool:
        return False


@dataclass(frozen=True)
class End:
    """Tells what became of a member."""

    member: int
    words: str
    state: str
    values: Mapping[str, str] = field(default_factory=dict)
    value: float | None = None  # of the metric
    seconds: float = 0.0
    experiment: str = ""
    problem: str = ""

    @property
    def final(self) -> bool:
        return self.state in FINAL


@dataclass
class Given:
    """A member that was given out: its slot, and its process where this one has started it."""

    member: Member
    slot: Slot
    process: Background | None = None
    place: Path | None = None
    interrupts: int = 0  # that it was sent
    hopeless: bool = False
    step: int | None = None  # of the newest value that it has measured
    value: float | None = None
    heads: int = 0  # that were given to its job, after the first one
    rests: float = 0.0  # until when it is left alone
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        return self.slot.held if self.process is None else not self.process.gone()


@dataclass
class Sweep:
    """A sweep that this process leads."""

    journal: Journal
    supply: Supply
    arguments: Callable[[Member], tuple[LaunchArguments, list[str]]]
    restarts: int = 0
    jobs: int | None = None
    metric: str = ""
    measures: bool = True  # while members run: for who looks on, or prunes
    show: Callable[[Sweep, End | None], None] = lambda *_: None
    given: dict[int, Given] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    left: deque[int] = field(default_factory=deque)
    tries: dict[int, int] = field(default_factory=dict)
    closing: list[Slot] = field(default_factory=list)  # of ends that are not on the disk yet
    interrupts: int = 0
    vain: int = 0  # members that could not start, before any could
    measures_at: float = 0.0

    # -- the whole ---------------------------------------------------------------------------

    def run(self) -> int:
        """Lead it to its end, or until it is stopped."""
        with self.journal.led():
            self.take_up()
            handlers = {
                number: signal.signal(number, self.interrupted) for number in interrupt.SIGNALS
            }
            try:
                while self.given or self.closing or (self.left and not self.over):
                    self.give()
                    self.wait()
                    self.look()
                    self.show(self, None)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return self.exit_code

    def interrupted(self, *_: object) -> None:
        self.interrupts += 1

    @property
    def over(self) -> bool:
        """Tell whether no further member is given out."""
        return bool(self.interrupts) or self.vain >= MOST_TRIES

    @property
    def exit_code(self) -> int:
        if self.interrupts:
            return EXIT_STOPPED
        done = all(end.state in ("done", "pruned") for end in self.ends.values())
        return EXIT_DONE if done and not self.left else EXIT_FAILED

    def take_up(self) -> None:
        """Go on where the journal ends, with the members that run without a head of the sweep."""
        for event in self.journal.read():
            if event.get("state"):
                names = End.__dataclass_fields__
                end = End(**{name: event[name] for name in names if name in event})
                self.ends[end.member] = end
        self.ends = {number: end for number, end in self.ends.items() if end.final}
        for end in self.ends.values():
            self.supply.ended(end)
        for slot in self.journal.slots():
            if slot.number >= len(self.supply):
                raise UsageError(f"{slot.path} is of no member of {self.journal.name}")
            if slot.number in self.ends:  # the head was killed between the two
                slot.remove()
            else:
                self.given[slot.number] = Given(self.supply.member(slot.number), slot)
        known = {*self.ends, *self.given}
        self.left.extend(number for number in range(len(self.supply)) if number not in known)

    # -- giving out --------------------------------------------------------------------------

    def give(self) -> None:
        """Start members as long as there is room for them."""
        if not self.journal.write():
            complain_once(f"{self.journal.file} cannot be written: no member is started until then")
            return
        for slot in self.closing:
            slot.remove()
        self.closing = []
        while self.left and not self.over and self.has_room:
            member = self.supply.member(self.left[0])
            slot = self.journal.slot(member.number)
            try:
                slot.make()
            except OSError as error:
                complain_once(f"{slot.path}: {error.strerror}: no member is started until then")
                return
            if not self.journal.add(member=member.number, given=member.words):
                slot.remove()
                return
            self.left.popleft()
            self.given[member.number] = Given(
                member, slot, slots.begin(slot, *self.arguments(member))
            )

    @property
    def has_room(self) -> bool:
        if self.jobs is not None:
            return len(self.given) < self.jobs
        waiting = sum(one.place is None for one in self.given.values())
        running = len(self.given) - waiting
        return waiting < min(max(LEAST_WAITING, running), self.supply.most_waiting)

    # -- what becomes of them ----------------------------------------------------------------

    def wait(self) -> None:
        """Wait a moment, or until the process of a member ends."""
        poll = select.poll()
        for one in self.given.values():
            if one.process is not None and not one.process.answers.closed:
                poll.register(one.process.answers, 0)
        poll.poll(LOOK_SECONDS * 1000)

    def look(self) -> None:
        began = time.monotonic()
        measures = self.metric and self.measures and began > self.measures_at
        for one in list(self.given.values()):
            lives = one.lives
            one.said = one.slot.read()
            one.place = Path(one.said["place"]) if "place" in one.said else None
            if not lives:
                self.settle(one)
                continue
            if "pid" in one.said:
                self.press(one, int(one.said["pid"]), str(one.said.get("host")))
            if measures and one.place is not None and not one.hopeless:
                self.measure(one, Experiment(one.place))
        if measures:
            now = time.monotonic()
            self.measures_at = now + max(MEASURE_SECONDS, PAUSES * (now - began))

    def measure(self, one: Given, experiment: Experiment) -> None:
        """Read what a member has measured so far."""
        record = experiment.read_record()
        steps, readings = trial.readings(experiment, record, self.metric, [])
        if readings:
            step, one.value = readings[-1]
            one.step = None if steps is None else step  # else it is only counted
        one.hopeless = self.supply.is_hopeless(one.member.number, readings)

    def press(self, one: Given, pid: int, host: str) -> None:
        """Press Ctrl-C in the head of a member, as often as here; it stops its job, proved."""
        wanted = max(self.interrupts, int(one.hopeless))
        if one.interrupts < wanted and host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            one.interrupts += 1

    def settle(self, one: Given) -> None:
        """See what is left where the process of a member has ended."""
        if time.monotonic() < one.rests:
            return
        descriptor = one.slot.take()
        if descriptor is None and one.slot.path.exists():
            one.process = None  # another one has it, and lives
            return
        if "pid" not in one.said:
            self.vainly(one)  # while it is locked: a process that comes late finds it removed
        if descriptor is not None:
            os.close(descriptor)
        if one.member.number not in self.given:
            return
        experiment = self.experiment_of(one)
        error, code = one.said.get("error"), one.said.get("code")
        if experiment is not None and code != EXIT_NODE:
            self.settle_job(one, experiment)
        elif error is None:
            self.vainly(one)
        elif code == EXIT_NODE and self.tried(one) <= self.restarts and not self.over:
            self.again(one)
        else:
            self.end(one, blank(one.member, NOT_STARTED, error), began=False)

    def settle_job(self, one: Given, experiment: Experiment) -> None:
        """Take the result of a job that is over; see that one which is not has a head."""
        record = experiment.read_record()
        if record.over:
            self.end(one, self.end_of(one, experiment, record))
            return
        holder = experiment.lock()
        if holder is not None:  # somebody follows it in a terminal
            self.press(one, holder.pid, holder.host)
            one.process = None
            return
        experiment.unlock()
        one.heads += 1
        if one.heads > MOST_HEADS:
            why = str(one.said.get("error", "its head ends as soon as it starts"))
            self.end(one, replace(blank(one.member, "lost", why), experiment=experiment.name))
            return
        place = str(experiment.path)
        one.slot.send(place=place)
        one.process = slots.begin(one.slot, *self.arguments(one.member), place=place)
        one.interrupts, one.rests = 0, time.monotonic() + REST_SECONDS * 2**one.heads

    def vainly(self, one: Given) -> None:
        """Begin a member again whose process has left nothing, a few times."""
        if self.tried(one) < MOST_TRIES:
            self.again(one)
            return
        words = one.process.last_words() if one.process else "its process ended without a word"
        self.end(one, blank(one.member, NOT_STARTED, words), began=False)

    def tried(self, one: Given) -> int:
        """Count the starts of a member that came to nothing."""
        self.tries[one.member.number] = self.tries.get(one.member.number, 0) + 1
        return self.tries[one.member.number]

    def experiment_of(self, one: Given) -> Experiment | None:
        """Return a member's experiment; one that its process had no time to name is looked for."""
        if one.place is not None:
            return Experiment(one.place)
        arguments, _ = self.arguments(one.member)
        for path in sorted(arguments.where.experiments.glob(f"{arguments.launch['name']}_*")):
            if (path / RECORD).exists():
                record = Experiment(path).read_record()
                later = record.started > one.said.get("since", 0.0)
                if later and self.journal.name in record.launch.tag:
                    return Experiment(path.absolute())
        return None

    def again(self, one: Given) -> None:
        """Let a member wait for its turn as if it had not been given out."""
        one.slot.remove()
        del self.given[one.member.number]
        self.left.appendleft(one.member.number)

    def end_of(self, one: Given, experiment: Experiment, record: JobRecord) -> End:
        found = trial.result(experiment, record, self.metric)
        state, member = record.state, one.member
        if found["time_limit"]:  # which was wanted
            state = "done"
        elif state == "stopped" and (one.hopeless or self.interrupts):
            state = "pruned" if one.hopeless else INTERRUPTED
        as_wanted = state in ("done", "pruned", INTERRUPTED)
        problem = record.verdict.message if record.verdict and not as_wanted else ""
        return replace(
            blank(member, state, problem or (found["problem"] if self.metric else "")),
            value=found["value"] if self.metric else None,
            seconds=found["seconds"],
            experiment=experiment.name,
        )

    def end(self, one: Given, end: End, *, began: bool = True) -> None:
        """Write the end of a member down; its slot is free once that is on the disk."""
        self.closing.append(one.slot)
        self.journal.add(**vars(end))
        self.ends[end.member] = end
        del self.given[end.member]
        self.supply.ended(end)
        self.vain = 0 if began else self.vain + (not self.has_begun)
        self.show(self, end)

    @property
    def has_begun(self) -> bool:
        return any(end.experiment for end in self.ends.values())


def blank(member: Member, state: str, problem: str) -> End:
    return End(member.number, member.words, state, member.values, problem=problem)
