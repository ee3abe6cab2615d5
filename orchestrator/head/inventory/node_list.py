"""node_ip_list.txt -> nodes: every node in rank order, or one error that tells every problem.

Called by all commands that talk to nodes. node_line.py knows the grammar of a line; here are the
file, the list as a whole, and how problems are shown.
"""

from __future__ import annotations

import codecs
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.head.inventory.node_host import MAX_NODES, Wrong, cut, same_host, too_many
from orchestrator.head.inventory.node_line import Line, read_line

__all__ = ["MAX_NODES", "Node", "NodeListError", "Problem", "parse_nodes", "read_nodes"]

MAX_BYTES = 1 << 20
MAX_SHOWN = 20

_LINE_END = re.compile("\r\n|\r|\n")


@dataclass(frozen=True)
class Node:
    """One machine, as its line says it. The first that is not a spare is the master."""

    host: str  # as written: name, ssh_config alias, IPv4 or IPv6 (no brackets)
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    python: str | None = None
    workdir: str | None = None
    ifname: str | None = None
    spare: bool = False
    line: int = 0  # where it stands in the file

    @property
    def name(self) -> str:
        """How it is shown: host, user@host, host:port or [v6]:port."""
        user = f"{self.user}@" if self.user else ""
        if self.port is None:
            return f"{user}{self.host}"
        return (
            f"{user}[{self.host}]:{self.port}"
            if ":" in self.host
            else f"{user}{self.host}:{self.port}"
        )


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where (both from 1), and what to write in its place."""

    line: int
    column: int
    what: str
    fix: str


class NodeListError(UsageError):
    """Every problem of one node list; shown with the lines they are on."""

    def __init__(self, source: str, problems: Iterable[Problem], lines: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        told = [f"{source} has {count} problem{'s' if count > 1 else ''}:"]
        for problem in self.problems[:MAX_SHOWN]:
            place = f"line {problem.line}, column {problem.column}"
            told.append(f"  {place}: {_printable(problem.what)}")
            told += _excerpt(lines[problem.line - 1] if lines else "", problem.column)
            told.append(f"    write: {_printable(problem.fix)}")
        if count > MAX_SHOWN:
            told.append(f"  and {count - MAX_SHOWN} more")
        super().__init__("\n".join(told))


def _printable(text: str) -> str:
    """At most a screen line, without what a terminal would act on."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in text[:120])


def _excerpt(line: str, column: int) -> list[str]:
    """The line with a mark under the column; of a long line what is around it."""
    start = max(0, column - 60)
    shown = _printable(line[start:]).rstrip()
    return [f"      {shown}", f"      {' ' * (column - 1 - start)}^"] if shown else []


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The nodes of a file; NodeListError or UsageError where there are none to be had."""
    data = _read_bytes(path).removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
        bad = data.find(0)  # NUL decodes, but only UTF-16 and binaries hold it
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        before = _LINE_END.split(data[:bad].decode())
        what, fix = "this is not text in UTF-8", "a plain text file, saved as UTF-8"
        raise NodeListError(str(path), [Problem(len(before), len(before[-1]) + 1, what, fix)])
    return parse_nodes(text, str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        # Reading a FIFO or a terminal would hang; <(...) and a piped /dev/stdin are FIFOs in /dev.
        pipe = stat.S_ISFIFO(mode) and path.parts[:2] == ("/", "dev")
        if not (stat.S_ISREG(mode) or pipe):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise UsageError(f"{path} is {kind}", "Name a text file that lists the nodes.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        fix = (
            "Create it with one node per line, the master first:\n    10.0.0.1\n    bob@gpu02:2222"
        )
        raise UsageError(f"there is no node list {path}", fix) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "Name a text file that you may read."
        raise UsageError(f"cannot read the node list {path}: {reason}", fix) from None
    if len(data) > MAX_BYTES:
        fix = "Name a text file with one node per line."
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB: not a node list", fix)
    return data


def parse_nodes(text: str, source: str) -> tuple[Node, ...]:
    """The nodes of a list in file order; `source` is what errors call it."""
    lines = _LINE_END.split(text.removeprefix("\ufeff"))
    nodes: dict[object, Node] = {}
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        said, wrong = read_line(line)
        try:
            if said:
                _add(nodes, said, number)
        except Wrong as error:
            wrong.append(error)
        told: dict[int, Wrong] = {}
        for one in wrong:
            told.setdefault(one.column, one)  # what follows from it at its place is noise
        problems += [Problem(number, at, told[at].what, told[at].fix) for at in sorted(told)]
    if not problems:
        problems = _without_master(tuple(nodes.values()), lines)
    if problems:
        raise NodeListError(source, problems, lines)
    return tuple(nodes.values())


def _add(nodes: dict[object, Node], line: Line, number: int) -> None:
    """A line's nodes into the list, each machine once, whatever its case or IPv6 spelling."""
    for node in _line_nodes(line, number):
        key = (node.user, same_host(node.host, line.column), node.port)
        if key in nodes:
            what = f"{cut(node.name)} is already on line {nodes[key].line}"
            raise Wrong(line.column, what, "each node once; slots=2 starts two processes on it")
        if len(nodes) > MAX_NODES:
            return  # told where the limit was passed
        nodes[key] = node
        if len(nodes) > MAX_NODES:
            raise too_many(line.column)


def _line_nodes(line: Line, number: int) -> Iterator[Node]:
    options = line.options
    for host in line.hosts:
        yield Node(
            host=host,
            user=line.user,
            port=line.port,
            slots=int(options["slots"]) if "slots" in options else None,
            python=options.get("python"),
            workdir=options.get("workdir"),
            ifname=options.get("ifname"),
            spare="spare" in options,
            line=number,
        )


def _without_master(nodes: tuple[Node, ...], lines: list[str]) -> list[Problem]:
    if not nodes:
        fix = "one node per line, for example 10.0.0.1 slots=8"
        return [Problem(len(lines), 1, "the list names no node", fix)]
    if not all(node.spare for node in nodes):
        return []
    first = nodes[0].line
    word = re.search(r"[ \t]\W*spare", lines[first - 1])
    fix = "the master without 'spare'"
    return [Problem(first, word.end() - 4 if word else 1, "every node is a spare", fix)]
