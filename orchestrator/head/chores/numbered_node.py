"""Number the nodes of a list as a job does, and choose some of them by number or name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import OrchestratorError, UsageError, nearest
from orchestrator.head.nodes.node_list import Node, read_nodes


@dataclass(frozen=True)
class NumberedNode:
    """A node of the list and its number: that of the job's node, and the spares last."""

    index: int
    node: Node

    @property
    def label(self) -> str:
        return f"node{self.index}"


def numbered(nodes: Sequence[Node]) -> list[NumberedNode]:
    active = [node for node in nodes if not node.spare]
    spares = [node for node in nodes if node.spare]
    return [NumberedNode(index, node) for index, node in enumerate([*active, *spares])]


def choose(nodes: Sequence[Node], wanted: Sequence[str]) -> list[NumberedNode]:
    """Return the nodes with these numbers or names, in the list's order; all where none is named.

    The host alone names a node, too, and then every node of the list on that host.
    """
    known = numbered(nodes)
    if not wanted:
        return known
    chosen: set[int] = set()
    for word in wanted:
        exact = [each for each in known if each.node.name == word]
        matches = exact or [each for each in known if each.node.host == word]
        if not matches and word.isascii() and word.isdigit():
            matches = [each for each in known if each.index == int(word)]
        if not matches:
            hint = nearest(word, [each.node.name for each in known])
            raise UsageError(
                f"{word}: the list has no such node{hint}",
                f"its nodes are 0 to {known[-1].index}; orchestrator nodes lists their names",
            )
        chosen |= {each.index for each in matches}
    return [each for each in known if each.index in chosen]


def names(path: Path) -> list[str]:
    """Return the names in a node list, for completion; none where it cannot be read."""
    try:
        return [node.name for node in read_nodes(path)]
    except OrchestratorError:
        return []


def in_words(indices: Sequence[int]) -> str:
    """Write sorted numbers of nodes: node 3, nodes 0-2, 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs]
    return f"node{'s' if len(indices) > 1 else ''} {', '.join(parts)}"
