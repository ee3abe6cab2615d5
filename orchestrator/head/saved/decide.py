"""Decides which files go from whom to whom: a pure function of what each node has.

After it, all nodes have what they would see on a disk that they share: what one of them wrote is
on all, what it removed is on none. But nothing that a node's ranks wrote is replaced, with one
exception: what rank 0 wrote there in an earlier attempt, and elsewhere since.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.head.saved.view import Key, View
from orchestrator.protocol.requests.saved import SavedFile
from orchestrator.protocol.saved_names import is_saved


@dataclass(frozen=True)
class Load:
    """A file that one node is to have from another."""

    source: int
    target: int
    key: Key
    by: str  # whose ranks wrote it
    older: bool = False  # the target has an older one, which its ranks wrote


@dataclass
class Decision:
    """The files that are brought and removed, and what cannot be brought, with its owners."""

    loads: list[Load] = field(default_factory=list)
    gone: dict[int, list[Key]] = field(default_factory=lambda: defaultdict(list))
    unlike: dict[Key, list[int]] = field(default_factory=dict)  # each has written its own
    broken: dict[Key, int] = field(default_factory=dict)  # half-written, and where
    # What it was before takes its place: where, and from whom
    restored: dict[Key, tuple[int, int]] = field(default_factory=dict)
    copies: dict[Key, str] = field(default_factory=dict)  # the best there is of a lost node's


def same(one: SavedFile, other: SavedFile) -> bool:
    """Tell whether two are the same, by what they say; a copy says what its origin was."""
    return (one.kind, one.size, one.changed, one.target) == (
        *(other.kind, other.size, other.changed, other.target),
    )


class Decide:
    """One decision."""

    def __init__(
        self,
        views: Sequence[View],
        nodes_of: Mapping[int, Sequence[str]],  # each attempt; the first had rank 0
        alike: Collection[Key] = (),
    ) -> None:
        self.views, self.nodes_of = views, nodes_of
        self.rank_0 = {number: names[0] for number, names in nodes_of.items() if names}
        self.alike = alike  # written by several nodes, and equal
        self.decision = Decision()
        self.places = {view.name: number for number, view in enumerate(views)}
        self.keys = sorted(set[Key]().union(*(view.files for view in views)))
        self.parts = set(self.parts_of_each())

    def go(self) -> Decision:
        broken = set(self.half_written())
        for key in self.keys:
            have = {n: view.files[key] for n, view in enumerate(self.views) if key in view.files}
            owners = {node: file for node, file in have.items() if not file.by}
            if key in broken or self.leads_to(key, have, broken):
                continue
            if key in self.decision.restored:
                self.restore(key, have, *self.decision.restored[key])
            elif owners:
                self.owned(key, have, owners)
            else:
                self.orphaned(key, have)
        return self.decision

    def owned(
        self, key: Key, have: Mapping[int, SavedFile], owners: Mapping[int, SavedFile]
    ) -> None:
        """Bring what was written last to all who have not written it themselves."""
        newest = max(owners[node].attempt for node in owners)
        first = min(node for node in owners if owners[node].attempt == newest)
        origin = owners[first]
        older = {node for node in owners if self.is_older(node, owners[node], first, origin)}
        unlike = [
            node
            for node in owners
            if node not in {first, *older} and not same(owners[node], origin)
        ]
        if unlike and key not in self.alike:
            if is_saved(key.name):
                self.decision.unlike[key] = sorted([first, *unlike])
            return
        for node in range(len(self.views)):
            mine = have.get(node)
            if node in owners and node not in older:
                continue
            if mine is None and (key, node) in self.parts:
                continue
            if mine is None or not same(mine, origin):
                by = self.views[first].name
                self.decision.loads.append(Load(first, node, key, by, older=node in older))

    def is_older(self, node: int, mine: SavedFile, first: int, origin: SavedFile) -> bool:
        """Tell whether rank 0 wrote it on this node, and later, in another attempt, elsewhere."""
        return (
            mine.attempt < origin.attempt
            and self.rank_0.get(mine.attempt) == self.views[node].name
            and self.rank_0.get(origin.attempt) == self.views[first].name
        )

    def orphaned(self, key: Key, have: Mapping[int, SavedFile]) -> None:
        """Remove copies of what is no more; of a lost node's, the newest is the best there is."""
        newest = max(have, key=lambda node: (have[node].changed, self.newest_on(node)))
        by = have[newest].by
        owner = self.places.get(by)
        if owner is not None and owner in have:  # it had to be brought back to it
            newest = owner
        elif owner is not None:
            if self.views[owner].whole:
                for node in have:
                    self.decision.gone[node].append(key)
            return
        elif self.was_removed(key, by):
            return
        else:
            self.decision.copies[key] = by
        for node in range(len(self.views)):
            if node not in have or not same(have[node], have[newest]):
                self.decision.loads.append(Load(newest, node, key, by))

    def newest_on(self, node: int) -> int:
        return max((file.changed for file in self.views[node].files.values() if file.by), default=0)

    def was_removed(self, key: Key, by: str) -> bool:
        """Tell whether rank 0, to which it was brought for the last attempt, removed it since."""
        last = max(self.nodes_of, default=0)
        names = self.nodes_of.get(last, ())
        where = self.places.get(names[0]) if names else None
        return by not in names and where is not None and key not in self.views[where].files

    # -- what is not brought -----------------------------------------------------------------

    def half_written(self) -> Iterator[Key]:
        """Yield files that lack their end, and all that is in a directory with one.

        Where another node has copies of what such a directory had before, these take its place.
        """
        for node, view in enumerate(self.views):
            bad = [key for key, file in view.files.items() if not file.sound]
            for where in sorted({(key.place, key.directory) for key in bad}):
                inside = [key for key in self.keys if (key.place, key.directory) == where]
                lost = [key for key in inside if key in bad]
                before = self.before(node, lost)
                if before is None:
                    self.decision.broken.update(dict.fromkeys(lost, node))
                    yield from inside if where[1] else lost
                    continue
                copies = [key for key in inside if self.is_copy(before, key, node)]
                self.decision.restored.update(dict.fromkeys(copies, (node, before)))

    def before(self, node: int, lost: Sequence[Key]) -> int | None:
        """Return who has copies of all these files as they were on a node, the newest ones."""
        holders = [
            other
            for other in range(len(self.views))
            if all(self.is_copy(other, key, node) for key in lost)
        ]
        return max(holders, key=self.newest_on, default=None)

    def is_copy(self, holder: int, key: Key, of: int) -> bool:
        file = self.views[holder].files.get(key)
        return file is not None and file.by == self.views[of].name and key in self.views[of].files

    def restore(self, key: Key, have: Mapping[int, SavedFile], node: int, before: int) -> None:
        """Let all have what one was before; what it is now is kept beside it."""
        for other in range(len(self.views)):
            mine = have.get(other)
            if mine is None or not same(mine, have[before]):
                older = mine is not None and not mine.by
                by = self.views[node].name
                self.decision.loads.append(Load(before, other, key, by, older=older))

    def leads_to(self, key: Key, have: Mapping[int, SavedFile], broken: Collection[Key]) -> bool:
        """Tell whether a link leads to what is not brought."""
        targets = {
            f"{key.directory}/{file.target}".strip("/") for file in have.values() if file.target
        }
        return any(at in (bad.path, bad.directory) for bad in broken for at in targets)

    def parts_of_each(self) -> Iterator[tuple[Key, int]]:
        """Yield files that a node need not have, as it has its own with its own ranks' numbers.

        Those of torch.distributed.checkpoint are one state, which every rank may read all of.
        """
        together = {(k.place, k.directory) for k in self.keys if k.name == ".metadata"}
        shapes: dict[tuple[str, str], dict[int, list[Key]]] = defaultdict(lambda: defaultdict(list))
        for node, view in enumerate(self.views):
            for key, file in view.files.items():
                if not file.by and (key.place, key.directory) not in together:
                    shapes[key.place, shape(key)][node].append(key)
        for owned in shapes.values():
            if self.is_part(owned):
                keys = (key for own in owned.values() for key in own)
                yield from ((k, n) for k in keys for n in owned if k not in self.views[n].files)

    def is_part(self, owned: Mapping[int, Sequence[Key]]) -> bool:
        """Tell whether one of the numbers in these names is always that of the node or a rank."""
        if len(owned) < 2:
            return False
        columns = [
            [(node, number) for node, keys in owned.items() for number in column_of(keys, at)]
            for at in range(len(numbers(next(iter(owned.values()))[0])))
        ]
        return any(
            all(number in self.views[node].numbers for node, number in column)
            and len({number for _, number in column}) > 1
            for column in columns
        )


def shape(key: Key) -> str:
    return re.sub(r"[0-9]+", "#", key.path)


def numbers(key: Key) -> list[int]:
    return [int(number[-18:]) for number in re.findall(r"[0-9]+", key.path)]


def column_of(keys: Sequence[Key], at: int) -> Iterator[int]:
    return (numbers(key)[at] for key in keys)
