"""Take what a command prints on each node: show it at once, or keep it to fold it or for JSON."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from orchestrator.common.hosts import listed
from orchestrator.head.exec.execution import Outcome
from orchestrator.head.nodes.node_list import NumberedNode, in_words
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.lines import LineSplitter


class Stream:
    """Keeps what one program writes to one of its streams, until the end."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        """Keep what has come."""


# By the node's number, and whether it is standard error.
Streams = Mapping[tuple[int, bool], Stream]


def folded(nodes: Sequence[NumberedNode], streams: Streams) -> Iterator[tuple[str, str]]:
    """Yield each different output once, with a heading that names its nodes."""
    groups: dict[bytes, list[NumberedNode]] = {}
    for node in sorted(nodes, key=lambda node: node.index):
        stream = streams.get((node.index, False))
        if stream is not None and stream.data:
            groups.setdefault(bytes(stream.data), []).append(node)
    for data, group in groups.items():
        names = in_words([node.index for node in group])
        heading = f"--- {names} ({listed([node.node.name for node in group])})"
        yield heading, data.decode("utf-8", "replace")


def as_json(outcome: Outcome, streams: Streams) -> dict[str, Any]:
    """Return how a command ended on a node, and what it printed."""
    index = outcome.node.index
    shown: dict[str, Any] = {
        "node": index,
        "name": outcome.node.node.name,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "problem": outcome.problem,
        "fix": outcome.fix,
    }
    for name, errors in (("stdout", False), ("stderr", True)):
        stream = streams.get((index, errors)) or Stream()
        shown[f"{name}_bytes"] = len(stream.data)
        shown[name] = stream.data.decode("utf-8", "replace")
    return shown


# -- prefixed -----------------------------------------------------------------------------------
# Shows what programs on several nodes print, line by line, each with its node's prefix.


class PrefixedOutput:
    """The two streams of a terminal or of pipes, and the nodes whose lines go there."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.width = max((len(f"node{node}") for node in nodes), default=0)
        self.broken = False  # nobody reads us any more, as in `| head`
        self.when_broken: Callable[[], None] = lambda: None
        self.turn = threading.Lock()
        self.colored = {out: styles.shown(out) for out in (sys.stdout, sys.stderr)}

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
        color = whole.colored[out]
        self.splitter = LineSplitter(color)
        prefix = f"node{node}".ljust(whole.width) + " | "
        self.prefix = (
            f"\x1b[{styles.OF_NODES[node % len(styles.OF_NODES)]}m{prefix}\x1b[0m"
            if color
            else prefix
        )

    def write(self, data: bytes) -> None:
        self._show(self.splitter.feed(data))

    def close(self) -> None:
        """Show the last line, if nothing has ended it."""
        self._show(self.splitter.flush())

    def _show(self, lines: list[str]) -> None:
        if lines:
            text = self.prefix + f"\n{self.prefix}".join(lines) + "\n"
            self.whole.write(text, self.out)
