"""Parses node_ip_list.txt into nodes in rank order, or raises one error with every wrong line.

A line is `[user@]host[:port] [option ...]  # comment`, with the quotes of a shell. A host may be a
range: gpu[01-04]. It appears in command lines of ssh and the shell, so few characters are allowed.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.common import hosts as host_ranges
from orchestrator.common.errors import OrchestratorError, UsageError, did_you_mean, nearest_file
from orchestrator.common.hosts import BadRange
from orchestrator.common.text import plural
from orchestrator.head.nodes.environment import ACTIVATION_FORMS, ACTIVATIONS, NONE

# A typo in a range could make more, and all nodes are contacted at once.
MAX_NODES = 16384
MAX_BYTES = 1 << 20
MAX_SHOWN = 20

# Option -> (pattern of its value, the pattern in words). `spare` takes no value.
OPTIONS = {
    "slots": (r"0*[1-9][0-9]{0,3}", "a whole number from 1 to 9999"),
    "python": (r"[/~].*|\w[\w.+-]*", "/absolute, ~/... or a bare command"),
    "workdir": (r"[/~].*", "/absolute or ~/..."),
    "activate": (ACTIVATIONS, ACTIVATION_FORMS),
    "wrap": (r".*\S.*", 'a command in front of ours: wrap="docker exec -i NAME"'),
    "ifname": (r"\w[\w.-]{0,14}", "an interface name, 15 characters at most"),
    "site": (r"\w[\w.-]{0,62}", "a name of letters, digits, . _ and -"),
    "spare": ("", "nothing: spare"),
}
COMMENT = re.compile(r"(^|\s)#.*")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
BOXED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\](?::([0-9]+))?")
V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
FORM = "write [user@]host[:port], one node a line, such as bob@gpu01:2222 or [fe80::1]:22"


@dataclass(frozen=True)
class Node:
    """One machine of the node list. The first that is not a spare is the master."""

    # The host as written: name, ssh_config alias, IPv4 or IPv6 (no brackets).
    host: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    python: str | None = None
    workdir: str | None = None
    ifname: str | None = None
    # Empty if the line says "none": the login's own, even where a launch sets one for all.
    activate: str | None = None
    wrap: str | None = None
    # The site of the machine, which is only shown.
    site: str | None = None
    spare: bool = False
    # The number of its line in the file.
    line: int = 0

    @property
    def name(self) -> str:
        """Return the node as host, user@host, host:port or [v6]:port."""
        user = f"{self.user}@" if self.user else ""
        if self.port is None:
            return f"{user}{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}:{self.port}"

    @property
    def place(self) -> str:
        """Return the name of the node, with its wrap command if it has one."""
        return f"{self.name} ({self.wrap})" if self.wrap else self.name


class NodeListError(UsageError):
    """Every problem of one node list, with the numbers of the lines."""

    def __init__(self, source: str, problems: Sequence[tuple[int, str]]) -> None:
        self.problems = tuple(problems)
        shown = [f"{source} has {plural(len(problems), 'problem')}:"]
        for line, what in problems[:MAX_SHOWN]:
            shown.append(f"  line {line}: {what}")
        if len(problems) > MAX_SHOWN:
            shown.append(f"  and {len(problems) - MAX_SHOWN} more")
        super().__init__("\n".join(shown))


# -- the file ---------------------------------------------------------------------------------


def read_nodes(path: Path) -> tuple[Node, ...]:
    """Return the nodes of a file; raise UsageError or NodeListError if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except FileNotFoundError:
        fix = (
            "`orchestrator init` makes it; by hand it has one node per line, the master first:\n"
            "    10.0.0.1\n    bob@gpu02:2222"
        )
        near = nearest_file(path, (".txt", ".list", "hosts"))
        raise UsageError(f"there is no node list {path}{near}", fix) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        fix = "name a text file that lists the nodes"
        raise UsageError(f"cannot read the node list {path}: {reason}", fix) from None
    if len(text) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB: not a node list")
    return parse_nodes(text, str(path))


def parse_nodes(text: str, source: str) -> tuple[Node, ...]:
    """Return the nodes of a list in file order; `source` is its name in errors."""
    nodes: dict[object, Node] = {}
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            for key, node in nodes_of(line):
                if key in nodes:
                    raise ValueError(f"{node.name} is already on line {nodes[key].line}")
                nodes[key] = replace(node, line=number)
                if len(nodes) > MAX_NODES:
                    raise ValueError(f"this makes more than {MAX_NODES} nodes")
        except ValueError as error:
            problems.append((number, f"{error}"))
        if len(nodes) > MAX_NODES:
            break
    if not nodes and not problems:
        problems = [(1, "the list names no node; write one per line, for example 10.0.0.1 slots=8")]
    if not problems and all(node.spare for node in nodes.values()):
        problems = [(next(iter(nodes.values())).line, "every node is a spare: none is the master")]
    if problems:
        raise NodeListError(source, problems)
    return tuple(nodes.values())


