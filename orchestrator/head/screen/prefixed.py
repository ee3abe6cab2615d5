"""Shows what programs on several nodes print, line by line, each with its node's prefix.

Whoever receives a node's output writes it, in turn with the others: a terminal that is paused
holds them all up, and with them the nodes. So nothing piles up in memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

from orchestrator.head.screen import output
from orchestrator.head.screen.lines import LineSplitter, plain
from orchestrator.head.screen.screen import COLORS


class PrefixedOutput:
    """The two streams of a terminal or of pipes, and the nodes whose lines go there."""

    def __init__(self, nodes: Iterable[int], color: bool | None) -> None:
        self.width = max((len(f"node{node}") for node in nodes), default=0)
        self.color = color
        self.broken = False  # nobody reads us any more, as in `| head`
        self.when_broken: Callable[[], None] = lambda: None
        self.turn = threading.Lock()

    def stream(self, node: int, *, errors: bool) -> PrefixedStream:
        return PrefixedStream(self, node, sys.stderr if errors else sys.stdout)

    def write(self, text: str, out: TextIO) -> None:
        with self.turn:
            if text and not self.broken and not output.pass_on(text, out):
                self.broken = True
                self.when_broken()


class PrefixedStream:
    """The output of one program on one of its streams."""

    def __init__(self, whole: PrefixedOutput, node: int, out: TextIO) -> None:
        self.whole, self.out = whole, out
        color = output.look(whole.color, out).color
        self.splitter = LineSplitter(color)
        self.at_start = True
        prefix = f"node{node}".ljust(whole.width) + " | "
        self.prefix = f"\x1b[{COLORS[node % len(COLORS)]}m{prefix}\x1b[0m" if color else prefix

    def write(self, data: bytes) -> None:
        whole = data if self.at_start and data.endswith(b"\n") else b""
        block = plain(whole)  # the usual case, and five times faster
        self._show(block[:-1].split("\n") if block else self.splitter.feed(data))
        self.at_start = data.endswith(b"\n")

    def close(self) -> None:
        """Show the last line, if nothing has ended it."""
        self._show(self.splitter.flush())

    def _show(self, lines: list[str]) -> None:
        if lines:
            text = self.prefix + f"\n{self.prefix}".join(lines) + "\n"
            self.whole.write(text, self.out)
