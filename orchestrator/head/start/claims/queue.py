"""Wait until it is a launch's turn on its nodes, and start then."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, StoppedEarly
from orchestrator.common.text import Say
from orchestrator.config.launch import moment_of
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.screen import failures
from orchestrator.head.screen.progress import Progress
from orchestrator.head.start import selection
from orchestrator.head.start.claims import rules
from orchestrator.head.start.claims.claims import (
    ANSWER_SECONDS,
    Occupied,
    in_order,
    problems,
    wish_of,
)
from orchestrator.head.start.claims.turn import Machine, holders, make_way, obstacles, place
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import Request
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.claims import NO_ENTRIES, WAITING, Entry, Wish, clock, is_gpu
from orchestrator.protocol.requests.request import Request as Question
from orchestrator.protocol.requests.start import Claim, Page, ReadBook, Unclaim, Wait
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord

log = logging.getLogger(__name__)

AWAY_SECONDS = 5.0  # between two tries to reach nodes that were lost meanwhile
LOOK_SECONDS = 0.3  # that a node waits for a change before it answers
LATER_SECONDS = 1.0  # between two looks whether another job is over, or it is time
RETRY_SECONDS = 5.0  # after a look at who computes on the GPUs, which takes a command

T = TypeVar("T")
A = TypeVar("A", bound=Message)
Asked = Mapping[str, tuple[str, ...]]  # the name of a node -> ids of entries there


def wait(
    request: Request,
    nodes: Nodes,
    reach: Callable[[], tuple[Request, Nodes]],
    say: Say,
    entered: Callable[[], None],
) -> tuple[Request, Nodes]:
    """Choose and hold the nodes of a job when it is its turn.

    Nodes that are away for a while cost it nothing.
    """
    while True:
        rules.check_time(request, nodes.reached)
        line = of_launch(request, nodes, say)
        entered()
        try:
            line.until(partial(not_yet, request))
            if not request.config.launch.queue:
                return request, selection.choose(request, nodes, hold=True)
            free = partial(line.free_first, nodes)
            return request, line.run(lambda: selection.choose(request, free(), hold=True))  # noqa: B023
        except Disconnected as error:
            say(error.what)
        while True:
            try:
                request, nodes = reach()
                break
            except NodeError as error:
                log.info("the nodes are tried again in %g s: %s", AWAY_SECONDS, error.what)
                time.sleep(AWAY_SECONDS)


def not_yet(request: Request) -> str:
    """Say what a launch waits for before it stands in the queue; nothing if for nothing."""
    launch = request.config.launch
    if launch.at and time.time() < (moment := moment_of(launch.at, request.begun)):
        return f"not before {clock(moment)}"
    for name in (*launch.after, *launch.after_any):
        root = request.where.experiments
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


def of_launch(request: Request, nodes: Nodes, say: Say) -> Queue:
    """Return the place in the queue of a launch that has not started yet."""
    places = [
        Place(node.node.name, node.channel, wish_of(request, node) or Wish())
        for node in nodes.reached
    ]
    launch, wish = request.config.launch, places[0].wish
    # How far the clock is ahead that all who meet on these nodes go by.
    ahead = min(nodes.reached, key=in_order).facts.clock_offset
    since = request.begun + ahead
    entry = entry_of(launch.name, since, wish).replace(preempts=launch.preempt == "save")
    least = nodes.bounds.least if nodes.bounds else len(nodes.reached)
    return Queue(entry, places, least, say, ahead)


def wait_again(
    record: JobRecord,
    channels: Mapping[str, NodeChannel],
    least: int,
    say: Say,
    refuse: Callable[[], None],
) -> None:
    """Hold the nodes of a job again that has made way, when it is its turn.

    It stands in the queue where its start has placed it. `refuse` raises where it is not wanted
    any more.
    """
    places = [
        Place(node.name, channels[node.name], part=record.first_part(node)) for node in record.nodes
    ]
    began = record.attempts[0].started + record.nodes[0].clock
    entry = entry_of(record.job, began, Wish(priority=record.launch.priority))
    line = Queue(entry, places, least, say, record.nodes[0].clock)
    line.refuse = refuse
    line.run(line.hold)


def entry_of(job: str, since: float, wish: Wish) -> Entry:
    return Entry(
        id=os.urandom(8).hex(),
        state=WAITING,
        job=job,
        since=since,
        order=since,
        priority=wish.priority,
        seconds=wish.seconds,
        head=socket.gethostname(),
    )


class Disconnected(NodeError):
    """A launch that waits has lost a node."""


@dataclass(frozen=True)
class Place:
    """A node on which somebody waits, and what is wanted of it: a wish, or that of a part."""

    name: str
    channel: NodeChannel
    wish: Wish = field(default_factory=Wish)
    part: tuple[str, int] | None = None


@dataclass
class Queue:
    """Somebody who waits on some nodes, each of which has an entry that ends with this head."""

    mine: Entry
    places: Sequence[Place]
    least: int  # nodes
    say: Say
    clock_ahead: float = 0.0
    refuse: Callable[[], None] = lambda: None
    books: Sequence[Page] = ()
    asked: Asked = field(default_factory=dict)  # who makes way
    would_ask: Asked = field(default_factory=dict)  # by the books alone
    asks_at: float = 0.0
    said: str = ""

    def until(self, not_yet: Callable[[], str]) -> None:
        """Wait as long as there is something to wait for before the queue."""
        while reason := not_yet():
            self.tell(f"it waits: {reason}")
            self.look(0.0)
            time.sleep(LATER_SECONDS)

    def run(self, start: Callable[[], T]) -> T:
        """Call `start` when it is this one's turn; once more where others were quicker."""
        self.enter()
        pause = LOOK_SECONDS
        with Progress("waiting in the queue") as line:
            while True:
                self.refuse()
                machines, now = self.machines, time.time() + self.clock_ahead
                reasons: Mapping[str, str] = self.against_the_rules(machines)
                reasons = reasons or obstacles(self.mine, machines, self.least, now)
                if not reasons:
                    try:
                        return start()
                    except Occupied as error:  # a program that is no job of ours, perhaps
                        reasons = error.taken
                        time.sleep(pause)
                        pause = min(2 * pause, RETRY_SECONDS)
                else:
                    pause = LOOK_SECONDS
                    self.ask_for_way(machines)
                    held = {machine.name: holders(machine) for machine in machines}
                    reasons = {name: why + held.get(name, "") for name, why in reasons.items()}
                self.tell(f"in the queue: {'; '.join(said_of(reasons.items()))}")
                before = place(self.mine, machines)
                line.what = f"in the queue, {before} before it" if before else "next in the queue"
                self.look(LOOK_SECONDS)

    def enter(self) -> None:
        """Stand in the queue on all nodes, if enough of them can ever do."""
        self.look(0.0)
        machines = self.machines
        small_ones = [machine for machine in machines if machine.wants > machine.total]
        if len(machines) - len(small_ones) < self.least:
            small = small_ones[0]
            has = f"{small.name} has {small.total}, and {small.wants} are wanted"
            raise CheckFailed(f"no waiting helps: {has}", "take fewer: --gpus N, --nproc N")
        own = sum(book.own for book in self.books)
        if words := self.forbidden(machines, leaving=own):
            raise CheckFailed(f"no waiting helps: {words}", "take fewer: --gpus N, --nnodes N")
        self.stand(machines)
        log.info("stands in the queue of %s", [machine.name for machine in machines])
        self.look(0.0)

    def stand(self, machines: Sequence[Machine]) -> None:
        """Write on each node what is waited for there."""
        entries = [
            self.mine.replace(wants=one.wants, of=one.total, asks=self.asked.get(one.name, ()))
            for one in machines
        ]
        self.ask([Wait(entry=entry) for entry in entries], ANSWER_SECONDS)

    def forbidden(self, machines: Sequence[Machine], leaving: int) -> str:
        """Say which rule forbids this one, once so many GPUs of the same user are free."""
        pairs = zip(machines, self.books, strict=True)
        books = {machine.name: book for machine, book in pairs}
        more = sum(sorted(book.gpus for book in self.books)[: self.least])
        return rules.too_many(books, more, leaving)

    def against_the_rules(self, machines: Sequence[Machine]) -> Mapping[str, str]:
        """Say which rule the user's other jobs leave no room in; nothing where there is room.

        Those that this launch may ask to make way are none of them.
        """
        words = self.forbidden(machines, 0)
        if words and self.mine.preempts:
            asked = make_way(self.mine.replace(why=""), machines, self.least)
            words = self.forbidden(machines, self.own_of(asked))
        if words != self.mine.why:
            self.mine = self.mine.replace(why=words)
            self.stand(machines)
        return {"the rules": words} if words else {}

    def own_of(self, asked: Asked) -> int:
        """Count the GPUs that jobs of the same user hold, of those that make way."""
        known = [
            (one, place.name in asked and one.id in asked[place.name])
            for place, book in zip(self.places, self.books, strict=True)
            for one in book.entries
        ]
        us = {one.user for one, _ in known if one.id == self.mine.id}
        keys = [key for one, leaves in known if leaves and one.user in us for key in one.keys]
        return sum(map(is_gpu, keys))

    def ask_for_way(self, machines: Sequence[Machine]) -> None:
        """Ask jobs of lower priority to make way, where that is wanted and would be enough.

        Who computes on the GPUs without a job is looked at before: it takes a command there.
        """
        would_ask = make_way(self.mine, machines, self.least) if self.mine.preempts else {}
        now = time.monotonic()
        if would_ask == self.would_ask or (would_ask and now < self.asks_at):
            return
        asked: Asked = {}
        if would_ask:
            requests = [ReadBook(wish=p.wish, part=p.part, programs=True) for p in self.places]
            pages = zip(machines, self.ask(requests, ANSWER_SECONDS), strict=True)
            used = [replace(machine, free=page.free) for machine, page in pages]
            asked = make_way(self.mine, used, self.least)
        self.would_ask = would_ask if asked else {}
        self.asks_at = now + RETRY_SECONDS
        if asked != self.asked:
            log.info("asks jobs of lower priority to make way: %s", asked)
            self.asked = asked
            self.stand(machines)

    def hold(self) -> None:
        """Hold all that is wanted, or nothing of it, which raises Occupied."""
        requests = [Claim(wish=one.wish, part=one.part) for one in self.places]
        answers = self.ask(requests, ANSWER_SECONDS)
        taken = problems([one.name for one in self.places], answers)
        log.info("held in its turn; not there: %s", taken or "nothing is taken")
        if len(self.places) - len(taken) < self.least:
            self.ask([Unclaim()] * len(self.places), ANSWER_SECONDS)
            raise Occupied(taken, self.least)
        self.look(0.0)  # two that go on at a time both see what the other has
        books = {one.name: book for one, book in zip(self.places, self.books, strict=True)}
        if words := rules.too_many(books, 0):
            self.ask([Unclaim()] * len(self.places), ANSWER_SECONDS)
            raise Occupied({"the rules": words}, self.least)

    @property
    def machines(self) -> list[Machine]:
        return [
            Machine(
                one.name,
                [entry for entry in book.entries if entry.id != self.mine.id],
                book.free,
                book.total,
                book.wants,
            )
            for one, book in zip(self.places, self.books, strict=True)
        ]

    def look(self, seconds: float) -> None:
        """Read the books; with a time, once something has changed in one of them."""
        known = [book.entries for book in self.books] or [NO_ENTRIES] * len(self.places)
        requests = [
            ReadBook(wish=one.wish, part=one.part, before=entries, seconds=seconds)
            for one, entries in zip(self.places, known, strict=True)
        ]
        self.books = self.ask(requests, ANSWER_SECONDS + seconds, self.call_others)
        if any(book.removed for book in self.books):
            raise StoppedEarly("the launch was taken out of the queue; nothing was started")

    def call_others(self, asked: Place, book: Page) -> None:
        """Have all nodes answer as soon as one of them has news."""
        pairs = zip(self.places, self.books, strict=False)  # at first there are no books
        known = {one.name: page.entries for one, page in pairs}
        if book.entries != known.get(asked.name, book.entries):
            for one in self.places:
                if one is not asked:
                    one.channel.beat()

    def free_first(self, nodes: Nodes) -> Nodes:
        """Return the nodes, first those with enough that is free: no other is asked in vain."""
        free = {machine.name for machine in self.machines if machine.free >= machine.wants}
        reached = sorted(nodes.reached, key=lambda one: one.node.name not in free)
        return replace(nodes, reached=tuple(reached))

    def ask(
        self,
        requests: Sequence[Question[A]],
        timeout: float,
        heard: Callable[[Place, A], None] = lambda *_: None,
    ) -> list[A]:
        """Ask each node; where one does not answer, the launch has lost its place for a moment."""

        def ask_one(pair: tuple[Place, Question[A]]) -> A:
            answer = pair[0].channel.ask(pair[1], timeout)
            heard(pair[0], answer)
            return answer

        answers = fleet.everywhere(list(zip(self.places, requests, strict=True)), ask_one)
        lost = failures.failures(self.places, answers)
        if lost:
            for one in self.places:
                one.channel.connection.close()
            raise Disconnected(failures.failure_table(lost, len(answers), "; connecting again"))
        return [answer for answer in answers if not isinstance(answer, OrchestratorError)]

    def tell(self, words: str) -> None:
        """Say why it waits, once for each reason."""
        if words != self.said:
            self.said = words
            log.info("waits: %s", words)
            self.say(words)
