"""Take what a command prints on each node: show it at once, or keep it to fold it or for JSON."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TextIO

from orchestrator.head.exec.execution import Outcome
from orchestrator.head.nodes.node_list import NumberedNode, in_words
from orchestrator.head.screen import output
from orchestrator.head.screen.lines import LineSplitter, plain
from orchestrator.head.screen.screen import COLORS

IN_MEMORY = 1 << 16  # bytes of a stream; what is longer goes to a file
PIECE = 1 << 16
LONGEST = 64 << 20  # bytes of a stream that JSON shows


class Live:
    """Shows each line when it comes, with its node's prefix."""

    def __init__(self, whole: PrefixedOutput, node: NumberedNode) -> None:
        self.out = whole.stream(node.index, errors=False)
        self.err = whole.stream(node.index, errors=True)

    def take(self, data: bytes, *, errors: bool) -> None:
        (self.err if errors else self.out).write(data)

    def close(self) -> None:
        self.out.close()
        self.err.close()


class Stream:
    """One stream of one program, kept."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115
        self.sum = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sum.update(data)
        self.size += len(data)

    def pieces(self) -> Iterator[bytes]:
        self.file.seek(0)
        while data := self.file.read(PIECE):
            yield data


class Kept:
    """Keeps both streams until the end."""

    def __init__(self) -> None:
        self.out, self.err = Stream(), Stream()

    def take(self, data: bytes, *, errors: bool) -> None:
        (self.err if errors else self.out).write(data)

    def close(self) -> None:
        pass


class Folding:
    """Keeps standard output until the end, to show equal ones once; shows errors as they come."""

    def __init__(self, whole: PrefixedOutput, node: NumberedNode) -> None:
        self.node, self.out = node, Stream()
        self.err = whole.stream(node.index, errors=True)

    def take(self, data: bytes, *, errors: bool) -> None:
        if errors:
            self.err.write(data)
        else:
            self.out.write(data)

    def close(self) -> None:
        self.err.close()


def folded(parts: Sequence[Folding]) -> Iterator[tuple[str, Stream]]:
    """Return each different output once, with a heading that names its nodes."""
    groups: dict[bytes, list[Folding]] = {}
    for part in sorted(parts, key=lambda part: part.node.index):
        if part.out.size:
            groups.setdefault(part.out.sum.digest(), []).append(part)
    for group in groups.values():
        names = in_words([part.node.index for part in group])
        alone = f" ({group[0].node.node.name})" if len(group) == 1 else f" ({len(group)} nodes)"
        yield f"--- {names}{alone}", group[0].out


def as_json(outcome: Outcome, kept: Kept | None) -> dict[str, Any]:
    """Return how a command ended on a node, and what it printed."""
    shown: dict[str, Any] = {
        "node": outcome.node.index,
        "name": outcome.node.node.name,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "problem": outcome.problem,
        "fix": outcome.fix,
    }
    for name, stream in (("stdout", kept and kept.out), ("stderr", kept and kept.err)):
        data = b""
        if stream:
            stream.file.seek(0)
            data = stream.file.read(LONGEST)
        shown[f"{name}_bytes"] = stream.size if stream else 0
        shown[name] = data.decode("utf-8", "replace")
    return shown


def json_pieces(outcomes: Sequence[Outcome], kept: dict[int, Kept], code: int) -> Iterator[str]:
    """Write one JSON document, a node at a time: together they may be larger than the memory."""
    yield '{"nodes": ['
    for number, outcome in enumerate(outcomes):
        text = json.dumps(as_json(outcome, kept.get(outcome.node.index)))
        yield f"{',' * bool(number)}\n{text}"
    yield f'\n], "exit_code": {code}}}\n'


# -- prefixed -----------------------------------------------------------------------------------
# Shows what programs on several nodes print, line by line, each with its node's prefix.


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
        color = output.terminal(whole.color, out).color
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
