"""Decides which files go from whom to whom: a pure function of what each node has.

After it, all nodes have what they would see on a disk that they share: what any of them wrote is
on all, what it removed is on none. But what a node's own ranks wrote stays, unless another node
wrote that file anew, or it lacks its end and others know what it was before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.common.hosts import listed
from orchestrator.common.text import duration, plural, size
from orchestrator.head.screen.output import printable
from orchestrator.protocol.requests.transfer import Overwritten, SavedFile


class Key(NamedTuple):
    """The name of a file on all nodes: a place, and a path below it."""

    place: str
    path: str

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        if self.place == "work":
            return self.path
        kind, _, directory = self.place.partition("/")
        return f"{directory if kind == 'above' else self.place.rpartition('/')[2] + '/'}{self.path}"


@dataclass(frozen=True)
class View:
    """One node, and what it has."""

    name: str
    files: Mapping[Key, SavedFile] = field(default_factory=dict)  # and links
    removed: frozenset[Key] = frozenset()  # copies that were brought to it
    directories: Mapping[Key, int] = field(default_factory=dict)  # nanoseconds
    roots: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True  # these are all
    shared: bool = False
    kept: bool = False
    leaves: bool = False  # it gives what it has, and the next attempt does without it

    def is_its_own(self, key: Key) -> bool:
        """Tell whether its own ranks wrote it; what came back from others counts as that."""
        return key in self.files and self.files[key].by in ("", self.name)


@dataclass(frozen=True)
class Copying:
    """A file that one node is to have from another."""

    source: int
    target: int
    key: Key
    by: str  # whose ranks wrote it
    replaces: bool = False  # the target has another one, which its own ranks wrote


@dataclass
class Decision:
    """The files that are brought and removed, and what is to be said of the others."""

    copies: list[Copying] = field(default_factory=list)
    gone: dict[int, list[Key]] = field(default_factory=lambda: defaultdict(list))
    different: dict[Key, list[int]] = field(default_factory=dict)  # each has written its own
    unsound: dict[Key, int] = field(default_factory=dict)  # half-written, and where
    restored: dict[Key, tuple[int, int]] = field(default_factory=dict)  # to whom, from whom
    of_lost: dict[Key, str] = field(default_factory=dict)  # the best there is of a lost node's


@dataclass(frozen=True)
class Origin:
    """The node that all others have a file from, and those that keep their own."""

    node: int
    by: str
    keep: frozenset[int] = frozenset()


def decide(views: Sequence[View], nodes_of: Mapping[int, Sequence[str]]) -> Decision:
    """Decide for the nodes of the next attempt; `nodes_of` names those of each one before."""
    decision = Decision()
    takers = {node for node, view in enumerate(views) if not view.leaves}
    decision.restored.update(restored(views))
    for key in sorted(set[Key]().union(*(view.files for view in views))):
        have = {node: view.files[key] for node, view in enumerate(views) if key in view.files}
        owners = {node: file for node, file in have.items() if views[node].is_its_own(key)}
        for node, file in owners.items():
            if not file.sound:
                decision.unsound[key] = node
        if key in decision.restored:
            owner, holder = decision.restored[key]
            origin = Origin(holder, views[owner].name)
        elif owners:
            origin = origin_of_owned(decision, views, nodes_of, key, owners)
        elif was_removed(views, key, have):
            for node in have.keys() & takers:
                decision.gone[node].append(key)
            continue
        elif any(
            view.name == file.by and not view.whole for view in views for file in have.values()
        ):
            continue  # it may have what it wrote, or not
        else:
            origin = origin_of_copies(decision, views, key, have)
        for node in takers - origin.keep:
            mine = have.get(node)
            if mine is None or not is_copy(mine, have[origin.node]):
                decision.copies.append(Copying(origin.node, node, key, origin.by, node in owners))
    return decision


def origin_of_owned(
    decision: Decision,
    views: Sequence[View],
    nodes_of: Mapping[int, Sequence[str]],
    key: Key,
    owners: Mapping[int, SavedFile],
) -> Origin:
    """Give the newest to who has none, and to who was away when it was written. So too to who had
    it before, if the newest was written over a copy of that: then one rank writes it, which was
    on another node in that attempt."""
    newest = max(owners, key=lambda node: (owners[node].attempt, owners[node].changed, -node))
    last = owners[newest]
    there = nodes_of.get(last.attempt, ())
    earlier = {node for node, file in owners.items() if file.attempt < last.attempt}
    by_one = len(earlier) == len(owners) - 1
    missed = {
        node
        for node in earlier
        if views[node].name not in there
        or (by_one and last.over == as_overwritten(views[node].name, owners[node]))
    }
    keep = owners.keys() - missed
    if any(not is_equal(owners[node], owners[newest]) for node in keep):
        decision.different[key] = sorted(keep)
    return Origin(newest, views[newest].name, frozenset(keep))


def as_overwritten(name: str, file: SavedFile) -> Overwritten:
    """Describe a node's own file as one says it that had a copy of it."""
    return Overwritten(by=name, changed=file.changed, target=file.target)


