"""Wait until it is a launch's turn on its nodes, and start then."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, StoppedEarly
from orchestrator.common.text import Say
from orchestrator.config.launch import moment_of
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.screen.progress import Progress
from orchestrator.head.start.claims import rules
from orchestrator.head.start.claims.claims import ANSWER_SECONDS, Occupied, in_order, wants, wish_of
from orchestrator.head.start.claims.turn import Machine, holders, obstacles, place
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.planning import Prepared, prepare
from orchestrator.head.start.request import Request
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.claims import NO_ENTRIES, WAITING, Entry, Wish, clock
from orchestrator.protocol.requests.request import Request as Asked
from orchestrator.protocol.requests.start import Page, ReadBook, Wait
from orchestrator.records import experiments

AWAY_SECONDS = 5.0  # between two tries to reach nodes that were lost meanwhile
LOOK_SECONDS = 0.3  # that a node waits for a change before it answers
LATER_SECONDS = 1.0  # between two looks whether another job is over, or it is time
RETRY_SECONDS = 5.0  # after a look at who computes on the GPUs, which takes a command

T = TypeVar("T")
A = TypeVar("A", bound=Message)


def wait(
    request: Request,
    nodes: Nodes,
    reach: Callable[[], tuple[Request, Nodes]],
    say: Say,
    entered: Callable[[], None],
) -> Prepared:
    """Prepare a job when it is its turn; nodes that are away for a while cost it nothing."""
    while True:
        try:
            return Queue(request, nodes, say, entered).run(partial(prepare, request, nodes))
        except Disconnected as error:
            say(error.what)
        while True:
            try:
                request, nodes = reach()
                break
            except NodeError:
                time.sleep(AWAY_SECONDS)


class Disconnected(NodeError):
    """A launch that waits has lost a node."""


@dataclass
class Queue:
    """A launch that waits on its nodes; each has an entry of it, which ends with this head."""

    request: Request
    nodes: Nodes
    say: Say
    entered: Callable[[], None] = lambda: None  # called once it waits
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    books: Sequence[Page] = ()
    said: str = ""
    forbidden: str = ""  # why a rule keeps it from starting

    def run(self, start: Callable[[], T]) -> T:
        """Call `start` when it is this launch's turn; once more where others were quicker."""
        rules.check_time(self.request, self.nodes.reached)
        self.entered()
        while reason := self.not_yet():
            self.tell(f"it waits: {reason}")
            self.look(0.0)
            time.sleep(LATER_SECONDS)
        if not self.request.config.launch.queue:
            return start()
        self.enter()
        pause = LOOK_SECONDS
        with Progress("waiting in the queue") as line:
            while True:
                mine, machines = self.mine, self.machines
                now = time.time() + self.clock_ahead
                reasons: Mapping[str, str] = self.against_the_rules(machines)
                reasons = reasons or obstacles(mine, machines, self.least, now)
                if not reasons:
                    try:
                        return start()
                    except Occupied as error:  # a program that is no job of ours, perhaps
                        reasons = error.taken
                        time.sleep(pause)
                        pause = min(2 * pause, RETRY_SECONDS)
                else:
                    pause = LOOK_SECONDS
                    held = {machine.name: holders(machine) for machine in machines}
                    reasons = {name: why + held.get(name, "") for name, why in reasons.items()}
                self.tell(f"in the queue: {'; '.join(said_of(reasons.items()))}")
                before = place(mine, machines)
                line.what = f"in the queue, {before} before it" if before else "next in the queue"
                self.look(LOOK_SECONDS)

    def not_yet(self) -> str:
        """Say what the launch waits for before it stands in the queue; nothing if for nothing."""
        launch = self.request.config.launch
        if launch.at and time.time() < (moment := moment_of(launch.at, self.request.begun)):
            return f"not before {clock(moment)}"
        for name in (*launch.after, *launch.after_any):
            root = self.request.where.experiments
            experiment = experiments.find(root, name)
            if experiment is None:
                raise experiments.missing(root, name)
            record = experiment.read_record()
            if not record.over:
                return f"not before {name} is over"
            if name in launch.after and record.state != "done":
                fix = f"--after-any {name} starts it all the same"
                raise CheckFailed(f"{name} has {record.state}; nothing was started", fix)
        return ""

    def enter(self) -> None:
        """Stand in the queue on all nodes, if enough of them can ever do."""
        self.look(0.0)
        machines = self.machines
        small_ones = [machine for machine in machines if machine.wants > machine.total]
        if len(machines) - len(small_ones) < self.least:
            small = small_ones[0]
            has = f"{small.name} has {small.total}, and {small.wants} are wanted"
            raise CheckFailed(f"no waiting helps: {has}", "take fewer: --gpus N, --nproc N")
        if words := rules.too_many(self.nodes.reached, (), self.gpus_of(machines)):
            raise CheckFailed(f"no waiting helps: {words}", "take fewer: --gpus N, --nnodes N")
        self.stand(machines)
        self.look(0.0)

    def stand(self, machines: Sequence[Machine]) -> None:
        """Write on each node what the launch waits for there."""
        entries = [self.mine.replace(wants=one.wants, of=one.total) for one in machines]
        self.ask([Wait(entry=entry) for entry in entries], ANSWER_SECONDS)

    def against_the_rules(self, machines: Sequence[Machine]) -> Mapping[str, str]:
        """Say which rule the user's other jobs leave no room in; nothing where there is room."""
        words = rules.too_many(self.nodes.reached, self.books, self.gpus_of(machines))
        if words != self.forbidden:
            self.forbidden = words
            self.stand(machines)
        return {"the rules": words} if words else {}

    def gpus_of(self, machines: Sequence[Machine]) -> int:
        """Return how many GPUs the launch will take, of as few nodes as it may have."""
        pairs = zip(self.nodes.reached, machines, strict=True)
        return sum(sorted(one.wants if node.facts.gpus else 0 for node, one in pairs)[: self.least])

    @property
    def least(self) -> int:
        return self.nodes.bounds.least if self.nodes.bounds else len(self.nodes.reached)

    @property
    def clock_ahead(self) -> float:
        """Return how far the clock is ahead that all who meet on these nodes go by."""
        return min(self.nodes.reached, key=in_order).facts.clock_offset

    @property
    def mine(self) -> Entry:
        launch, since = self.request.config.launch, self.request.begun + self.clock_ahead
        wish = wish_of(self.request, self.nodes.reached[0])
        return Entry(
            id=self.id,
            state=WAITING,
            job=launch.name,
            since=since,
            order=since,
            priority=launch.priority,
            seconds=wish.seconds if wish else 0.0,
            head=socket.gethostname(),
            why=self.forbidden,
        )

    @property
    def machines(self) -> list[Machine]:
        return [
            Machine(
                node.node.name,
                [entry for entry in book.entries if entry.id != self.id],
                book.free,
                book.total,
                wants(node, self.wish(node), book),
            )
            for node, book in zip(self.nodes.reached, self.books, strict=True)
        ]

    def wish(self, node: Reached) -> Wish:
        return wish_of(self.request, node) or Wish()

    def look(self, seconds: float) -> None:
        """Read the books; with a time, once something has changed in one of them."""
        known = [book.entries for book in self.books] or [NO_ENTRIES] * len(self.nodes.reached)
        requests = [
            ReadBook(wish=self.wish(node), before=entries, seconds=seconds)
            for node, entries in zip(self.nodes.reached, known, strict=True)
        ]
        self.books = self.ask(requests, ANSWER_SECONDS + seconds)
        if any(book.removed for book in self.books):
            raise StoppedEarly("the launch was taken out of the queue; nothing was started")

    def ask(self, requests: Sequence[Asked[A]], timeout: float) -> list[A]:
        """Ask each node; where one does not answer, the launch has lost its place for a moment."""
        answers = fleet.ask(self.nodes.reached, requests, timeout)
        lost = fleet.failures([node.node for node in self.nodes.reached], answers)
        if lost:
            for node in self.nodes.reached:
                node.channel.connection.close()
            raise Disconnected(fleet.failure_table(lost, len(answers), "; connecting again"))
        return [answer for answer in answers if not isinstance(answer, OrchestratorError)]

    def tell(self, words: str) -> None:
        """Say why it waits, once for each reason."""
        if words != self.said:
            self.said = words
            self.say(words)
