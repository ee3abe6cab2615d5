"""A node of the list together with what was learned about it when it was reached."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.head.nodes.facts import Facts
from orchestrator.head.nodes.node_list import Node

MOST_NAMES = 5
PLAIN = re.compile(r"~?(/[\w.+-]+)+")  # a path that a shell and a node list take as it is
# Bridges of containers, which may have the same addresses on every machine.
OWN_BRIDGES = ("docker", "virbr", "br-", "cni", "podman", "lxcbr", "flannel", "veth")

N = TypeVar("N")
V = TypeVar("V")


@dataclass(frozen=True)
class ProbedNode:
    """A node, its facts, and the IP address by which the head reached it ("" via a jump host)."""

    node: Node
    facts: Facts
    reached: str

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def ifname(self) -> str | None:
        """The interface that the user chose in the node list."""
        return self.node.ifname


def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def names(nodes: Sequence[ProbedNode]) -> str:
    return listed([node.name for node in nodes])


def by_value(values: Iterable[tuple[N, V]]) -> dict[V, list[N]]:
    """Return the nodes of each value, of pairs of a node (or its name) and its value."""
    found: dict[V, list[N]] = {}
    for node, value in values:
        found.setdefault(value, []).append(node)
    return found


def where_torch_is(without: Mapping[str, Facts]) -> str:
    """Say which Pythons of these nodes have torch, as it may be typed; nothing where none has."""
    found = {
        name: [python for python in facts.torch_elsewhere if PLAIN.fullmatch(python)]
        for name, facts in without.items()
    }
    first = next(iter(found.values()), [])
    everywhere = [python for python in first if all(python in own for own in found.values())]
    if everywhere:
        # In quotes, a shell here leaves it the home of each node.
        words = [f"'{python}'" if python.startswith("~") else python for python in everywhere]
        return f"these have it there: --python {' or '.join(words)}"
    places = [f"{name} python={pythons[0]}" for name, pythons in found.items() if pythons]
    return f"these have it, as lines of the list: {'; '.join(places)}" if places else ""


def listed(names: Sequence[str]) -> str:
    """Join the first names: "gpu01, gpu02 and 62 others"."""
    shown = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} other{'s' if more > 1 else ''}" if more > 0 else shown