def was_removed(views: Sequence[View], key: Key, have: Mapping[int, SavedFile]) -> bool:
    """Tell whether who wrote it, or a node that it was brought to, has removed it since.

    A node that has nothing of its own may have lost its disk, and shows nothing.
    """
    writers = {file.by for file in have.values()}
    return any(
        key in view.removed
        or (view.name in writers and view.whole and any(map(view.is_its_own, view.files)))
        for view in views
    )


def origin_of_copies(
    decision: Decision, views: Sequence[View], key: Key, have: Mapping[int, SavedFile]
) -> Origin:
    newest = max(have, key=lambda node: (have[node].changed, newest_copy(views[node])))
    by = have[newest].by
    decision.of_lost[key] = by
    return Origin(newest, by)


def newest_copy(view: View) -> int:
    return max((file.changed for file in view.files.values() if file.by), default=0)


def is_copy(mine: SavedFile, origin: SavedFile) -> bool:
    """Tell whether one is like the other; a copy says what its origin was."""
    return (mine.kind, mine.size, mine.changed, mine.target) == (
        *(origin.kind, origin.size, origin.changed, origin.target),
    )


def is_equal(mine: SavedFile, other: SavedFile) -> bool:
    """Tell whether what two nodes wrote is the same."""
    return (mine.kind, mine.size, mine.sum, mine.target) == (
        *(other.kind, other.size, other.sum, other.target),
    )


def restored(views: Sequence[View]) -> Iterator[tuple[Key, tuple[int, int]]]:
    """Yield what a node is to have as it was before, and from whom.

    That is a file which lacks its end, and all in its directory that is of one state with it.
    """
    for node, view in enumerate(views):
        broken: dict[tuple[str, str], set[Key]] = defaultdict(set)
        for key, file in view.files.items():
            if view.is_its_own(key) and not file.sound:
                broken[key.place, key.directory].add(key)
        for (place, directory), keys in broken.items():
            before = [
                {key for key, file in other.files.items() if file.by == view.name and file.sound}
                for other in views
            ]
            holders = [
                other for other in range(len(views)) if other != node and keys <= before[other]
            ]
            if not holders:
                continue
            holder = max(holders, key=lambda other: newest_copy(views[other]))
            for key in before[holder] & view.files.keys():
                if (key.place, key.directory) == (place, directory):
                    yield key, (node, holder)


# Says what was brought, what was not, and what to do about it.

EACH_ITS_OWN = (
    "each keeps its own; where ranks go on from it, save on rank 0 alone, or put the rank into its"
    " name"
)
APART = "its ranks would start from the beginning, or from an older state, beside those that go on"
LEAVE_OUT = (
    "; what is in a directory whose name begins with a dot is left out: no rank reads it again"
)
MEND = f"mend that, and launch again{LEAVE_OUT}"
LARGE = f"orchestrator.distributed.copy_to_nodes(path) in the program brings it{LEAVE_OUT}"
HALF = (
    "it was being written when its rank ended: save under another name and os.replace() it, so that"
    " a whole one is always there"
)


def named(keys: Collection[Key], views: Sequence[View]) -> str:
    """Name the largest of these files, and say how many there are."""
    sizes = {key: file.size for view in views for key, file in view.files.items()}
    largest = max(keys, key=lambda key: (sizes.get(key, 0), key))
    first = printable(str(largest))
    return f"{first} and {len(keys) - 1} more" if len(keys) > 1 else first


