"""Decides which files go from whom to whom: a pure function of what each node has.

After it, all nodes have what they would see on a disk that they share: what any of them wrote is
on all, what it removed is on none. But what a node's own ranks wrote stays, unless that node was
away when another one wrote the file anew, or it lacks its end and others know what it was before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.protocol.requests.transfer import SavedFile


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
        return self.path if self.place == "work" else f"{self.place.rpartition('/')[2]}/{self.path}"


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

    def is_own(self, key: Key) -> bool:
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
    decision.restored.update(restored(views))
    for key in sorted(set[Key]().union(*(view.files for view in views))):
        have = {node: view.files[key] for node, view in enumerate(views) if key in view.files}
        owners = {node: file for node, file in have.items() if views[node].is_own(key)}
        for node, file in owners.items():
            if not file.sound:
                decision.unsound[key] = node
        if key in decision.restored:
            owner, holder = decision.restored[key]
            origin = Origin(holder, views[owner].name)
        elif owners:
            origin = origin_of_owned(decision, views, nodes_of, key, owners)
        elif was_removed(views, key, have):
            for node in have:
                decision.gone[node].append(key)
            continue
        elif any(
            view.name == file.by and not view.whole for view in views for file in have.values()
        ):
            continue  # it may have what it wrote, or not
        else:
            origin = origin_of_copies(decision, views, key, have)
        for node in set(range(len(views))) - origin.keep:
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
    """Give the newest to who has none; who was away when it was written has missed it."""
    newest = max(owners, key=lambda node: (owners[node].attempt, owners[node].changed, -node))
    there = nodes_of.get(owners[newest].attempt, ())
    missed = {
        node
        for node, file in owners.items()
        if file.attempt < owners[newest].attempt and views[node].name not in there
    }
    keep = owners.keys() - missed
    if any(not is_equal(owners[node], owners[newest]) for node in keep):
        decision.different[key] = sorted(keep)
    return Origin(newest, views[newest].name, frozenset(keep))


def was_removed(views: Sequence[View], key: Key, have: Mapping[int, SavedFile]) -> bool:
    """Tell whether who wrote it, or a node that it was brought to, has removed it since.

    A node that has nothing of its own may have lost its disk, and shows nothing.
    """
    writers = {file.by for file in have.values()}
    return any(
        key in view.removed
        or (view.name in writers and view.whole and any(map(view.is_own, view.files)))
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
            if view.is_own(key) and not file.sound:
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
