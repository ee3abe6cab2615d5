"""Before each attempt, gives its nodes what they lack of what the job's master wrote.

The master's file wins; nothing is merged or deleted: see docs/guide/shared_files.md. What cannot be
brought ends the attempt before it begins: some ranks would start from an older state than others.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import duration, size
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined
from orchestrator.head.screen.output import printable, say
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.head.transfer.peer import NodeTree, Peer
from orchestrator.head.transfer.spread import send_to_all
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry, link_is_inside
from orchestrator.protocol.requests.request import NO_PART
from orchestrator.protocol.requests.transfer import (
    AskJobFiles,
    AskLacking,
    JobFiles,
    LackingFiles,
    OutputFile,
    Place,
    ReadFile,
)
from orchestrator.protocol.timing import ANSWER_SECONDS

log = logging.getLogger(__name__)

LAG_SECONDS = 70.0  # NFS keeps attributes for 60 s at most, unless it is told otherwise
POLL_SECONDS = 1.0
MUCH_BYTES = 10**9  # it is said before they come
DISK_BYTES_PER_SECOND = 20e6  # of a slow disk whose files get their checksums
SUMS_AT_ONCE = 64
APART = "its ranks would start from the beginning, or from an older state, beside those that go on"
MEND = (
    "mend that, and launch again; what is in a directory whose name begins with a dot is left out:"
    " no rank reads it again"
)
NAMED_DISK = (
    "look at it there: orchestrator exec -- ls -l DIRECTORY; a network disk that is mounted with"
    " actimeo=1 lags less"
)


@dataclass(eq=False)
class JobPeer(Peer):
    """A node of a job, and the job's part that describes what lies there."""

    part: tuple[str, int] = ("", 0)


def bring_job_files(
    peers: Sequence[JobPeer],
    last: Sequence[str],
    reach: Callable[[str], JobPeer | None],
    outputs: Sequence[str],
    stopped: Callable[[], None],
) -> None:
    """Give the nodes of the next attempt what they lack of what the master wrote.

    The master is the first of the `last` attempt's nodes that still has its part of the job, and
    reach() opens a channel to one that the next attempt leaves. stopped() raises an error once the
    user has stopped the job. CheckFailed says what cannot be brought.
    """
    there = {peer.name: peer for peer in peers}
    for name in last:
        master = there.get(name) or reach(name)
        if master is None:
            continue
        job, node = master.part
        try:
            question = AskJobFiles(job=job, node=node, outputs=tuple(outputs))
            found = master.ask(question, ANSWER_SECONDS)
        except NodeError as error:
            without_disk = isinstance(error, Declined) and error.kind == NO_PART
            if without_disk or name not in there:
                continue
            raise CheckFailed(f"{name}: {error.what}", error.fix, names=[name]) from error
        if name != last[0]:
            say(f"{last[0]} is lost, with what it alone had: ranks find what {name} has")
        takers = [peer for peer in peers if peer is not master]
        JobFilesOf(master, found, takers, tuple(outputs), stopped).bring()
        return
    say(
        f"WARNING: {listed(last)} {'is' if len(last) == 1 else 'are'} lost, with what the program"
        " saved there: nothing is carried to the next attempt"
    )


def is_inside(file: OutputFile, found: JobFiles) -> bool:
    """Return True for a file or link that stays in one of the directories of its node."""
    inside = file.kind != "link" or link_is_inside(file.path, file.target)
    return plain(file.path) and file.place in found.roots and inside


