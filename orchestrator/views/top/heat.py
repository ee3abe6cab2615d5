"""A map of all GPUs, a character each: by its height in grey, by its colour beside. Pure.

Where there are more GPUs than there is room, a character is a node, or several of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.head.screen import styles
from orchestrator.views.top.sample import NodeSample
from orchestrator.views.top.table import HEIGHTS, IDLE, cpu_share

LEAST_NODES = 16  # fewer are seen in the table at once
LONGEST_NAME = 12
AT_REST, SICK, UNKNOWN = "·", "!", "?"


@dataclass(frozen=True)
class Mark:
    """One character of the map: a share that is in use, or what is the matter."""

    share: float | None = None
    sick: bool = False

    @property
    def drawn(self) -> tuple[str, str]:
        if self.sick:
            return SICK, styles.FAILED
        if self.share is None:
            return UNKNOWN, styles.WARNING
        if self.share < IDLE:
            return AT_REST, styles.DIM
        return HEIGHTS[min(7, int(8 * self.share))], styles.DONE


def of_node(node: NodeSample, *, gpus: bool) -> list[Mark]:
    """Return a mark for each GPU of a node, or one for its processors."""
    if node.checkup is None:
        return [Mark()]
    if not gpus:
        return [Mark(cpu_share(node))]
    return [
        Mark(None if gpu.busy is None else gpu.busy / 100, bool(gpu.problem)) for gpu in node.gpus
    ]


def merged(marks: Sequence[Mark]) -> Mark:
    """Return one mark for several: the mean of those that are known."""
    known = [mark.share for mark in marks if mark.share is not None]
    share = sum(known) / len(known) if known else None
    return Mark(share, any(mark.sick for mark in marks))


def heat_map(nodes: Sequence[NodeSample], width: int, most: int) -> list[list[tuple[str, str]]]:
    """Return at most so many lines, each as texts and their styles; nothing of few nodes."""
    if len(nodes) < LEAST_NODES:
        return []
    gpus = any(node.gpus for node in nodes)
    every = [(node.name, of_node(node, gpus=gpus)) for node in nodes]
    each = "GPU" if gpus else "node's CPUs"
    lines = laid_out(every, width, between=" " if gpus else "")
    if len(lines) >= most:
        lines = laid_out(every, width, between="")
    together = 1
    while len(lines) >= most and together <= len(every):
        groups = [every[at : at + together] for at in range(0, len(every), together)]
        one = [
            (group[0][0], [merged([mark for _, marks in group for mark in marks])])
            for group in groups
        ]
        each = "node" if together == 1 else f"{together} nodes"
        lines, together = laid_out(one, width, between=""), together * 2
    return [[(heading(each, every), styles.STRONG)], *lines]


def heading(each: str, every: Sequence[tuple[str, Sequence[Mark]]]) -> str:
    marks = [mark for _, marks in every for mark in marks]
    busy = sum(mark.share is not None and mark.share >= IDLE for mark in marks)
    legend = f"{AT_REST} idle {HEIGHTS[3]} half {HEIGHTS[7]} full {SICK} sick"
    return f"{busy} of {len(marks)} in use, a mark per {each}: {legend}"


def laid_out(
    every: Sequence[tuple[str, Sequence[Mark]]], width: int, between: str
) -> list[list[tuple[str, str]]]:
    """Lay marks out in lines, each beginning with the name of its first node."""
    label = min(LONGEST_NAME, max(len(name) for name, _ in every))
    room = max(8, width - label - 4)
    lines: list[list[tuple[str, str]]] = []
    left = 0
    for name, marks in every:
        if left < len(marks) or not lines:
            lines.append([(f"  {name[:label]:<{label}}  ", "")])
            left = room
        drawn = [mark.drawn for mark in marks]
        lines[-1] += [
            ("".join(text for text, _ in group), style)
            for style, group in itertools.groupby(drawn, key=lambda pair: pair[1])
        ]
        lines[-1].append((between, ""))
        left -= len(marks) + len(between)
    return lines
