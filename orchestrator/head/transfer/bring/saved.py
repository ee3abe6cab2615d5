"""Before the next attempt: what the program wrote on some of its nodes comes to all of them.

Where nodes share no disk, ranks there would find nothing, and begin anew beside those that go on.
So what cannot be brought ends the attempt before it begins: the trained numbers would be wrong.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.text import Say
from orchestrator.config import resolved
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined
from orchestrator.head.screen.output import printable
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.bring import decide
from orchestrator.head.transfer.bring.checkpoint import Partner
from orchestrator.head.transfer.bring.decide import Copying, Decision, Key, View
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.head.transfer.peer import QUICK_SECONDS, NodeTree
from orchestrator.head.transfer.schedule import WIDTH, Rules
from orchestrator.head.transfer.spread import ServedFromHere, Spread, exchange
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry
from orchestrator.protocol.requests.request import NO_PART
from orchestrator.protocol.requests.transfer import (
    SAVED,
    AskSaved,
    Place,
    RemoveCopies,
    Saved,
    SavedPlace,
    SumOutput,
)
from orchestrator.records.experiment import Experiment, JobRecord

ANSWER_SECONDS = 15.0
REMOVE_SECONDS = 60.0  # of thousands of files, on a network disk
LAG_SECONDS = 70.0  # NFS keeps attributes for 60 s at most, unless it is told otherwise
POLL_SECONDS = 1.0
MOST_BYTES = 1 << 38  # to one node, for one attempt
MUCH_BYTES = 10**9  # it is said before they come
DISK_BYTES_PER_SECOND = 20e6  # of a slow disk whose files get their checksums
SUMS_AT_ONCE = 64
RETRY_SECONDS = (1.0,)  # before each other try: a line may come back
RULES = Rules(WIDTH, streams=False, pauses=RETRY_SECONDS)


def bring_saved(
    experiment: Experiment,
    record: JobRecord,
    partners: Sequence[Partner],
    left: Sequence[Partner],
    say: Say,
    stopped: Callable[[], None],
) -> None:
    """Bring it, and say so; on one disk that nodes share, wait until each sees all there is.

    The partners are the nodes of the next attempt, over open channels, with their part of the
    first one as `job`; those that it leaves give what they have. CheckFailed says what cannot be
    brought.
    """
    try:
        SavedFiles(partners, resolved.outputs(experiment.path), record, say, stopped, left).bring()
    except NodeError as error:
        what = f"what the program saved is not the same on all nodes: {error.what}"
        raise CheckFailed(what, error.fix or decide.MEND, names=error.names) from error


class Parcel(NamedTuple):
    """Names files of one node that the same others lack, so that they can give them on."""

    source: int
    place: str
    by: str  # whose ranks wrote it
    keys: frozenset[Key]


def alike(copies: Sequence[Copying]) -> dict[Parcel, dict[int, list[Copying]]]:
    """Put together what the same nodes lack of one node; each has its copies."""
    lacking: dict[tuple[int, str, str, int], list[Copying]] = defaultdict(list)
    for copy in copies:
        lacking[copy.source, copy.key.place, copy.by, copy.target].append(copy)
    parcels: dict[Parcel, dict[int, list[Copying]]] = defaultdict(dict)
    for (source, place, by, target), some in lacking.items():
        keys = frozenset(copy.key for copy in some)
        parcels[Parcel(source, place, by, keys)][target] = some
    return parcels


class SavedFiles:
    """Sees to it that the nodes of the next attempt have the same files of the program."""

    def __init__(
        self,
        partners: Sequence[Partner],
        outputs: Sequence[str],
        record: JobRecord,
        say: Say,
        stopped: Callable[[], None],
        left: Sequence[Partner] = (),
    ) -> None:
        self.own, self.partners = partners, [*partners, *left]
        self.outputs, self.record = tuple(outputs), record
        self.say, self.stopped = say, stopped
        self.known_sums: dict[int, dict[Key, str]] = defaultdict(dict)  # of each node's files

    def bring(self) -> None:
        views = self.views(self.own)
        if all(view.shared for view in views):
            self.await_all(views)
            return
        left = self.views(self.partners[len(views) :])
        views += [replace(view, leaves=True) for view in left]
        began = time.monotonic()
        nodes_of = {attempt.number: attempt.nodes for attempt in self.record.attempts}
        decision = decide.decide(views, nodes_of)
        copies = decision.copies
        self.check_size(copies, views)
        failed = self.carry_out(decision, views)
        came = [copy for copy in copies if copy.target not in failed]
        if came:
            self.say(decide.come(came, views, time.monotonic() - began))
        if failed:
            what = decide.lacking(copies, views, {n: error.what for n, error in failed.items()})
            by = [error.names or (views[node].name,) for node, error in failed.items()]
            raise CheckFailed(what, decide.MEND, names=[name for names in by for name in names])
        if count := sum(map(len, decision.gone.values())):
            removed = "1 copy" if count == 1 else f"{count} copies"
            self.say(f"{removed} removed of what was removed where it had been saved")
        for line in decide.notes(decision, views):
            self.say(line)
        names = {view.name for view in views}
        away = [name for name in self.record.attempts[-1].nodes if name not in names]
        if away and not any(view.files or view.kept for view in views):
            self.say(decide.all_lost(away))

    def views(self, partners: Sequence[Partner]) -> list[View]:
        """Ask nodes; one that does not answer has nothing, and that may not be all.

        One that has lost its part with its disk has nothing for certain.
        """

        def ask(partner: Partner) -> Saved:
            job, node = partner.job
            return partner.ask(AskSaved(job=job, node=node, outputs=self.outputs), ANSWER_SECONDS)

        answers = fleet.everywhere(partners, ask)
        return [
            View(partner.name, whole=isinstance(answer, Declined) and answer.kind == NO_PART)
            if isinstance(answer, OrchestratorError)
            else view(partner.name, answer)
            for partner, answer in zip(partners, answers, strict=True)
        ]

    def check_size(self, copies: Sequence[Copying], views: Sequence[View]) -> None:
        totals = Counter[int]()
        for copy in copies:
            totals[copy.target] += views[copy.source].files[copy.key].size
        if (total := max(totals.values(), default=0)) > MOST_BYTES:
            raise CheckFailed(decide.too_much(copies, total, views, MOST_BYTES), decide.LARGE)
        if total > MUCH_BYTES:
            self.say(decide.begins(copies, views))

    # -- bringing ----------------------------------------------------------------------------

    def carry_out(self, decision: Decision, views: Sequence[View]) -> dict[int, OrchestratorError]:
        """Bring and remove what was decided; return which nodes that failed on, and why."""
        total = sum(views[copy.source].files[copy.key].size for copy in decision.copies)
        progress = Progress("bringing what one node alone has saved", total)
        served = ServedFromHere(self.say, "the files come through this machine")
        spreads = [
            self.spread(parcel, targets, views, served, progress)
            for parcel, targets in alike(decision.copies).items()
        ]
        failed = exchange(spreads, progress)
        served.sum_up()
        gone = [
            (self.partners[node], self.place(node, place), tuple(key.path for key in keys))
            for node, all_keys in decision.gone.items()
            for place, keys in groupby(sorted(all_keys), key=lambda key: key.place)
        ]

        def remove(item: tuple[Partner, Place, tuple[str, ...]]) -> None:
            partner, place, paths = item
            partner.ask(RemoveCopies(place=place, paths=paths), REMOVE_SECONDS)

        for (partner, _, _), result in zip(gone, fleet.everywhere(gone, remove), strict=True):
            if isinstance(result, OrchestratorError):
                failed[partner] = result
        return {at: failed[peer] for at, peer in enumerate(self.partners) if peer in failed}

    def spread(
        self,
        parcel: Parcel,
        copies: Mapping[int, Sequence[Copying]],
        views: Sequence[View],
        served: ServedFromHere,
        progress: Progress,
    ) -> Spread:
        """Let some nodes have what they lack alike of one node."""
        giver, root = self.partners[parcel.source], views[parcel.source].roots[parcel.place]
        tree = NodeTree.at(giver, root, "", self.entries(parcel, views[parcel.source]))
        takers: dict[Partner, Place] = {}
        for target, some in copies.items():
            older = tuple(copy.key.path for copy in some if copy.replaces)
            place = self.place(target, parcel.place, parcel.by, older)
            takers[self.partners[target]] = place
        return Spread.from_node(tree, takers, served, RULES, self.stopped, progress.add)

    def place(self, node: int, root: str, by: str = "", older: tuple[str, ...] = ()) -> Place:
        job, index = self.partners[node].job
        saved = SavedPlace(root=root, by=by, outputs=self.outputs, older=older)
        return Place(kind=SAVED, job=job, node=index, saved=saved)

    def entries(self, parcel: Parcel, view: View) -> Iterator[Entry]:
        """Describe the files, with checksums, and the directories that they are in."""
        sums = self.sums(parcel, view)
        for key in parcel.keys:
            file, path = view.files[key], os.fsencode(key.path)
            if key in sums:
                yield Entry(path, FILE, file.mode, file.size, sums[key].encode(), file.changed)
            else:
                yield Entry(path, LINK, 0, 0, os.fsencode(file.target))
        for above in {directory for key in parcel.keys for directory in directories_of(key)}:
            if above in view.directories:
                path = os.fsencode(above.path)
                yield Entry(path, DIRECTORY, 0, 0, b"", view.directories[above])

    def sums(self, parcel: Parcel, view: View) -> dict[Key, str]:
        """Have a node read its files for their checksums, many asked for at once: it may be far."""
        partner, root = self.partners[parcel.source], view.roots[parcel.place]
        sums = self.known_sums[parcel.source]
        files = (key for key in parcel.keys if view.files[key].kind == "file")
        keys = sorted(key for key in files if key not in sums)
        for at in range(0, len(keys), SUMS_AT_ONCE):
            self.stopped()
            some = keys[at : at + SUMS_AT_ONCE]
            sizes = [view.files[key].size for key in some]
            questions = [
                SumOutput(place=root, path=key.path, offset=0, size=size + 1)
                for key, size in zip(some, sizes, strict=True)
            ]
            seconds = QUICK_SECONDS + sum(sizes) / DISK_BYTES_PER_SECOND
            for key, size, answer in zip(
                some, sizes, partner.ask_all(questions, seconds), strict=True
            ):
                if answer.size != size:
                    what = f"{partner.name}: {key.path} changes while it is read"
                    raise NodeError(what, names=[partner.name])
                sums[key] = answer.sum
        return sums

    # -- a disk that all share ---------------------------------------------------------------

    def await_all(self, views: Sequence[View]) -> None:
        """Wait until all nodes see what any saw at first on their disk; CheckFailed if not."""
        wanted = set[Key]().union(*(view.files for view in views))
        late = unseen(wanted, views)
        if late:
            self.say(f"not every node sees {printable(late)} yet: a network disk lags behind;"
                     f" waiting for it, {LAG_SECONDS:.0f} s at most")  # fmt: skip
        deadline = time.monotonic() + LAG_SECONDS
        while late and time.monotonic() < deadline:
            self.stopped()
            time.sleep(POLL_SECONDS)
            late = unseen(wanted, self.views(self.own))
        if late:
            raise CheckFailed(*decide.unseen(late, LAG_SECONDS))


def view(name: str, saved: Saved) -> View:
    """Take what a node says, but for names that lead out of its directories."""
    known = [file for file in saved.files if plain(file.path) and file.place in saved.roots]
    by_kind: dict[str, dict[Key, int]] = defaultdict(dict)
    for file in known:
        by_kind[file.kind][Key(file.place, file.path)] = file.changed
    return View(
        name,
        {Key(f.place, f.path): f for f in known if f.kind in ("file", "link")},
        frozenset(by_kind["removed"]),
        by_kind["directory"],
        saved.roots,
        saved.whole,
        saved.shared,
        saved.kept,
    )


def unseen(wanted: set[Key], views: Sequence[View]) -> str:
    """Return the first of these that only some nodes see; or nothing."""
    if not all(view.whole for view in views):
        return ""
    seen = [wanted & view.files.keys() for view in views]
    return str(min(seen[0].union(*seen) - seen[0].intersection(*seen), default=""))


def directories_of(key: Key) -> Iterator[Key]:
    path = key.directory
    while path:
        yield Key(key.place, path)
        path = path.rpartition("/")[0]
