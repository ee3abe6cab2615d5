"""Find the machines that the user's ssh knows: in ssh_config, and in known_hosts as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.head.connect.known_hosts import KnownFile
from orchestrator.head.connect.ssh_config import SYSTEM_CONFIG, SshConfig, lines_of_config
from orchestrator.head.nodes.node_list import Node, parse_nodes

HOST = re.compile(r"\s*host[\s=]+(.*)", re.IGNORECASE)
# A word with one of these stands for other hosts, or for none.
PATTERN = re.compile(r"[*?!%\"'#]")
# A port of known_hosts: [10.0.0.1]:2222.
WITH_PORT = re.compile(r"\[([^]:]+)\](:[0-9]+)")
MOST_OFFERED = 40
# A range of numbers in an answer: 3-5.
NUMBERS = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")
# Commas and blanks between the words of an answer, and not in gpu[1,3].
BETWEEN = re.compile(r"[\s,]+(?![^\[]*\])")


@dataclass(frozen=True)
class KnownMachine:
    """A machine as ssh knows it, and the file that names it."""

    name: str
    source: str


def find_offers(config: SshConfig) -> list[KnownMachine]:
    """Return the machines of ssh_config, then those of known_hosts, each once."""
    aliases = {name: "ssh_config" for name in configured(config) if is_node(name)}
    try:
        hosts = {config.destination(name).host for name in aliases}
        files = config.destination("any-host").user_known_hosts
    except UsageError:
        # The first login reports what is wrong with the file.
        hosts, files = set(), ()
    found = {name: "known_hosts" for path in files for name in known(path) if name not in hosts}
    named = {**{name: source for name, source in found.items() if is_node(name)}, **aliases}
    ordered = [*aliases, *(name for name in named if name not in aliases)]
    return [KnownMachine(name, named[name]) for name in ordered][:MOST_OFFERED]


def configured(config: SshConfig) -> Iterator[str]:
    """Yield the names of `Host` lines that stand for one machine."""
    files = [config.file] if config.file else [Path.home() / ".ssh/config", SYSTEM_CONFIG]
    for path in files:
        for line in lines_of_config(path):
            match = HOST.match(line)
            words = match[1].split() if match else []
            yield from (word for word in words if not PATTERN.search(word))


def known(path: Path) -> Iterator[str]:
    """Yield the first name of each line of a known_hosts file; hashed ones cannot be read."""
    try:
        lines = KnownFile(path.read_text(errors="replace"), path).by_name.values()
    except OSError:
        return
    for line in (line for same in lines for line in same):
        yield WITH_PORT.sub(r"\1\2", line.names.split(",")[0])


def is_node(name: str) -> bool:
    try:
        return len(parse_nodes(name, "")) == 1
    except UsageError:
        return False


def chosen_nodes(answer: str, offers: Sequence[KnownMachine]) -> tuple[Node, ...]:
    """Return the nodes that an answer names: numbers of offers, or hosts as in a node list."""
    lines: list[str] = []
    for word in filter(None, BETWEEN.split(answer)):
        match = NUMBERS.fullmatch(word)
        if match is None:
            lines.append(word)
            continue
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= len(offers):
            raise UsageError(f"{word} is not a number from 1 to {len(offers)}")
        lines += [offer.name for offer in offers[first - 1 : last]]
    return parse_nodes("\n".join(dict.fromkeys(lines)), "the answer")
