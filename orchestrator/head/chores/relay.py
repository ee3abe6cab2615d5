"""Let nodes pass on what is pushed: two get it from here, and each gives it to two others.

Contents go straight into their place, each compared with its checksum; a file travels on as soon as
it is whole. Then each node is compared again as any other is, and gets from here what it still
lacks: one that cannot reach the node before it, or loses it, costs time and nothing else.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator.head.chores.numbered_node import NumberedNode
from orchestrator.head.chores.push import Cargo, Sending, Sums
from orchestrator.head.transfer.fanout import WIDTH, Fanout, parent
from orchestrator.head.transfer.take import QUICK_SECONDS, take
from orchestrator.protocol.manifest import FILE
from orchestrator.protocol.requests.request import Beat
from orchestrator.protocol.requests.transfer import (
    EndGiving,
    GiveFiles,
    GivingNode,
    NamedFile,
    TakeFiles,
    WantedFiles,
)
from orchestrator.protocol.timing import HEAD_BEAT

LONGEST = 86400.0  # seconds: terabytes over a slow line
HASHES = min(8, os.cpu_count() or 1)  # files that are read at the same time for their checksums
STALLED_SECONDS = 60.0  # without a byte from a node that has all: what it has is not what was sent
LABEL = "push"  # and the node adds its name, as in node/transfer/arrivals.py, to continue

Say = Callable[[str], None]


class Relay:
    """The way of one cargo from node to node. Every node has a thread, which calls serve()."""

    def __init__(
        self,
        cargo: Cargo,
        sums: Sums,
        targets: Sequence[NumberedNode],
        fanout: Fanout,
        say: Say,
    ) -> None:
        self.cargo, self.sums, self.targets = cargo, sums, targets
        self.fanout, self.say = fanout, say
        count = len(targets)
        # The files of which a node has nothing, or something else: its checksum
        self.lacking: list[dict[int, str]] = [{} for _ in range(count)]
        self.compared = [threading.Event() for _ in range(count)]
        self.planned = threading.Event()
        self.ready = [threading.Event() for _ in range(count)]  # it gives, or will not
        self.over = [threading.Event() for _ in range(count)]  # nothing more comes to it
        self.files: dict[int, NamedFile] = {}  # that are passed on
        self.givers: dict[int, GivingNode] = {}
        self.broken: set[int] = set()  # they will not have all that they were to pass on
        self.direct: list[str] = []  # nodes that could not take it from another
        self.lock = threading.Lock()  # of `direct`, which all nodes' threads tell
        threading.Thread(target=self.plan, daemon=True).start()

    def children(self, at: int) -> list[int]:
        return [child for child in range(WIDTH, len(self.over)) if parent(child) == at]

    def serve(self, at: int, sending: Sending) -> None:
        """Bring one node what it lacks, and keep it there for those that take from it."""
        try:
            answer = sending.compare()
            self.lacking[at] = {
                wanted.number: wanted.sum if wanted.whole else ""
                for wanted in answer.wanted
                if self.cargo.files[wanted.number].kind == FILE
                if wanted.whole or not wanted.have
            }
            self.compared[at].set()
            self.wait(sending, self.planned)
            self.give(at, sending)
            self.receive(at, sending, answer)
        finally:
            self.end(at, whole=sys.exc_info()[0] is None and not sending.result.failed)
        for child in self.children(at):
            self.wait(sending, self.over[child])
        if at in self.givers:
            sending.channel.ask(EndGiving(), QUICK_SECONDS)

    def end(self, at: int, *, whole: bool) -> None:
        """Let nobody wait any more for a node that has all, or will not."""
        if not whole:
            self.broken.add(at)
        for event in (self.compared[at], self.ready[at], self.over[at]):
            event.set()

    def wait(self, sending: Sending, event: threading.Event) -> None:
        """Wait for others; the node hears from us meanwhile."""
        while not event.wait(HEAD_BEAT):
            sending.channel.ask(Beat(), QUICK_SECONDS)

    def plan(self) -> None:
        """Choose what is passed on, once all have said what they lack; read its checksums."""
        try:
            for event in self.compared:
                event.wait()
            takers = [lacking for lacking in self.lacking[WIDTH:] if lacking]
            numbers = sorted(set[int]().union(*takers))
            size = sum(self.cargo.files[number].size for number in numbers)
            if self.fanout.pays(len(takers) + WIDTH, size):
                with ThreadPoolExecutor(HASHES) as pool:
                    named = zip(numbers, pool.map(self.named, numbers), strict=True)
                    self.files = {number: file for number, file in named if file is not None}
        finally:
            self.planned.set()

    def named(self, number: int) -> NamedFile | None:
        """Describe a file; None for one that cannot be read, which is said where it is sent."""
        file = self.cargo.files[number]
        try:
            path = file.path.decode("utf-8")  # as a message has it; other names go from here
            descriptor = self.cargo.opened(number)
        except (OSError, UnicodeDecodeError):
            return None
        try:
            total = self.sums.of(number, descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return NamedFile(path=path, size=file.size, sum=total, mode=file.mode, changed=file.changed)

    def give(self, at: int, sending: Sending) -> None:
        """Let a node listen that others will call."""
        below = [child for child in self.children(at) if self.wanted(child)]
        if below:
            token = secrets.token_hex(32)
            request = GiveFiles(
                directory=self.cargo.directory,
                files=(),
                token=token,
                seconds=LONGEST,
                coming=tuple(self.files.values()),
            )
            port = sending.channel.ask(request, QUICK_SECONDS).port
            address = sending.channel.connection.address
            if port and address:
                self.givers[at] = GivingNode(addresses=(address,), port=port, token=token)
        self.ready[at].set()

    def wanted(self, at: int) -> list[NamedFile]:
        """List what a node takes from another: not what it has, under another time."""
        return [
            self.files[number]
            for number, total in sorted(self.lacking[at].items())
            if number in self.files and self.files[number].sum != total
        ]

    def receive(self, at: int, sending: Sending, answer: WantedFiles) -> None:
        """Let a node take from the one before it, and send it from here what does not come so."""
        wanted = self.wanted(at) if at >= WIDTH else []
        if wanted:
            self.wait(sending, self.ready[parent(at)])
        giver = self.givers.get(parent(at)) if wanted else None
        if giver is None:
            sending.deliver(answer)
            return
        size, problem = self.take(at, sending, wanted, giver)
        if problem:
            self.tell(at, problem)
        again = sending.compare()
        came = {named.path for named in wanted}
        came -= {os.fsdecode(self.cargo.files[each.number].path) for each in again.wanted}
        sending.result.sent += sorted(came)
        sending.result.kept -= len(came)
        sending.result.size += size
        sending.deliver(again)

    def take(
        self, at: int, sending: Sending, wanted: Sequence[NamedFile], giver: GivingNode
    ) -> tuple[int, str]:
        """Return how many bytes came, and why the rest did not."""
        before, last, moved = parent(at), 0, time.monotonic()
        request = TakeFiles(
            directory=self.cargo.directory,
            files=tuple(wanted),
            giver=giver,
            seconds=LONGEST,
            label=LABEL,
        )

        def stalls(size: int) -> bool:
            nonlocal last, moved
            settled, now = self.over[before].is_set(), time.monotonic()
            moved = now if size > last or not settled else moved
            last = size
            return settled and (before in self.broken or now - moved > STALLED_SECONDS)

        taken = take(sending.channel, request, sending.progress.add, stalls)
        return taken.size, taken.problem

    def tell(self, at: int, why: str) -> None:
        """Say that a node is served from here, too; the first time with the reason."""
        with self.lock:
            self.direct.append(self.targets[at].label)
            first = len(self.direct) == 1
        if first:
            why = why.encode("ascii", "replace").decode()[:200]
            here, there = self.targets[at].label, self.targets[parent(at)].label
            self.say(f"{here} cannot take files from {there} ({why}): what it lacks is sent from"
                     " here, as to others that cannot")  # fmt: skip
