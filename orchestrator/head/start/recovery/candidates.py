"""Choose the nodes of an attempt: those of the last one first, then others in order. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.common.text import plural

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A node that the next attempt could run on, and what speaks against it, as words after it."""

    name: str  # as the node list has it
    place: int | None = None  # its number in the last attempt; None: it stood by
    problem: str = ""  # why it cannot be used: "cannot be reached: ..."
    rests: str = ""  # why it is taken only where the job could not go on without it

    @property
    def good(self) -> bool:
        return not self.problem and not self.rests


@dataclass(frozen=True)
class Choice:
    """The nodes of the next attempt in the order of their numbers, and the reasons in words."""

    nodes: tuple[str, ...]
    words: tuple[str, ...] = ()  # one line for each change; none if the nodes stay the same
    problem: str = ""  # why there can be no next attempt; then `nodes` is empty


def choose(candidates: Sequence[Candidate], least: int, most: int) -> Choice:
    """Choose at least `least` and at most `most` nodes, the same as in the last attempt first.

    Standing by are the candidates without a place, the preferred ones first. Nodes that stay keep
    their order, and a spare gets the place of the node that it replaces: then the ranks of those
    that stay find their shards and memory copies where they left them.
    """
    last = {node.place: node for node in candidates if node.place is not None}
    seats = {place: node if node.good else None for place, node in sorted(last.items())}
    for node in candidates:
        if node.good and node.place is None:
            seat(node, seats, most)
    resting = [node for node in candidates if node.rests and not node.problem]
    for node in sorted(resting, key=lambda node: node.place is None):
        seat(node, seats, least)  # only where the job could not go on without it
    nodes = tuple(node.name for _, node in sorted(seats.items()) if node is not None)
    if len(nodes) < max(least, 1):
        missing = [f"{node.name} {node.problem}" for node in candidates if node.problem]
        needs = f"the job needs at least {plural(least, 'node')}, and {len(nodes)} can be used"
        return Choice((), problem=f"{needs}: {'; '.join(missing)}")
    log.info("chosen among %d candidates: %s", len(candidates), nodes)
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
        against = f"{before.name} {before.problem or before.rests}" if before else ""
        if before is None and node is not None:
            yield f"{node.name} joins"
        elif node is None:
            yield f"{against}: on without it, as there is no other node"
        elif node is not before:
            yield f"{against}: {node.name} takes its place"
        elif node.rests:
            yield f"{against}; it stays, as there is no other node"
    count = sum(node is not None for node in seats.values())
    if count < len(last):
        yield f"the job continues with {count} of {plural(len(last), 'node')}"
