"""Hold what a job needs of its nodes: all of it or nothing; wait for it, first come first served.

The queue is the launches themselves: each has an entry on each of its nodes. The order is the time
of the entry, then its id. It is the same on all nodes, so the first of all can always go ahead.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import by_value, said_of
from orchestrator.head.plan.plan import count_ranks, wish_of_launch
from orchestrator.head.screen import failures
from orchestrator.head.screen.output import say
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import LaunchRequest
from orchestrator.protocol.requests.claims import (
    NO_ENTRIES,
    STARTING,
    WAITING,
    ClaimEntry,
    Wish,
    who_has,
)
from orchestrator.protocol.requests.start import Claim, Claimed, Page, ReadBook, Unclaim, Wait
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS
from orchestrator.records import experiments

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0  # for a launch that is about to start, or to give up


class Occupied(CheckFailed):
    """Others have GPUs or slots that the job needs."""

    def __init__(self, missing: Mapping[str, str], least: int) -> None:
        lines = "".join(
            f"\n  {line}"
            for line in failures.reasons((name, words, "") for name, words in missing.items())
        )
        super().__init__(
            f"the job needs {plural(least, 'node')}, and what it wants of them is not free; nothing"
            f" was started{lines}",
            "wait for it: --queue; or take a part of each node: --gpus N; or start whoever else is"
            " there: --claim none",
        )
        self.missing = missing


@dataclass(frozen=True)
class NodeClaim:
    """The GPUs or slots that a job needs of one node."""

    name: str
    channel: NodeChannel
    wish: Wish | None = None
    part: tuple[str, int] | None = None  # of a job that is started again: the node has its wish


@dataclass(frozen=True)
class Hold:
    """The GPUs that are held on some nodes, or why none are."""

    missing: Mapping[str, str] = field(default_factory=dict)  # by the node's name
    notes: tuple[str, ...] = ()  # which part of each node it is, and what is not known


def hold(wanted: Sequence[NodeClaim]) -> Hold:
    """Hold what is wanted of all these nodes, or nothing; return what is missing per node.

    All nodes are asked at once. Launches that meet there all let go. Then each asks one node after
    the other, in an order of machines that is the same for all, so that one gets everything.
    """
    answers = ask(wanted, 0.0)
    # What is in the way may pass in a moment, where launches meet that are about to start.
    passing = all(
        not one.lacking and all(taken.state == STARTING for taken in one.taken) for one in answers
    )
    if passing and not all(one.held for one in answers):
        release(wanted)
        order = sorted(range(len(wanted)), key=lambda at: answers[at].machine)
        wanted, answers = [wanted[at] for at in order], []
        for one in wanted:
            answers += ask([one], PATIENCE_SECONDS)
            if not answers[-1].held:
                break
    missing = {
        one.name: answer.lacking or who_has(answer.taken)
        for one, answer in zip(wanted, answers, strict=False)  # the last may not have been asked
        if not answer.held
    }
    log.info("claims on %s: %s", [one.name for one in wanted], missing or "held")
    if missing:
        release(wanted)
        return Hold(missing)
    return Hold(notes=tuple(notes([one.name for one in wanted], answers)))


def ask(wanted: Sequence[NodeClaim], patience: float) -> list[Claimed]:
    """Ask nodes for what is wanted of them; if one does not answer, let go of the others."""
    claims = [Claim(wish=one.wish, part=one.part, patience=patience) for one in wanted]
    channels = [one.channel for one in wanted]
    answers = fleet.ask_channels(channels, claims, QUICK_ANSWER_SECONDS + patience)
    if silent := failures.failures(wanted, answers):
        release(wanted)
        table = failures.failure_table(silent, len(answers), "; nothing was started")
        raise NodeError(table, names=[one.name for one, _ in silent])
    return [answer for answer in answers if isinstance(answer, Claimed)]


def release(wanted: Sequence[NodeClaim]) -> None:
    """Let go of what is held on these nodes; one that does not answer lets go by itself."""
    requests = [Unclaim()] * len(wanted)
    fleet.ask_channels([one.channel for one in wanted], requests, QUICK_ANSWER_SECONDS)


def notes(names: Sequence[str], answers: Sequence[Claimed]) -> Iterator[str]:
    """Say which GPUs a job has of which nodes, where it has not all, and what is not known."""
    parts = [answer.words if " of " in answer.words else "" for answer in answers]
    for words, where in by_value(zip(names, parts, strict=True)).items():
        if words:
            yield f"{words} on {listed(where)}"
    for why, where in by_value(zip(names, (one.unsure for one in answers), strict=True)).items():
        if why:
            yield f"who else computes on the GPUs of {listed(where)} is not known: {why}"


def wish_of(request: LaunchRequest, node: Reached) -> Wish | None:
    """Return what a launch wants of a node; None with --claim none."""
    ranks, _ = count_ranks(node.probed, request.config.launch)
    return wish_of_launch(node.probed, request.config, ranks, request.env)


# -- whose turn it is, which is pure ------------------------------------------------------------


def ahead(mine: ClaimEntry, page: Page) -> list[ClaimEntry]:
    """Return the entries that wait on a node before this one, the first of all first."""
    waiting = [one for one in page.entries if one.state == WAITING and one.rank < mine.rank]
    return sorted(waiting, key=lambda one: one.rank)


def blocked(mine: ClaimEntry, page: Page) -> str:
    """Say why a launch cannot start on a node yet; nothing if it can.

    It goes before others only where it leaves enough for all of them.
    """
    left = page.free - page.wants
    if left < 0:
        return f"{page.free} of {page.wants} free"
    for one in ahead(mine, page):
        left -= one.wants
        if left < 0:
            return f"{one.user}'s {one.job} waits before it"
    return ""


def obstacles(mine: ClaimEntry, pages: Mapping[str, Page], least: int) -> dict[str, str]:
    """Return nothing if enough nodes are ready for a launch, else why the others are not."""
    reasons = {name: why for name, page in pages.items() if (why := blocked(mine, page))}
    return reasons if len(pages) - len(reasons) < least else {}


def holders(page: Page) -> str:
    """Say who has what a launch waits for; nothing if enough is free."""
    some = [one for one in page.entries if one.keys]
    if page.free >= page.wants or not some:
        return ""
    who = ", ".join(f"{one.user}'s {one.job}" for one in some)
    return f"; {who} {'has' if len(some) == 1 else 'have'} the rest"


AWAY_SECONDS = 5.0  # between two tries to reach nodes that were lost
LOOK_SECONDS = 0.3  # that a node waits for a change before it answers
RETRY_SECONDS = 5.0  # at most, before a node looks again who computes on its GPUs

A = TypeVar("A")
T = TypeVar("T")


class Disconnected(NodeError):
    """A launch that waits has lost a node."""


def wait(
    request: LaunchRequest,
    nodes: Nodes,
    reach: Callable[[], tuple[LaunchRequest, Nodes]],
    start: Callable[[LaunchRequest, Nodes], T],
) -> T:
    """Start a job when it is its turn; nodes that are away for a while cost it nothing."""
    place, said, pause = QueuePlace(request, nodes), "", LOOK_SECONDS
    with ProgressBar("waiting for its turn"):
        while True:
            try:
                place.look(LOOK_SECONDS if place.pages else 0.0)
                why = place.why_it_waits()
                if not why:
                    return start(place.request, place.nodes)
                pause = LOOK_SECONDS
            except Occupied as error:
                # Others were quicker, or a program that is no job of ours computes there.
                why = in_queue(error.missing)
                time.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS)
            except Disconnected as error:
                say(error.what)
                place = QueuePlace(*reach_again(reach))
                continue
            if why != said:
                log.info("waits: %s", why)
                say(why)
            said = why


def reach_again(reach: Callable[[], tuple[LaunchRequest, Nodes]]) -> tuple[LaunchRequest, Nodes]:
    """Reach the nodes as soon as they can be reached."""
    while True:
        try:
            return reach()
        except NodeError as error:
            log.info("the nodes are tried again in %g s: %s", AWAY_SECONDS, error.what)
            time.sleep(AWAY_SECONDS)


class QueuePlace:
    """The place of a launch in the queue: an entry on each node, which ends with this head."""

    def __init__(self, request: LaunchRequest, nodes: Nodes) -> None:
        self.request, self.nodes = request, nodes
        self.wanted = [
            NodeClaim(node.node.name, node.channel, wish_of(request, node) or Wish())
            for node in nodes.reached
        ]
        self.least = nodes.bounds.least if nodes.bounds else len(nodes.reached)
        self.entry = entry_of(request, nodes.reached)
        self.entered = False
        self.pages: dict[str, Page] = {}  # what was seen last of each node

    def why_it_waits(self) -> str:
        """Say why the launch cannot start yet; nothing if it is its turn."""
        if not self.entered:
            self.enter()
        reasons = obstacles(self.entry, self.pages, self.least)
        return in_queue({name: why + holders(self.pages[name]) for name, why in reasons.items()})

    def enter(self) -> None:
        """Stand in the queue of all nodes, if enough of them can ever do."""
        pages = self.pages.values()
        small = [name for name, page in self.pages.items() if page.wants > page.total]
        if len(pages) - len(small) < self.least:
            page = self.pages[small[0]]
            has = f"{small[0]} has {page.total}, and {page.wants} are requested"
            raise CheckFailed(f"this can never start: {has}", "take fewer: --gpus N, --nproc N")
        waits = [Wait(entry=self.entry.replace(wants=one.wants, of=one.total)) for one in pages]
        channels = [one.channel for one in self.wanted]
        self.answered(fleet.ask_channels(channels, waits, QUICK_ANSWER_SECONDS))
        log.info("stands in the queue of %s", [*self.pages])
        self.entered = True
        self.look(0.0)

    def look(self, seconds: float) -> None:
        """Read the books; with a time, once something has changed in one of them."""
        pages = self.answered(fleet.everywhere(self.wanted, partial(self.read, seconds)))
        self.pages = {one.name: page for one, page in zip(self.wanted, pages, strict=True)}

    def read(self, seconds: float, one: NodeClaim) -> Page:
        """Read the book of a node, with a time once it has news."""
        before = self.pages[one.name].entries if self.pages else NO_ENTRIES
        request = ReadBook(wish=one.wish or Wish(), before=before, seconds=seconds)
        return one.channel.ask(request, QUICK_ANSWER_SECONDS + seconds)

    def answered(self, answers: Sequence[A | OrchestratorError]) -> list[A]:
        """Return the answers of all nodes; if one is lost, leave the others and raise."""
        if lost := failures.failures(self.wanted, answers):
            for one in self.wanted:
                one.channel.connection.close()
            raise Disconnected(failures.failure_table(lost, len(answers), "; connecting again"))
        return [answer for answer in answers if not isinstance(answer, OrchestratorError)]


def in_queue(reasons: Mapping[str, str]) -> str:
    """Say by node why a launch waits in the queue; nothing without a reason."""
    return f"in the queue: {'; '.join(said_of(reasons.items()))}" if reasons else ""


def entry_of(request: LaunchRequest, reached: Sequence[Reached]) -> ClaimEntry:
    """Return the entry of a launch that waits on these nodes."""
    # All launches that meet on these nodes go by the clock of the same one.
    judge = min(reached, key=lambda node: (node.facts.boot, node.facts.network))
    since = request.begun + judge.facts.clock_offset
    return ClaimEntry(
        id=os.urandom(8).hex(),
        state=WAITING,
        job=request.config.launch.name,
        since=since,
        order=since,
        head=socket.gethostname(),
    )


LOOK_SECONDS = 2.0  # between two reads of a record


def wait_for_others(request: LaunchRequest) -> None:
    """Return once the experiments of --after are done; refuse the launch if one ended otherwise."""
    for name in request.config.launch.after:
        if not is_done(request, name):
            say(f"it waits: not before {name} is over")
            with ProgressBar(f"waiting for {name}"):
                while not is_done(request, name):
                    time.sleep(LOOK_SECONDS)


def is_done(request: LaunchRequest, name: str) -> bool:
    experiment = experiments.find(request.where.experiments, name)
    if experiment is None:
        raise experiments.missing(request.where.experiments, name)
    record = experiment.read_record()
    if record.over and record.state != "done":
        fix = "leave out --after, or name a job that is done"
        raise CheckFailed(f"{name} has {record.state}; nothing was started", fix)
    return record.over
