"""Choose the nodes of an attempt: those of the last one first, then others in order. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.common.text import plural

MOST_FAILURES = 3  # a node that verdicts named so often gives its place to a spare


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A node that the next attempt could run on, and what speaks against it."""

    name: str  # as the node list has it
    place: int | None = None  # its number in the last attempt; None: it stood by
    problem: str = ""  # why it cannot be used, as words after its name: "cannot be reached: ..."
    failures: int = 0  # of this job, with this node named as the cause
    cordoned: str = ""  # why, and since when
    rests: str = ""  # why it is taken only where the job could not go on without it
    unable: bool = False  # that is what it could not do before: the last choice of all

    @property
    def fit(self) -> bool:
        return not self.problem and not self.cordoned

    @property
    def suspect(self) -> bool:
        return self.failures >= MOST_FAILURES or bool(self.rests)

    @property
    def against(self) -> str:
        """Say what speaks against this node, in words after its name."""
        if self.cordoned:
            return f"is cordoned ({self.cordoned})"
        if self.problem:
            return self.problem
        if self.rests:
            return self.rests
        return f"was named as the cause of {plural(self.failures, 'failure')}"


@dataclass(frozen=True)
class Choice:
    """The nodes of the next attempt in the order of their numbers, and the reasons in words."""

    nodes: tuple[str, ...]
    words: tuple[str, ...] = ()  # one line for each change; none if the nodes stay the same
    problem: str = ""  # why there can be no next attempt; then `nodes` is empty
    fix: str = ""


def choose(candidates: Sequence[Candidate], least: int, most: int) -> Choice:
    """Choose at least `least` and at most `most` nodes, the same as in the last attempt first.

    Standing by are the candidates without a place, the preferred ones first. Nodes that stay keep
    their order, and a spare gets the place of the node that it replaces: then the ranks of those
    that stay find their shards and memory copies where they left them.
    """
    seats: dict[int, Candidate | None] = {}
    last = {node.place: node for node in candidates if node.place is not None}
    for place in sorted(last):
        seats[place] = last[place] if last[place].fit and not last[place].suspect else None
    fit = [node for node in candidates if node.fit]
    for node in (node for node in fit if node.place is None and not node.suspect):
        seat(node, seats, most)
    suspects = [node for node in fit if node.suspect]
    for node in sorted(suspects, key=lambda node: (node.unable, node.place is None)):
        seat(node, seats, least)  # only where the job could not go on without it
    chosen = [seats[place] for place in sorted(seats)]
    nodes = tuple(node.name for node in chosen if node is not None)
    if len(nodes) < max(least, 1):
        return too_few(candidates, len(nodes), least)
    log.info("chosen among %d candidates: %s", len(candidates), nodes)
    for node in candidates:
        if not node.fit or node.suspect:
            log.debug("against %s: it %s", node.name, node.against)
    return Choice(nodes, tuple(changes(last, seats)))


def seat(node: Candidate, seats: dict[int, Candidate | None], most: int) -> None:
    """Give a node a place, while there are fewer than `most`: its own, an empty one, or a new."""
    if sum(taken is not None for taken in seats.values()) >= most:
        return
    empty = [place for place, taken in sorted(seats.items()) if taken is None]
    new = max(seats, default=-1) + 1
    seats[node.place if node.place in empty else next(iter(empty), new)] = node


def changes(last: Mapping[int, Candidate], seats: Mapping[int, Candidate | None]) -> Iterator[str]:
    """Yield a line for each place that changes hands, and why."""
    for place, node in sorted(seats.items()):
        before = last.get(place)
        if node is before and node is not None and node.suspect:
            yield f"{node.name} {node.against}; it stays, as there is no other node"
        elif before is None and node is not None:
            yield f"{node.name} joins"
        elif before is not None and node is None:
            yield f"{before.name} {before.against}: on without it, as there is no other node"
        elif before is not None and node is not None and node is not before:
            yield f"{before.name} {before.against}: {node.name} takes its place"
    count = sum(node is not None for node in seats.values())
    if count < len(last):
        yield f"the job continues with {count} of {plural(len(last), 'node')}"


def too_few(candidates: Sequence[Candidate], count: int, least: int) -> Choice:
    """Say which nodes are missing, and what to do about each of them."""
    missing = [f"{node.name} {node.against}" for node in candidates if not node.fit]
    needs = f"at least {plural(least, 'node')}"
    problem = f"the job needs {needs}, and {count} can be used: {'; '.join(missing)}"
    fixes = [
        f"orchestrator nodes --uncordon {node.name}"
        for node in candidates
        if node.cordoned and not node.problem
    ]
    fixes.append("bring the nodes back, or add a line with 'spare' to the node list")
    return Choice((), problem=problem, fix="; or ".join(fixes))