class JobFilesOf:
    """The files that the master of a job wrote, and the nodes that lack some of them."""

    def __init__(
        self,
        master: JobPeer,
        found: JobFiles,
        takers: Sequence[JobPeer],
        outputs: tuple[str, ...],
        stopped: Callable[[], None],
    ) -> None:
        self.master, self.roots, self.shared = master, found.roots, found.shared
        self.files = tuple(file for file in found.files if is_inside(file, found))
        self.takers, self.outputs, self.stopped = takers, outputs, stopped
        if not found.whole:
            say(f"WARNING: {master.name}: too many files to look at: not all are brought to others")

    def bring(self) -> None:
        """Bring what is lacking; wait for what a disk that nodes share does not show yet."""
        if not self.files or not self.takers:
            return
        answers = self.ask()
        groups = self.groups(answers)
        if groups:
            self.carry(groups)
            answers = self.ask()  # directories get the times of the master's
        deadline, said = time.monotonic() + LAG_SECONDS, False
        while late := self.late(answers):
            if time.monotonic() > deadline:
                what = f"after {LAG_SECONDS:.0f} s not every node sees {late} on the disk that they"
                raise CheckFailed(f"{what} share: {APART}", NAMED_DISK)
            if not said:
                said = True
                say(f"not every node sees {late} yet: a network disk lags behind; waiting for"
                         f" it, {LAG_SECONDS:.0f} s at most")  # fmt: skip
            self.stopped()
            time.sleep(POLL_SECONDS)
            answers = self.ask()

    def ask(self) -> dict[JobPeer, LackingFiles]:
        """Ask each node what it lacks."""

        def ask(taker: JobPeer) -> LackingFiles:
            job, node = taker.part
            request = AskLacking(
                job=job, node=node, files=self.files, shared=self.shared, outputs=self.outputs
            )
            return taker.ask(request, ANSWER_SECONDS)

        answers = dict(zip(self.takers, fleet.everywhere(self.takers, ask), strict=True))
        for taker, answer in answers.items():
            if isinstance(answer, LackingFiles) and max(answer.numbers, default=0) >= len(
                self.files
            ):
                answers[taker] = NodeError("it lacks files that the list does not have")
        failed = {p: a for p, a in answers.items() if isinstance(a, OrchestratorError)}
        self.refuse(failed, range(len(self.files)))
        return {p: a for p, a in answers.items() if not isinstance(a, OrchestratorError)}

    def refuse(self, failed: Mapping[JobPeer, OrchestratorError], numbers: Collection[int]) -> None:
        """Raise an error that names the nodes that could not be given their files."""
        if failed:
            why = "; ".join(f"{p.name} ({printable(e.what)})" for p, e in failed.items())
            what = f"{self.named(numbers)}, which {self.master.name} has, did not come to {why}"
            names = [name for p, e in failed.items() for name in e.names or (p.name,)]
            raise CheckFailed(f"{what}: {APART}", MEND, names=names)

    def late(self, answers: Mapping[JobPeer, LackingFiles]) -> str:
        """Return the first file on a shared disk that a node does not see; or nothing."""
        unseen = [
            self.files[number].path
            for answer in answers.values()
            for number in answer.numbers
            if self.files[number].place not in answer.roots
        ]
        return printable(min(unseen, default=""))

    def groups(
        self, answers: Mapping[JobPeer, LackingFiles]
    ) -> dict[tuple[str, frozenset[int]], dict[JobPeer, Place]]:
        """Put together the nodes that lack the same files of a directory: they pass them on."""
        groups: dict[tuple[str, frozenset[int]], dict[JobPeer, Place]] = defaultdict(dict)
        for taker, answer in answers.items():
            lacking: dict[str, set[int]] = defaultdict(set)
            for number in answer.numbers:
                lacking[self.files[number].place].add(number)
            for name in lacking.keys() & answer.roots.keys():
                place = Place(directory=answer.roots[name])
                groups[name, frozenset(lacking[name])][taker] = place
        return groups

    def carry(self, groups: Mapping[tuple[str, frozenset[int]], dict[JobPeer, Place]]) -> None:
        """Bring files from the master to the nodes that lack them, and say so."""
        began = time.monotonic()
        numbers = frozenset[int]().union(*(numbers for _, numbers in groups))
        whole = sum(self.files[number].size for number in numbers)
        what = f"{self.named(numbers)} ({size(whole)})"
        takers = {taker: None for places in groups.values() for taker in places}
        names = listed([taker.name for taker in takers])
        if whole > MUCH_BYTES:
            say(f"bringing {what} from {self.master.name} to {names}")
        log.info("brings %s from %s to %s", what, self.master.name, names)
        moved = sum(
            self.files[number].size * len(places)
            for (_, of_group), places in groups.items()
            for number in of_group
        )
        progress = Progress("bringing what the master saved", moved)
        sums = self.sums(numbers)
        failed: dict[JobPeer, OrchestratorError] = {}
        try:
            for (name, of_group), places in groups.items():
                entries = self.entries(name, of_group, sums)
                tree = NodeTree.at(self.master, self.roots[name], "", entries)
                failed |= self.send(tree, places, progress)
        finally:
            progress.clear()
        self.refuse({taker: failed[taker] for taker in takers if taker in failed}, numbers)
        took = duration(time.monotonic() - began)
        say(f"{names} lacked {what} of {self.master.name}: came in {took}, checksums compared")

    def send(
        self, tree: NodeTree, places: Mapping[JobPeer, Place], progress: Progress
    ) -> dict[JobPeer, OrchestratorError]:
        """Send files of the master to nodes that lack them; return which could not have them."""
        results = send_to_all(
            list(places),
            list(places.values()),
            tree,
            progress.add,
            stopped=self.stopped,
        )
        failed: dict[JobPeer, OrchestratorError] = {}
        for taker, result in zip(places, results, strict=True):
            if isinstance(result, OrchestratorError):
                failed[taker] = result
            elif result.failed:
                path, reason = min(result.failed.items())
                failed[taker] = NodeError(f"{os.fsdecode(path)}: {reason}")
        return failed

    def entries(
        self, name: str, numbers: Collection[int], sums: Mapping[int, str]
    ) -> Iterator[Entry]:
        """Describe files and links of one directory, and the directories that they are in."""
        for number, file in enumerate(self.files):
            path = os.fsencode(file.path)
            if number in sums and number in numbers:
                value = sums[number].encode()
                yield Entry(path, FILE, file.mode, file.size, value, file.changed)
            elif number in numbers:
                yield Entry(path, LINK, 0, 0, os.fsencode(file.target))
            elif file.kind == "directory" and file.place == name:
                inside = f"{file.path}/"
                if any(self.files[each].path.startswith(inside) for each in numbers):
                    yield Entry(path, DIRECTORY, 0, 0, b"", file.changed)

    def sums(self, numbers: Collection[int]) -> dict[int, str]:
        """Have the master read files for their checksums, many at once: it may be far."""
        sums, ordered = dict[int, str](), sorted(n for n in numbers if self.is_file(n))
        for at in range(0, len(ordered), SUMS_AT_ONCE):
            self.stopped()
            some = ordered[at : at + SUMS_AT_ONCE]
            files = [self.files[number] for number in some]
            questions = [
                ReadFile(
                    place=self.roots[f.place], path=f.path, offset=f.size, size=1, with_sum=True
                )
                for f in files
            ]
            seconds = ANSWER_SECONDS + sum(file.size for file in files) / DISK_BYTES_PER_SECOND
            answers = self.master.ask_all(questions, seconds)
            for number, file, answer in zip(some, files, answers, strict=True):
                if answer.data:
                    what = f"{self.master.name}: {printable(file.path)} changes while it is read"
                    raise CheckFailed(what, MEND, names=[self.master.name])
                sums[number] = answer.sum
        return sums

    def is_file(self, number: int) -> bool:
        return self.files[number].kind == "file"

    def named(self, numbers: Collection[int]) -> str:
        """Name the largest of these files, and say how many there are."""
        files = [self.files[n] for n in numbers if self.files[n].kind != "directory"]
        first = printable(max(files, key=lambda file: (file.size, file.path)).path)
        return f"{first} and {len(files) - 1} more" if len(files) > 1 else first
