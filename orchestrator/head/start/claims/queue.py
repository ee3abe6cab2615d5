"""Wait until it is a launch's turn on its nodes, and start then."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.screen import failures
from orchestrator.head.screen.output import say
from orchestrator.head.screen.progress import Progress
from orchestrator.head.start.claims.claims import NodeClaim, Occupied, wish_of
from orchestrator.head.start.claims.turn import holders, obstacles
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import Request
from orchestrator.protocol.requests.claims import NO_ENTRIES, WAITING, Entry, Wish
from orchestrator.protocol.requests.start import Page, ReadBook, Wait
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS

log = logging.getLogger(__name__)

AWAY_SECONDS = 5.0  # between two tries to reach nodes that were lost
LOOK_SECONDS = 0.3  # that a node waits for a change before it answers
RETRY_SECONDS = 5.0  # at most, before a node looks again who computes on its GPUs

A = TypeVar("A")
T = TypeVar("T")


class Disconnected(NodeError):
    """A launch that waits has lost a node."""


def wait(
    request: Request,
    nodes: Nodes,
    reach: Callable[[], tuple[Request, Nodes]],
    start: Callable[[Request, Nodes], T],
) -> T:
    """Start a job when it is its turn; nodes that are away for a while cost it nothing."""
    place, said, pause = QueuePlace(request, nodes), "", LOOK_SECONDS
    with Progress("waiting for its turn"):
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


def reach_again(reach: Callable[[], tuple[Request, Nodes]]) -> tuple[Request, Nodes]:
    """Reach the nodes as soon as they can be reached."""
    while True:
        try:
            return reach()
        except NodeError as error:
            log.info("the nodes are tried again in %g s: %s", AWAY_SECONDS, error.what)
            time.sleep(AWAY_SECONDS)


class QueuePlace:
    """The place of a launch in the queue: an entry on each node, which ends with this head."""

    def __init__(self, request: Request, nodes: Nodes) -> None:
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


def entry_of(request: Request, reached: Sequence[Reached]) -> Entry:
    """Return the entry of a launch that waits on these nodes."""
    # All launches that meet on these nodes go by the clock of the same one.
    judge = min(reached, key=lambda node: (node.facts.boot, node.facts.network))
    since = request.begun + judge.facts.clock_offset
    return Entry(
        id=os.urandom(8).hex(),
        state=WAITING,
        job=request.config.launch.name,
        since=since,
        order=since,
        head=socket.gethostname(),
    )
