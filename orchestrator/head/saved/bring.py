"""Brings files that one node's ranks saved to others, from node to node.

Who has all of them gives them to two more at a time, so that the time hardly grows with the nodes.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.resume.holder import Holder
from orchestrator.head.saved.decide import Load
from orchestrator.head.saved.view import Key, View
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.take import QUICK_SECONDS
from orchestrator.protocol.requests.saved import TakeSaved
from orchestrator.protocol.requests.transfer import GivingNode, NamedFile, SumOutput

SLOWEST = 20e6  # bytes per second of a disk whose files get their checksums
LONGEST = 86400.0  # seconds
PIECE = 4 << 20  # bytes of a sample
AGAIN_SECONDS = (1.0, 5.0, 10.0)  # before each other try: a line may come back
LOOK_SECONDS = 0.2
AT_ONCE = 64  # checksums that a node is asked for
WIDTH = 2  # nodes that take from one at a time


@dataclass(frozen=True)
class Parcel:
    """All that one node is to have of a place, from those who have it."""

    by: str
    place: str
    source: int
    loads: tuple[Load, ...]


class Bringing:
    """Brings files over open channels; what a node could not take is in `failed`."""

    def __init__(
        self,
        holders: Sequence[Holder],
        views: Sequence[View],
        given: Sequence[str],
        stopped: Callable[[], None],
    ) -> None:
        self.holders, self.views = holders, views
        self.given, self.stopped = tuple(given), stopped
        self.sums: dict[tuple[int, Key], str] = {}
        self.failed: dict[int, str] = {}  # a target -> why

    def go(self, loads: Sequence[Load], gone: Mapping[int, Sequence[Key]]) -> None:
        """Bring all of it, then remove copies that are no more wanted."""
        groups: dict[tuple[int, str, str], list[Load]] = defaultdict(list)
        for load in loads:
            groups[load.source, load.key.place, load.by].append(load)
        total = sum(self.views[load.source].files[load.key].size for load in loads)
        self.progress = Progress("bringing what one node alone has saved", total)
        try:
            for (source, place, by), group in sorted(groups.items()):
                self.add_sums(source, {load.key for load in group})
                self.spread(source, place, by, group)
        finally:
            self.progress.clear()
        self.remove(gone)

    def add_sums(self, node: int, keys: set[Key]) -> None:
        """Have a node read its files for their checksums."""
        own = self.views[node].files
        lacking = sorted(key for key in keys - {key for at, key in self.sums if at == node}
                         if own[key].kind == "file")  # fmt: skip
        for at in range(0, len(lacking), AT_ONCE):
            self.stopped()
            self.add_some(node, lacking[at : at + AT_ONCE])

    def add_some(self, node: int, keys: Sequence[Key]) -> None:
        """Ask for some checksums at once: a node may be far."""
        holder, view = self.holders[node], self.views[node]
        seconds = QUICK_SECONDS + sum(view.files[key].size for key in keys) / SLOWEST
        with holder.lock:
            asked = [
                (key, question, holder.open.tell(question))
                for key in keys
                for question in [self.question(view, key, 0, view.files[key].size + 1)]
            ]
            for key, question, number in asked:
                answer = holder.open.wait_for(number, question, seconds)
                if answer.size != view.files[key].size:
                    raise NodeError(f"{holder.name}: {key.path} changes while it is read")
                self.sums[node, key] = answer.sum

    def question(self, view: View, key: Key, offset: int, size: int) -> SumOutput:
        return SumOutput(place=view.roots[key.place], path=key.path, offset=offset, size=size)

    def sample(self, node: int, key: Key) -> tuple[str, ...]:
        """Return checksums of a file's begin, middle and end; in a zip, that is one of all."""
        holder, view = self.holders[node], self.views[node]
        size, sums = view.files[key].size, list[str]()
        for offset in sorted({0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)}):
            question = self.question(view, key, offset, PIECE)
            self.stopped()
            with holder.lock:
                sums.append(holder.open.ask(question, QUICK_SECONDS).sum)
        return tuple(sums)

    def spread(self, source: int, place: str, by: str, group: Sequence[Load]) -> None:
        """Let each that has all that others lack give it to the next ones."""
        lacking: dict[int, list[Load]] = defaultdict(list)
        for load in group:
            lacking[load.target].append(load)
        all_keys = {load.key for load in group}
        # Who lacks least is first: it may have had the rest before.
        waiting = sorted(lacking, key=lambda node: (len(lacking[node]), node))
        have, tries = [source], Counter[int]()
        while waiting:
            pairs = list(
                zip((giver for giver in have for _ in range(WIDTH)), waiting, strict=False)
            )
            parcels = [Parcel(by, place, source, tuple(lacking[target])) for _, target in pairs]
            results = self.round(place, all_keys, pairs, parcels)
            self.stopped()
            for (giver, target), result in zip(pairs, results, strict=True):
                waiting.remove(target)
                if isinstance(result, OrchestratorError) and giver != source:
                    waiting.append(target)  # the node that wrote it may do better
                    have = [source]
                elif isinstance(result, OrchestratorError) and self.may_again(tries, target):
                    waiting.append(target)
                elif isinstance(result, OrchestratorError):
                    self.failed[target] = result.what
                elif {load.key for load in lacking[target]} == all_keys:
                    have.append(target)

    def may_again(self, tries: Counter[int], target: int) -> bool:
        """Wait a moment for a line that broke; not as often as one likes."""
        tries[target] += 1
        if tries[target] > len(AGAIN_SECONDS):
            return False
        until = time.monotonic() + AGAIN_SECONDS[tries[target] - 1]
        while time.monotonic() < until:
            self.stopped()
            time.sleep(LOOK_SECONDS)
        return True

    def round(
        self,
        place: str,
        keys: set[Key],
        pairs: Sequence[tuple[int, int]],
        parcels: Sequence[Parcel],
    ) -> list[OrchestratorError | None]:
        """Let each of these give to the other, all at once."""
        givers = {giver: self.give(giver, place, keys) for giver in {giver for giver, _ in pairs}}

        def take(work: tuple[tuple[int, int], Parcel]) -> None:
            (giver, target), parcel = work
            self.take(target, givers[giver], parcel)

        try:
            return fleet.everywhere(list(zip(pairs, parcels, strict=True)), take)
        finally:
            for giver in givers:
                self.holders[giver].end_giving()

    def give(self, node: int, place: str, keys: set[Key]) -> GivingNode | None:
        """Let a node listen that others will call."""
        directory = self.views[node].roots.get(place, "")
        return self.holders[node].give(directory, {key.path for key in keys}, LONGEST)

    def take(self, target: int, giver: GivingNode | None, parcel: Parcel) -> None:
        """Let a node take what it lacks; NodeError says why it could not."""
        if giver is None:
            raise NodeError("the node that has it may not listen for others")
        origin, holder = self.views[parcel.source], self.holders[target]
        files = [load.key for load in parcel.loads if origin.files[load.key].kind == "file"]
        links = [load.key for load in parcel.loads if origin.files[load.key].kind == "link"]
        above = {d for load in parcel.loads for d in directories_of(load.key)}
        job, node = holder.job
        request = TakeSaved(
            job=job,
            node=node,
            given=self.given,
            place=parcel.place,
            by=parcel.by,
            files=tuple(self.named(parcel.source, key) for key in files),
            links={key.path: origin.files[key].target for key in links},
            directories={d.path: origin.directories[d] for d in above if d in origin.directories},
            gone=(),
            older=tuple(load.key.path for load in parcel.loads if load.older),
            giver=giver,
            seconds=LONGEST,
        )
        self.run(holder, request)

    def named(self, source: int, key: Key) -> NamedFile:
        file = self.views[source].files[key]
        return NamedFile(
            path=key.path,
            size=file.size,
            sum=self.sums[source, key],
            mode=file.mode,
            changed=file.changed,
        )

    def run(self, holder: Holder, request: TakeSaved) -> None:
        """Have a node do it, and wait for its end."""
        problem = holder.take(request, self.progress, self.stopped)
        if problem:
            raise NodeError(problem[:300])

    def remove(self, gone: Mapping[int, Sequence[Key]]) -> None:
        """Have copies removed whose origins are no more."""

        def ask(item: tuple[int, str, tuple[str, ...]]) -> None:
            target, place, paths = item
            holder = self.holders[target]
            job, node = holder.job
            request = TakeSaved(
                job=job,
                node=node,
                given=self.given,
                place=place,
                by="",
                files=(),
                links={},
                directories={},
                gone=paths,
                older=(),
                seconds=LONGEST,
            )
            self.run(holder, request)

        items = [
            (target, place, tuple(sorted(key.path for key in keys if key.place == place)))
            for target, keys in gone.items()
            for place in sorted({key.place for key in keys})
        ]
        for (target, _, _), result in zip(items, fleet.everywhere(items, ask), strict=True):
            if isinstance(result, OrchestratorError):
                self.failed[target] = result.what


def directories_of(key: Key) -> Iterator[Key]:
    path = key.directory
    while path:
        yield Key(key.place, path)
        path = path.rpartition("/")[0]