def lacking(copies: Sequence[Copying], views: Sequence[View], failed: Mapping[int, str]) -> str:
    """Say what nodes do not have as others have it, and why."""
    said = []
    for target, reason in sorted(failed.items()):
        keys = {copy.key for copy in copies if copy.target == target}
        sources = listed(
            [views[n].name for n in sorted({copy.source for copy in copies if copy.key in keys})]
        )
        what = f"{named(keys, views)}, as {sources} has it" if keys else "the last removals"
        said.append(f"{views[target].name} does not have {what} ({printable(reason)})")
    return f"{'; '.join(said)}: {APART}"


def begins(copies: Sequence[Copying], views: Sequence[View]) -> str:
    """Say what is about to take a while."""
    takers = listed([views[node].name for node in sorted({copy.target for copy in copies})])
    what = named({copy.key for copy in copies}, views)
    return f"bringing {what} ({size(of_all(copies, views))}) to {takers}"


def of_all(copies: Sequence[Copying], views: Sequence[View]) -> int:
    """Return how many bytes they are, each once."""
    return sum({copy.key: views[copy.source].files[copy.key].size for copy in copies}.values())


def come(copies: Sequence[Copying], views: Sequence[View], took: float) -> str:
    """Say what all have now, and who had it."""
    keys = {copy.key for copy in copies}
    sources, targets = {copy.source for copy in copies}, {copy.target for copy in copies}
    givers = listed([views[node].name for node in sorted(sources)])
    takers = listed([views[node].name for node in sorted(targets)])
    what = f"{named(keys, views)} ({size(of_all(copies, views))})"
    if targets <= sources:
        who = f"{givers} each had a part of {what}: each has all of it now"
    else:
        has = "has" if len(targets) == 1 else "have"
        who = f"only {givers} had {what}: {takers} {has} it now, too"
    older = sorted(copy.key.name for copy in copies if copy.replaces)
    kept = f"; what was there is kept as .{older[0]}.1.before" if older else ""
    return f"{who}, in {duration(took)}, checksums compared{kept}"


def notes(decision: Decision, views: Sequence[View]) -> Iterator[str]:
    """Say what nobody could decide."""
    if short := [view.name for view in views if view.files and not view.whole]:
        yield (
            f"WARNING: {listed(short)}: too many files to look at in the program's directory: what"
            " it saved may not all be on the other nodes"
        )
    for key, (node, holder) in decision.restored.items():
        if key in decision.unsound:
            yield (
                f"{printable(str(key))} on {views[node].name} lacks its end, as its rank ended"
                f" while it wrote it: what it was before, which {views[holder].name} has, takes its"
                " place"
            )
    unsound = {k: node for k, node in decision.unsound.items() if k not in decision.restored}
    if unsound:
        node = min(unsound.values())
        what = named([key for key, other in unsound.items() if other == node], views)
        yield f"WARNING: {what} on {views[node].name} lacks its end: {HALF}"
    if decision.different:
        nodes = sorted({node for nodes in decision.different.values() for node in nodes})
        who = listed([views[node].name for node in nodes])
        yield f"{who} have each written another {named(decision.different, views)}: {EACH_ITS_OWN}"
    names = {view.name for view in views}
    for by in sorted(set(decision.of_lost.values())):
        keys = {key for key, owner in decision.of_lost.items() if owner == by}
        lost = "has lost its files" if by in names else "is not there"
        yield (
            f"{by} {lost}, and with it what it alone has saved since it was brought to"
            f" others: the ranks find {named(keys, views)} as it was then"
        )


def all_lost(away: Sequence[str]) -> str:
    return (
        f"WARNING: what the program saved on {listed(away)}, if anything, is not there, and no"
        " other node has files that it saved: its ranks start from the beginning."
        " orchestrator.distributed.copy_to_nodes(path) brings others at once what rank 0 saves"
    )


def too_much(copies: Sequence[Copying], total: int, views: Sequence[View], most: int) -> str:
    sources = listed([views[n].name for n in sorted({copy.source for copy in copies})])
    return (
        f"saved on {sources} alone: {named({copy.key for copy in copies}, views)}"
        f" ({plural(len(copies), 'file')}, {size(total)}), which is more than the {size(most)} that"
        f" are brought to others: {APART}"
    )


def unseen(name: str, seconds: float) -> tuple[str, str]:
    return (
        f"after {seconds:.0f} s not every node sees {printable(name)} on the disk that they share:"
        f" {APART}",
        "look at it there: orchestrator exec -- ls -l DIRECTORY; a network disk that is mounted"
        " with actimeo=1 lags less",
    )