def nodes_of(line: str) -> Iterator[tuple[object, Node]]:
    """Yield the nodes of a line, each with a key that is equal for every spelling of it."""
    words = shlex.split(COMMENT.sub("", line))
    if not words:
        return
    user, host, port = split_host(words[0])
    shared = replace(parse_options(words[1:]), user=user, port=port)
    try:
        names = [host] if v6(host) else host_ranges.expand_pattern(host, MAX_NODES)
        for name in names:
            yield (user, canonical_name(name), port), replace(shared, host=name)
    except BadRange as error:
        raise ValueError(f"{error.what}; write {error.fix}") from None


def parse_options(words: Sequence[str]) -> Node:
    """Return a Node with these options and without a host."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in OPTIONS:
            known = f"there are {', '.join(OPTIONS)}; another node goes on its own line"
            raise ValueError(
                f"unknown option {word[:60]!r}{did_you_mean(key, OPTIONS) or f'; {known}'}"
            )
        pattern, wanted = OPTIONS[key]
        right = re.fullmatch(pattern, value, re.ASCII) and value.isprintable()
        if not right or bool(equals) == (key == "spare"):
            raise ValueError(f"{key} is {wanted}, not {word.removeprefix(f'{key}=')!r}")
        if key in values:
            raise ValueError(f"{key!r} is given twice")
        values[key] = "" if value == NONE and key in ("activate", "wrap") else value
    slots, spare = values.pop("slots", None), values.pop("spare", None)
    return Node("", slots=int(slots) if slots else None, spare=spare is not None, **values)


def split_host(word: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port; the host keeps its ranges and loses the brackets of IPv6."""
    user, at, rest = word.rpartition("@")
    if at and not USER.fullmatch(user):
        raise ValueError(f"{user[:60]!r} is not a user name; {FORM}")
    port: str | None
    if (boxed := BOXED.fullmatch(rest)) and ":" in boxed[1]:
        host, port = boxed[1], boxed[2]
        if not v6(host):
            raise ValueError(f"{host!r} is not an IPv6 address; {FORM}")
    elif v6(rest):
        host, port = rest, None
    else:
        host, _, port = rest.partition(":")
    if (
        port is not None
        and port != ""
        and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) <= 65535)
    ):
        raise ValueError(f"{word[:60]!r} is not a host with a port; {FORM}")
    if rest.endswith(":"):
        raise ValueError(f"{word[:60]!r} has no port; {FORM}")
    return user or None, host, int(port) if port else None


def v6(text: str) -> str | None:
    """Return the canonical spelling of an IPv6 address; None for anything else."""
    try:
        return str(ipaddress.IPv6Address(text)) if V6.fullmatch(text) else None
    except ValueError:
        return None


def canonical_name(name: str) -> str:
    """Return the canonical spelling of a name or address; raise ValueError if it is invalid."""
    if address := v6(name):
        return address
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:60]!r} is not a host name; {FORM}")
    if re.fullmatch(r"[0-9]+\.[0-9.]*", name):
        return str(ipaddress.IPv4Address(name))
    return name.lower()


# -- numbered node ------------------------------------------------------------------------------
# Numbers the nodes of a list as a job does, and selects some of them by number or name.


@dataclass(frozen=True)
class NumberedNode:
    """A node of the list and its number in a job; the spares come last."""

    index: int
    node: Node

    @property
    def label(self) -> str:
        return f"node{self.index}"


def number_nodes(nodes: Sequence[Node]) -> list[NumberedNode]:
    active = [node for node in nodes if not node.spare]
    spares = [node for node in nodes if node.spare]
    return [NumberedNode(index, node) for index, node in enumerate([*active, *spares])]


def choose_nodes(nodes: Sequence[Node], wanted: Sequence[str]) -> list[NumberedNode]:
    """Return the nodes with these numbers or names, in the list's order; all if none is named.

    A host without user and port selects every node of the list on that host.
    """
    known = number_nodes(nodes)
    if not wanted:
        return known
    chosen: set[int] = set()
    for word in wanted:
        exact = [each for each in known if each.node.name == word]
        matches = exact or [each for each in known if each.node.host == word]
        if not matches and word.isascii() and word.isdigit():
            matches = [each for each in known if each.index == int(word)]
        if not matches:
            hint = did_you_mean(word, [each.node.name for each in known])
            raise UsageError(
                f"{word}: the list has no such node{hint}",
                f"its nodes are 0 to {known[-1].index}; orchestrator nodes lists their names",
            )
        chosen |= {each.index for each in matches}
    return [each for each in known if each.index in chosen]


def names_in_list(path: Path) -> list[str]:
    """Return the names in a node list, for completion; [] if it cannot be read."""
    try:
        return [node.name for node in read_nodes(path)]
    except OrchestratorError:
        return []


def indices_in_words(indices: Sequence[int], noun: str = "node") -> str:
    """Return numbers of nodes (or of another noun) as text: node 3, nodes 0-2, 5."""
    numbers = host_ranges.number_ranges(indices).replace(",", ", ")
    return f"{noun}{'s' if len(indices) > 1 else ''} {numbers}"
